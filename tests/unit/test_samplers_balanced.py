"""Batches in which every routed teacher has something to say, in every step."""

from __future__ import annotations

from collections import Counter

import pytest

from distill.curriculum.samplers import TaskSampler
from distill.curriculum.samplers.balanced import Balanced
from distill.errors import ConfigError
from distill.types import Message, Task


def tasks(**sizes):
    """So many tasks of each domain, one domain after the other."""
    return [
        Task(
            id=f"{domain}{i}",
            env="e",
            domain=domain,
            split="train",
            prompt=(Message(role="user", content=f"{domain}{i}"),),
        )
        for domain, size in sizes.items()
        for i in range(size)
    ]


def sampler(found, batch, key="k"):
    return TaskSampler(found, batch=batch, key=key, sampler=Balanced())


def test_every_step_shows_every_domain_equally_often():
    balanced = sampler(tasks(math=50, code=7, chat=20), batch=6)
    for step in range(1, 40):
        assert Counter(t.domain for t in balanced(step)) == {"math": 2, "code": 2, "chat": 2}


def test_what_cannot_be_shared_out_evenly_goes_round():
    balanced = sampler(tasks(a=9, b=9, c=9), batch=4)
    counts = [Counter(t.domain for t in balanced(step)) for step in range(1, 7)]
    assert all(sorted(count.values()) == [1, 1, 2] for count in counts)
    assert sum(counts, Counter()) == {"a": 8, "b": 8, "c": 8}


def test_each_domain_is_seen_whole_before_it_repeats():
    balanced = sampler(tasks(a=10, b=4), batch=4)
    seen = [t.id for step in range(1, 11) for t in balanced(step)]
    ours = {name: [i for i in seen if i.startswith(name)] for name in "ab"}
    assert len(set(ours["a"][:10])) == len(set(ours["a"][10:])) == 10
    assert all(len(set(ours["b"][i : i + 4])) == 4 for i in range(0, 20, 4))
    assert ours["b"][:4] != ours["b"][4:8], "every epoch is shuffled anew"
    assert ours["a"][:10] != sorted(ours["a"][:10], key=lambda i: int(i[1:]))


def test_a_step_depends_on_its_number_and_the_key_alone():
    found = tasks(a=10, b=30)
    one, two = sampler(found, batch=6), sampler(found, batch=6)
    backwards = {step: two(step) for step in reversed(range(1, 9))}
    assert all(one(step) == backwards[step] for step in range(1, 9))
    assert one(1) != sampler(found, batch=6, key="other")(1)
    assert one.state == {}


def test_domains_are_mixed_within_a_step():
    balanced = sampler(tasks(a=30, b=30), batch=8)
    orders = {tuple(t.domain for t in balanced(step)) for step in range(1, 6)}
    assert len(orders) > 1


def test_refills_are_balanced_too_and_draw_others():
    balanced = sampler(tasks(a=40, b=40), batch=6)
    first, more = balanced(1), balanced.extra(1, 1)
    assert Counter(t.domain for t in more) == {"a": 3, "b": 3}
    assert first != more != balanced.extra(1, 2)


def test_one_domain_is_just_shuffled():
    balanced = sampler(tasks(a=8), batch=4)
    assert len({t.id for step in (1, 2) for t in balanced(step)}) == 8


def test_a_step_that_cannot_show_every_domain_is_refused():
    with pytest.raises(ConfigError, match=r"all 3 domains .* has 2 tasks; set trainer\.batch to 3"):
        sampler(tasks(a=2, b=2, c=2), batch=2)(1)


def test_a_list_that_is_too_long_to_be_read_is_refused():
    with pytest.raises(ConfigError, match="at most 200000, but there are 200001"):
        sampler(range(200_001), batch=4)(1)


def test_lists_are_read_once():
    class Lazy(list):
        read = 0

        def __iter__(self):
            Lazy.read += 1
            return super().__iter__()

    balanced = sampler(Lazy(tasks(a=5, b=5)), batch=4)
    for step in range(1, 6):
        balanced(step)
    assert Lazy.read == 1
