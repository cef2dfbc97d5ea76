"""A teacher behind an endpoint: what is forgiven, what is an error, and what is never shown."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from email.utils import formatdate

import pytest

from distill.calls import retry_after
from distill.errors import ConfigError, TeacherError
from distill.types import Message, Sampling
from endpoint import Reply, completion, echo, serve
from teachers.black_box import BlackBoxModel, BlackBoxOptions
from teachers.endpoint import read_answer, seed_of, server_message

SECRET = "sk-very-secret-0123456789"
PROMPT = (Message(role="user", content="a question that nobody else may read"),)
BEGUN = (*PROMPT, Message(role="assistant", content="It is"))


def model_of(endpoint, **changes):
    values = {"url": endpoint.url, "model": "m", "backoff": 0.01, "retries": 2, "timeout": 5.0}
    return BlackBoxModel(
        BlackBoxOptions(**(values | changes)), render=lambda m: f"<{m[0].content}>"
    )


def ask(model, n=1, prompts=(PROMPT,), **changes):
    keys = tuple(f"k{i}" for i in range(len(prompts)))
    sampling = Sampling(**({"max_new_tokens": 7, "keys": keys} | changes))
    return model.complete(list(prompts), n, sampling)


def in_turn(*replies):
    """The replies one after the other, then the good one."""
    return lambda asked, number: replies[number] if number < len(replies) else echo(asked, number)


# -- what is sent -------------------------------------------------------------------------------


def test_a_request_carries_model_messages_limits_and_a_seed():
    with serve() as endpoint:
        ask(model_of(endpoint, body={"x": 1}, headers={"X-Team": "t"}), n=3, top_k=4, top_p=0.5)
    (asked,) = endpoint.asked
    assert asked.path == "/v1/chat/completions"
    assert asked.headers["X-Team"] == "t"
    assert "Authorization" not in asked.headers
    assert asked.body == {
        "model": "m",
        "messages": [{"role": "user", "content": PROMPT[0].content}],
        "n": 3,
        "max_tokens": 7,
        "temperature": 1.0,
        "top_p": 0.5,
        "top_k": 4,
        "seed": seed_of("k0/0/0"),
        "x": 1,
    }


def test_options_change_how_the_limit_is_called_and_leave_out_the_seed():
    with serve() as endpoint:
        ask(model_of(endpoint, seeds=False, limit_field="max_completion_tokens"))
    body = endpoint.asked[0].body
    assert body["max_completion_tokens"] == 7
    assert not {"seed", "max_tokens", "top_k"} & set(body)


def test_a_begun_reply_is_continued_and_not_answered():
    with serve() as endpoint:
        ask(model_of(endpoint), prompts=(BEGUN,))
    body = endpoint.asked[0].body
    assert body["messages"][-1] == {"role": "assistant", "content": "It is"}
    assert body["continue_final_message"] is True
    assert body["add_generation_prompt"] is False


def test_a_begun_reply_may_be_continued_as_plain_text():
    answer = Reply(body={"choices": [{"index": 0, "text": " so", "finish_reason": "length"}]})
    with serve(lambda asked, number: answer) as endpoint:
        assert ask(model_of(endpoint, continue_mode="completions"), prompts=(BEGUN,)) == [[" so"]]
    (asked,) = endpoint.asked
    assert asked.path == "/v1/completions"
    assert asked.body["prompt"] == f"<{PROMPT[0].content}>It is"
    assert "messages" not in asked.body
    with pytest.raises(ConfigError, match="needs a chat template"):
        BlackBoxModel(BlackBoxOptions(url=endpoint.url, model="m", continue_mode="completions"))


def test_the_key_travels_in_a_header_only(monkeypatch):
    monkeypatch.setenv("TEST_KEY", SECRET)
    with serve() as endpoint:
        plain = model_of(endpoint, api_key_env="TEST_KEY")
        ask(plain)
        ask(model_of(endpoint, api_key_env="TEST_KEY", api_key_header="api-key"))
    first, second = endpoint.asked
    assert first.headers["Authorization"] == f"Bearer {SECRET}"
    assert second.headers["api-key"] == SECRET
    assert SECRET not in str(first.body)
    assert SECRET not in repr(vars(plain))


def test_requests_run_at_once_and_answers_keep_their_order():
    prompts = [(Message(role="user", content=f"p{i}"),) for i in range(8)]
    meeting = threading.Barrier(4, timeout=5)

    def together(asked, number):
        meeting.wait()  # passes only if four requests are under way
        time.sleep(0.01 * (number % 3))
        return echo(asked, number)

    with serve(together) as endpoint:
        found = ask(model_of(endpoint, concurrency=4), n=2, prompts=prompts)
    assert endpoint.most_at_once == 4
    assert [[t.split(":")[0] for t in texts] for texts in found] == [
        [f"p{i}"] * 2 for i in range(8)
    ]


def test_a_call_works_inside_a_running_event_loop():
    async def outer(model):
        return ask(model)

    with serve() as endpoint:
        assert len(asyncio.run(outer(model_of(endpoint)))[0]) == 1


# -- what is forgiven ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        Reply(status=500, body={"error": {"message": "oops"}}),
        Reply(status=503, body=b"<html>", headers={"Retry-After": "0"}),
        Reply(status=429, body={}, headers={"Retry-After": "soon"}),
        Reply(body=b"not json"),
        Reply(body=b"\xff\xfe"),
        Reply(body={"choices": None}),
        Reply(body=["?"]),
        Reply(body=completion(None)),
        Reply(body=completion("", reason=None)),
        Reply(body=completion("half", reason="content_filter")),
        Reply(body=completion("", reason="length")),
        Reply(body=completion("one", "two", "three", "four")),
    ],
    ids=lambda bad: f"{bad.status} {str(bad.body)[:40]}",
)
def test_two_bad_answers_are_forgiven_and_the_third_is_an_error(bad):
    with serve(in_turn(bad, bad)) as endpoint:
        ((first, second, third),) = ask(model_of(endpoint), n=3)
        assert first != second != third
    with serve(in_turn(bad, bad, bad)) as endpoint:
        with pytest.raises(TeacherError, match=r"^m at .*:\d+/v1 should write 3 texts"):
            ask(model_of(endpoint), n=3)
        assert len(endpoint.asked) == 3


def test_an_empty_text_is_a_text_where_the_model_stopped_by_itself():
    with serve(lambda asked, number: Reply(body=completion(""))) as endpoint:
        assert ask(model_of(endpoint)) == [[""]]


def test_only_the_missing_texts_are_asked_for_again_under_another_seed():
    short = Reply(body=completion("a", None, "c"))
    with serve(in_turn(short)) as endpoint:
        ((first, second, third, fourth),) = ask(model_of(endpoint), n=4)
    assert (first, second) == ("a", "c")
    assert third != fourth
    assert [asked.body["n"] for asked in endpoint.asked] == [4, 2]
    seeds = {asked.body["seed"] for asked in endpoint.asked}
    assert len(seeds) == 2


def test_a_failed_connection_repeats_the_same_draw():
    with serve(in_turn(Reply(status=500, body={}))) as endpoint:
        ask(model_of(endpoint))
    first, second = endpoint.asked
    assert first.body == second.body


def test_a_server_that_ignores_n_is_named_with_the_way_out():
    def one(asked, number):
        return Reply(body=completion(f"t{number}"))

    way_out = r"1 of 4 texts.*teacher\.per_request = 1"
    with serve(one) as endpoint, pytest.raises(TeacherError, match=way_out):
        ask(model_of(endpoint, retries=1), n=5)
    with serve(one) as endpoint:
        assert ask(model_of(endpoint, retries=0, per_request=1), n=5) == [
            ["t0", "t1", "t2", "t3", "t4"]
        ]


def test_choices_are_taken_in_the_order_of_their_index():
    choices = completion("a", "b", "c")["choices"]
    assert read_answer({"choices": choices[::-1]}, 3).texts == ("a", "b", "c")


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_obeyed(status):
    busy = Reply(status=status, body={}, headers={"Retry-After": "0.3"})
    with serve(in_turn(busy)) as endpoint:
        start = time.monotonic()
        ask(model_of(endpoint))
        assert time.monotonic() - start >= 0.3


def test_the_wait_doubles_with_every_failure():
    bad = Reply(status=500, body={})
    with serve(in_turn(bad, bad)) as endpoint:
        start = time.monotonic()
        ask(model_of(endpoint, backoff=0.1))
        assert time.monotonic() - start >= 0.1 + 0.2


def test_a_wait_beyond_the_deadline_is_an_error_at_once():
    busy = Reply(status=429, body={}, headers={"Retry-After": "600"})
    with serve(in_turn(busy)) as endpoint:
        start = time.monotonic()
        with pytest.raises(
            TeacherError, match=r"429.*waiting 600 s would exceed teacher\.deadline"
        ):
            ask(model_of(endpoint, deadline=20.0))
        assert time.monotonic() - start < 5


def test_retry_after_is_read_as_seconds_or_as_a_date():
    assert retry_after("2.5") == 2.5
    assert retry_after("-1") == 0.0
    assert 50 < retry_after(formatdate(time.time() + 60, usegmt=True)) <= 60
    for junk in ("soon", "", None, "nan", "inf"):
        assert retry_after(junk) is None


# -- what is an error ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (400, "status 400: too long; the server refuses the request itself"),
        (401, "status 401 .*check the key in the variable that teacher.api_key_env names"),
        (403, "status 403 .*check the key"),
        (404, "status 404: too long.*check teacher.model, and teacher.url"),
    ],
)
def test_a_refusal_is_not_tried_again(status, words):
    refusal = Reply(status=status, body={"error": {"message": "too  long"}})
    with serve(lambda asked, number: refusal) as endpoint:
        with pytest.raises(TeacherError, match=words.replace("long;", r"long.*;")):
            ask(model_of(endpoint))
        assert len(endpoint.asked) == 1


def test_a_slow_answer_is_given_up_and_tried_again():
    def slow_once(asked, number):
        time.sleep(0.6 if number == 0 else 0)
        return echo(asked, number)

    with serve(slow_once) as endpoint:
        assert len(ask(model_of(endpoint, timeout=0.2))[0]) == 1
    advice = r"no answer within 0\.2 s.*raise teacher\.timeout"
    always = serve(lambda asked, number: time.sleep(0.6) or echo(asked, number))
    with always as endpoint, pytest.raises(TeacherError, match=advice):
        ask(model_of(endpoint, timeout=0.2, retries=1))


def test_an_answer_that_trickles_in_does_not_outlive_its_timeout():
    class Trickle(bytes):
        """Looks long to the header and arrives never: the client waits for the rest."""

        def __len__(self):
            return 10_000

    with serve(lambda asked, number: Reply(body=Trickle(b"{"))) as endpoint:
        start = time.monotonic()
        with pytest.raises(TeacherError, match="no answer within"):
            ask(model_of(endpoint, timeout=0.2, retries=0))
        assert time.monotonic() - start < 3


def test_the_whole_call_has_a_deadline():
    prompts = [(Message(role="user", content=f"p{i}"),) for i in range(6)]

    def slow(asked, number):
        time.sleep(0.2)
        return echo(asked, number)

    with serve(slow) as endpoint:
        start = time.monotonic()
        with pytest.raises(TeacherError, match=r"6 prompts within 0\.5 s, but only [12] were"):
            ask(model_of(endpoint, concurrency=1, deadline=0.5), prompts=prompts)
        assert time.monotonic() - start < 3


def test_nobody_listening_is_an_error_that_says_what_to_check():
    with serve() as endpoint:
        pass
    with pytest.raises(TeacherError, match=r"connection failed.*check that the server runs"):
        ask(model_of(endpoint))


# -- what is never shown ------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 401, 429, 500])
def test_neither_key_nor_prompt_reaches_an_error_or_a_log(status, monkeypatch, caplog):
    monkeypatch.setenv("TEST_KEY", SECRET)
    said = {"error": {"message": f"wrong key {SECRET} for: {PROMPT[0].content}"}}
    caplog.set_level(logging.DEBUG)
    refusing = serve(lambda asked, number: Reply(status=status, body=said))
    with refusing as endpoint, pytest.raises(TeacherError) as caught:
        ask(model_of(endpoint, api_key_env="TEST_KEY"))
    text = str(caught.value) + caplog.text
    assert SECRET not in text
    assert "nobody else" not in text


def test_the_server_is_quoted_without_the_key_and_only_in_short():
    assert server_message({"error": {"message": f"bad {SECRET}"}}, PROMPT, SECRET) == ": bad ***"
    assert server_message({"error": "x" * 900}, PROMPT, "") == ": " + "x" * 200
    assert server_message({"message": "m"}, PROMPT, "") == ": m"
    assert server_message({"detail": [{"input": "x"}]}, PROMPT, "") == ""
    assert server_message(None, PROMPT, "") == ""
    echoed = {"message": "in 'a question that nobody else may read'"}
    assert "not shown" in server_message(echoed, PROMPT, "")
    assert "not shown" in server_message({"message": "in 'It is so'"}, (_short("It is so"),), "")


def _short(text):
    return Message(role="user", content=text)


def test_a_key_that_is_missing_or_odd_is_an_error_without_its_value(monkeypatch):
    with serve() as endpoint:
        monkeypatch.delenv("TEST_KEY", raising=False)
        with pytest.raises(ConfigError, match="TEST_KEY, which is not set"):
            model_of(endpoint, api_key_env="TEST_KEY")
        monkeypatch.setenv("TEST_KEY", "geheim\u00e9")
        with pytest.raises(ConfigError, match="characters that no key has") as caught:
            model_of(endpoint, api_key_env="TEST_KEY")
        assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"url": "ftp://127.0.0.1"}, "must look like"),
        ({"url": "127.0.0.1:8000/v1"}, "must look like"),
        ({"url": "http://127.0.0.1:99999/v1"}, "must look like"),
        ({"url": "http://localhost:word@127.0.0.1/v1"}, "no user, password"),
        ({"url": "http://127.0.0.1/v1?key=word"}, "no user, password"),
        ({"api_key_env": "sk-word"}, "name of an environment variable"),
        ({"headers": {"Authorization": "Bearer word"}}, "must not hold 'Authorization'"),
        ({"headers": {"x": 1}}, "must be a string"),
        ({"body": {"n": 2}}, "must not set 'n'"),
        ({"model": ""}, "model is empty"),
        ({"timeout": 0.0}, "timeout must be positive"),
        ({"deadline": -1.0}, "deadline must be positive"),
        ({"concurrency": 0}, "concurrency must be at least 1"),
        ({"retries": -1}, "retries must be at least 0"),
    ],
)
def test_options_that_cannot_work_are_refused_without_showing_a_secret(changes, words):
    with pytest.raises(ConfigError, match=words) as caught:
        BlackBoxOptions(**({"url": "http://127.0.0.1/v1", "model": "m"} | changes))
    assert "word" not in str(caught.value).replace("password", "")


# -- what it cost -------------------------------------------------------------------------------


def test_tokens_are_counted_where_the_server_reports_them():
    def reply(asked, number):
        if number == 0:
            return Reply(body=completion("a", None, tokens=30))
        return Reply(body=completion("b", tokens=4))

    with serve(reply) as endpoint:
        model = model_of(endpoint)
        (written,) = model.write([PROMPT], 2, Sampling(keys=("k",)))
        assert (written.texts, written.num_tokens) == (("a", "b"), 34)
        ask(model)
        assert (model.num_tokens, model.num_uncounted) == (38, 0)
    with serve(lambda asked, number: Reply(body=completion("a"))) as endpoint:
        model = model_of(endpoint)
        assert model.write([PROMPT], 1, Sampling(keys=("k",)))[0].num_tokens is None
        assert (model.num_tokens, model.num_uncounted) == (0, 1)
