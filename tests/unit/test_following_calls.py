"""What the first of several processes announces arrives at the others as it was."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distill.batch import Batch, collate
from distill.distributions import HiddenDistribution, LogitMix
from distill.errors import ConfigError
from distill.following import Leader, follow
from distill.logprobs import Head
from distill.parallel import together
from helpers import random_rollouts

CPU = torch.device("cpu")


class Wire:
    """Carries what one process sends to another one that reads it later."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self.reads = False

    def share(self, value: Any = None) -> Any:
        if self.reads:
            return self.messages.pop(0)
        self.messages.append(value)
        return value

    def send(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            if self.reads:
                tensor.copy_(self.tensors.pop(0))
            else:
                self.tensors.append(tensor.clone())


class Calls:
    """Remembers what it was called with; one call makes another one."""

    def __init__(self) -> None:
        self.line: Any = None
        self.seen: list[tuple[str, Any]] = []

    @together
    def outer(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append(("outer", (args, kwargs)))
        self.inner()

    @together
    def inner(self) -> None:
        self.seen.append(("inner", None))


def told(*args: Any, **kwargs: Any) -> tuple[Calls, Calls]:
    """The calls of the first process and those of a second one after `outer` was called."""
    wire, first, second = Wire(), Calls(), Calls()
    goal = SimpleNamespace(name="an objective")
    first.line = Leader(wire, {"calls": first}, CPU)
    first.line.know("objective", goal)
    first.outer(*[goal if a == "GOAL" else a for a in args], **kwargs)
    first.line.end()
    wire.reads = True
    follow(wire, {"calls": second, "objective": "its own objective"}, CPU)
    return first, second


def test_a_call_inside_a_call_is_not_announced_again():
    first, second = told(1)
    assert [name for name, _ in first.seen] == ["outer", "inner"]
    assert [name for name, _ in second.seen] == ["outer", "inner"]


def test_an_object_that_every_process_has_is_named_only():
    _, second = told("GOAL", lr=0.5)
    assert second.seen[0] == ("outer", (("its own objective",), {"lr": 0.5}))


def test_a_batch_with_distributions_arrives_bit_by_bit():
    head = Head(weight=torch.randn(9, 4), bias=torch.randn(9), soft_cap=3.0)
    hidden = HiddenDistribution(hidden=torch.randn(5, 4), head=head)
    mix = LogitMix(first=hidden, second=copy.deepcopy(hidden), mix=0.25)
    sent = collate(random_rollouts(), {"teacher.distribution": mix})
    _, second = told(sent)
    (found,), _ = second.seen[0][1]
    assert isinstance(found, Batch)
    assert torch.equal(found.input_ids, sent.input_ids)
    assert torch.equal(found.completion_mask, sent.completion_mask)
    assert torch.equal(found.rewards, sent.rewards)
    assert found.domains == sent.domains
    rows = torch.arange(5)
    target = found.targets["teacher.distribution"]
    assert torch.equal(target.log_probs(rows), mix.log_probs(rows))


@dataclass(frozen=True)
class Foreign:
    value: int = 1


def test_a_value_of_an_unknown_type_is_refused_before_anything_is_sent():
    with pytest.raises(ConfigError, match="a value of type Foreign cannot be handed"):
        told(Foreign())


@pytest.mark.parametrize("words", ["Connection closed by peer [x]:1", "something else"])
def test_a_process_that_is_left_alone_says_so_in_words(words, monkeypatch):
    from distill import parallel
    from distill.errors import DistillError
    from flows import together

    class Gone:
        def share(self):
            raise RuntimeError(words)

    monkeypatch.setattr(parallel, "init_from_env", Gone)
    wanted = DistillError if "peer" in words else RuntimeError
    with pytest.raises(wanted, match=r"another training process|something else"):
        together.follow()
