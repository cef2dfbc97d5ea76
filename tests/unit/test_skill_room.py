"""Skills in the acting prompt of a model that has little room for them."""

from __future__ import annotations

from distill.tokens import Chat
from distill.types import Message, Task
from flows.acting import SkillPrompts, fits, with_skill
from skill_nights import CHAT
from skills.items import SkillItem
from skills.render import RenderOptions
from skills.retrieve import Retriever


def test_skills_that_the_model_has_no_room_for_are_left_out_and_never_cut():
    items = [
        SkillItem(
            id=f"s{i}", title=f"rule {i}", principle="look " * 30, category="d", status="active"
        )
        for i in range(4)
    ]
    task = Task(
        id="t", env="", domain="d", split="train", prompt=(Message(role="user", content="go="),)
    )
    for most in (40, 480, 700, 3000):
        chat = Chat(CHAT.tokenizer, max_length=most)
        prompts = SkillPrompts(retriever=Retriever(items), chat=chat)
        shown = prompts.show([task])
        assert fits(shown.tasks[0], chat)
        text = shown.tasks[0].prompt[-1].content
        assert [f"rule {i}:" in text for i in range(4)] == [
            f"s{i}" in shown.skills["t"] for i in range(4)
        ]
    assert len(shown.skills["t"]) == 4
    one, ids, _ = with_skill(task, items[0], RenderOptions(), chat)
    assert "<retrieved_experience>" in one.prompt[-1].content
    assert ids == ("s0",)
    small = Chat(CHAT.tokenizer, max_length=40)
    assert with_skill(task, items[0], RenderOptions(), small) == (task, (), 0)
