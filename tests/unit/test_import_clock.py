"""Times of logs in every clock, and tiers of names and models."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from distill.curriculum.clock import parse_time
from distill.curriculum.drops import RowError
from distill.curriculum.tiers import Tiers
from distill.errors import ConfigError

MOMENT = 1_788_228_780_000
"""2026-09-01 02:13:00 UTC."""


@pytest.mark.parametrize(
    "value",
    [
        1_788_228_780,
        1_788_228_780.0,
        "1788228780",
        "1788228780.0",
        1_788_228_780_000,
        "1788228780000",
        1_788_228_780_000_000,
        1_788_228_780_000_000_000,
        "1788228780000000000",
        "2026-09-01T02:13:00Z",
        "2026-09-01T02:13:00",
        "2026-09-01 02:13:00.000000",
        "2026-09-01 02:13:00 UTC",
        "2026-09-01T02:13:00+00:00",
        "2026-09-01T04:13:00+02:00",
        "2026-08-31T21:13:00-0500",
        "2026-09-01T02:13:00.000000999Z",
        " 2026-09-01T02:13:00Z ",
        datetime(2026, 9, 1, 2, 13),
        datetime(2026, 9, 1, 2, 13, tzinfo=UTC),
        datetime(2026, 9, 1, 4, 13, tzinfo=timezone(timedelta(hours=2))),
    ],
)
def test_every_clock_of_a_log_gives_the_same_milliseconds(value: Any) -> None:
    assert parse_time(value) == MOMENT


def test_fractions_of_a_second_are_kept_to_the_millisecond() -> None:
    assert parse_time("2026-09-01T02:13:00.257Z") == MOMENT + 257
    assert parse_time(1_788_228_780.257) == MOMENT + 257
    assert parse_time("1788228780257999999") == MOMENT + 257  # floats cannot hold this number


def test_a_known_unit_is_not_guessed() -> None:
    assert parse_time(5, "ms") == 5
    assert parse_time("7000000", "ns") == 7
    assert parse_time(1_788_228_780_000, "us") == 1_788_228_780


def test_a_date_alone_is_its_first_moment() -> None:
    assert parse_time("2026-09-01") == MOMENT - (2 * 60 + 13) * 60_000
    assert parse_time("20260901") == MOMENT - (2 * 60 + 13) * 60_000


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -5,
        0,
        12345,
        float("nan"),
        float("inf"),
        1e30,
        10**400,
        "9" * 5000,
        "",
        "soon",
        "2026-13-45",
        "1960-01-01T00:00:00Z",
        "-1788228780",
        [],
        {"seconds": 1},
        "\ud800",
    ],
)
def test_what_is_no_time_is_a_row_error_that_says_so(value: Any) -> None:
    with pytest.raises(RowError) as error:
        parse_time(value)
    assert error.value.reason == "bad_time"
    assert "ISO 8601" in error.value.detail


def test_tier_names_of_known_routers_have_their_order() -> None:
    tiers = Tiers()
    for names in (
        ("c0", "c1", "c2", "c3"),
        ("R0", "R1", "R2", "R3"),
        ("SIMPLE", "MEDIUM", "COMPLEX", "REASONING"),
        (0, 1, 2, 3),
    ):
        assert [tiers.of_name(name) for name in names] == [0, 1, 2, 3]
    assert tiers.of_name("platinum") is None
    assert tiers.of_name(4) is None
    assert tiers.of_name(True) is None
    assert tiers.of_name(None) is None


def test_models_are_found_exactly_then_without_provider_then_by_pattern() -> None:
    tiers = Tiers(models={"gpt-x": 3, "azure/gpt-x": "medium", "qwen-*": "c2", "*": 0})
    assert tiers.of_model("azure/gpt-x") == 1
    assert tiers.of_model("openai/gpt-x") == 3
    assert tiers.of_model("vendor/qwen-32b") == 2
    assert tiers.of_model("unheard") == 0
    assert tiers.of_model(None) is None
    assert Tiers(models={"a": 1}).of_model("b") is None


def test_own_tier_names_win_over_the_known_ones() -> None:
    tiers = Tiers(names={"gold": 3, "c0": 1}, models={"m": "gold", "silver": 2})
    assert (tiers.of_name("Gold"), tiers.of_name("c0"), tiers.of_model("m")) == (3, 1, 3)
    assert tiers.of_name("silver") == 2  # one table may hold models and tier names


@pytest.mark.parametrize("table", [{"m": 4}, {"m": "best"}, {"m": -1}, {"m": None}])
def test_a_tier_that_is_none_is_a_configuration_error(table: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="tier of model 'm'"):
        Tiers(models=table)
    with pytest.raises(ConfigError, match="tier name"):
        Tiers(names={"m": 9})


def test_the_digest_changes_with_the_meaning_of_an_alias() -> None:
    before, after = Tiers(models={"fast": 0}), Tiers(models={"fast": 1})
    assert before.digest != after.digest
    assert before.digest == Tiers(models={"fast": 0}).digest
    assert len(before.digest) == 16
