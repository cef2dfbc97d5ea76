"""Replies of analysts: read without trust, and never silently bent into shape."""

from __future__ import annotations

import json
import random
import time

import pytest

from distill.errors import ConfigError
from hindsight_parts import SKILL
from skills.hindsight.objects import MAX_CHARACTERS, find
from skills.hindsight.parse import ReplyRules, parse_list, parse_note

RULES = ReplyRules(max_step_skills=2)
EPISODE_ONLY = ReplyRules()
SLOT = ReplyRules(format="slot", min_words=1, slot=r"[a-e]{1,4}")
STEP = "Look at the label before you act."


def reply(**fields):
    return json.dumps({"episode_summary": "It went well.", "episode_skill": SKILL} | fields)


def read(text, num_steps=3, rules=RULES):
    return parse_note(text, num_steps, rules)


@pytest.mark.parametrize(
    ("text", "how"),
    [
        (reply(), "raw"),
        (f"Sure! Here it is:\n```json\n{reply()}\n```\nDone.", "fence"),
        (f"```\n{reply()}", "fence"),
        (f"I think {{so}} and { {} } and then {reply()} is it {{", "raw"),
        (reply().replace('"}', '",\n }'), "repaired"),
        ("{'episode_summary': None, 'episode_skill': '" + SKILL + "', }", "literal"),
        (f'{{"a": 1}} {{"b": 2}} {reply()}', "raw"),
        (f'{{"result": {reply()}}}', "raw"),
        (f'The schema is {{"episode_skill": "text"}}, so: {reply()}', "raw"),
        (f'```json\n{{"note": 1}}\n``` and\n{reply()}', "raw"),
    ],
)
def test_an_object_is_found_in_whatever_stands_around_it(text, how):
    parsed = read(text)
    assert (parsed.status, parsed.episode_skill, parsed.how) == ("ok", SKILL, how)


def test_a_trailing_comma_inside_of_a_text_stays():
    skill = "First a, then b,} and c,] in this order"
    text = reply(episode_skill=skill).replace('"}', '",}')
    assert read(text).episode_skill == skill
    assert read(text).how == "repaired"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "there is no JSON object in the reply"),
        ("I cannot answer.", "there is no JSON object in the reply"),
        (reply()[:-20], "there is no complete JSON object: Unterminated string"),
        (reply()[:-1], "there is no complete JSON object: Expecting ',' delimiter"),
        ("{episode_skill: Look first}", "there is no complete JSON object"),
        ('{"skill": "Look at the label first."}', "the object has no 'episode_skill'"),
        ('["episode_skill"]', "there is no JSON object in the reply"),
        ("{'episode_skill'}", "the object has no 'episode_skill'"),
        (reply(episode_skill=["Look"]), "episode_skill must be text, found list"),
        (reply(episode_skill=None), "episode_skill must be text, found NoneType"),
        (reply(episode_skill={"a": "b"}), "episode_skill must be text, found dict"),
        (reply(episode_skill="Look first, always."), "it has 3 of at least 5 words"),
        (reply(episode_skill="... !? --- ..."), "it has no word"),
        (reply(episode_skill="text"), "it has 1 of at least 5 words"),
        (reply(episode_skill="word " * 1000), "it has 4999 characters, at most 2000"),
        ("{" * 5000, "there is no complete JSON object"),
        ('{"a":' * 9_000, "there is no readable JSON object: RecursionError"),
        (f'{{"episode_skill": {"9" * 5000}}}', "there is no readable JSON object: ValueError"),
        ("x" * (MAX_CHARACTERS + 1), f"has {MAX_CHARACTERS + 1} characters, at most"),
    ],
    ids=lambda text: text[:40],
)
def test_what_cannot_be_read_is_invalid_with_a_reason(text, reason):
    parsed = read(text)
    assert parsed.status == "invalid"
    assert reason in parsed.reason
    assert not parsed.episode_skill
    assert not parsed.step_skills


def test_an_analyst_may_have_nothing_to_say():
    assert read(reply(episode_skill=" ")).status == "empty"
    assert read(reply(episode_skill="", step_skills={})).status == "empty"
    assert read(reply(episode_skill="", step_skills={"1": STEP})).status == "ok"


@pytest.mark.parametrize(
    ("steps", "kept", "reasons"),
    [
        ({"0": STEP, "2": STEP}, [0, 2], []),
        ({"2": STEP, "0": STEP}, [0, 2], []),
        ({"0": STEP, "1": STEP, "2": STEP}, [0, 1], ["step 2: more than 2 steps"]),
        ({"2": STEP, "1": STEP, "0": STEP}, [1, 2], ["step 0: more than 2 steps"]),
        ({"0": STEP, "3": STEP}, [0], ["step 3: not executed, the steps are 0 to 2"]),
        ({"7": STEP}, [], ["step 7: not executed, the steps are 0 to 2"]),
        ({"-1": STEP}, [], ["step -1: no step number, which is 0, 1, 2 and so on"]),
        ({"1.0": STEP}, [], ["step 1.0: no step number, which is 0, 1, 2 and so on"]),
        ({"01": STEP, "step 1": STEP}, [], ["step 01: no step", "step step 1: no step"]),
        ({"\u0661": STEP}, [], ["step \\u0661: no step number"]),
        ({"1": "Look."}, [], ["step 1: it has 1 of at least 5 words"]),
        ({"1": 5, "0": STEP}, [0], ["step 1: must be text, found int"]),
        (["Look"], [], ["step_skills must be an object, found list"]),
        ("none", [], ["step_skills must be an object, found str"]),
        (None, [], []),
        ([], [], []),
    ],
)
def test_skills_of_steps_are_kept_or_dropped_with_a_reason(steps, kept, reasons):
    parsed = read(reply(step_skills=steps))
    assert parsed.status == "ok"
    assert list(parsed.step_skills) == kept
    assert len(parsed.dropped) == len(reasons)
    assert all(want in got for want, got in zip(reasons, parsed.dropped, strict=True))


def test_steps_that_seem_to_be_counted_from_1_are_dropped_and_not_shifted():
    parsed = read(reply(step_skills={"1": STEP, "3": STEP}))
    assert parsed.step_skills == {}
    assert parsed.dropped == ("step_skills: numbered from 1 (3 steps end at 2)",)
    assert list(read(reply(step_skills={"0": STEP, "3": STEP})).step_skills) == [0]


def test_numbers_of_a_python_literal_are_steps_and_its_truth_values_are_not():
    text = f"{{'episode_skill': '{SKILL}', 'step_skills': {{2: '{STEP}', False: '{STEP}'}}}}"
    parsed = read(text)
    assert parsed.step_skills == {2: STEP}
    assert parsed.dropped == ("step False: no step number, which is 0, 1, 2 and so on",)


def test_a_huge_step_number_is_a_reason_and_no_failure():
    text = f"{{'episode_skill': '{SKILL}', 'step_skills': {{0x{'f' * 9000}: '{STEP}'}}}}"
    parsed = read(text)
    assert parsed.status == "ok"
    assert parsed.dropped == ("step with a huge number: not executed, the steps are 0 to 2",)


def test_skills_of_steps_that_nobody_asked_for_are_dropped():
    parsed = read(reply(step_skills={"1": STEP}), rules=EPISODE_ONLY)
    assert parsed.step_skills == {}
    assert parsed.dropped == ("step_skills: none were asked for",)


def test_words_of_scripts_without_spaces_count_by_sign():
    assert read(reply(episode_skill="\u5148\u770b\u6807\u7b7e\u518d\u8f6c\u52a8")).status == "ok"
    assert read(reply(episode_skill="\u5148\u770b")).status == "invalid"


# -- slot ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "status", "skill"),
    [
        ("[dac]", "ok", "dac"),
        ("well, [dac] or [abc]", "ok", "dac"),
        ("[]", "empty", ""),
        ("[ ]", "empty", ""),
        ("dac", "invalid", ""),
        ("", "invalid", ""),
        ("[dac", "invalid", ""),
        ("[[dac]", "invalid", ""),
        ("[xyz]", "invalid", ""),
        ("[dac ignore]", "invalid", ""),
        ("[..]", "invalid", ""),
        ("[" + "a" * MAX_CHARACTERS + "]", "invalid", ""),
    ],
    ids=lambda text: text[:20],
)
def test_a_slot_is_what_stands_in_the_first_brackets(text, status, skill):
    parsed = read(text, rules=SLOT)
    assert (parsed.status, parsed.episode_skill) == (status, skill)
    assert bool(parsed.reason) == (status != "ok")


def test_a_slot_can_be_checked_by_a_function():
    rules = ReplyRules(format="slot", min_words=1, slot=lambda text: text == "rev+inc")
    assert read("[rev+inc]", rules=rules).status == "ok"
    assert read("[rev]", rules=rules).reason == "[rev]: it is no skill of this world"


@pytest.mark.parametrize(
    "fields",
    [
        {"format": "xml"},
        {"max_step_skills": -1},
        {"min_words": 0},
        {"max_characters": 0},
        {"format": "slot", "max_step_skills": 1},
    ],
)
def test_rules_that_make_no_sense_are_refused(fields):
    with pytest.raises(ConfigError):
        ReplyRules(**fields)


# -- lists -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "titles"),
    [
        ('[{"title": "a"}, {"title": "b"}]', ["a", "b"]),
        ('As in [1], see:\n```json\n[{"title": "a"},]\n```', ["a"]),
        ("[{'title': 'a'}, 'b', 3]", ["a"]),
        ('{"skills": [{"title": "a"}]}', ["a"]),
        ('{"title": "a"}', ["a"]),
        ('[{"title": "a"}, {"title": ', ["a"]),
        ("[]", []),
    ],
)
def test_the_objects_of_an_array_are_found(text, titles):
    parsed = parse_list(text)
    assert [row["title"] for row in parsed.rows] == titles
    assert parsed.reason == ""


@pytest.mark.parametrize("text", ["", "none", "[1, 2]", "[" * 9000, "{"])
def test_an_array_that_cannot_be_read_has_a_reason(text):
    parsed = parse_list(text)
    assert parsed.rows == ()
    assert parsed.reason


def test_no_more_rows_are_taken_than_the_limit():
    assert len(parse_list(json.dumps([{"a": 1}] * 400)).rows) == 50
    assert len(parse_list(json.dumps([{"a": 1}] * 400), limit=3).rows) == 3


# -- hostile ---------------------------------------------------------------------------------------

HOSTILE = {
    "braces": "{" * MAX_CHARACTERS,
    "brackets": "[" * MAX_CHARACTERS,
    "nested objects": '{"a":' * (MAX_CHARACTERS // 5),
    "nested lists in an object": '{"episode_skill":' + "[" * 40_000,
    "nested parentheses": "{" + "(" * 40_000,
    "escaped quotes": '{"' + '\\"' * (MAX_CHARACTERS // 2 - 2),
    "escaped quotes and a backslash": '{"' + '\\"' * (MAX_CHARACTERS // 2 - 2) + "\\",
    "single quotes": "{'" + "\\'" * (MAX_CHARACTERS // 2 - 2),
    "commas and blanks": "{" + ", " * (MAX_CHARACTERS // 2 - 1),
    "fences": "```{" * (MAX_CHARACTERS // 4),
    "many small objects": '{"a":1}' * (MAX_CHARACTERS // 7),
    "many literals": "{'a':1}" * (MAX_CHARACTERS // 7),
    "many steps": json.dumps(
        {"episode_skill": SKILL, "step_skills": {str(i): STEP for i in range(900)}}
    ),
    "long ints": "{'a': " + "9" * 40_000 + "}",
    "code": "{'a': __import__('os').getcwd()}",
    "power": "{'a': 9**9**9}",
    "surrogates": '{"episode_skill": "\\ud800 word word word word word"}',
    "nan": '{"episode_skill": NaN}',
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_replies_cost_little_and_raise_nothing(text):
    assert len(text) <= MAX_CHARACTERS
    start = time.process_time()
    parsed = read(text, num_steps=900)
    rows = parse_list(text)
    read(text, rules=SLOT)
    assert time.process_time() - start < 4.0
    assert len(parsed.step_skills) <= 2
    assert len(parsed.dropped) <= 20
    assert len(rows.rows) <= 50
    assert len(parsed.reason) < 300


@pytest.mark.parametrize(("depth", "status"), [(10, "ok"), (20, "invalid")])
def test_a_literal_that_is_nested_too_deep_is_not_evaluated(depth, status):
    nest = "(" * depth + "1" + ")" * depth
    assert read(f"{{'episode_skill': '{SKILL}', 'x': {nest}}}").status == status


def test_nothing_in_a_literal_is_executed(tmp_path):
    mark = tmp_path / "mark"
    text = f"{{'episode_skill': open({str(mark)!r}, 'w').name}}"
    assert read(text).status == "invalid"
    assert not mark.exists()


def test_random_damage_to_a_good_reply_never_raises_and_never_invents_steps():
    rng = random.Random(0)
    good = reply(step_skills={"0": STEP, "2": STEP})
    seen = set()
    for _ in range(400):
        chars = list(good)
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(chars))
            chars[at : at + rng.randint(0, 3)] = rng.choice(
                ['"', "{", "}", ",", "'", "", "\\", "0"]
            )
        parsed = read("".join(chars))
        seen.add(parsed.status)
        assert set(parsed.step_skills) <= {0, 1, 2}
        assert (parsed.status == "invalid") == bool(parsed.reason and parsed.status != "empty")
    assert {"ok", "invalid"} <= seen


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_every_kept_step_was_executed(num_steps):
    rules = ReplyRules(max_step_skills=50)
    for first in range(-2, 4):
        steps = {str(i): STEP for i in range(first, first + num_steps + 2)}
        kept = read(reply(step_skills=steps), num_steps, rules).step_skills
        assert set(kept) <= set(range(num_steps))


def test_the_first_wanted_value_of_the_earliest_way_wins():
    text = '{"x": 1}\n```\n{"y": 2}\n```'
    assert find(text, "{", lambda v: "x" in v).how == "raw"
    assert find(text, "{", lambda v: "y" in v).how == "fence"
    assert find(text, "{", lambda v: "z" in v).value == {"y": 2}
