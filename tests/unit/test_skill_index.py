"""The index over skills: exact, ordered, in step with the bank, and never the truth."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import skills.index
from distill.errors import SkillBankError
from skills.embed import EmbedderKey, HashingEmbedder, Vectors
from skills.index import SkillIndex, open_index, sync
from skills.items import SkillItem

KEY = EmbedderKey(name="test", version="1", dimension=8)


def vectors(count: int, seed: int = 0) -> Vectors:
    rows = np.random.default_rng(seed).normal(size=(count, 8)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def filled(count: int, seed: int = 0) -> tuple[SkillIndex, Vectors]:
    index, rows = SkillIndex(KEY), vectors(count, seed)
    index.add([f"s{i:04d}" for i in range(count)], ["h"] * count, rows)
    return index, rows


def exact(rows: Vectors, query: Vectors, k: int, among: list[int] | None = None) -> list[str]:
    places = range(len(rows)) if among is None else among
    scores = {f"s{i:04d}": round(float(rows[i] @ query), 6) for i in places}
    return sorted(scores, key=lambda name: (-scores[name], name))[:k]


def small_bank(count: int = 6) -> list[SkillItem]:
    return [
        SkillItem(id=f"s{i}", title=f"skill number{i}", principle=f"open word{i}.")
        for i in range(count)
    ]


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inverted files already beyond 500 vectors."""
    monkeypatch.setattr(skills.index, "EXACT_UP_TO", 500)


def test_search_equals_the_exact_ranking() -> None:
    index, rows = filled(300)
    for number, hits in enumerate(index.search(rows[:20], 10)):
        assert [h.id for h in hits] == exact(rows, rows[number], 10)


def test_equal_scores_are_ordered_by_id_even_at_the_limit() -> None:
    index = SkillIndex(KEY)
    names = [f"s{i:02d}" for i in range(40)]
    shuffled = list(np.random.default_rng(1).permutation(names))
    index.add(shuffled, ["h"] * 40, np.ones((40, 8)))
    (hits,) = index.search(np.ones((1, 8)), 3)
    assert [h.id for h in hits] == ["s00", "s01", "s02"]


def test_a_search_among_some_ids_finds_only_those() -> None:
    index, rows = filled(300)
    some = [3, 50, 51, 200]
    (hits,) = index.search(rows[:1], 3, among=[f"s{i:04d}" for i in some] + ["unknown"])
    assert [h.id for h in hits] == exact(rows, rows[0], 3, some)
    assert index.search(rows[:1], 3, among=[]) == [[]]


def test_removed_and_replaced_skills_are_not_found_any_more() -> None:
    index, rows = filled(300)
    assert index.remove(["s0000", "s0001", "nobody"]) == 2
    index.add(["s0002"], ["new"], -rows[2:3])
    (hits,) = index.search(rows[2:3], 300)
    assert len(index) == len(hits) == 298
    assert hits[-1].id == "s0002"
    assert hits[-1].score == pytest.approx(-1.0, abs=1e-5)
    assert index.entries["s0002"] == "new"


def test_many_removals_compact_the_index_without_changing_answers() -> None:
    index, rows = filled(400)
    gone = [f"s{i:04d}" for i in range(0, 400, 2)]
    index.remove(gone)
    (hits,) = index.search(rows[:1], 5)
    assert [h.id for h in hits] == exact(rows, rows[0], 5, list(range(1, 400, 2)))
    assert index.search(rows[:1], 5, among=gone) == [[]]


@pytest.mark.usefixtures("small_limit")
def test_a_large_index_is_inverted_and_still_finds_its_own() -> None:
    index, rows = filled(1500)
    assert index.kind == "ivf"
    assert [hits[0].id for hits in index.search(rows[:50], 1)] == [f"s{i:04d}" for i in range(50)]
    found = index.search(rows[:50], 10)
    right = sum(
        len({h.id for h in hits} & set(exact(rows, rows[i], 10))) for i, hits in enumerate(found)
    )
    assert right / 500 >= 0.9
    (among,) = index.search(rows[:1], 3, among=["s0700", "s0900", "s1100", "s0001"])
    assert [h.id for h in among] == exact(rows, rows[0], 3, [1, 700, 900, 1100])
    index.remove([f"s{i:04d}" for i in range(1200)])
    assert index.kind == "flat"
    assert len(index.search(rows[:1], 400)[0]) == 300


@pytest.mark.usefixtures("small_limit")
def test_a_large_index_answers_the_same_after_it_was_saved(tmp_path: Path) -> None:
    index, rows = filled(900)
    again = SkillIndex.load(index.save(tmp_path), KEY)
    assert again.kind == "ivf"
    assert again.search(rows[:30], 5) == index.search(rows[:30], 5)
    assert again.entries == index.entries


def test_only_safetensors_and_json_are_stored(tmp_path: Path) -> None:
    index, _ = filled(5)
    path = index.save(tmp_path)
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "vectors.safetensors"]
    index.remove(["s0001"])
    assert index.save(tmp_path) != path
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        (np.ones((2, 7)), "expected the shape"),
        (np.zeros((2, 8)), "no direction"),
        (np.full((2, 8), np.nan), "no direction"),
        (np.ones((3, 8)), "expected the shape"),
    ],
)
def test_vectors_that_do_not_fit_are_refused(rows: Vectors, word: str) -> None:
    index = SkillIndex(KEY)
    with pytest.raises(SkillBankError, match=word):
        index.add(["a", "b"], ["x", "y"], rows)
    assert len(index) == 0


def test_a_query_of_another_size_is_refused() -> None:
    index, _ = filled(3)
    with pytest.raises(SkillBankError, match="8 dimensions"):
        index.search(np.ones((1, 384)), 1)


def test_an_index_of_another_embedder_is_refused(tmp_path: Path) -> None:
    index, _ = filled(3)
    path = index.save(tmp_path)
    other = EmbedderKey(name="other", version="1", dimension=8)
    with pytest.raises(SkillBankError, match="holds vectors of test"):
        SkillIndex.load(path, other)
    with pytest.raises(SkillBankError, match="start a new"):
        sync(index, small_bank(), HashingEmbedder(8))


def test_opening_embeds_everything_once_and_then_only_what_changed(tmp_path: Path) -> None:
    bank, embedder = small_bank(), HashingEmbedder()
    _, first = open_index(tmp_path, bank, embedder)
    assert (first.num_added, first.rebuilt) == (6, "there was none")
    _, second = open_index(tmp_path, bank, embedder)
    assert (second.num_kept, second.num_added, second.rebuilt) == (6, 0, "")
    changed = [
        *bank[:4],
        SkillItem(id="s4", title="another", principle="text."),
        *small_bank(8)[6:],
    ]
    index, third = open_index(tmp_path, changed, embedder)
    assert (third.num_kept, third.num_added, third.num_removed) == (4, 3, 1)
    assert set(index.entries) == {"s0", "s1", "s2", "s3", "s4", "s6", "s7"}
    assert index.search(embedder.embed(["another text"]), 1)[0][0].id == "s4"


def test_credit_and_status_do_not_make_a_skill_new(tmp_path: Path) -> None:
    bank, embedder = small_bank(), HashingEmbedder()
    open_index(tmp_path, bank, embedder)
    _, synced = open_index(tmp_path, [i.with_status("active") for i in bank], embedder)
    assert synced.num_added == 0


def test_another_version_of_the_embedder_has_its_own_cache(tmp_path: Path) -> None:
    open_index(tmp_path, small_bank(), HashingEmbedder(64))
    _, synced = open_index(tmp_path, small_bank(), HashingEmbedder(32))
    assert synced.num_added == 6
    _, synced = open_index(tmp_path, small_bank(), HashingEmbedder(64))
    assert synced.num_added == 0


@pytest.mark.parametrize("name", ["vectors.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_a_damaged_cache_is_made_anew(tmp_path: Path, name: str, damage: str) -> None:
    bank, embedder = small_bank(), HashingEmbedder()
    index, _ = open_index(tmp_path, bank, embedder)
    query = embedder.embed(["open word3"])
    before = index.search(query, 3)
    (path,) = tmp_path.glob(f"*/{name}")
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data[: len(data) // 2] if damage == "cut" else data[:-9] + b"x" * 9)
    index, synced = open_index(tmp_path, bank, embedder)
    assert synced.rebuilt
    assert index.search(query, 3) == before
    assert open_index(tmp_path, bank, embedder)[1].rebuilt == ""


def test_a_cache_that_claims_other_ids_than_vectors_is_made_anew(tmp_path: Path) -> None:
    bank, embedder = small_bank(), HashingEmbedder()
    open_index(tmp_path, bank, embedder)
    (path,) = tmp_path.glob("*/manifest.json")
    manifest = json.loads(path.read_text())
    manifest["ids"] = manifest["ids"][:-1]
    path.write_text(json.dumps(manifest))
    index, synced = open_index(tmp_path, bank, embedder)
    assert "ids" in synced.rebuilt
    assert len(index) == 6


def test_an_unknown_id_has_no_vector() -> None:
    with pytest.raises(SkillBankError, match="knows no skill 'x'"):
        filled(2)[0].vectors(["x"])
