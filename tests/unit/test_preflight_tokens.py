"""Token in, token out: prompts are never cut, specials survive, one BOS, conversations only grow.

The numbers T21 and T28 to T32 are those of the field notes.
"""

from __future__ import annotations

from typing import Any

import pytest

from distill.batch import collate
from distill.errors import DataError
from distill.models import build_model
from distill.objectives.base import ForwardPlan
from distill.policy import Policy
from distill.step import Parts, on_policy_step
from distill.tokens import Chat
from distill.trainer import Trainer, TrainerOptions
from distill.types import Message, Rollout, Task
from distill.worked import demonstrate
from doctor_parts import BUILD, CHATML, END, FORGETFUL, START, chat_tokenizer
from flows.doctor_tokens import first_difference, turn_end
from helpers import make_rollout, random_rollouts
from teachers.local import LocalTeacher
from teachers.privileged import WithSolution
from teachers.sight import view_of
from teachers.views import Plain


def user(text: str) -> Message:
    return Message(role="user", content=text)


def chat_of(template: str = CHATML, **options: Any) -> Chat:
    return Chat(chat_tokenizer(template), **options)


def policy_of(chat: Chat, seed: int = 0) -> Policy:
    return Policy(build_model(BUILD, chat.tokenizer, seed=seed), base="tiny")


# -- T21: prompt leak ---------------------------------------------------------------------------


def test_prompt_positions_contribute_nothing() -> None:
    from distill.objectives import GKD

    chat = chat_of()
    policy, teacher = policy_of(chat), LocalTeacher(policy_of(chat, 1), name="t")
    rows = random_rollouts(4)
    views = [v for v in Plain().build(rows, {}) if v is not None]
    batch = collate(rows, {"teacher.distribution": teacher.distribution(views)}, pad_id=0)
    objective = GKD(beta=1.0)
    from helpers import INFO

    ready, _ = objective.prepare(batch, INFO, {})
    outside = ~ready.completion_mask
    assert bool((ready.labels[outside] == -100).all())
    seen = policy.forward(ready, objective.plan())
    for term in objective(seen, ready):
        assert float(term.weights[outside].abs().sum()) == 0.0
        assert float(term.per_token[outside].detach().abs().sum()) == 0.0
    assert float(seen.logprobs[outside].detach().abs().sum()) == 0.0


def test_only_sampled_tokens_are_scored() -> None:
    policy = policy_of(chat_of())
    batch = collate([make_rollout([5, 6, 7], [8, 9])], {}, pad_id=0)
    scored = policy.forward(batch, ForwardPlan()).logprobs.detach() != 0
    assert scored.tolist() == batch.completion_mask.tolist()
    assert batch.labels.tolist() == [[-100, -100, -100, 8, 9]]


# -- T28: nothing is cut ------------------------------------------------------------------------


def test_a_prompt_over_the_limit_is_an_error_that_names_it() -> None:
    with pytest.raises(DataError, match=r"\d+ tokens, but model.max_length is 30"):
        chat_of(max_length=30).prompts([[user("a long question " * 3)]])


def test_the_prompt_of_sampling_is_the_prompt_of_training_and_of_the_teacher() -> None:
    chat = chat_of()
    asked = (user("say b now"),)
    ids = chat.prompt(asked)
    assert chat.tokenizer.decode(list(ids)).endswith(f"{START}assistant\n")
    task = Task(id="t", env="e", domain="d", split="train", prompt=asked, meta={"solution": "b"})
    (row,) = demonstrate([task], chat, key="k")
    assert row.token_ids[: len(ids)] == ids
    assert row.completion_mask.index(True) == len(ids)
    (view,) = Plain().build([row], {})
    assert view is not None
    assert view.token_ids[: len(ids)] == ids


# -- T29: the teacher's prompt may be longer than the student's ----------------------------------


def hinted(max_length: int) -> tuple[WithSolution, Rollout, Chat, str]:
    chat = chat_of(max_length=40)
    hint = "because it is said here " * 5
    task = Task(
        id="t0",
        env="e",
        domain="d",
        split="train",
        prompt=(user("say b now"),),
        answer="b",
        meta={"solution": hint},
    )
    prompt = chat.prompt(task.prompt)
    row = make_rollout(prompt, chat.replies(["b"])[0], name="t0", prompt_length=len(prompt))
    view = WithSolution(chat=chat, task_of=lambda name: task, max_length=max_length)
    return view, row, chat, hint


def test_a_hint_of_three_times_the_students_limit_is_read_whole() -> None:
    view, row, chat, hint = hinted(400)
    (built,) = view.build([row], {})
    assert built is not None
    text = chat.tokenizer.decode(list(built.token_ids))
    assert len(built.token_ids) > 3 * chat.max_length
    assert "say b now" in text
    assert hint.strip() in text


def test_a_view_over_its_own_limit_is_left_out_and_counted_never_cut() -> None:
    view, row, _, _ = hinted(100)
    built, counts = view.build_counted([row], {})
    assert built == [None]
    assert any("too_long" in name and value > 0 for name, value in counts.items()), counts


# -- T30: append-only ---------------------------------------------------------------------------


def test_ids_of_a_turn_are_the_beginning_of_the_next_with_its_separator() -> None:
    chat = chat_of()
    history = [user("say b now")]
    ids = list(chat.prompt(history))
    for number, reply in enumerate(("b", "c", "d")):
        sampled = [*ids, *chat.replies([reply])[0]]
        history.append(Message(role="assistant", content=reply))
        grown = chat.extend(sampled, [user(f"turn {number}")], history)
        assert grown is not None
        assert list(grown[: len(sampled)]) == sampled
        history.append(user(f"turn {number}"))
        # the line break behind a turn's end is there again, as the template writes it
        assert list(grown) == list(chat.prompt(history))
        ids = list(grown)


def test_a_template_that_drops_thoughts_makes_rows_fork() -> None:
    chat = chat_of(FORGETFUL)
    said = Message(role="assistant", content="b", reasoning="it was asked")
    history = [user("say b now"), said]
    ids = chat.encode([chat.written(history)])[0]
    assert chat.extend(ids, [user("again")], history) is None


# -- T31: specials survive ----------------------------------------------------------------------


def test_sampled_specials_reach_the_teacher_as_the_same_ids() -> None:
    chat = chat_of()
    start, end = (chat.tokenizer.convert_tokens_to_ids(t) for t in (START, END))
    prompt = chat.prompt([user("say b now")])
    reply = (*chat.encode(["b"])[0], start, *chat.encode(["c"])[0], end)
    row = make_rollout(prompt, reply, prompt_length=len(prompt))
    view = view_of(row, chat.prompt([user("say b now, please")]), "other")
    assert tuple(view.token_ids[p] for p in view.positions) == reply
    # a way back through text would have lost both markers
    again = tuple(chat.encode([chat.tokenizer.decode(list(reply), skip_special_tokens=True)])[0])
    assert again != reply
    assert start not in again


def test_a_prompt_holds_each_marker_as_one_token() -> None:
    chat = chat_of()
    ids = chat.prompt([user("a"), Message(role="assistant", content="b"), user("c")])
    start, end = (chat.tokenizer.convert_tokens_to_ids(t) for t in (START, END))
    assert (ids.count(start), ids.count(end)) == (4, 3)
    assert turn_end(chat) == end


# -- T32: one BOS -------------------------------------------------------------------------------


def test_a_template_that_begins_with_bos_gives_exactly_one() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = chat_tokenizer("{{ bos_token }}" + CHATML.replace("<|im_start|>", "."))
    tokenizer.bos_token = START
    number = tokenizer.convert_tokens_to_ids(START)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, number)]
    )
    chat = Chat(tokenizer)
    text = chat.render([user("hello")])
    assert tokenizer(text)["input_ids"][:2] == [number, number], "the trap is real"
    assert chat.prompt([user("hello")]).count(number) == 1


# -- what a difference looks like ---------------------------------------------------------------


def test_the_first_difference_has_a_position_and_both_texts() -> None:
    chat = chat_of()
    left, right = chat.encode(["say b now", "say c now"])
    found = first_difference(left, right, chat.tokenizer)
    assert found == (4, "'b now'", "'c now'")
    assert first_difference(left, left, chat.tokenizer) is None
    longer = first_difference(left, [*left, left[0]], chat.tokenizer)
    assert longer == (9, "''", "'s'")


def test_an_equal_teacher_gives_no_gradient_through_the_chat_template() -> None:
    chat = chat_of()
    policy = policy_of(chat)
    prompt = chat.prompt([user("say b now")])
    rows = [make_rollout(prompt, chat.replies([c])[0], name=c, reward=0.5) for c in "bcd"]
    from distill.objectives import GKD

    parts = Parts(
        tasks=lambda step: [],
        rows=lambda tasks, step: rows,
        policy=policy,
        objective=GKD(beta=1.0),
        trainer=Trainer(policy, TrainerOptions(num_steps=1, lr=1e-6)),
        teacher=LocalTeacher(policy, name="itself"),
        view=Plain(),
    )
    report = on_policy_step(parts, 1).update
    assert abs(report.loss) < 1e-6
    assert report.grad_norm < 1e-5
