"""Scores that are kept: found again, never stale, never trusted when damaged, never too many."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
from dataclasses import replace

import pytest

from distill.errors import ConfigError
from distill.types import ScoreRequest, Scores, TeacherView
from teachers.cache import GIB, CachedTeacher

PLAIN = ScoreRequest()


class Counted:
    """A teacher whose scores are functions of the ids, and that knows what it was asked."""

    name, capabilities = "counted", frozenset({"logprobs", "entropy"})

    def __init__(self, factor=1.0):
        self.factor = factor
        self.asked = []

    def score(self, views, want):
        self.asked += [v.id for v in views]
        out = []
        for row, view in enumerate(views):
            chosen = [view.token_ids[p] for p in view.positions]
            listed = want.candidate_ids[row] if want.candidate_ids is not None else None
            if want.candidates:
                listed = [list(range(want.candidates))] * len(chosen)
            known = None
            if listed is not None:
                known = tuple(tuple(-i / 4 if i < 90 else -math.inf for i in ids) for ids in listed)
            out.append(
                Scores(
                    logprobs=tuple(-self.factor * i / 8 for i in chosen),
                    entropy=tuple(float(i) for i in chosen) if want.entropy else None,
                    candidate_ids=None if listed is None else tuple(map(tuple, listed)),
                    candidate_logprobs=known,
                    source="counted",
                    view_id=view.id,
                )
            )
        return out

    def distribution(self, views):
        return "a distribution"


def view(number, trained=2):
    ids = (number, 7, *range(10 + number, 10 + number + trained))
    places = tuple(range(2, 2 + trained))
    return TeacherView(token_ids=ids, positions=places, kind="plain", id=f"v{number}")


VIEWS = [view(i) for i in range(4)]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache" / "scores"


def shards(folder):
    return sorted(folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    "want",
    [
        PLAIN,
        ScoreRequest(entropy=True),
        ScoreRequest(candidates=3),
        ScoreRequest(candidate_ids=[[[1, 99]] * 2] * 4),
        ScoreRequest(candidate_ids=[[[]] * 2] * 4),
    ],
)
def test_what_was_scored_once_comes_from_disk_unchanged(folder, want):
    first, teacher = Counted(), Counted()
    made = CachedTeacher(first, folder, "k").score(VIEWS, want)
    cached = CachedTeacher(teacher, folder, "k")
    again = cached.score(VIEWS[::-1], replace(want))[::-1]
    assert again == made == Counted().score(VIEWS, want)
    assert (teacher.asked, cached.hits, cached.misses) == ([], 4, 0)


def test_only_the_views_that_are_missing_are_computed_each_once(folder):
    CachedTeacher(Counted(), folder, "k").score(VIEWS[:2], PLAIN)
    teacher = Counted()
    twin = replace(view(3), id="twin")
    found = CachedTeacher(teacher, folder, "k").score([*VIEWS, twin], PLAIN)
    assert teacher.asked == ["v2", "v3"]
    assert [s.view_id for s in found] == ["v0", "v1", "v2", "v3", "twin"]
    assert found[4].logprobs == found[3].logprobs


def test_the_candidates_of_a_view_go_with_it(folder):
    CachedTeacher(Counted(), folder, "k").score(VIEWS[:1], ScoreRequest(candidate_ids=[[[1]] * 2]))
    teacher = Counted()
    listed = [[[1]] * 2, [[2]] * 2, [[3]] * 2]
    want = ScoreRequest(candidate_ids=listed)
    found = CachedTeacher(teacher, folder, "k").score(VIEWS[:3], want)
    assert teacher.asked == ["v1", "v2"]
    assert [s.candidate_ids[0] for s in found] == [(1,), (2,), (3,)]


@pytest.mark.parametrize(
    "change",
    ["key", "ids", "positions", "entropy", "candidates", "candidate ids"],
)
def test_another_question_is_another_entry(folder, change):
    CachedTeacher(Counted(), folder, "k").score([view(1)], PLAIN)
    asked, want, key = view(1), PLAIN, "k"
    if change == "key":
        key = "other weights"
    elif change == "ids":
        asked = replace(asked, token_ids=(5, *asked.token_ids[1:]))
    elif change == "positions":
        asked = replace(asked, positions=(1, 2))
    elif change == "entropy":
        want = ScoreRequest(entropy=True)
    elif change == "candidates":
        want = ScoreRequest(candidates=2)
    else:
        want = ScoreRequest(candidate_ids=[[[4]] * 2])
    teacher = Counted(2.0)
    found = CachedTeacher(teacher, folder, key).score([asked], want)
    assert teacher.asked == ["v1"]
    assert found == Counted(2.0).score([asked], want)


def test_views_without_a_trained_token_are_kept_too(folder):
    empty = view(1, trained=0)
    for teacher in (Counted(), Counted()):
        (found,) = CachedTeacher(teacher, folder, "k").score([empty], ScoreRequest(candidates=2))
        assert (found.logprobs, found.candidate_ids) == ((), ())
    assert teacher.asked == []
    assert CachedTeacher(teacher, folder, "k").score([], PLAIN) == []


def test_values_that_float32_cannot_hold_are_kept_exactly(folder):
    class Fine(Counted):
        def score(self, views, want):
            return [replace(s, logprobs=(-0.1, -1e-300)) for s in super().score(views, want)]

    for _ in range(2):
        (found,) = CachedTeacher(Fine(), folder, "k").score([view(1)], PLAIN)
        assert found.logprobs == (-0.1, -1e-300)


def test_nan_is_never_kept(folder):
    class Broken(Counted):
        def score(self, views, want):
            return [replace(s, logprobs=(math.nan, -1.0)) for s in super().score(views, want)]

    cached = CachedTeacher(Broken(), folder, "k")
    cached.score([view(1)], PLAIN)
    assert shards(folder) == []
    assert CachedTeacher(Counted(), folder, "k").score([view(1)], PLAIN)[0].logprobs[0] < 0


@pytest.mark.parametrize("damage", ["a flipped bit", "cut short", "empty", "no shard", "its sums"])
def test_damaged_entries_are_made_again_with_a_warning(folder, caplog, damage):
    CachedTeacher(Counted(), folder, "k").score(VIEWS, PLAIN)
    (path,) = shards(folder)
    raw = bytearray(path.read_bytes())
    if damage == "a flipped bit":
        raw[-3] ^= 64
    elif damage == "cut short":
        raw = raw[:-5]
    elif damage == "empty":
        raw = bytearray()
    elif damage == "no shard":
        raw = bytearray(b"{}" * 50)
    else:
        place = raw.index(b"sums")
        raw[place : place + 4] = b"smus"
    path.write_bytes(raw)
    teacher = Counted()
    with caplog.at_level(logging.WARNING):
        found = CachedTeacher(teacher, folder, "k").score(VIEWS, PLAIN)
    assert found == Counted().score(VIEWS, PLAIN)
    assert len(teacher.asked) == (1 if damage == "a flipped bit" else 4)
    assert ("made again" in caplog.text) == (damage != "its sums")
    after = Counted()
    assert CachedTeacher(after, folder, "k").score(VIEWS, PLAIN) == found
    assert after.asked == [], "the new scores count, whatever lies beside them"


def test_the_folder_stays_below_its_limit_and_what_was_used_last_stays(folder):
    def scored(number):
        return CachedTeacher(Counted(), folder, "k").score([view(number, trained=200)], PLAIN)

    scored(0)
    (first,) = shards(folder)
    size = first.stat().st_size
    limit = 3.5 * size / GIB
    for number in (1, 2):
        scored(number)
    for age, path in enumerate(reversed(shards(folder)), start=1):
        os.utime(path, (1000 - age, 1000 - age))
    scored(0)  # used again: now the youngest
    cached = CachedTeacher(Counted(), folder, "k", max_gib=limit)
    cached.score([view(3, trained=200)], PLAIN)
    assert sum(p.stat().st_size for p in shards(folder)) <= 3.5 * size
    left = Counted()
    CachedTeacher(left, folder, "k").score([view(i, trained=200) for i in range(4)], PLAIN)
    assert left.asked == ["v1"]


def test_a_shard_that_another_night_removed_is_made_again_quietly(folder, caplog):
    cached = CachedTeacher(Counted(), folder, "k")
    cached.score(VIEWS, PLAIN)
    for path in shards(folder):
        path.unlink()
    assert cached.score(VIEWS, PLAIN) == Counted().score(VIEWS, PLAIN)
    assert (cached.hits, cached.misses, caplog.text) == (0, 8, "")


def test_what_another_night_writes_is_found_without_a_restart(folder):
    early = CachedTeacher(Counted(), folder, "k")
    early.score(VIEWS[:1], PLAIN)
    CachedTeacher(Counted(), folder, "k").score(VIEWS[1:], PLAIN)
    early.score(VIEWS, PLAIN)
    assert (early.hits, early.misses) == (4, 1)


def _write(folder, start):
    for number in range(start, start + 5):
        CachedTeacher(Counted(), folder, "k").score([view(number % 8)], PLAIN)


def test_several_processes_may_write_at_once(folder):
    context = multiprocessing.get_context("fork" if os.name == "posix" else "spawn")
    workers = [context.Process(target=_write, args=(folder, start)) for start in range(0, 8, 2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    teacher, views = Counted(), [view(i) for i in range(8)]
    assert CachedTeacher(teacher, folder, "k").score(views, PLAIN) == Counted().score(views, PLAIN)
    assert teacher.asked == []
    assert [p.name for p in folder.iterdir() if p.name.startswith(".")] == []


def test_a_file_that_a_killed_night_left_half_written_is_never_read(folder):
    CachedTeacher(Counted(), folder, "k").score(VIEWS[:1], PLAIN)
    (path,) = shards(folder)
    (folder / f".{path.name}.partial-1-1").write_bytes(path.read_bytes()[:40])
    cached = CachedTeacher(Counted(), folder, "k")
    cached.score(VIEWS[:1], PLAIN)
    assert cached.hits == 1


def test_distributions_and_names_pass_through(folder):
    cached = CachedTeacher(Counted(), folder, "k")
    assert cached.distribution(VIEWS) == "a distribution"
    assert (cached.name, cached.capabilities) == ("counted", Counted.capabilities)
    assert not folder.exists()


def test_a_cache_without_room_is_refused(folder):
    with pytest.raises(ConfigError, match="cache_gib = 0"):
        CachedTeacher(Counted(), folder, "k", max_gib=0.0)
