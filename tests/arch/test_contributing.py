"""The objective that CONTRIBUTING.md shows is a working one."""

from __future__ import annotations

import re
import sys
from types import ModuleType

import pytest
import torch

from distill.errors import ConfigError
from distill.objectives.base import Objective
from distill.parts import Parts
from distill.policy import Policy
from distill.step import on_policy_step
from distill.trainer import Trainer, TrainerOptions
from helpers import logits_batch, make_policy, objective_loss, random_rollouts
from teachers.local import LocalTeacher
from teachers.views import Plain
from tree import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.fixture
def shown(tmp_path, monkeypatch) -> type:
    """The class of the example, imported as a module of one's own."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.M | re.S)
    (tmp_path / "bounded_example.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    import importlib

    module: ModuleType = importlib.import_module("bounded_example")
    monkeypatch.delitem(sys.modules, "bounded_example")
    assert len(code.splitlines()) < 75
    return module.BoundedOPD


def test_it_is_an_objective_and_checks_its_options(shown):
    assert isinstance(shown(), Objective)
    with pytest.raises(ConfigError, match="bound must be positive"):
        shown(bound=0.0)


def test_its_loss_is_the_bounded_gap(shown):
    logits = torch.tensor([[[1.0, 0.0, -1.0], [0.5, 0.5, 0.0]]], dtype=torch.float64)
    batch = logits_batch(torch.tensor([[0, 1]]), torch.tensor([[-1.407606, -2.239545]]))
    assert float(objective_loss(shown(bound=1.1), logits, batch)) == pytest.approx(
        (1.0 + 1.1) / 2, abs=1e-5
    )


def test_a_step_with_it_moves_the_student(shown):
    policy = make_policy()
    parts = Parts(
        tasks=lambda step: [],
        rows=lambda tasks, step: random_rollouts(),
        policy=policy,
        objective=shown(),
        trainer=Trainer(policy, TrainerOptions(num_steps=1, lr=1e-3)),
        teacher=LocalTeacher(Policy(make_policy(1).model, base="t", trainable=False), name="t"),
        view=Plain(),
    )
    report = on_policy_step(parts, 1)
    assert report.update.grad_norm > 0
    assert report.update.metrics["bounded_opd/advantage_max"] <= 1.0
