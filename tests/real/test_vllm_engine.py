"""What vllm in this process promises, against the trainer's own model. Needs the package vllm."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch

from distill.engines.hf import HFEngine
from distill.engines.publishing import HEAD, read_probe
from distill.engines.vllm_weights import full_tensors
from distill.errors import ConfigError, EngineError
from distill.models import FULL_WEIGHTS
from distill.types import Sampling, StopReason, TeacherView
from real.vllm_parts import LENGTH, LONG, Holder, expected, make_adapter, make_full

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make vllm-env"
    ),
]

PROMPTS = [(5, 6, 7), (8, 9), (10, 11, 12, 13, 14)]
KEYS = ("a", "b", "c")
STOPS = (1, 20, 21)
CHOICES = (((5, 1), (9, 8, 7, 1), (6, 6, 1)), (), ((4, 20),))
POLICY = make_full()


def sampling(**changes):
    values = {"num_samples": 3, "max_new_tokens": 6, "stop_token_ids": STOPS, "keys": KEYS}
    return Sampling(**(values | changes))


@pytest.fixture(scope="module")
def holder(tmp_path_factory):
    holder = Holder(tmp_path_factory.mktemp("vllm"))
    yield holder
    holder.close()


@pytest.fixture
def engine(holder):
    """The engine for full weights, with those of `POLICY`."""
    engine = holder.engine("full")
    if engine.policy_version != 0:
        engine.load(holder.start)
    return engine


def said(groups):
    return [[c.token_ids for c in group] for group in groups]


def test_every_prompt_gets_its_completions_with_a_log_probability_per_token(engine):
    groups = engine.generate(PROMPTS, sampling())
    assert [len(g) for g in groups] == [3, 3, 3]
    for completion in (c for group in groups for c in group):
        assert 1 <= len(completion.token_ids) == len(completion.logprobs) <= 6
        assert all(-100 < x <= 0 for x in completion.logprobs)


def test_a_completion_ends_at_its_first_stop_token_and_says_why(engine):
    reasons = set()
    for group in engine.generate(PROMPTS, sampling(num_samples=16, max_new_tokens=12)):
        for completion in group:
            *body, last = completion.token_ids
            assert not set(body) & set(STOPS)
            assert (completion.stop == StopReason.STOP) == (last in STOPS)
            assert last in STOPS or len(completion.token_ids) == 12
            reasons.add(completion.stop)
    assert reasons == {StopReason.STOP, StopReason.LENGTH}


def test_nothing_but_the_given_stops_ends_a_reply_not_even_eos(engine):
    groups = engine.generate(PROMPTS, sampling(num_samples=24, stop_token_ids=(20,)))
    rows = [c.token_ids for group in groups for c in group]
    assert any(1 in row[:-1] for row in rows), "no sample went on behind the eos of the model"
    endless = engine.generate(PROMPTS, sampling(stop_token_ids=()))
    assert {len(c.token_ids) for group in endless for c in group} == {6}


def test_a_stop_token_that_is_also_the_padding_ends_a_reply_and_stays_in_it(engine):
    groups = engine.generate(PROMPTS, sampling(num_samples=24, stop_token_ids=(0,)))
    ended = [c for group in groups for c in group if c.stop == StopReason.STOP]
    assert ended
    for completion in ended:
        assert completion.token_ids.count(0) == 1
        assert completion.token_ids[-1] == 0
        assert len(completion.logprobs) == len(completion.token_ids)


def test_a_draw_depends_on_its_key_and_number_alone(engine):
    together = said(engine.generate(PROMPTS, sampling()))
    assert said(engine.generate(PROMPTS[1:2], sampling(keys=("b",)))) == together[1:2]
    more = said(engine.generate(PROMPTS, sampling(num_samples=5)))
    assert [group[:3] for group in more] == together
    turned = said(engine.generate(PROMPTS[::-1], sampling(keys=KEYS[::-1])))
    assert turned[::-1] == together
    assert len({ids for ids in more[0]}) > 1
    assert said(engine.generate(PROMPTS, sampling(keys=("x", "y", "z")))) != together


def test_sampling_leaves_the_trainers_random_numbers_alone(engine):
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    engine.generate(PROMPTS, sampling())
    assert torch.equal(torch.rand(4), wanted)


def test_the_trainer_can_still_set_its_number_of_threads(engine):
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)  # vllm takes this away on a CPU
    assert torch.get_num_threads() == before + 1
    torch.set_num_threads(before)


def test_samples_follow_the_models_distribution(engine):
    asked = Sampling(num_samples=4000, max_new_tokens=1, keys=("many",))
    (drawn,) = engine.generate(PROMPTS[:1], asked)
    counts = torch.tensor([c.token_ids[0] for c in drawn]).bincount(minlength=engine.num_ids)
    with torch.no_grad():
        probs = POLICY.model(input_ids=torch.tensor(PROMPTS[:1])).logits[0, -1].softmax(-1)
    torch.testing.assert_close(counts / 4000, probs, atol=0.03, rtol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.0, "keys": ()},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"temperature": 0.7, "top_p": 0.8},
        {"top_k": 5},
        {"temperature": 0.7, "top_k": 7, "top_p": 0.8},
    ],
    ids=str,
)
def test_a_recorded_log_probability_is_that_of_the_distribution_drawn_from(engine, changes):
    asked = sampling(max_new_tokens=10, **changes)
    for prompt, group in zip(PROMPTS, engine.generate(PROMPTS, asked), strict=True):
        for completion in group:
            by_hand = expected(POLICY, prompt, completion.token_ids, asked)
            assert completion.logprobs == pytest.approx(by_hand, abs=2e-5)


def test_temperature_divides_the_logits_not_the_log_probabilities(engine):
    (group,) = engine.generate(PROMPTS[:1], sampling(temperature=0.6, keys=("a",)))
    plain = expected(POLICY, PROMPTS[0], group[0].token_ids, Sampling())
    assert group[0].logprobs != pytest.approx(plain, abs=0.05)
    assert group[0].logprobs != pytest.approx([x / 0.6 for x in plain], abs=0.05)


def test_the_trainer_scores_a_rollout_as_the_engine_did(engine):
    groups = engine.generate(PROMPTS, sampling(max_new_tokens=12))
    views, theirs = [], []
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            whole = (*prompt, *completion.token_ids)
            places = tuple(range(len(prompt), len(whole)))
            views.append(TeacherView(token_ids=whole, positions=places, kind="own", id="x"))
            theirs.append(completion.logprobs)
    gaps = [
        abs(a - b)
        for scores, own in zip(POLICY.score(views), theirs, strict=True)
        for a, b in zip(scores.logprobs, own, strict=True)
    ]
    assert max(gaps) < 2e-5


def test_greedy_replies_are_those_of_the_reference_engine(engine):
    asked = sampling(temperature=0.0, keys=(), num_samples=2, max_new_tokens=10)
    reference = HFEngine(POLICY).generate(PROMPTS, asked)
    found = engine.generate(PROMPTS, asked)
    assert said(found) == said(reference)
    assert engine.generate(PROMPTS, asked) == found


def test_a_sequence_is_scored_token_by_token(engine):
    rows = [(5, 6, 7, 8, 9), (3, 4)]
    for row, scores in zip(rows, engine.logprobs_of(rows), strict=True):
        by_hand = expected(POLICY, row[:1], row[1:], Sampling())
        assert scores == pytest.approx(by_hand, abs=2e-5)


def test_given_replies_are_drawn_and_recorded_as_the_reference_engine_does(engine):
    for temperature in (1.0, 0.0):
        asked = sampling(num_samples=40, temperature=temperature, choices=CHOICES)
        ours, theirs = (e.generate(PROMPTS, asked) for e in (engine, HFEngine(POLICY)))
        for i in (0, 2):
            assert [c.token_ids for c in ours[i]] == [c.token_ids for c in theirs[i]]
            for a, b in zip(ours[i], theirs[i], strict=True):
                assert a.logprobs == pytest.approx(b.logprobs, abs=2e-5)
                assert a.stop == StopReason.STOP
    assert (
        said(engine.generate(PROMPTS, sampling(choices=CHOICES)))[1]
        == said(engine.generate(PROMPTS, sampling()))[1]
    )


@pytest.mark.parametrize(
    ("changes", "error", "word"),
    [
        ({"num_samples": 0}, ConfigError, "num_samples"),
        ({"num_samples": 20_000}, EngineError, "at most 16384 samples"),
        ({"top_p": 0.0}, ConfigError, "top_p"),
        ({"keys": ("a",)}, ConfigError, "one key per prompt"),
        ({"temperature": 0.001}, EngineError, "no temperature between 0 and 0.01"),
        ({"choices": CHOICES, "temperature": 0.5}, EngineError, 'engine.name = "hf"'),
        ({"choices": (((5, 6),), (), ())}, EngineError, "must end with a stop token"),
        ({"choices": (((5, 99, 1),), (), ())}, EngineError, "holds the id 99"),
        ({"max_new_tokens": LENGTH}, EngineError, f"takes {LENGTH} in all"),
    ],
)
def test_what_cannot_be_honoured_is_refused(engine, changes, error, word):
    with pytest.raises(error, match=word):
        engine.generate(PROMPTS, sampling(**changes))


@pytest.mark.parametrize(
    ("prompt", "word"),
    [
        ((5, 48), "holds the id 48, the engine's model has the ids 0 to 47"),
        ((-1, 5), "holds the id -1"),
        ((), "at least one token"),
        ((5,) * LENGTH, f"has {LENGTH} tokens and may get 6 more"),
    ],
)
def test_a_prompt_that_the_model_cannot_read_is_named_and_nothing_is_lost(engine, prompt, word):
    with pytest.raises(EngineError, match=word):
        engine.generate([PROMPTS[0], prompt], sampling(keys=("a", "b")))
    engine.generate(PROMPTS, sampling())


def test_a_prompt_and_reply_may_fill_the_whole_length(engine):
    asked = Sampling(max_new_tokens=4, keys=("a",))
    ((completion,),) = engine.generate([(5,) * (LENGTH - 4)], asked)
    assert len(completion.token_ids) == 4


def test_other_full_weights_arrive_and_move_the_version(engine, holder):
    prompts = [*PROMPTS, LONG]
    asked = sampling(keys=(*KEYS, "d"))
    before = engine.generate(prompts, asked)
    other = make_full(seed=1)
    engine.load(holder.publish(other, "other", 7))
    assert engine.policy_version == 7
    assert engine.sync_gap < 1e-5
    after = engine.generate(prompts, asked)
    assert after != before
    for prompt, group in zip(prompts, after, strict=True):
        for c in group:
            assert c.logprobs == pytest.approx(
                expected(other, prompt, c.token_ids, Sampling()), abs=2e-5
            )
    engine.load(holder.start)
    assert engine.generate(prompts, asked) == before


def test_a_tied_head_that_was_not_sent_is_caught_by_the_probe(engine, holder):
    ref = holder.publish(make_full(seed=2), "headless", 8)
    tensors = [(name, t) for name, t in full_tensors(ref.path) if name != HEAD]
    engine._send(iter(tensors))
    with pytest.raises(EngineError, match="does not have the weights that were sent"):
        engine.require(read_probe(ref.path))
    engine.load(ref)
    assert engine.sync_gap < 1e-5
    engine.load(holder.start)


def test_a_file_without_the_tied_head_is_loaded_with_it(engine, holder):
    from safetensors.torch import load_file, save_file

    ref = holder.publish(make_full(seed=2), "untold", 9)
    path = ref.path / FULL_WEIGHTS
    tensors = load_file(path)
    del tensors[HEAD]
    save_file(tensors, path, metadata={"format": "pt"})
    engine.load(ref)
    assert engine.sync_gap < 1e-5


def test_samples_of_a_version_that_is_not_inside_are_refused(engine):
    engine.policy_version = 3
    with pytest.raises(EngineError, match=r"version 0, and samples were asked of version 3"):
        engine.generate(PROMPTS, sampling())
    engine.policy_version = 0
    engine.generate(PROMPTS, sampling())


def test_unusable_full_weights_are_refused_before_anything_is_sent(engine, holder):
    before = engine.generate(PROMPTS, sampling())
    cut = holder.publish(make_full(seed=3), "cut", 4)
    path = cut.path / FULL_WEIGHTS
    path.write_bytes(path.read_bytes()[:-1000])
    wide = holder.publish(make_full(seed=3, num_layers=1), "wide", 4)
    bare = holder.publish(make_full(seed=3), "bare", 4)
    (bare.path / "probe.json").unlink()
    adapter = holder.publish(make_adapter(), "adapter", 4)
    for ref, word in (
        (cut, "damaged or was cut off"),
        (wide, "the checkpoint is not whole"),
        (bare, "no probe.json"),
        (adapter, "was started for full weights"),
        (replace(bare, base="another"), "belong to the base 'another'"),
    ):
        with pytest.raises(EngineError, match=word):
            engine.load(ref)
        assert engine.policy_version == 0
        assert engine.generate(PROMPTS, sampling()) == before


def test_weights_that_are_not_the_trainers_leave_an_engine_that_samples_nothing(engine, holder):
    ref = holder.publish(make_full(seed=4), "swapped", 5)
    foreign = holder.publish(make_full(seed=5), "foreign", 5)
    (foreign.path / FULL_WEIGHTS).replace(ref.path / FULL_WEIGHTS)
    with pytest.raises(EngineError, match="does not have the weights that were sent"):
        engine.load(ref)
    assert engine.policy_version == 0
    with pytest.raises(EngineError, match="load whole weights before sampling again"):
        engine.generate(PROMPTS, sampling())
    engine.load(holder.start)
    engine.generate(PROMPTS, sampling())
