"""The numbers of the specification for skills: retrieval, utility, counters, names of files."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from skills.embed import EmbedderKey, Vectors
from skills.index import SkillIndex
from skills.interop.validate import front_matter_problems, name_problems, validate_text
from skills.items import SkillItem
from skills.lifecycle import voted
from skills.retrieve import RetrieveOptions, Retriever
from skills.utility import moved, next_id, pair_weight, ucb_score, weak_families

QUERY = [0.6, 0.8, 0.0]
SKILLS = {
    "s1": [1.0, 0.0, 0.0],
    "s2": [0.0, 1.0, 0.0],
    "s3": [0.0, 0.0, 1.0],
    "s4": [0.6, 0.8, 0.0],
    "s5": [0.8, 0.0, 0.6],
}


class Planted:
    """Vectors by text: the skills', and the query's for everything else."""

    name, version, dimension = "planted", "1", 3

    def embed(self, texts: Sequence[str]) -> Vectors:
        return np.array([SKILLS.get(t[:2], QUERY) for t in texts], dtype=np.float32)


def planted_bank() -> list[SkillItem]:
    return [
        SkillItem(id=name, title=name, principle="p.", category="c", status="active")
        for name in SKILLS
    ]


def planted_retriever(**options: object) -> Retriever:
    chosen = RetrieveOptions(mode="embedding", **options)  # type: ignore[arg-type]
    return Retriever(planted_bank(), chosen, embedder=Planted())


def test_the_index_ranks_the_planted_skills_by_cosine() -> None:
    index = SkillIndex(EmbedderKey.of(Planted()))
    index.add(list(SKILLS), ["x"] * 5, np.array(list(SKILLS.values())))
    (hits,) = index.search([QUERY], 5)
    assert [h.id for h in hits] == ["s4", "s2", "s1", "s5", "s3"]
    assert [h.score for h in hits] == pytest.approx([1.0, 0.8, 0.6, 0.48, 0.0], abs=5e-7)


def test_a_threshold_and_a_limit_leave_the_two_nearest_skills() -> None:
    (found,) = planted_retriever(sim_threshold=0.4, task_top_k=2).retrieve(["goal"])
    assert found.ids == ("s4", "s2")
    picks = [(p.id, p.section, p.rank, round(p.similarity or 0, 6)) for p in found.record.picks]
    assert picks == [("s4", "task", 1, 1.0), ("s2", "task", 2, 0.8)]


def test_without_a_threshold_all_five_come_in_order() -> None:
    (found,) = planted_retriever(task_top_k=6).retrieve(["goal"])
    assert found.ids == ("s4", "s2", "s1", "s5", "s3")


def test_the_threshold_is_strict() -> None:
    (found,) = planted_retriever(sim_threshold=1.0).retrieve(["goal"])
    assert found.ids == ()


def test_only_families_strictly_below_the_threshold_are_weak() -> None:
    assert weak_families({"clean": 0.40, "heat": 0.39, "cool": 0.90}) == ("heat",)


def test_evolved_skills_are_numbered_behind_the_highest() -> None:
    assert next_id(["dyn_001", "dyn_007", "gen_012"]) == "dyn_008"
    assert next_id([]) == "dyn_001"
    assert next_id(["dyn_999"]) == "dyn_1000"


@pytest.mark.parametrize(
    ("relevance", "utility", "used", "score"),
    [(0.70, 0.50, 1, 0.692858), (0.70, 0.62, 9, 0.685619), (0.45, 0.80, 20, 0.803652)],
)
def test_utility_retrieval_scores(
    relevance: float, utility: float, used: int, score: float
) -> None:
    assert ucb_score(relevance, utility, used, 40) == pytest.approx(score, abs=5e-7)


def test_a_bank_that_was_never_used_scores_without_a_bonus() -> None:
    assert ucb_score(0.5, 0.5, 0, 0) == pytest.approx(0.5)


def test_utility_moves_towards_its_credit() -> None:
    assert moved(0.5, 0.25) == pytest.approx(0.45, abs=5e-7)


@pytest.mark.parametrize(
    ("gap", "weight"), [(0.12, 0.6), (0.30, 1.5), (0.50, 2.0), (-0.30, 1.5), (0.04, None)]
)
def test_weights_of_pairs(gap: float, weight: float | None) -> None:
    found = pair_weight(gap)
    assert found is None if weight is None else found == pytest.approx(weight, abs=5e-7)


def test_counters_of_rules() -> None:
    added = voted(0, "ADD")
    agreed = voted(added, "AGREE")
    edited = voted(agreed, "EDIT")
    assert (added, agreed, edited) == (2, 3, 4)
    assert voted(edited, "REMOVE") == 3
    assert voted(edited, "REMOVE", full=True) == 1
    assert voted(added, "REMOVE", full=True) == -1


@pytest.mark.parametrize(
    ("name", "folder", "word"),
    [
        ("pdf-tools", "pdf-tools", None),
        ("a" * 64, "a" * 64, None),
        ("наука", "наука", None),
        ("PDF-tools", "PDF-tools", "lower case"),
        ("-pdf", "-pdf", "hyphen"),
        ("pdf-", "pdf-", "hyphen"),
        ("pdf--x", "pdf--x", "hyphen"),
        ("pdf_tools", "pdf_tools", "'_'"),
        ("pdf tools", "pdf tools", "' '"),
        ("a" * 65, "a" * 65, "65 characters"),
        ("pdf-tools", "pdftools", "equal"),
        ("", "x", "missing"),
    ],
)
def test_names_of_skill_folders(name: str, folder: str, word: str | None) -> None:
    problems = name_problems(name, folder)
    if word is None:
        assert problems == []
    else:
        assert word in problems[0].text


def test_names_are_compared_after_normalisation() -> None:
    assert name_problems("cafe\u0301", "caf\u00e9") == []


@pytest.mark.parametrize(("size", "is_valid"), [(1024, True), (1025, False)])
def test_the_length_of_a_description(size: int, is_valid: bool) -> None:
    problems = front_matter_problems({"name": "a", "description": "d" * size}, "a")
    assert (problems == []) is is_valid


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("---\nname: a\ndescription: d\n---\nbody\n", None),
        ("---\nname: a\ndescription: d\nversion: 1\n---\n", "unknown key"),
        ("name: a\ndescription: d\n", "must begin"),
        ('---\nname: a\ndescription: "before --- after"\n---\n', "inside a value"),
        ("---\nname: a\nname: a\ndescription: d\n---\n", "twice"),
        ("---\nname: a\ndescription: d\nmetadata: {a: b}\n---\n", "flow style"),
        ("---\nname: a\ndescription: x: y\n---\n", "colon"),
        ("---\nname: a\ndescription: d\nmetadata:\n  k:\n    - v\n---\n", "must be text"),
        ("---\nname: a\n---\n", "missing or blank"),
        ("---\nname: a\ndescription: d\nallowed-tools:\n  - x\n---\n", "must be text"),
        (f"---\nname: a\ndescription: d\ncompatibility: {'c' * 501}\n---\n", "501"),
    ],
)
def test_the_strict_validator(text: str, word: str | None) -> None:
    problems = [str(p) for p in validate_text(text, "a")]
    assert problems == [] if word is None else any(word in p for p in problems), problems
