"""A scoring endpoint that is asked wrongly, and a client whose server is down, slow or wrong."""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import numpy as np
import pytest

from distill.errors import ConfigError, TeacherError
from distill.models import char_tokenizer
from distill.tokens import tokenizer_digest
from distill.types import ScoreRequest
from helpers import ALPHABET, make_model, random_rollouts
from scoring_endpoint import make_scorer, serving, teacher_at
from teachers.remote import RemoteOptions
from teachers.scoring import CONTENT_TYPE, Question, pack, unpack
from teachers.scoring_server import Scorer
from teachers.views import Plain

DIGEST = tokenizer_digest(char_tokenizer(ALPHABET))
PLAIN = ScoreRequest()
NAME, TOKEN = "SCORING_TOKEN", "sesame-4711"


def views_of(rollouts):
    return [v for v in Plain().build(rollouts, {}) if v is not None]


VIEWS = views_of(random_rollouts())


def question(want=PLAIN, views=VIEWS, **changes):
    settings = {"number": 0, "tokenizer": DIGEST} | changes
    return Question.of(views, want, candidate_ids=want.candidate_ids, **settings)


def ask(url, body, **headers):
    headers = {"content-type": CONTENT_TYPE} | headers
    with httpx.Client(trust_env=False) as client:
        return client.post(f"{url}/score", content=body, headers=headers)


def with_ids(*ids):
    asked = question()
    changed = asked.token_ids.copy()
    changed[: len(ids)] = ids
    return replace(asked, token_ids=changed)


# -- the server ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def endpoint():
    limits = {"max_request_bytes": 2000, "max_views": 8, "max_tokens": 200}
    with serving(make_scorer(**limits, max_answer_bytes=3000)) as found:
        yield found


def test_a_good_question_is_answered(endpoint):
    answer = ask(endpoint.url, question().pack())
    assert (answer.status_code, answer.headers["content-type"]) == (200, CONTENT_TYPE)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, "malformed"),
        (b"\x00" * 500, 400, "malformed"),
        (question().pack()[:-1], 400, "malformed"),
        (replace(question(), positions=question().positions * 0).pack(), 400, "positions must be"),
        (with_ids(48).pack(), 400, "within 0 to 47, found 48"),
        (with_ids(-1).pack(), 400, "within 0 to 47, found -1"),
        (with_ids(2**31 - 1).pack(), 400, "within 0 to 47, found 2147483647"),
        (question(tokenizer="other").pack(), 409, "token ids mean other tokens here"),
        (question(ScoreRequest(candidates=49)).pack(), 400, "within 1 to 48"),
        (question(num_ids=49).pack(), 400, "within 1 to 48"),
        (question(num_ids=0).pack(), 400, "within 1 to 48"),
        (question(ScoreRequest(candidates=40)).pack(), 413, "at most 3000 bytes, it would have"),
        (question(views=views_of(random_rollouts(9))).pack(), 413, "at most 8 views"),
        (question(views=VIEWS[:1] * 8, hidden=True).pack(), 413, "at most 3000 bytes"),
        (b"\x00" * 2001, 413, "at most 2000 bytes"),
        (b"\x00" * 10_000, 413, "at most 2000 bytes"),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused_in_words(endpoint, body, status, words):
    answer = ask(endpoint.url, body)
    assert answer.status_code == status
    assert words in answer.json()["error"]
    assert ask(endpoint.url, question().pack()).status_code == 200, "it goes on"


def test_too_many_tokens_and_negative_candidates_are_refused(endpoint):
    with serving(make_scorer(max_tokens=20)) as small:
        answer = ask(small.url, question().pack())
        assert (answer.status_code, "at most 20 tokens" in answer.text) == (413, True)
    listed = [[[-1]] * len(v.positions) for v in VIEWS]
    answer = ask(endpoint.url, question(ScoreRequest(candidate_ids=listed)).pack())
    assert (answer.status_code, "not be negative" in answer.text) == (400, True)


@pytest.mark.parametrize("kind", ["application/json", "text/plain", ""])
def test_another_content_type_is_refused(endpoint, kind):
    assert ask(endpoint.url, question().pack(), **{"content-type": kind}).status_code == 415


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("", 400),
        ("?start=0", 400),
        ("?start=a&stop=b", 400),
        ("?start=0&stop=49", 400),
        ("?start=5&stop=5", 400),
        ("?start=-1&stop=5", 400),
        ("?start=0&stop=24", 413),
        ("?start=40&stop=48", 200),
    ],
)
def test_only_rows_that_exist_are_given_of_the_head(endpoint, query, status):
    assert httpx.get(f"{endpoint.url}/head{query}", trust_env=False).status_code == status


def test_a_server_with_a_token_answers_nobody_else(monkeypatch):
    with serving(make_scorer(), token=TOKEN) as endpoint:
        bodies = [("get", "/info"), ("get", "/head?start=0&stop=1"), ("post", "/score")]
        for wrong in ("", "Bearer", f"Bearer {TOKEN}x", TOKEN, "Bearer é"):
            headers = {"authorization": wrong.encode(), "content-type": CONTENT_TYPE.encode()}
            for method, path in bodies:
                with httpx.Client(trust_env=False) as client:
                    answer = client.request(method, endpoint.url + path, headers=headers)
                assert answer.status_code == 401
                assert TOKEN not in answer.text
        assert httpx.get(f"{endpoint.url}/health", trust_env=False).status_code == 200
        with pytest.raises(TeacherError, match=r"status 401.* check the key") as failed:
            endpoint.teacher()
        assert TOKEN not in str(failed.value)
        monkeypatch.setenv(NAME, TOKEN)
        teacher = endpoint.teacher(api_key_env=NAME)
        assert len(teacher.score(VIEWS, PLAIN)) == len(VIEWS)
        monkeypatch.setenv(NAME, "wrong")
        with pytest.raises(TeacherError, match="status 401"):
            teacher.score(VIEWS, PLAIN)


class Slow(Scorer):
    """Takes its time, and knows how many it was asked at once."""

    seconds = 0.15
    now = most = 0

    def answer(self, body):
        self.now += 1
        self.most = max(self.most, self.now)
        time.sleep(self.seconds)
        self.now -= 1
        return super().answer(body)


def like(kind, scorer=None):
    """A scorer of another class with the same model."""
    base = scorer or make_scorer()
    return kind(
        base.policy,
        model=base.model,
        weights=base.weights,
        tokenizer=base.tokenizer,
        limits=base.limits,
    )


def test_the_model_is_asked_one_thing_at_a_time_and_a_full_house_says_come_back():
    scorer = like(Slow, make_scorer(max_queue=3))
    with serving(scorer) as endpoint, ThreadPoolExecutor(8) as pool:
        bodies = [question(number=n).pack() for n in range(8)]
        answers = list(pool.map(lambda body: ask(endpoint.url, body), bodies))
        states = [a.status_code for a in answers]
        assert sorted(set(states)) == [200, 503]
        assert states.count(200) >= 3
        assert {a.headers["retry-after"] for a in answers if a.status_code == 503} == {"1"}
        assert scorer.most == 1
        answered = [(a, n) for n, a in enumerate(answers) if a.status_code == 200]
        assert all(unpack(a.content)[0]["number"] == n for a, n in answered)
        # A client waits for its turn instead of failing.
        teacher = endpoint.teacher(batch_tokens=8, concurrency=6, deadline=60)
        assert len(teacher.score(VIEWS, PLAIN)) == len(VIEWS)
        assert scorer.most == 1


class Failing(Scorer):
    def answer(self, body):
        raise RuntimeError("secret-detail of the inside")


def test_what_goes_wrong_inside_stays_in_the_log(caplog):
    with serving(like(Failing)) as endpoint, caplog.at_level(logging.ERROR):
        answer = ask(endpoint.url, question().pack())
        assert answer.status_code == 500
        assert answer.json() == {"error": "the server failed; its log says why"}
        for _ in range(500):  # the log is written when the answer has left
            if "secret-detail" in caplog.text:
                break
            time.sleep(0.01)
        assert "secret-detail" in caplog.text
        with pytest.raises(TeacherError, match=r"status 500.* \(3 failed of up to 3 tries\)"):
            endpoint.teacher().score(VIEWS, PLAIN)


def test_a_client_that_goes_away_does_no_harm(endpoint):
    host, port = endpoint.url.removeprefix("http://").split(":")
    head = f"POST /score HTTP/1.1\r\nHost: x\r\nContent-Type: {CONTENT_TYPE}\r\n"
    for start in (head + "Content-Length: 900\r\n\r\nabc", head, "nonsense\r\n\r\n"):
        with socket.create_connection((host, int(port))) as line:
            line.sendall(start.encode())
    time.sleep(0.05)
    assert ask(endpoint.url, question().pack()).status_code == 200
    assert endpoint.scorer.limits.max_queue == 16
    for _ in range(20):  # nothing of the above still counts as being here
        assert ask(endpoint.url, question().pack()).status_code == 200


def test_the_log_probabilities_of_one_temperature_do_not_leak_into_the_next(liar):
    hot, cold = liar.teacher(temperature=2.0), liar.teacher(temperature=0.5)
    first = cold.score(VIEWS, PLAIN)
    assert hot.score(VIEWS, PLAIN)[0].logprobs != first[0].logprobs
    assert [s.logprobs for s in cold.score(VIEWS, PLAIN)] == [s.logprobs for s in first]


# -- the client ----------------------------------------------------------------------------------


class Tampered(Scorer):
    """Answers some times with what `tamper` makes of a good answer, and is honest again."""

    asked = times = 0

    def lie(self, tamper, times=10**9):
        self.tamper, self.times, self.asked = tamper, times, 0

    def answer(self, body):
        answer = super().answer(body)
        self.asked += 1
        if self.asked > self.times:
            return answer
        head, arrays = unpack(answer)
        raw = self.tamper(head, arrays)
        return pack(head, arrays) if raw is None else raw


@pytest.fixture(scope="module")
def lying():
    with serving(like(Tampered)) as found:
        yield found


@pytest.fixture
def liar(lying):
    """An endpoint that lies when it is told to."""
    lying.scorer.lie(None, times=0)
    return lying


def setting(name, change):
    def tamper(head, arrays):
        arrays[name] = change(arrays[name])

    return tamper


def at(place, value):
    def change(array):
        array[place] = value
        return array

    return change


LIES = {
    "NaN": (setting("logprobs", at(2, math.nan)), "holds 1 values that are no log-prob"),
    "infinite": (setting("logprobs", at(0, -math.inf)), "holds 1 values"),
    "positive": (setting("logprobs", at(0, 0.5)), "holds 1 values"),
    "too few": (setting("logprobs", lambda a: a[:-1]), "should hold"),
    "none": (setting("logprobs", lambda a: a[:0]), "should hold"),
    "k+1 candidates": (setting("top_ids", lambda a: np.pad(a, ((0, 0), (0, 1)))), "should hold"),
    "k-1 candidates": (setting("known", lambda a: a[:, :1]), "should hold"),
    "ids beyond": (setting("top_ids", at((0, 0), 48)), "such as 48, outside of the vocabulary"),
    "other tokens": (setting("ids", at(0, 3)), "their ids differ"),
    "other order": (setting("ids", lambda a: a[::-1]), "their ids differ"),
    "other weights": (lambda head, arrays: head.update(weights="w9"), "comes from weights w9"),
    "other question": (lambda head, arrays: head.update(number=5), "is to question 5"),
    "no message": (lambda head, arrays: b"null", "must begin with"),
    "empty": (lambda head, arrays: b"", "must begin with"),
}


@pytest.mark.parametrize(("tamper", "match"), LIES.values(), ids=LIES.keys())
def test_a_wrong_answer_is_asked_for_again_and_then_refused(liar, tamper, match):
    views, want = VIEWS[:1], ScoreRequest(candidates=2)  # its first token is not 3
    expected = liar.teacher().score(views, want)
    liar.scorer.lie(tamper)
    with pytest.raises(TeacherError, match=match) as failed:
        liar.teacher().score(views, want)
    assert f"at {liar.url}/score" in str(failed.value)
    assert "3 failed of up to 3 tries" in str(failed.value)
    liar.scorer.lie(tamper, times=2)
    assert liar.teacher().score(views, want) == expected
    assert liar.scorer.asked == 3


def test_hidden_states_and_heads_that_are_wrong_are_refused(liar):
    liar.scorer.lie(setting("hidden", at((0, 0), math.nan)))
    with pytest.raises(TeacherError, match="hidden states that are not finite"):
        liar.teacher().distribution(VIEWS)
    liar.scorer.lie(setting("hidden", lambda a: a[:, 1:]))
    with pytest.raises(TeacherError, match=r"should hold hidden states \[\d+, 32\]"):
        liar.teacher().distribution(VIEWS)

    class OtherHead(Scorer):
        def head(self, start, stop):
            head, arrays = unpack(super().head(start, stop))
            return pack(head | changes, {"weight": arrays["weight"][:, slice(*columns)]})

    with serving(like(OtherHead)) as endpoint:
        for changes, columns in (({}, (31,)), ({"weights": "w2"}, (32,))):  # noqa: B007
            with pytest.raises(TeacherError, match="its head should hold"):
                endpoint.teacher(retries=0).distribution(VIEWS)


def test_a_slow_server_is_an_error_that_names_the_limit():
    scorer = like(Slow)
    with serving(scorer) as endpoint:
        teacher = endpoint.teacher(timeout=0.4, retries=0)
        scorer.seconds = 0.8
        with pytest.raises(TeacherError, match=r"no answer within 0\.4 s.* teacher\.timeout"):
            teacher.score(VIEWS, PLAIN)


def test_a_server_that_was_never_there_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(TeacherError, match=rf"/info within 0.3 s, .*127\.0\.0\.1:{port}/info: "):
        teacher_at(f"http://127.0.0.1:{port}", deadline=0.3)


def test_something_else_at_the_address_is_named():
    class Other(Scorer):
        def info(self):
            return {"object": "list", "data": []}

    with (
        serving(like(Other)) as endpoint,
        pytest.raises(TeacherError, match=r"no scoring endpoint of this version.*serve"),
    ):
        endpoint.teacher()


def test_a_server_that_restarts_in_mid_stage_is_waited_for():
    with serving(make_scorer()) as first:
        teacher, port = first.teacher(), int(first.url.rpartition(":")[2])
        expected = teacher.score(VIEWS, PLAIN)
    found = []
    asking = threading.Thread(target=lambda: found.append(teacher.score(VIEWS, PLAIN)))
    asking.start()
    time.sleep(0.3)
    assert found == []
    with serving(make_scorer(), port=port):
        asking.join(20)
    assert [s.logprobs for s in found[0]] == [s.logprobs for s in expected]


def test_a_server_that_comes_back_with_another_model_is_refused():
    with serving(make_scorer()) as first:
        teacher, port = first.teacher(), int(first.url.rpartition(":")[2])
    with (
        serving(make_scorer(make_model(2), weights="w2"), port=port),
        pytest.raises(TeacherError, match=r"comes from weights w2, the run began with w1"),
    ):
        teacher.score(VIEWS, PLAIN)


def test_the_other_replica_takes_over(liar):
    expected = liar.teacher(batch_tokens=8).score(VIEWS, PLAIN)
    liar.scorer.lie(setting("logprobs", at(0, math.nan)))
    with serving(make_scorer()) as good:
        found = teacher_at(liar.url, good.url, batch_tokens=8).score(VIEWS, PLAIN)
    assert [s.logprobs for s in found] == [s.logprobs for s in expected]


def test_a_view_that_no_request_can_hold_is_named_before_anything_is_sent():
    longest = max(VIEWS, key=lambda v: len(v.token_ids))
    with serving(make_scorer(max_tokens=len(longest.token_ids) - 1)) as endpoint:
        teacher = endpoint.teacher()
        with pytest.raises(
            TeacherError, match=rf"view {longest.id} needs {len(longest.token_ids)}"
        ):
            teacher.score(VIEWS, PLAIN)
    with serving(make_scorer(max_request_bytes=4096 + 100)) as endpoint:
        listed = [[[1] * 40] * len(v.positions) for v in VIEWS]
        with pytest.raises(TeacherError, match="bytes, but"):
            endpoint.teacher().score(VIEWS, ScoreRequest(candidate_ids=listed))


@pytest.mark.parametrize(
    ("limits", "want"),
    [
        ({"max_views": 7}, PLAIN),
        ({"max_tokens": 300}, PLAIN),
        ({"max_request_bytes": 4096 + 2000}, PLAIN),
        ({"max_answer_bytes": 4096 + 2000}, ScoreRequest(candidates=3)),
    ],
    ids=["views", "tokens", "bytes", "bytes of answer"],
)
def test_requests_are_cut_to_what_the_server_takes(liar, limits, want):
    views = views_of(random_rollouts(100))
    expected = liar.teacher().score(views, want)
    with serving(make_scorer(**limits)) as small:
        found = small.teacher().score(views, want)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-6)
        assert mine.candidate_ids == theirs.candidate_ids


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"urls": ()}, "one or more different servers"),
        ({"urls": ("ftp://127.0.0.1",)}, "must look like"),
        ({"urls": ("http://127.0.0.1:1",) * 2}, "different servers"),
        ({"api_key_env": "my-secret"}, "name of an environment variable"),
        ({"timeout": 0.0}, "timeout must be positive"),
        ({"batch_tokens": 0}, "batch_tokens"),
        ({"cache_gib": 0.0}, "cache_gib"),
        ({"concurrency": 0}, "concurrency must be at least 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(changes, match):
    with pytest.raises(ConfigError, match=match) as failed:
        RemoteOptions(**({"urls": ("http://127.0.0.1:1",)} | changes))
    assert "my-secret" not in str(failed.value)


def test_a_view_beyond_what_the_model_reads_is_refused():
    model = make_model(1)
    model.config.max_position_embeddings = 4
    with serving(make_scorer(model)) as served:
        answer = ask(served.url, question().pack())
    assert answer.status_code == 413
    assert "at most 4 tokens, as many as tiny reads" in answer.json()["error"]
