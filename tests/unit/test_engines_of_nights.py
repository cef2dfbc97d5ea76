"""Engines of a night: made when they are needed, fed, and never left behind."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from distill.errors import ConfigError, EngineError
from distill.rundir import RunDir
from distill.types import Sampling
from flows import engines, wiring
from flows.configs import load_config
from flows.night import Night, load_student
from flows.progress import NoProgress
from openai_server import NAME, ModelServer

FAST = (
    "engine.name=server",
    f"engine.model={NAME}",
    "engine.sync=reload",
    "engine.timeout=5",
    "engine.deadline=2",
    "engine.retries=1",
    "engine.backoff=0.02",
)


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Where temporary folders of the test appear."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    engines.close_engines()


def surroundings(home: Path, *overrides: str):
    config = load_config(["micro", *FAST, *overrides])
    config = config.for_stage(config.last_student())
    night = Night(
        config=config,
        run=RunDir(path=home / "runs" / "none"),
        progress=NoProgress(),
        read_only=True,
    )

    built = replace(config, model=replace(config.model, path=""))
    return night, built, load_student(night, built, None)


def test_a_server_that_cannot_be_used_leaves_no_weights_behind(places):
    night, config, student = surroundings(places, 'engine.urls=["http://127.0.0.1:9"]')
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9"):
        engines.loaded_engine(night, config, student)
    assert not list(places.glob("distill-engine-*"))


def test_an_engine_with_weights_of_its_own_is_started_once_and_fed_for_every_use(places):
    tokenizer = surroundings(places, 'engine.urls=["http://127.0.0.1:9"]')[2].chat.tokenizer
    model = surroundings(places, 'engine.urls=["http://127.0.0.1:9"]')[2].policy.model
    with ModelServer(tokenizer=tokenizer, model=model, max_model_len=128) as server:
        night, config, student = surroundings(places, f'engine.urls=["{server.url}"]')
        first = engines.loaded_engine(night, config, student)
        again = engines.loaded_engine(night, config, student)
        assert first.engine is again.engine
        prompt = student.chat.encode(["abc"])[0]
        asked = Sampling(
            num_samples=2, max_new_tokens=4, stop_token_ids=student.chat.stop_token_ids, keys=("k",)
        )
        ((one, two),) = again.generate([prompt], asked)
        assert len(one.token_ids) == len(one.logprobs) > 0
        assert two.token_ids
        first.close()
        again.close()
        assert not list(places.glob("distill-engine-*/*"))
        engines.close_engines()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (('engine.urls=["http://127.0.0.1:9"]', "engine.sync=adapter"), "cannot deliver weights"),
        (("engine.name=vllm", "engine.sleep=true"), "engine.sleep"),
        (
            (
                "engine.name=hf",
                'stage.opd.teacher={name="server", urls=["http://127.0.0.1:9"], model="m"}',
                "sampling.temperature=0.7",
                'stage.opd.objective={name="opd", support="top_k", chosen_by="teacher", k=4}',
            ),
            "scores at temperature 1",
        ),
    ],
)
def test_what_an_engine_or_a_server_cannot_do_is_refused_before_anything_is_loaded(
    overrides, words
):
    own = [x for x in FAST if x.split("=")[0] not in {o.split("=")[0] for o in overrides}]
    if any(o.startswith("engine.name") for o in overrides):
        own = []
    with pytest.raises(ConfigError, match=words):
        wiring.check(load_config(["micro", *own, *overrides]))
