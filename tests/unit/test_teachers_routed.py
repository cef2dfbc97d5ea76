"""Several teachers by domain: every one that a configuration names is there and answers."""

from __future__ import annotations

import pytest
import torch

from distill.config import Layer, load
from distill.errors import ConfigError, TeacherError
from distill.models import new_adapter
from distill.policy import AdapterSpec, Policy
from distill.types import ScoreRequest, TeacherView
from flows import teaching
from flows.night import Student
from helpers import make_chat, make_model
from teachers.mixture import RoutedTeacher

NIGHT = """
[model]
build = {}
[objective]
name = "opd"
[[stage]]
name = "own"
kind = "on_policy"
target = "student"
"""


def adapted(seed):
    """A student with an adapter that is not zero."""
    policy = Policy(
        new_adapter(make_model(), AdapterSpec(rank=4), seed=seed), base="b", kind="adapter"
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.trainable().items():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return policy


@pytest.fixture
def experts(tmp_path):
    """Folders of three different adapters, and what each says about the view."""
    found = {}
    for number, name in enumerate("abc"):
        policy = adapted(number)
        policy.model.save_pretrained(str(tmp_path / name), save_embedding_layers=False)
        found[name] = policy.score([view()])[0].logprobs
    return tmp_path, found


def view(key=""):
    return TeacherView(token_ids=(5, 6, 7, 8), positions=(2, 3), kind="plain", id="v", key=key)


def teacher_of(text):
    config = load([Layer(origin="test", text=text + NIGHT)])
    student = Student(policy=adapted(9), chat=make_chat())
    found = teaching.build_teacher(config, student, lambda path, revision: path)
    assert found is not None
    return found


def says(teacher, key):
    return teacher.score([view(key)], ScoreRequest())[0].logprobs


def test_a_default_teacher_and_one_that_is_called_default_are_both_kept(experts):
    folder, expected = experts
    assert len({round(values[0], 4) for values in expected.values()}) == 3
    teacher = teacher_of(f"""
[teacher]
name = "routed"
[teacher.default]
name = "local"
adapter = "{folder / "a"}"
[teacher.teachers.default]
name = "local"
adapter = "{folder / "b"}"
[teacher.teachers.math]
name = "local"
adapter = "{folder / "c"}"
""")
    for key, name in {"default": "b", "math": "c", "anything else": "a"}.items():
        assert says(teacher, key) == pytest.approx(expected[name], abs=1e-5), key


def test_teachers_of_teachers_do_not_replace_each_other(experts):
    folder, expected = experts
    teacher = teacher_of(f"""
[teacher]
name = "routed"
[teacher.teachers.a_b]
name = "local"
adapter = "{folder / "a"}"
[teacher.teachers.a]
name = "routed"
[teacher.teachers.a.teachers.b]
name = "local"
adapter = "{folder / "b"}"
[teacher.teachers.a.teachers.a]
name = "local"
adapter = "{folder / "c"}"
""")
    assert says(teacher, "a_b") == pytest.approx(expected["a"], abs=1e-5)
    inner = teacher.teachers["a"]
    assert says(inner, "b") == pytest.approx(expected["b"], abs=1e-5)
    assert says(inner, "a") == pytest.approx(expected["c"], abs=1e-5)


class Fixed:
    """Always the same log-probability; knows which views it was asked about."""

    capabilities = frozenset({"logprobs", "entropy"})

    def __init__(self, name, value):
        self.name, self.value, self.asked = name, value, []

    def score(self, views, want):
        from distill.types import Scores

        self.asked += [v.id for v in views]
        self.want = want
        return [
            Scores(logprobs=(self.value,) * len(v.positions), source=self.name, view_id=v.id)
            for v in views
        ]


def test_each_teacher_sees_only_the_views_of_its_domain_in_one_call():
    one, two, rest = Fixed("one", -1.0), Fixed("two", -2.0), Fixed("rest", -3.0)
    teacher = RoutedTeacher(teachers={"a": one, "b": two}, default=rest)
    keys = ["b", "x", "a", "b", "a"]
    views = [
        TeacherView(token_ids=(5, 6, 7), positions=(2,), kind="plain", id=f"v{i}", key=key)
        for i, key in enumerate(keys)
    ]
    ids = [[[i]] for i in range(5)]
    found = teacher.score(views, ScoreRequest(candidate_ids=ids))
    assert [s.logprobs for s in found] == [(-2.0,), (-3.0,), (-1.0,), (-2.0,), (-1.0,)]
    assert [s.view_id for s in found] == [v.id for v in views]
    assert (one.asked, two.asked, rest.asked) == (["v2", "v4"], ["v0", "v3"], ["v1"])
    assert one.want.candidate_ids == [[[2]], [[4]]]


def test_a_domain_without_a_teacher_is_an_error_that_names_the_others():
    teacher = RoutedTeacher(teachers={"a": Fixed("one", -1.0), "b": Fixed("two", -2.0)})
    with pytest.raises(
        TeacherError, match="no teacher answers for 'c'; there are teachers for a, b"
    ):
        teacher.score([view("c")], ScoreRequest())


def test_a_table_without_teachers_is_refused():
    with pytest.raises(ConfigError, match="names no teacher"):
        teacher_of('[teacher]\nname = "routed"\nteachers = {}\n')
