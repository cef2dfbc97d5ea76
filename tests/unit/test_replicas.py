"""Asking several equal servers: order, bounds, patience, and what an error says."""

from __future__ import annotations

import asyncio
import logging
import time

import httpx
import pytest

from distill.calls import Unusable, check_key_name, check_urls, read_json, retry_after
from distill.errors import ConfigError, TeacherError
from distill.replicas import CallRules, Replicas

A, B = "http://127.0.0.1:1", "http://127.0.0.1:2"
ELSEWHERE = "http://" + "gpu-box:8000"
FAST = CallRules(timeout=1.0, deadline=5.0, retries=2, backoff=0.01, concurrency=2)


class Servers(httpx.AsyncBaseTransport):
    """`answer(request, number)` in place of a network; remembers what was asked."""

    def __init__(self, answer):
        self.answer, self.asked, self.now, self.most = answer, [], {}, {}

    async def handle_async_request(self, request):
        number = len(self.asked)
        self.asked.append(request)
        port = request.url.port
        self.now[port] = self.now.get(port, 0) + 1
        self.most[port] = max(self.most.get(port, 0), self.now[port])
        try:
            await asyncio.sleep(0.002)
            found = self.answer(request, number)
            return await found if asyncio.iscoroutine(found) else found
        finally:
            self.now[port] -= 1


def echo(request, number):
    return httpx.Response(200, content=request.content)


def value(response):
    return read_json(response)["x"]


def made(answer, urls=(A,), rules=FAST, **options):
    servers = Servers(answer)
    return servers, Replicas(
        urls, rules=rules, label="teacher", error=TeacherError, transport=servers, **options
    )


def bodies(count):
    return [{"x": i} for i in range(count)]


def test_answers_come_in_order_from_all_servers_and_never_too_many_at_once():
    async def late_first(request, number):
        await asyncio.sleep(0.02 if number == 0 else 0)
        return echo(request, number)

    servers, replicas = made(late_first, urls=(A, B))
    assert replicas.post("/x", bodies(20), value) == list(range(20))
    assert servers.most == {1: 2, 2: 2}
    assert replicas.post("/x", [], value) == []


def test_a_call_works_where_the_thread_already_has_an_event_loop():
    _, replicas = made(echo)

    async def inside():
        return replicas.post("/x", bodies(3), value)

    assert asyncio.run(inside()) == [0, 1, 2]


def test_every_answer_may_have_a_reader_of_its_own():
    _, replicas = made(echo)
    readers = [lambda r, i=i: (i, value(r)) for i in range(3)]
    assert replicas.post("/x", bodies(3), readers) == [(0, 0), (1, 1), (2, 2)]


def test_each_and_get_ask_without_a_body():
    servers, replicas = made(lambda r, n: httpx.Response(200, json={"x": r.url.port}), urls=(A, B))
    assert replicas.each("/x", value) == [1, 2]
    assert replicas.get("/x", value) in (1, 2)
    assert replicas.each("/x", value, body={}) == [1, 2]
    assert [r.method for r in servers.asked] == ["GET", "GET", "GET", "POST", "POST"]


def test_an_unusable_answer_is_asked_for_again_and_at_last_an_error_says_everything():
    def read(response):
        raise Unusable("it sent null", "feed the server")

    servers, replicas = made(echo)
    with pytest.raises(TeacherError) as failed:
        replicas.post("/x", bodies(1), read)
    assert len(servers.asked) == 3
    assert str(failed.value) == (
        f"teacher at {A}/x should answer 1 request(s), it answered 0: it sent null (3 failed of up "
        "to 3 tries); feed the server"
    )


def test_a_fatal_answer_ends_the_call_at_once():
    def read(response):
        raise Unusable("another model", fatal=True)

    servers, replicas = made(echo)
    with pytest.raises(TeacherError, match="another model"):
        replicas.post("/x", bodies(1), read)
    assert len(servers.asked) == 1


@pytest.mark.parametrize(
    ("status", "tries", "word"),
    [(400, 1, "refuses"), (401, 1, "api_key_env"), (404, 1, "teacher.model"), (500, 3, "log")],
)
def test_a_status_is_retried_only_where_another_try_may_end_otherwise(status, tries, word):
    said = {"error": {"message": "told  so"}}
    servers, replicas = made(lambda r, n: httpx.Response(status, json=said))
    with pytest.raises(TeacherError, match=word) as failed:
        replicas.post("/x", bodies(1), value)
    assert len(servers.asked) == tries
    assert ("told so" in str(failed.value)) == (status != 401)


def test_a_hint_replaces_the_general_advice_about_a_status():
    _, replicas = made(lambda r, n: httpx.Response(404, json={"detail": "Not Found"}))
    with pytest.raises(TeacherError, match=r"404: Not Found .*start it in another way"):
        replicas.post("/x", bodies(1), value, hints={404: "start it in another way"})


def refuse(request, number):
    raise httpx.ConnectError("refused", request=request)


def test_a_server_that_comes_back_is_waited_for_longer_than_the_tries_allow():
    servers, replicas = made(lambda r, n: refuse(r, n) if n < 5 else echo(r, n))
    assert replicas.post("/x", bodies(6), value) == list(range(6))
    assert sum(r.content == b'{"x": 0}' for r in servers.asked) > 1


def test_an_impatient_call_spends_a_try_on_every_refused_connection():
    servers, replicas = made(refuse)
    with pytest.raises(TeacherError, match=r"connection failed \(ConnectError\).*3 failed"):
        replicas.each("/x", value)
    assert len(servers.asked) == 3


def test_a_server_that_stays_away_ends_the_call_at_the_deadline():
    rules = CallRules(timeout=1.0, deadline=0.15, retries=0, backoff=0.01)
    _, replicas = made(refuse, rules=rules)
    begun = time.monotonic()
    with pytest.raises(TeacherError, match=r"only 0 were answered.*ConnectError.*deadline"):
        replicas.post("/x", bodies(4), value)
    assert time.monotonic() - begun < 1.0


def test_a_slow_answer_is_cut_and_counted():
    async def slow(request, number):
        await asyncio.sleep(0.5 if number == 0 else 0)
        return echo(request, number)

    rules = CallRules(timeout=0.05, deadline=5.0, retries=1, backoff=0.01)
    servers, replicas = made(slow, rules=rules)
    assert replicas.post("/x", bodies(1), value) == [0]
    assert len(servers.asked) == 2


def test_the_others_take_over_from_a_server_that_died():
    dead = []

    def answer(request, number):
        if request.url.port == 1 and number > 3:
            dead.append(number)
            return refuse(request, number)
        return echo(request, number)

    _, replicas = made(answer, urls=(A, B))
    assert replicas.post("/x", bodies(40), value) == list(range(40))
    assert 1 <= len(dead) < 12, "it is set aside, longer each time"


def test_a_server_asks_for_time_and_gets_it():
    def answer(request, number):
        if number:
            return echo(request, number)
        return httpx.Response(429, headers={"Retry-After": "0.2"})

    _, replicas = made(answer)
    begun = time.monotonic()
    assert replicas.post("/x", bodies(1), value) == [0]
    assert time.monotonic() - begun >= 0.2
    assert retry_after("Thu, 01 Jan 1970 00:00:00 GMT") == 0.0
    assert retry_after("soon") is retry_after(None) is None


def test_a_server_that_was_away_is_brought_up_to_date_once_before_anything_else():
    told = []

    def answer(request, number):
        if number < 4:
            return refuse(request, number)
        assert told, "asked before it was brought up to date"
        return echo(request, number)

    _, replicas = made(answer, revive=lambda one: told.append(one.urls))
    assert replicas.post("/x", bodies(20), value) == list(range(20))
    assert len(told) >= 1
    before = len(told)
    assert replicas.post("/x", bodies(20), value) == list(range(20))
    assert len(told) == before


def test_a_server_that_forgot_its_model_is_told_again():
    told = []

    def answer(request, number):
        return echo(request, number) if told else httpx.Response(404)

    _, replicas = made(answer, revive=lambda one: told.append(1))
    assert replicas.post("/x", bodies(8), value) == list(range(8))
    assert told == [1]


def test_what_goes_wrong_while_a_server_is_brought_up_to_date_ends_the_call():
    def revive(one):
        raise TeacherError("it cannot be revived")

    _, replicas = made(lambda r, n: httpx.Response(404), revive=revive)
    with pytest.raises(TeacherError, match="cannot be revived"):
        replicas.post("/x", bodies(1), value)


def refused_by_the_reader(response):
    raise Unusable("no")


def test_the_waits_do_not_depend_on_chance(monkeypatch):
    def waits():
        found = []

        async def sleep(seconds):
            found.append(seconds)

        monkeypatch.setattr("distill.replicas.asyncio.sleep", sleep)
        _, replicas = made(echo)
        with pytest.raises(TeacherError):
            replicas.post("/x", bodies(1), refused_by_the_reader)
        return [w for w in found if w != 0.002]

    first = waits()
    assert first == waits()
    assert len(first) == 2
    assert first[1] > first[0] > 0


def test_the_key_travels_in_its_header_and_nowhere_else(monkeypatch, caplog):
    monkeypatch.setenv("SOME_KEY", "sk-very-secret")
    caplog.set_level(logging.DEBUG)
    said = {"error": {"message": "the key sk-very-secret is used up"}}
    servers, replicas = made(lambda r, n: httpx.Response(400, json=said), api_key_env="SOME_KEY")
    with pytest.raises(TeacherError, match=r"the key \*\*\* is used up") as failed:
        replicas.post("/x", bodies(1), value)
    assert servers.asked[0].headers["authorization"] == "Bearer sk-very-secret"
    assert "sk-very-secret" not in str(failed.value) + caplog.text + repr(vars(replicas))


def test_a_key_that_is_not_set_is_named_before_anything_is_sent(monkeypatch):
    monkeypatch.delenv("SOME_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"teacher\.api_key_env names the variable SOME_KEY"):
        made(echo, api_key_env="SOME_KEY")
    with pytest.raises(ConfigError, match="name of an environment variable") as failed:
        check_key_name("sk-very-secret", "teacher")
    assert "secret" not in str(failed.value)


def test_a_key_over_plain_http_is_warned_about(monkeypatch, caplog):
    monkeypatch.setenv("SOME_KEY", "k")
    made(echo, urls=(ELSEWHERE,), api_key_env="SOME_KEY")
    assert "travels unencrypted" in caplog.text


@pytest.mark.parametrize(
    "urls",
    [
        (),
        (A, f"{A}/"),
        ("127.0.0.1:8000",),
        ("ftp://host",),
        ("http://127.0.0.1:0",),
        ("http://" + "u:p@host",),
        ("http://127.0.0.1/?key=1",),
    ],
)
def test_addresses_that_cannot_be_meant_are_refused(urls):
    with pytest.raises(ConfigError, match=r"teacher\.urls") as failed:
        check_urls(urls, "teacher.urls")
    assert "u:p" not in str(failed.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"timeout": 0.0},
        {"deadline": float("nan")},
        {"backoff": -1.0},
        {"retries": -1},
        {"concurrency": 0},
    ],
)
def test_rules_that_make_no_sense_are_refused(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        CallRules(**changes)
