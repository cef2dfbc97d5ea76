"""A teacher with another tokenizer: what it reads, what it says, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cross_parts import byte_level, chat_of, sentence_piece, sharp_policy, task_of, word_piece
from distill.batch import collate, micro_batches
from distill.divergence import generalised_jsd
from distill.errors import ConfigError, DataError, TeacherError
from distill.groups import SKIPPED, UNMATCHED, GroupTeacher, groups_of
from distill.objectives import Gold
from distill.step import Parts, on_policy_step
from distill.tokens import Chat
from distill.trainer import Trainer, TrainerOptions
from distill.types import Message, ScoreRequest, StopReason
from helpers import INFO, make_rollout
from teachers.cross_options import CAPABILITIES, CrossTokenizerOptions
from teachers.cross_tokenizer import CrossTokenizerTeacher
from teachers.local import LocalTeacher
from teachers.views import Plain, Shuffled

PROMPTS = {"t0": "name the numbers", "t1": "the cat", "t2": "caf\u00e9"}
REPLIES = {"t0": "12 and 345", "t1": "sat on the \U0001f600 mat", "t2": "na\u00efve \u6f22"}
PIECES = {"byte-level": byte_level, "SentencePiece": sentence_piece}


@pytest.fixture(scope="module")
def ours():
    return chat_of(byte_level(), "{% for m in messages %}[{{ m.content }}]{% endfor %}")


@pytest.fixture(scope="module")
def student(ours):
    return sharp_policy(ours.tokenizer, 0)


def make_teacher(ours, student, tokenizer=None, **changes):
    chat = chat_of(sentence_piece() if tokenizer is None else tokenizer)
    values = {
        "name": "big",
        "student": ours,
        "num_ids": student.head().vocab_size,
        "task_of": task_of(PROMPTS),
    }
    return CrossTokenizerTeacher(
        sharp_policy(chat.tokenizer, 5, trainable=False), chat, **(values | changes)
    )


@pytest.fixture(scope="module")
def teacher(ours, student):
    return make_teacher(ours, student)


def rows_of(chat, replies=REPLIES, **changes):
    """One rollout per prompt, closed with the end token."""
    out = []
    for name, text in replies.items():
        prompt = chat.prompt(task_of(PROMPTS)(name).prompt)
        (reply,) = chat.replies([text])
        out.append(make_rollout(prompt, reply, name=name, **changes))
    return out


def views_of(rows):
    return [v for v in Plain().build(rows, {}) if v is not None]


def target_of(teacher, rows):
    return groups_of(teacher, rows, views_of(rows))


def by_hand(teacher, name, text):
    """Log-probability of each token of a reply behind the teacher's own prompt, from its model."""
    tokenizer = teacher.chat.tokenizer
    prompt = tokenizer(f"<user>{PROMPTS[name]}<reply>", add_special_tokens=True)["input_ids"]
    reply = tokenizer(text, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = teacher.policy.model(torch.tensor([prompt + reply])).logits[0].float()
    rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return rows, reply, rows.gather(-1, torch.tensor(reply)[:, None])[:, 0]


def test_it_reads_its_own_template_once_opened_and_its_own_tokens(teacher, ours):
    rows = rows_of(ours)
    for reading, (name, text) in zip(teacher._read(rows), REPLIES.items(), strict=True):
        tokenizer = teacher.chat.tokenizer
        expected = tokenizer(f"<user>{PROMPTS[name]}<reply>")["input_ids"]
        expected += tokenizer(text, add_special_tokens=False)["input_ids"]
        assert list(reading.view.token_ids) == expected
        assert expected.count(tokenizer.bos_token_id) == 1


def test_every_trained_byte_is_in_a_group_and_its_number_is_the_models(teacher, ours):
    rows = rows_of(ours)
    found = teacher.score_groups(rows)
    for row, scores, (name, text) in zip(rows, found, REPLIES.items(), strict=True):
        _, _, logprobs = by_hand(teacher, name, text)
        for (a, b), (c, d), value in zip(
            scores.student_spans, scores.teacher_spans, scores.logprobs, strict=True
        ):
            assert a < b
            assert value == pytest.approx(float(logprobs[c:d].sum()), abs=1e-4)
        covered = sum(b - a for a, b in scores.student_spans)
        assert covered == row.num_trained - 1, "all but the end of the reply"


def test_the_target_of_a_step_holds_the_models_rows_and_products(teacher, ours):
    rows = rows_of(ours)
    target, found = target_of(teacher, rows), teacher.score_groups(rows)
    at = group = 0
    for row, scores, (name, text) in zip(rows, found, REPLIES.items(), strict=True):
        table, _, logprobs = by_hand(teacher, name, text)
        for (a, b), (c, d) in zip(scores.student_spans, scores.teacher_spans, strict=True):
            assert target.first[at + a : at + b].tolist() == [at + a] * (b - a)
            assert int(target.group[at + a]) == group
            merged = target.log_probs(torch.tensor([at + a]))[0]
            expected = table[c] + logprobs[c + 1 : d].sum()
            torch.testing.assert_close(merged, expected, atol=1e-4, rtol=1e-4)
            group += 1
        at += row.num_trained
        assert int(target.first[at - 1]) == SKIPPED
    assert len(target.first) == at
    assert len(target.logprobs) == group


def test_the_ends_of_replies_and_equal_bytes_are_partners(teacher, ours, student):
    match = teacher.match
    pairs = dict(zip(match.student_ids.tolist(), match.teacher_ids.tolist(), strict=True))
    assert pairs[ours.end_id] == teacher.chat.end_id
    del pairs[ours.end_id]
    assert len(pairs) > 100
    assert all(teacher.ours.pieces[i] == teacher.theirs.pieces[j] for i, j in pairs.items())
    assert len(match.student_ids) + len(match.student_rest) == student.head().vocab_size


def loss_and_gradient(student, batch, objective, max_tokens):
    student.model.zero_grad()
    total = batch.weights["gold"].sum()
    value = 0.0
    for part in micro_batches(batch, max_tokens):
        (term,) = objective(student.forward(part, objective.plan()), part)
        loss = (term.per_token * term.weights).sum() / total
        loss.backward()
        value += loss.item()
    return value, [p.grad.clone() for p in student.model.parameters() if p.grad is not None]


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_other_micro_batches_and_chunks_change_neither_value_nor_gradient(
    teacher, ours, student, beta, monkeypatch
):
    from distill import logprobs

    rows, objective = rows_of(ours), Gold(beta=beta)
    batch = collate(rows, {"teacher.distribution": target_of(teacher, rows)})
    batch, _ = objective.prepare(batch, INFO, {})
    whole, slopes = loss_and_gradient(student, batch, objective, 0)
    assert whole > 0.01
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 3 * student.head().vocab_size)
    for size in (0, 1):
        value, others = loss_and_gradient(student, batch, objective, size)
        assert value == pytest.approx(whole, rel=1e-5)
        for mine, theirs in zip(slopes, others, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-4)


def test_a_teacher_of_the_same_tokenizer_and_template_is_the_plain_divergence(ours, student):
    frozen = sharp_policy(ours.tokenizer, 7, trainable=False)
    same = CrossTokenizerTeacher(
        frozen,
        ours,
        name="same",
        student=ours,
        num_ids=student.head().vocab_size,
        task_of=task_of(PROMPTS),
    )
    rows, objective = rows_of(ours), Gold(matched_weight=1.0, unmatched_weight=0.0)
    batch = collate(rows, {"teacher.distribution": target_of(same, rows)})
    batch, _ = objective.prepare(batch, INFO, {})
    view = student.forward(batch, objective.plan())
    exact = LocalTeacher(frozen, name="same").distribution(views_of(rows))
    mine = LocalTeacher(student, name="student").distribution(views_of(rows))
    numbers = torch.arange(batch.num_tokens)
    kept = same.match.student_ids
    ours_rows, their_rows = (d.log_probs(numbers)[:, kept] for d in (mine, exact))
    expected = generalised_jsd(ours_rows, their_rows, 0.5)
    grouped = batch.weights["gold"][batch.completion_mask] > 0
    assert int(grouped.sum()) == batch.num_tokens - len(rows), "one group per token but the ends"
    found = view.divergences["gold"].per_token[batch.completion_mask]
    torch.testing.assert_close(found[grouped], expected[grouped], atol=1e-5, rtol=1e-4)


def test_a_reply_cut_inside_a_character_has_an_unmatched_tail(teacher, ours):
    (row,) = rows_of(ours, {"t1": "\u6f22\U0001f9ea"})
    cut = len(row.token_ids) - 2  # the end, and the last byte of a character
    short = replace(
        row,
        token_ids=row.token_ids[:cut],
        completion_mask=row.completion_mask[:cut],
        logprobs=row.logprobs[:cut],
        stop=StopReason.LENGTH,
    )
    first = target_of(teacher, [short]).first.tolist()
    tail = short.num_trained - first.index(UNMATCHED)
    assert tail > 0
    assert min(first[:-tail]) >= 0
    assert set(first[-tail:]) == {UNMATCHED}


def test_a_row_that_is_too_long_for_the_teacher_has_no_groups_and_the_others_do(ours, student):
    whole = make_teacher(ours, student)
    lengths = [len(r.view.token_ids) for r in whole._read(rows_of(ours))]
    short = make_teacher(ours, student, max_length=max(lengths) - 1)
    rows = rows_of(ours)
    target = target_of(short, rows)
    bounds = torch.tensor([0, *(r.num_trained for r in rows)]).cumsum(0).tolist()
    for length, a, b in zip(lengths, bounds, bounds[1:], strict=False):
        is_grouped = bool((target.first[a : b - 1] >= 0).all())
        assert is_grouped == (length < max(lengths))


def test_a_reply_of_the_end_alone_says_nothing_and_is_no_error(teacher, ours):
    rows = rows_of(ours, {"t0": ""})
    target = target_of(teacher, rows)
    assert target.first.tolist() == [SKIPPED]
    assert len(target.logprobs) == 0
    batch = collate(rows, {"teacher.distribution": target})
    batch, _ = Gold().prepare(batch, INFO, {})
    assert float(batch.weights["gold"].sum()) == 0.0


def test_a_step_whose_replies_have_no_partner_at_all_is_refused(ours, student):
    short = make_teacher(ours, student, max_length=1)
    with pytest.raises(TeacherError, match=r"none of the \d+ tokens of 3 replies.*max_length = 1"):
        target_of(short, rows_of(ours))


def test_numbers_of_single_tokens_are_refused_with_advice(teacher, ours):
    views = views_of(rows_of(ours))
    with pytest.raises(TeacherError, match='use the objective "gold"'):
        teacher.score(views, ScoreRequest())
    with pytest.raises(TeacherError, match='use the objective "gold"'):
        teacher.distribution(views)
    assert teacher.capabilities == CAPABILITIES == {"groups"}
    assert isinstance(teacher, GroupTeacher)


def test_a_teacher_of_token_ids_cannot_serve_groups(student, ours):
    rows = rows_of(ours)
    with pytest.raises(ConfigError, match=r'teacher\.name = "cross_tokenizer"'):
        groups_of(LocalTeacher(student, name="ids"), rows, views_of(rows))


def test_a_privileged_view_would_be_ignored_and_is_refused(teacher, ours):
    rows = rows_of(ours)
    views = [v for v in Shuffled().build(rows, {}) if v is not None]
    with pytest.raises(TeacherError, match=r"'shuffled' would be ignored.*view\.name"):
        groups_of(teacher, rows, views)


def test_a_row_of_several_replies_is_refused_with_advice(teacher, ours):
    (row,) = rows_of(ours, {"t0": "12 and 345"})
    mask = list(row.completion_mask)
    mask[-3] = False
    with pytest.raises(DataError, match=r'2 replies.*sampling\.rows = "turns"'):
        teacher.score_groups([replace(row, completion_mask=tuple(mask))])


def test_what_was_said_before_a_later_turn_is_in_the_teachers_template(teacher, ours):
    said = (Message(role="assistant", content="12"), Message(role="user", content="and?"))
    (row,) = rows_of(ours, {"t0": "345"}, history=said)
    (reading,) = teacher._read([row])
    text = teacher.chat.tokenizer.decode(reading.view.token_ids)
    # SentencePiece begins every text with a blank: here the prompt, and the reply
    assert text == "<s> <user>name the numbers<assistant>12<user>and?<reply> 345"


def test_word_piece_and_a_missing_path_are_refused_before_anything_is_scored(ours, student):
    with pytest.raises(ConfigError, match="do not spell out the text"):
        make_teacher(ours, student, word_piece())
    with pytest.raises(ConfigError, match="option path is missing"):
        CrossTokenizerOptions()
    with pytest.raises(ConfigError, match="max_length must be at least 1, got 0"):
        CrossTokenizerOptions(path="x", max_length=0)


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES.keys())
def test_a_whole_step_trains_and_reports_what_was_left_out(ours, pieces):
    policy = sharp_policy(ours.tokenizer, 3)
    rows = rows_of(ours)
    parts = Parts(
        tasks=lambda step: [task_of(PROMPTS)(name) for name in PROMPTS],
        rows=lambda tasks, step: rows,
        policy=policy,
        objective=Gold(),
        trainer=Trainer(policy, TrainerOptions(num_steps=1, lr=1e-3)),
        teacher=make_teacher(ours, policy, pieces()),
        view=Plain(),
    )
    update = on_policy_step(parts, 1).update
    assert update.loss > 0.0
    assert update.grad_norm > 0.0
    total = sum(r.num_trained for r in rows)
    assert update.metrics["gold/skipped_share"] == pytest.approx(3 / total)
    assert update.metrics["gold/unmatched_share"] == 0.0


def test_a_chat_without_a_token_in_front_is_opened_with_nothing(ours, student):
    chat: Chat = make_teacher(ours, student, byte_level()).chat
    assert chat.tokenizer.bos_token_id is None
