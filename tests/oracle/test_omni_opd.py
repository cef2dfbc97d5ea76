"""OmniOPD against its published numbers, and a whole step against a computation by hand."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from distill.asking import own_view, with_audit
from distill.engines.hf import HFEngine
from distill.engines.scripted import ScriptedEngine
from distill.errors import AlignmentError, ConfigError, DataError, TeacherError
from distill.objectives.omni_opd import OmniOPD, greedy_peaks, smoothed
from distill.policy import Policy
from distill.step import Parts, on_policy_step
from distill.trainer import Trainer, TrainerOptions
from distill.types import Audit, Message, ScoreRequest, Scores, Task
from helpers import (
    logits_batch,
    make_chat,
    make_model,
    make_policy,
    make_rollout,
    objective_loss,
    random_rollouts,
)
from teachers.audit import Auditor
from teachers.local import LocalTeacher
from teachers.similarity import SIMILARITIES, levenshtein, normalised_edit_similarity
from teachers.text import LocalTextModel

# The shared fixture of the published vectors: two positions over three vocabulary entries.
STUDENT = [[2.0, 0.0, -1.0], [0.5, 0.4, 0.1]]
TEACHER = [[0.0, 1.0, -4.0], [3.0, -1.0, -1.0]]
OWN, CONTINUATIONS = "x = 4", ["x = 4", "x = 5", "so x is 4", "y"]
VOTES = 2.244444
CHUNK = [-0.2, -1.0, -0.3]


def close(found, expected, atol=1e-6):
    torch.testing.assert_close(
        torch.as_tensor(found, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        atol=atol,
        rtol=0,
    )


# -- similarity ---------------------------------------------------------------------------------


def test_edit_similarities_have_their_published_values():
    found = [normalised_edit_similarity(OWN, text) for text in CONTINUATIONS]
    close(found, [1.0, 0.8, 0.444444, 0.0])
    close(sum(found), VOTES)


def test_empty_texts_are_alike_and_unlike_everything_else():
    ned, exact = (SIMILARITIES[name].of for name in ("ned", "exact"))
    assert (ned("", ""), ned("", "a"), ned("a", "")) == (1.0, 0.0, 0.0)
    assert (exact("a", "a"), exact("a", "a ")) == (1.0, 0.0)
    assert [s.id for s in SIMILARITIES.values()] == ["ned/1", "exact/1"]


def test_only_the_first_four_thousand_characters_are_compared():
    same = "a" * 4000
    assert normalised_edit_similarity(same + "b" * 50, same + "c" * 90) == 1.0
    assert normalised_edit_similarity("b" + same, "c" + same) == 1 - 1 / 4000


def table(left, right):
    """The textbook table of edit distances."""
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        last, row[0] = row[0], i
        for j, b in enumerate(right, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (a != b))
    return row[-1]


def test_the_edit_distance_agrees_with_the_textbook_table():
    draw = random.Random(0)
    lengths = [*range(12), 63, 64, 65, 130]
    for _ in range(400):
        letters = draw.choice(["ab", "abcdef", "aé漢 "])
        left, right = ("".join(draw.choices(letters, k=draw.choice(lengths))) for _ in "lr")
        assert levenshtein(left, right) == table(left, right), (left, right)


# -- formulas -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("votes", "expected"), [(VOTES, 0.570195), (0, 0.121306), (2, 0.521306), (4, 0.921306)]
)
def test_smoothed_votes_have_their_published_values(votes, expected):
    mean = torch.tensor(CHUNK, dtype=torch.float64).mean()
    close(mean.exp(), 0.606531)
    close(smoothed(torch.tensor(votes, dtype=torch.float64), mean, 4, 1.0), expected)


ENTROPY = [0.1, 2.0, 1.9, 0.2, 0.3, 1.5, 0.1, 1.8]


@pytest.mark.parametrize("num_chunks", [2, 3])
def test_chunks_start_at_the_published_peaks(num_chunks):
    assert greedy_peaks(ENTROPY, num_chunks, 3) == [1, 5]


def test_chunks_never_overlap_and_always_fit():
    draw = random.Random(1)
    for _ in range(200):
        entropy = [draw.choice([0.5, draw.random()]) for _ in range(draw.randrange(30))]
        length, most = draw.randint(1, 6), draw.randint(1, 5)
        starts = greedy_peaks(entropy, most, length)
        assert len(starts) <= most
        assert all(b - a >= length for a, b in pairwise(starts))
        assert all(start + length <= len(entropy) for start in starts)
        if len(entropy) >= length:
            fitting = entropy[: len(entropy) - length + 1]
            assert fitting.index(max(fitting)) in starts


def published_batch():
    """Three tokens of one audited chunk, then two that are held near the reference."""
    rows = [[math.log(math.exp(p)), math.log(1 - math.exp(p)), -1e9] for p in CHUNK]
    student = torch.tensor([[*rows, *TEACHER]])
    reference = torch.tensor([[*rows, *STUDENT]])
    batch = logits_batch(torch.tensor([[0, 0, 0, 0, 1]]))
    audit = Audit(starts=(0,), votes=(VOTES,), length=3)
    return with_audit(batch, [audit]), student, reference


def test_the_loss_has_its_published_value():
    batch, student, reference = published_batch()

    def loss(**options):
        objective = OmniOPD(num_chunks=1, num_continuations=4, chunk_length=3, **options)
        return float(objective_loss(objective, student, batch, {"reference": reference}))

    close(loss(kl_coefficient=0.0), 0.855293, atol=2e-6)
    close(loss(), 1.079818, atol=2e-6)
    close(loss(kl_coefficient=1.0) - loss(kl_coefficient=0.0), 0.847754 + 1.397504, atol=2e-6)


def test_the_gradient_reinforces_audited_tokens_by_their_detached_share():
    batch, student, reference = published_batch()
    student.requires_grad_(True)
    objective = OmniOPD(num_chunks=1, num_continuations=4, chunk_length=3)
    objective_loss(objective, student, batch, {"reference": reference}).backward()
    probs = student.detach().softmax(-1)[0]
    expected = 0.570195 * probs[:3]
    expected[:, 0] -= 0.570195
    close(student.grad[0, :3], expected, atol=2e-6)
    towards = 0.1 * (probs[3:] - reference[0, 3:].softmax(-1))
    close(student.grad[0, 3:], towards, atol=2e-6)


# -- the audit ----------------------------------------------------------------------------------


class Recording:
    """A teacher that answers with the letters it is told, and remembers what it read."""

    name = "recording"

    def __init__(self, *texts):
        self.texts = list(texts)
        self.seen = []

    def complete(self, prompts, n, sampling):
        self.seen.append((list(prompts), n, sampling))
        return [self.texts[:n] for _ in prompts]


def task_of(task_id):
    return Task(
        id=task_id,
        env="e",
        domain="d",
        split="train",
        prompt=(Message(role="user", content="ab="),),
    )


def auditor(model, **changes):
    values = {"num_chunks": 2, "num_continuations": 2, "chunk_length": 3}
    return Auditor(model=model, chat=make_chat(), task_of=task_of, **(values | changes))


def row_of(text, name="t0", **changes):
    chat = make_chat()
    return make_rollout(
        chat.prompt(task_of(name).prompt), chat.replies([text])[0], name=name, **changes
    )


def scores_of(*entropy):
    return Scores(logprobs=(-0.5,) * len(entropy), source="s", view_id="v", entropy=entropy)


def test_the_teacher_reads_the_task_and_the_reply_up_to_each_chunk():
    model = Recording("fgz", "fg")
    (audit,) = auditor(model)([row_of("abcdefg")], [scores_of(*ENTROPY)])
    ((prompts, n, sampling),) = model.seen
    user = Message(role="user", content="ab=")
    begun = [Message(role="assistant", content=text) for text in ("a", "abcde")]
    assert prompts == [(user, begun[0]), (user, begun[1])]
    assert (n, sampling.max_new_tokens, sampling.temperature) == (2, 3, 1.0)
    assert (audit.starts, audit.length) == ((1, 5), 3)
    # The second chunk is "fg" and the end of the reply, which is no text.
    close(audit.votes, [0.0, 2 / 3 + 1.0])
    assert audit.num_tokens == 2 * 5  # by the student's tokenizer: "fgz" and "fg" per chunk


def test_a_chunk_at_the_very_start_shows_the_task_alone():
    model = Recording("abc", "xyz")
    (audit,) = auditor(model, num_chunks=1)([row_of("abcd")], [scores_of(9, 0, 0, 0, 0)])
    assert model.seen[0][0] == [task_of("t0").prompt]
    assert (audit.starts, audit.votes) == ((0,), (1.0,))


def test_no_two_chunks_of_a_step_share_their_randomness():
    model = Recording("x", "y")
    rows = [row_of("abcdefg", traj_id=f"r{i}") for i in range(3)]
    auditor(model)(rows, [scores_of(*ENTROPY)] * 3)
    keys = [key for _, _, sampling in model.seen for key in sampling.keys]
    assert keys == [f"r{i}/audit/{start}" for i in range(3) for start in (1, 5)]


def test_short_replies_and_worked_solutions_are_not_audited():
    model = Recording("x", "y")
    rows = [row_of("a"), row_of("abcdefg", policy_version=-1)]
    audits = auditor(model)(rows, [scores_of(1, 2), scores_of(*ENTROPY)])
    assert audits == [Audit(starts=(), votes=(), length=3)] * 2
    assert model.seen == []
    assert auditor(model)([], []) == []


def test_equality_may_vote_instead_of_edit_distance():
    (audit,) = auditor(Recording("bcd", "bce"), num_chunks=1, similarity="exact")(
        [row_of("abcdefg")], [scores_of(*ENTROPY)]
    )
    assert audit.votes == (1.0,)
    with pytest.raises(ConfigError, match="ned, exact"):
        auditor(Recording(), similarity="cosine")


def test_what_cannot_be_audited_is_an_error_and_never_fewer_votes():
    row = row_of("abcdefg")
    with pytest.raises(TeacherError, match=r"continue 2 prefixes 2 times.*with 1 texts"):
        auditor(Recording("x"))([row], [scores_of(*ENTROPY)])
    with pytest.raises(AlignmentError, match="8 trained tokens, found 3"):
        auditor(Recording())([row], [scores_of(1, 2, 3)])
    with pytest.raises(AlignmentError, match="found none"):
        auditor(Recording())([row], [replace(scores_of(*ENTROPY), entropy=None)])
    mask = [False, *row.completion_mask[1:]]
    mask[7] = False  # words of an environment in between
    turns = replace(row, completion_mask=tuple(mask))
    with pytest.raises(DataError, match=r"t0 of d.*several"):
        auditor(Recording())([turns], [scores_of(*ENTROPY[:7])])


def test_a_local_teacher_reports_its_own_count_of_tokens():
    model = LocalTextModel(ScriptedEngine(lambda p, g: [5, 6, 7, 8]), make_chat())
    (audit,) = auditor(model)([row_of("abcdefg")], [scores_of(*ENTROPY)])
    assert audit.num_tokens == 2 * 2 * 3


# -- a whole step -------------------------------------------------------------------------------


def step_of(rows, objective):
    """One step with a local teacher that writes and a frozen reference; also its audits."""
    chat, policy = make_chat(), make_policy()
    writer = LocalTextModel(HFEngine(make_policy(seed=1), pad_id=chat.pad_id), chat)
    reference = LocalTeacher(Policy(make_model(2), base="r", trainable=False), name="r")
    kept = {}

    def once(name, kind, make):
        kept[name] = make()
        return kept[name]

    audit = auditor(
        writer,
        num_chunks=objective.num_chunks,
        num_continuations=objective.num_continuations,
        chunk_length=objective.chunk_length,
    )
    parts = Parts(
        tasks=lambda step: [],
        rows=lambda tasks, step: rows,
        policy=policy,
        objective=objective,
        trainer=Trainer(policy, TrainerOptions(num_steps=1, lr=0.0)),
        reference=reference,
        audit=audit,
    )
    return on_policy_step(parts, 1, once), kept["audit"], policy, reference


def by_hand(rows, audits, objective, policy, reference):
    """The loss of the step from scores alone, and every pi_hat."""
    scores = policy.score([own_view(r) for r in rows])
    total, shares = 0.0, []
    for row, audit, score in zip(rows, audits, scores, strict=True):
        free = torch.ones(row.num_trained, dtype=torch.bool)
        for start, votes in zip(audit.starts, audit.votes, strict=True):
            chunk = score.logprobs[start : start + audit.length]
            mean = math.exp(sum(chunk) / len(chunk))
            share = (votes + objective.prior * mean) / (
                objective.num_continuations + objective.prior
            )
            shares.append(share)
            total -= share * sum(chunk)
            free[start : start + audit.length] = False
        every = torch.arange(row.num_trained)
        ours, theirs = (
            LocalTeacher(p, name="x").distribution([own_view(row)]).log_probs(every)
            for p in (policy, reference.policy)
        )
        divergence = (theirs.exp() * (theirs - ours)).sum(-1)
        total += objective.kl_coefficient * float(divergence[free].sum())
    return total / len(rows), shares


def test_a_step_has_the_loss_that_its_audits_imply():
    objective = OmniOPD(num_chunks=2, num_continuations=3, chunk_length=3)
    rows = random_rollouts(8)
    report, audits, policy, reference = step_of(rows, objective)
    expected, shares = by_hand(rows, audits, objective, policy, reference)
    assert math.isfinite(report.update.loss)
    assert report.update.loss == pytest.approx(expected, rel=1e-5)
    assert all(0 <= share <= 1 for share in shares)
    assert report.update.grad_norm > 0
    short = [r.num_trained < 3 for r in rows]
    assert any(short)
    assert [not a.starts for a in audits] == short
    assert report.sampled["audit/chunks"] == len(shares) > 0
    assert report.sampled["audit/rows_without"] == sum(short)
    assert report.sampled["audit/teacher_tokens"] == sum(a.num_tokens for a in audits) > 0


def test_a_step_of_short_replies_is_only_held_near_the_reference():
    objective = OmniOPD(num_chunks=2, num_continuations=3, chunk_length=50)
    rows = random_rollouts()
    report, audits, policy, reference = step_of(rows, objective)
    assert all(a == Audit(starts=(), votes=(), length=50) for a in audits)
    expected, _ = by_hand(rows, audits, objective, policy, reference)
    assert report.update.loss == pytest.approx(expected, rel=1e-5)
    assert report.update.loss > 0


def test_equal_keys_make_equal_audits():
    objective = OmniOPD(num_chunks=2, num_continuations=3, chunk_length=3)
    first, second = (step_of(random_rollouts(), objective)[1] for _ in range(2))
    assert first == second


def test_scores_of_the_student_carry_the_entropy_that_the_audit_needs():
    (scores,) = make_policy().score([own_view(row_of("abc"))], want=ScoreRequest(entropy=True))
    assert len(scores.entropy) == 4
