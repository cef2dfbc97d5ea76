"""What every rollout engine promises, over the real one and the fake."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distill.engines import hf
from distill.engines.hf import HFEngine, common_prefix
from distill.engines.sampling import draw, uniforms
from distill.engines.scripted import ScriptedEngine
from distill.errors import ConfigError, EngineError
from distill.types import CheckpointRef, Sampling, StopReason
from helpers import make_chat, make_policy

PROMPTS = [(5, 6, 7), (8, 9), (10, 11, 12, 13, 14)]
KEYS = ("a", "b", "c")


def make_hf():
    return HFEngine(make_policy(), pad_id=make_chat().pad_id, max_batch=8)


def make_scripted():
    return ScriptedEngine(lambda prompt, sample: [prompt[0] + sample, 3, 1, 4])


@pytest.fixture(params=[make_hf, make_scripted], ids=["hf", "scripted"])
def engine(request):
    return request.param()


def sampling(**changes):
    values = {"num_samples": 3, "max_new_tokens": 6, "stop_token_ids": (1, 20, 21), "keys": KEYS}
    return Sampling(**(values | changes))


def test_every_prompt_gets_its_number_of_completions_in_order(engine):
    groups = engine.generate(PROMPTS, sampling())
    assert [len(g) for g in groups] == [3, 3, 3]


def test_a_completion_carries_one_finite_log_probability_per_token(engine):
    for group in engine.generate(PROMPTS, sampling()):
        for completion in group:
            assert 1 <= len(completion.token_ids) == len(completion.logprobs) <= 6
            assert all(-100 < x <= 0 for x in completion.logprobs)


def test_a_completion_ends_at_its_first_stop_token_and_says_why(engine):
    for group in engine.generate(PROMPTS, sampling(max_new_tokens=12)):
        for completion in group:
            *body, last = completion.token_ids
            assert not set(body) & {1, 20, 21}
            stopped = last in (1, 20, 21)
            assert completion.stop == (StopReason.STOP if stopped else StopReason.LENGTH)
            if not stopped:
                assert len(completion.token_ids) == 12


def test_equal_keys_give_equal_completions_whatever_stands_beside_them(engine):
    alone = engine.generate(PROMPTS[1:2], sampling(keys=("b",)))
    together = engine.generate(PROMPTS, sampling())
    assert [c.token_ids for c in alone[0]] == [c.token_ids for c in together[1]]


def test_loading_a_checkpoint_moves_the_version(engine):
    ref = CheckpointRef(
        path=Path("live"), step=7, policy_version=7, base="b", kind="full", digest="live"
    )
    engine.load(ref)
    assert engine.policy_version == 7
    engine.close()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"num_samples": 0}, "num_samples"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"keys": ("a",)}, "one key per prompt"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(engine, changes, word):
    with pytest.raises(ConfigError, match=word):
        engine.generate(PROMPTS, sampling(**changes))


def test_greedy_decoding_needs_no_keys_and_repeats_itself(engine):
    settings = sampling(temperature=0.0, keys=(), num_samples=1)
    assert engine.generate(PROMPTS, settings) == engine.generate(PROMPTS, settings)


def test_other_keys_give_other_samples():
    engine = make_hf()
    first = engine.generate(PROMPTS, sampling(max_new_tokens=12))
    other = engine.generate(PROMPTS, sampling(max_new_tokens=12, keys=("x", "y", "z")))
    assert first != other


def test_a_sample_does_not_depend_on_how_many_there_are():
    assert (uniforms("key", 2, 5) == uniforms("key", 4, 5)[:2]).all()
    assert (uniforms("key", 2, 5)[0] != uniforms("key", 2, 5)[1]).any()
    assert (uniforms("key", 2, 5) != uniforms("other", 2, 5)).any()


def test_samples_follow_the_model_distribution():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05])).repeat(20_000, 1)
    noise = torch.from_numpy(uniforms("key", 1, 20_000)[0])
    ids, scores = draw(logits, noise, Sampling(keys=("k",)))
    shares = ids.bincount(minlength=4) / 20_000
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.3, 0.15, 0.05]), atol=0.015, rtol=0)
    torch.testing.assert_close(scores, logits.log_softmax(-1)[0][ids])


def test_temperature_and_truncation_shape_the_recorded_distribution():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(500, 1)
    noise = torch.from_numpy(uniforms("key", 1, 500)[0])
    ids, scores = draw(logits, noise, Sampling(keys=("k",), top_k=2))
    assert set(ids.tolist()) == {0, 1}
    torch.testing.assert_close(scores.exp()[ids == 0][0], torch.tensor(0.625))
    ids, _ = draw(logits, noise, Sampling(keys=("k",), top_p=0.7))
    assert set(ids.tolist()) == {0, 1}
    _, scores = draw(logits, noise, Sampling(keys=("k",), temperature=0.5))
    squared = torch.tensor([0.25, 0.09, 0.0225, 0.0025])
    assert any(torch.isclose(scores[0].exp(), squared / squared.sum()))


def test_a_token_without_probability_is_never_drawn():
    logits = torch.tensor([[0.0, float("-inf"), 0.0, float("-inf")]])
    for u in (0.0, 0.5, 1.0 - 1e-16, 1.0):
        ids, _ = draw(logits, torch.tensor([u], dtype=torch.float64), Sampling(keys=("k",)))
        assert int(ids[0]) in (0, 2)


def test_what_all_prompts_begin_with_is_computed_once_and_changes_nothing(monkeypatch):
    shared = (5, 6, 7, 8, 9, 10, 11, 12, 13, 14)
    prompts = [(*shared, 15), (*shared, 16, 17, 18), (*shared, 3, 19)]
    assert common_prefix(prompts) == 10
    results = []
    for least in (8, 1000):
        monkeypatch.setattr(hf, "MIN_SHARED", least)
        results.append(make_hf().generate(prompts, sampling(max_new_tokens=10)))
    for ours, theirs in zip(*results, strict=True):
        assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]
        for left, right in zip(ours, theirs, strict=True):
            torch.testing.assert_close(
                torch.tensor(left.logprobs), torch.tensor(right.logprobs), atol=1e-4, rtol=1e-4
            )


def test_a_prompt_keeps_a_token_of_its_own():
    assert common_prefix([(5, 6, 7), (5, 6, 7)]) == 2
    assert common_prefix([(5,), (5, 6)]) == 0
    assert common_prefix([(5, 6), (7, 6)]) == 0


def by_hand(engine, prompt, ids):
    """Log-probability of each of `ids` after the prompt, from one plain pass."""
    whole = torch.tensor([[*prompt, *ids]])
    with torch.no_grad():
        logits = engine.policy.model(input_ids=whole).logits[0].float().log_softmax(-1)
    return [float(logits[len(prompt) - 1 + i, token]) for i, token in enumerate(ids)]


CHOICES = (((5, 1), (9, 8, 7, 1), (6, 6, 1)), (), ((4, 20),))


def test_a_choice_is_drawn_by_the_chance_of_the_whole_reply_and_records_each_token():
    engine = make_hf()
    asked = sampling(num_samples=2, choices=CHOICES)
    first, free, forced = engine.generate(PROMPTS, asked)
    alone = engine.generate(PROMPTS, sampling(num_samples=2))[1]
    assert [c.token_ids for c in free] == [c.token_ids for c in alone]
    assert [c.token_ids for c in forced] == [(4, 20), (4, 20)]
    for completion in first:
        assert completion.token_ids in CHOICES[0]
        expected = by_hand(engine, PROMPTS[0], completion.token_ids)
        assert completion.logprobs == pytest.approx(expected, abs=1e-5)
        assert completion.stop == StopReason.STOP
    best = max(CHOICES[0], key=lambda ids: sum(by_hand(engine, PROMPTS[0], ids)))
    greedy = engine.generate(PROMPTS, sampling(temperature=0.0, choices=CHOICES))
    assert greedy[0][0].token_ids == best


def test_choices_are_drawn_in_proportion_to_their_chances():
    engine = make_hf()
    asked = Sampling(
        num_samples=4000, stop_token_ids=(1,), keys=("k",), choices=(CHOICES[0],), temperature=1.0
    )
    (drawn,) = engine.generate(PROMPTS[:1], asked)
    totals = torch.tensor([sum(by_hand(engine, PROMPTS[0], ids)) for ids in CHOICES[0]])
    expected = totals.softmax(0).tolist()
    counts = [sum(c.token_ids == ids for c in drawn) / 4000 for ids in CHOICES[0]]
    assert counts == pytest.approx(expected, abs=0.03)


def test_a_choice_without_a_stop_token_or_an_entry_for_every_prompt_is_refused(engine):
    with pytest.raises(ConfigError, match=r"one entry per prompt \(3\), got 1"):
        engine.generate(PROMPTS, sampling(choices=(((5, 1),),)))
    if isinstance(engine, HFEngine):
        with pytest.raises(EngineError, match="must end with a stop token"):
            engine.generate(PROMPTS, sampling(choices=(((5, 6),), (), ())))


def test_choices_at_another_temperature_record_what_the_trainer_scores():
    engine = make_hf()
    asked = sampling(num_samples=2, temperature=0.5, choices=CHOICES)
    first, _, _ = engine.generate(PROMPTS, asked)
    for completion in first:
        whole = torch.tensor([[*PROMPTS[0], *completion.token_ids]])
        with torch.no_grad():
            logits = engine.policy.model(input_ids=whole).logits[0].float() / 0.5
        start = len(PROMPTS[0]) - 1
        expected = [
            float(logits[start + i].log_softmax(-1)[token])
            for i, token in enumerate(completion.token_ids)
        ]
        assert completion.logprobs == pytest.approx(expected, abs=1e-5)


def test_choices_do_not_depend_on_how_many_are_scored_at_once():
    whole, small = make_hf(), HFEngine(make_policy(), pad_id=make_chat().pad_id, max_batch=1)
    asked = sampling(num_samples=2, choices=CHOICES)
    for ours, theirs in zip(
        whole.generate(PROMPTS, asked), small.generate(PROMPTS, asked), strict=True
    ):
        assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]
