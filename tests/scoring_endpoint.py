"""A real scoring endpoint on the loopback, in a thread of the test."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette

from distill.models import char_tokenizer
from distill.policy import Policy
from distill.tokens import tokenizer_digest
from helpers import ALPHABET, make_model
from teachers.remote import RemoteOptions, RemoteTeacher
from teachers.scoring_server import Limits, Scorer, Server, make_app

WIDTH = 48
"""Entries of the tiny models' heads, of which the first 41 are tokens."""


@dataclass
class Endpoint:
    url: str
    scorer: Scorer

    def teacher(self, **changes: Any) -> RemoteTeacher:
        """A client of this endpoint, for a student like the tiny models."""
        return teacher_at(self.url, **changes)


def teacher_at(*urls: str, **changes: Any) -> RemoteTeacher:
    student: dict[str, Any] = {
        "tokenizer": char_tokenizer(ALPHABET),
        "num_ids": WIDTH,
        "temperature": 1.0,
        "transport": None,
    }
    own = {name: changes.pop(name, value) for name, value in student.items()}
    rules = {"backoff": 0.01, "deadline": 20.0, "retries": 2}
    return RemoteTeacher(RemoteOptions(urls=urls, **(rules | changes)), **own)


def make_scorer(model: Any = None, *, weights: str = "w1", **limits: Any) -> Scorer:
    policy = Policy(model or make_model(1), base="t", trainable=False)
    return Scorer(
        policy,
        model="tiny",
        weights=weights,
        tokenizer=tokenizer_digest(char_tokenizer(ALPHABET)),
        limits=Limits(**limits),
    )


@contextmanager
def serving(scorer: Scorer, *, token: str = "", port: int = 0) -> Iterator[Endpoint]:
    """Serves a scorer until the block ends."""
    with serving_app(make_app(scorer, token=token), port=port) as url:
        yield Endpoint(url=url, scorer=scorer)


@contextmanager
def serving_app(app: Starlette, *, port: int = 0) -> Iterator[str]:
    ready = threading.Event()
    server = Server(app, ready=ready.set)
    place = socket.create_server(("127.0.0.1", port))
    thread = threading.Thread(target=server.serve_on, args=([place],))
    thread.start()
    try:
        assert ready.wait(10), "the server did not start"
        yield f"http://127.0.0.1:{place.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        place.close()
        assert not thread.is_alive(), "the server did not end"
