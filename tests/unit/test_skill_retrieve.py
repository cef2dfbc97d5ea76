"""Which skills are shown for a goal, in which order, and what is recorded about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from distill.errors import ConfigError
from skills.embed import EmbedderKey, HashingEmbedder
from skills.index import SkillIndex, sync
from skills.items import Credit, Scope, SkillItem
from skills.retrieve import RetrieveOptions, Retriever
from skills.rules import ALFWORLD, SEARCH, WEBSHOP, category_of


def skill(number: str, **changes: Any) -> SkillItem:
    values: dict[str, Any] = {"title": f"title {number}", "principle": "p.", "status": "active"}
    return SkillItem(id=number, **(values | changes))


def general(number: str, **changes: Any) -> SkillItem:
    return skill(number, level="general", **changes)


def bank() -> list[SkillItem]:
    return [
        *(general(f"dyn_{n:03d}") for n in range(1, 8)),
        *(general(f"gen_{n:03d}") for n in range(1, 4)),
        *(skill(f"hea_{n:03d}", category="heat") for n in range(1, 9)),
        skill("coo_001", category="cool"),
        *(skill(f"err_{n:03d}", kind="mistake", level="general") for n in range(1, 8)),
    ]


def ids(items: list[SkillItem], goal: str = "heat an egg", **options: Any) -> tuple[str, ...]:
    chosen = RetrieveOptions(**({"rules": "alfworld"} | options))
    return Retriever(items, chosen).retrieve([goal])[0].ids


@pytest.mark.parametrize(
    ("goal", "category"),
    [
        ("look at the alarmclock under the desklamp", "look_at_obj_in_light"),
        ("Look at the clean bowl under the lamp.", "look_at_obj_in_light"),
        ("put a clean mug in the coffeemachine", "clean"),
        ("clean and heat an apple", "clean"),
        ("heat some egg and put it in the garbagecan", "heat"),
        ("heated potato", "heat"),
        ("put a cool tomato in the microwave", "cool"),
        ("examine the book", "examine"),
        ("find two pens and put them on the desk", "examine"),
        ("put two soapbars in the cabinet", "pick_and_place"),
        ("put the wheat on the table", "pick_and_place"),
        ("put a coolant and a cheater on the shelf", "pick_and_place"),
    ],
)
def test_household_goals_find_their_category_in_order(goal: str, category: str) -> None:
    assert ALFWORLD.category(goal) == category


@pytest.mark.parametrize(
    ("goal", "category"),
    [
        ("i want a red cotton t-shirt under 30 dollars", "apparel"),
        ("women's high heels size 8", "footwear"),
        ("a wheel and a string for kites", "other"),
        ("a silver ring", "accessories"),
        ("noise cancelling headphones", "electronics"),
        ("coconut shampoo", "beauty_health"),
        ("a walnut bookcase", "home_decor"),
        ("gluten free crackers", "other"),
    ],
)
def test_products_find_their_category_by_whole_words(goal: str, category: str) -> None:
    assert WEBSHOP.category(goal) == category


def test_questions_have_a_query_type() -> None:
    assert SEARCH.category("Which of the two bands is older?") == "comparison"
    assert SEARCH.category("Who wrote Hamlet?") == "direct_retrieval"


def test_without_a_table_the_names_of_the_categories_decide() -> None:
    known = ("red_door", "door", "cool")
    assert category_of("open the red door", known=known) == "red_door"
    assert category_of("open the blue doors", known=known) == "door"
    assert category_of("count to ten", known=known) == "general"


def test_curated_skills_come_before_evolved_ones() -> None:
    assert ids(bank())[:6] == ("gen_001", "gen_002", "gen_003", "dyn_001", "dyn_002", "dyn_003")


def test_the_order_of_the_reference_pushes_curated_skills_out() -> None:
    found = ids(bank(), order="evolved_first")
    assert found[:6] == tuple(f"dyn_{n:03d}" for n in range(1, 7))


def test_all_skills_of_the_category_and_the_first_mistakes_are_shown() -> None:
    found = ids(bank())
    assert found[6:14] == tuple(f"hea_{n:03d}" for n in range(1, 9))
    assert found[14:] == tuple(f"err_{n:03d}" for n in range(1, 6))


def test_limits_of_zero_show_nothing() -> None:
    assert ids(bank(), "put a pen", top_k=0, mistakes_k=0) == ()


@pytest.mark.parametrize("status", ["candidate", "quarantined", "retired"])
def test_only_active_skills_are_shown(status: Any) -> None:
    items = [replace(item, status=status) for item in bank()]
    assert ids(items) == ()
    for mode in ("embedding", "utility"):
        retriever = Retriever(items, RetrieveOptions(mode=mode), embedder=HashingEmbedder())
        assert retriever.retrieve(["heat"])[0].ids == ()


def test_skills_of_another_environment_or_model_stay_out() -> None:
    items = [
        general("a", scope=Scope(env="kitchen")),
        general("b", scope=Scope(env="shop")),
        general("c", scope=Scope(models=("big",))),
        general("d"),
    ]
    assert Retriever(items).retrieve(["x"])[0].ids == ("a", "b", "c", "d")
    assert Retriever(items, env="kitchen", model="small").retrieve(["x"])[0].ids == ("a", "d")


def test_the_record_says_what_was_chosen_from_which_bank() -> None:
    retriever = Retriever(bank(), RetrieveOptions(rules="alfworld"), bank_version="v17")
    record = retriever.retrieve(["cool a pan"])[0].record
    assert (record.bank_version, record.mode, record.category) == ("v17", "template", "cool")
    assert [(p.section, p.rank) for p in record.picks if p.id in ("gen_002", "coo_001")] == [
        ("general", 2),
        ("task", 1),
    ]
    assert record.tokens_added is None


def test_a_given_category_overrides_the_rules() -> None:
    found = Retriever(bank(), RetrieveOptions(rules="alfworld")).retrieve(["heat"], category="cool")
    assert found[0].record.category == "cool"
    assert [i.id for i in found[0].task] == ["coo_001"]


def meaning_bank() -> list[SkillItem]:
    return [
        general("g1", principle="open doors."),
        general("g2", principle="count coins."),
        skill("t1", principle="open red doors with keys.", category="a"),
        skill("t2", principle="count coins twice.", category="b"),
        skill("t3", principle="sing loudly.", category="b"),
        skill("m1", kind="mistake", principle="never run."),
    ]


def test_vectors_choose_across_categories_and_mistakes_stay_first() -> None:
    options = RetrieveOptions(mode="embedding", top_k=1, task_top_k=2)
    retriever = Retriever(meaning_bank(), options, embedder=HashingEmbedder(256))
    doors, coins = retriever.retrieve(["open red doors with keys", "count coins twice"])
    assert [i.id for i in doors.general] == ["g1"]
    assert doors.task[0].id == "t1"
    assert [i.id for i in coins.general] == ["g2"]
    assert coins.task[0].id == "t2"
    assert [i.id for i in doors.mistakes] == ["m1"]
    best = coins.record.picks[1]
    assert best.similarity is not None
    assert 0.3 < best.similarity < 1.0


def test_utility_reorders_what_is_near_enough() -> None:
    near = [
        skill("t1", principle="open doors now.", credit=Credit(utility=0.1, num_used=10)),
        skill("t2", principle="open doors.", credit=Credit(utility=0.9, num_used=10)),
        skill("t3", principle="sing.", credit=Credit(utility=1.0, num_used=10)),
    ]
    options = RetrieveOptions(mode="utility", sim_threshold=0.2, task_top_k=3)
    found = Retriever(near, options, embedder=HashingEmbedder(256)).retrieve(["open doors now"])[0]
    assert [i.id for i in found.task] == ["t2", "t1"]
    scores = [p.score for p in found.record.picks]
    assert scores == sorted(scores, reverse=True)


def test_an_untried_skill_gets_a_bonus() -> None:
    near = [
        skill("a_old", principle="open.", credit=Credit(utility=0.5, num_used=40)),
        skill("b_new", principle="open.", credit=Credit(utility=0.5, num_used=0)),
    ]
    options = RetrieveOptions(mode="utility")
    found = Retriever(near, options, embedder=HashingEmbedder(256)).retrieve(["open"])[0]
    assert [i.id for i in found.task] == ["b_new", "a_old"]


def test_a_stale_index_is_brought_up_to_date() -> None:
    items, embedder = meaning_bank(), HashingEmbedder(256)
    index = SkillIndex(EmbedderKey.of(embedder))
    sync(index, items[:2], embedder)
    options = RetrieveOptions(mode="embedding", task_top_k=1)
    retriever = Retriever(items, options, embedder=embedder, index=index)
    assert retriever.retrieve(["sing loudly"])[0].task[0].id == "t3"
    assert len(index) == 6


def test_vectors_need_an_embedder() -> None:
    with pytest.raises(ConfigError, match="needs an embedder"):
        Retriever(meaning_bank(), RetrieveOptions(mode="embedding"))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"mode": "magic"}, "template, embedding, utility"),
        ({"order": "dyn_first"}, "curated_first or evolved_first"),
        ({"rules": "chess"}, "alfworld, webshop, search"),
        ({"top_k": -1}, "top_k must not be negative"),
        ({"sim_threshold": 2.0}, "cosine"),
        ({"alpha": 1.5}, "alpha"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        RetrieveOptions(**options)
