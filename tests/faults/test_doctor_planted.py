"""The doctor finds each planted fault, under the name of its check, and says what to change."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from distill.errors import PreflightError
from distill.models import build_model, new_adapter
from distill.policy import AdapterSpec
from distill.sections import ModelBuild
from doctor_parts import (
    ALPHABET,
    BUILD,
    CHATML,
    END,
    FORGETFUL,
    START,
    SWITCHED,
    chat_tokenizer,
    config_of,
    edit_json,
    edit_tokenizer,
    make_site,
    of_stages,
    quick,
    save_model,
    save_rows,
    task_rows,
)
from flows import doctor
from flows.doctor_checks import Status
from flows.doctor_models import _misfit
from openai_server import ModelServer

Plant = Callable[[Path, pytest.MonkeyPatch], Sequence[str]]
"""Breaks a site and returns further words of the configuration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    name: str
    plant: Plant
    check: str
    """The end of the name of the check that finds it."""
    status: Status
    says: tuple[str, ...]
    """What the finding and its advice must hold."""
    device: str = ""


def _template(which: str, template: str | None) -> Plant:
    def plant(site: Path, patch: pytest.MonkeyPatch) -> Sequence[str]:
        def change(tokenizer: Any) -> None:
            tokenizer.chat_template = template

        edit_tokenizer(site / which, change)
        return ()

    return plant


def _both(template: str, *words: str) -> Plant:
    def plant(site: Path, patch: pytest.MonkeyPatch) -> Sequence[str]:
        for which in ("student", "teacher"):
            _template(which, template)(site, patch)
        return words

    return plant


def permuted(site: Path, patch: pytest.MonkeyPatch) -> Sequence[str]:
    shutil.rmtree(site / "teacher")
    swapped = ALPHABET.replace("ab", "ba")
    save_model(site / "teacher", chat_tokenizer(alphabet=swapped))
    return ()


def shorter(site: Path, patch: pytest.MonkeyPatch) -> Sequence[str]:
    shutil.rmtree(site / "teacher")
    save_model(site / "teacher", chat_tokenizer(alphabet=ALPHABET[:-3]))
    return ()


def padded(site: Path, patch: pytest.MonkeyPatch) -> Sequence[str]:
    edit_json(site / "student" / "config.json", vocab_size=151936)
    edit_json(site / "teacher" / "config.json", vocab_size=152064)
    return ()


def double_bos(site: Path, patch: pytest.MonkeyPatch) -> Sequence[str]:
    for which in ("student", "teacher"):
        edit_tokenizer(site / which, _adds_bos)
    return ()


def _adds_bos(tokenizer: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer.bos_token = START
    number = tokenizer.convert_tokens_to_ids(START)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, number)]
    )


def written_twice(site: Path, patch: pytest.MonkeyPatch) -> Sequence[str]:
    def change(tokenizer: Any) -> None:
        tokenizer.bos_token = START
        tokenizer.chat_template = "{{ bos_token }}" + CHATML

    for which in ("student", "teacher"):
        edit_tokenizer(site / which, change)
    return ()


def _eos(*which: str, eos: str | None) -> Plant:
    def plant(site: Path, patch: pytest.MonkeyPatch) -> Sequence[str]:
        def change(tokenizer: Any) -> None:
            tokenizer.eos_token = eos

        for name in which:
            edit_tokenizer(site / name, change)
            number = None if eos is None else 1
            for file in ("config.json", "generation_config.json"):
                edit_json(site / name / file, eos_token_id=number)
        return ()

    return plant


def base_with_instruct(site: Path, patch: pytest.MonkeyPatch) -> Sequence[str]:
    _template("student", None)(site, patch)
    return _eos("student", eos="$")(site, patch)


def pad_is_eos(site: Path, patch: pytest.MonkeyPatch) -> Sequence[str]:
    def change(tokenizer: Any) -> None:
        tokenizer.pad_token = END

    edit_tokenizer(site / "student", change)
    return ()


def narrow(site: Path, patch: pytest.MonkeyPatch) -> Sequence[str]:
    """One id more than rows, which nobody writes."""
    for which in ("student", "teacher"):
        edit_tokenizer(site / which, lambda tokenizer: tokenizer.add_tokens(["<image>"]))
        edit_json(site / which / "config.json", vocab_size=79)
    return ()


def too_narrow(site: Path, patch: pytest.MonkeyPatch) -> Sequence[str]:
    for which in ("student", "teacher"):
        edit_json(site / which / "config.json", vocab_size=77)
    return ()


def odd_end(site: Path, patch: pytest.MonkeyPatch) -> Sequence[str]:
    edit_json(site / "student" / "generation_config.json", eos_token_id="two")
    return ()


def _rows(change: Callable[[list[dict[str, Any]]], object], *words: str) -> Plant:
    def plant(site: Path, patch: pytest.MonkeyPatch) -> Sequence[str]:
        rows = task_rows()
        change(rows)
        save_rows(site, rows)
        return words

    return plant


def empty_messages(site: Path, patch: pytest.MonkeyPatch) -> Sequence[str]:
    rows = [
        {
            "talk": [
                {"role": "system", "content": " " if i == 7 else "Answer."},
                {"role": "user", "content": " " if i == 4 else row["question"]},
            ],
            **row,
        }
        for i, row in enumerate(task_rows())
    ]
    save_rows(site, rows)
    text = (site / "mine.toml").read_text()
    (site / "mine.toml").write_text(text.replace('prompt = "question"', 'messages = "talk"'))
    return ()


def no_solutions(site: Path, patch: pytest.MonkeyPatch) -> Sequence[str]:
    text = (site / "mine.toml").read_text()
    head, _, rest = text.partition("[stage.teacher]")
    rest = rest.partition("[stage.trainer]")[2]
    sft = f'{head}[stage.objective]\nname = "sft"\n[stage.trainer]{rest}'
    (site / "mine.toml").write_text(sft.replace('"on_policy"', '"sft"'))
    return ()


def _cut(file: str) -> Plant:
    def plant(site: Path, patch: pytest.MonkeyPatch) -> Sequence[str]:
        path = site / file
        path.write_bytes(path.read_bytes()[:-100])
        return ()

    return plant


def _adapter(site: Path, build: ModelBuild = BUILD) -> Sequence[str]:
    model = build_model(build, chat_tokenizer(), seed=0)
    new_adapter(model, AdapterSpec(rank=4, alpha=8), seed=0).save_pretrained(str(site / "expert"))
    text = (site / "mine.toml").read_text()
    text = text.replace(f'path = "{site}/teacher"', f'adapter = "{site}/expert"')
    (site / "mine.toml").write_text(text)
    return ["model.kind=adapter"]


def cut_adapter(site: Path, patch: pytest.MonkeyPatch) -> Sequence[str]:
    words = _adapter(site)
    _cut("expert/adapter_model.safetensors")(site, patch)
    return words


def foreign_adapter(site: Path, patch: pytest.MonkeyPatch) -> Sequence[str]:
    return _adapter(site, replace(BUILD, hidden_size=64))


def small_disk(site: Path, patch: pytest.MonkeyPatch) -> Sequence[str]:
    usage = shutil.disk_usage(site)
    patch.setattr(
        "flows.doctor_resources.shutil.disk_usage", lambda place: usage._replace(free=10**6)
    )
    return ()


def read_only(site: Path, patch: pytest.MonkeyPatch) -> Sequence[str]:
    patch.setattr("flows.doctor_resources.os.access", lambda place, mode: False)
    return ()


def lying_disk(site: Path, patch: pytest.MonkeyPatch) -> Sequence[str]:
    patch.setattr("flows.doctor_resources.os.urandom", lambda size: bytes(size))
    real = Path.read_bytes

    def read(path: Path) -> bytes:
        found = real(path)
        return b"x" + found[1:] if ".doctor." in path.name else found

    patch.setattr(Path, "read_bytes", read)
    return ()


def huge(site: Path, patch: pytest.MonkeyPatch) -> Sequence[str]:
    sizes = {"hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 28672}
    sizes |= {"layer_types": ["full_attention"] * 80}  # type: ignore[dict-item]
    edit_json(site / "student" / "config.json", **sizes, num_attention_heads=64, head_dim=128)
    return ()


def few_positions(site: Path, patch: pytest.MonkeyPatch) -> Sequence[str]:
    edit_json(site / "student" / "config.json", max_position_embeddings=30)
    return ()


def server_is_down(site: Path, patch: pytest.MonkeyPatch) -> Sequence[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return ["engine.name=server", f'engine.urls=["http://127.0.0.1:{port}"]', "engine.model=x"]


def words(*given: str) -> Plant:
    return lambda site, patch: given


FAULTS = [
    Fault(
        name="a teacher with a permuted vocabulary",
        plant=permuted,
        check="opd: teacher",
        status="fail",
        says=("another tokenizer", "first difference: 'a'"),
    ),
    Fault(
        name="a teacher with a shorter vocabulary",
        plant=shorter,
        check="opd: teacher",
        status="fail",
        says=("another tokenizer", "first difference: '7'"),
    ),
    Fault(
        name="widths padded to 151936 and 152064",
        plant=padded,
        check="opd: teacher",
        status="ok",
        says=("151936 rows here and 152064", "cut to the 79 shared ids"),
    ),
    Fault(
        name="no template",
        plant=_template("student", None),
        check="opd: template",
        status="warn",
        says=("no chat template",),
    ),
    Fault(
        name="another template than the teacher's",
        plant=_template("student", None),
        check="opd: teacher",
        status="warn",
        says=("written differently", "position 0 is"),
    ),
    Fault(
        name="BOS by the template and by the tokenizer",
        plant=double_bos,
        check="opd: template",
        status="warn",
        says=("double BOS", "send ids"),
    ),
    Fault(
        name="BOS written twice",
        plant=written_twice,
        check="opd: template",
        status="fail",
        says=("double BOS", "positions 0 and 1"),
    ),
    Fault(
        name="a template that drops thoughts",
        plant=_both(FORGETFUL),
        check="opd: template",
        status="warn",
        says=("drops earlier thinking", "fork into one row per turn"),
    ),
    Fault(
        name="a role that is no token",
        plant=_both(CHATML.replace("im_start", "im_begin")),
        check="opd: template",
        status="warn",
        says=("'<|im_begin|>'", "cuts into 12 tokens", "trained with it as plain text"),
    ),
    Fault(
        name="an end of a turn that is no token",
        plant=_both(CHATML.replace("im_start", "im_begin").replace("im_end", "im_last")),
        check="opd: template",
        status="fail",
        says=("'<|im_last|>'", "cuts into 11 tokens", "a reply should stop there"),
    ),
    Fault(
        name="ids without a row that nobody uses",
        plant=narrow,
        check="opd: model",
        status="warn",
        says=("the last 1 ids have no row and must not be used",),
    ),
    Fault(
        name="ids without a row that are used",
        plant=too_narrow,
        check="opd: model",
        status="fail",
        says=("'<|im_end|>' (id 77) is used and has no row",),
    ),
    Fault(
        name="an end that is no id",
        plant=odd_end,
        check="opd: model",
        status="fail",
        says=("student/generation_config.json", "found 'two'"),
    ),
    Fault(
        name="a turn end outside the stop set",
        plant=_eos("student", "teacher", eos="$"),
        check="opd: stop set",
        status="fail",
        says=(END, 'model.stop = ["<|im_end|>"]'),
    ),
    Fault(
        name="a base student under an instruct teacher",
        plant=base_with_instruct,
        check="opd: teacher",
        status="fail",
        says=("does not end the student's", "model.stop"),
    ),
    Fault(
        name="pad is the end token",
        plant=pad_is_eos,
        check="opd: stop set",
        status="ok",
        says=("pad and end are the same", "masks are made from lengths"),
    ),
    Fault(
        name="no end token at all",
        plant=_eos("student", eos=None),
        check="opd: model",
        status="fail",
        says=("no eos token", "model.stop"),
    ),
    Fault(
        name="thinking off on one side",
        plant=_both(SWITCHED, "model.template_kwargs={enable_thinking=false}"),
        check="opd: teacher",
        status="warn",
        says=("the flag enable_thinking differs", "position 28"),
    ),
    Fault(
        name="a flag that the template ignores",
        plant=words("model.template_kwargs={enable_thinking=false}"),
        check="opd: template",
        status="warn",
        says=("enable_thinking changes nothing",),
    ),
    Fault(
        name="a prompt over the limit",
        plant=words("model.max_length=20"),
        check="opd: prompts",
        status="fail",
        says=("model.max_length is 20",),
    ),
    Fault(
        name="a prompt and reply over the positions",
        plant=few_positions,
        check="opd: prompts",
        status="fail",
        says=("reads 30 positions",),
    ),
    Fault(
        name="gate tasks in training",
        plant=_rows(
            lambda rows: rows.append({**rows[0], "question": "SAY  a now", "part": "train"})
        ),
        check="opd: data",
        status="fail",
        says=("1 of 12 gate tasks are trained on", "'SAY  a now'"),
    ),
    Fault(
        name="repeated rows",
        plant=_rows(lambda rows: rows.append(rows[0])),
        check="opd: data",
        status="warn",
        says=("1 of 37 rows", "duplicates"),
    ),
    Fault(
        name="an empty message",
        plant=empty_messages,
        check="opd: data",
        status="fail",
        says=("empty messages: 2 tasks of split train",),
    ),
    Fault(
        name="a null answer",
        plant=_rows(lambda rows: rows[3].update(answer=None)),
        check="opd: data",
        status="fail",
        says=("line 4", "'answer' is missing or null"),
    ),
    Fault(
        name="nothing to learn from",
        plant=no_solutions,
        check="opd: data",
        status="fail",
        says=("null fields: 24 of 24", "data.columns.solution"),
    ),
    Fault(
        name="cut weights",
        plant=_cut("student/model.safetensors"),
        check="opd: model",
        status="fail",
        says=("student/model.safetensors", "cut short"),
    ),
    Fault(
        name="a cut adapter",
        plant=cut_adapter,
        check="opd: adapter",
        status="fail",
        says=("adapter_model.safetensors", "cut short"),
    ),
    Fault(
        name="an adapter for another base",
        plant=foreign_adapter,
        check="opd: adapter",
        status="fail",
        says=("for another base", "[64, 4]", "[32, 64]"),
    ),
    Fault(
        name="a full disk",
        plant=small_disk,
        check="disk",
        status="fail",
        says=("1.0 MiB free", "run.home"),
    ),
    Fault(
        name="a home that cannot be written",
        plant=read_only,
        check="disk",
        status="fail",
        says=("is not writable", "run.home"),
    ),
    Fault(
        name="a disk that gives back something else",
        plant=lying_disk,
        check="disk",
        status="fail",
        says=("byte 0 of 65536 differs",),
    ),
    Fault(
        name="an unknown engine",
        plant=words("engine.name=vlm"),
        check="configuration",
        status="fail",
        says=("did you mean 'vllm'",),
    ),
    Fault(
        name="truncated sampling",
        plant=words("sampling.top_p=0.9"),
        check="opd: sampling",
        status="warn",
        says=("ratios carry the kept mass", "top_p = 1"),
    ),
    Fault(
        name="a model that no such GPU holds",
        plant=huge,
        check="opd: memory and time",
        status="fail",
        says=("L4 with 22.5 GiB", "trainer.offload"),
        device="L4",
    ),
    Fault(
        name="a server that is down",
        plant=server_is_down,
        check="opd: servers",
        status="fail",
        says=("nobody answers at http://127.0.0.1", "start the server"),
    ),
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site without a fault; tests take a copy."""
    return make_site(tmp_path_factory.mktemp("sound") / "site")


@pytest.fixture
def site(sound: Path, tmp_path: Path) -> Path:
    place = tmp_path / "site"
    shutil.copytree(sound, place)
    text = (place / "mine.toml").read_text(encoding="utf-8")
    (place / "mine.toml").write_text(text.replace(str(sound), str(place)), encoding="utf-8")
    return place


def test_nothing_is_wrong_where_nothing_was_planted(site: Path) -> None:
    checks = quick(site, device="H200")
    assert [c for c in checks if c.status == "fail"] == []
    assert [c for c in checks if c.status == "warn" and c.name != "disk"] == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found_by_name(
    fault: Fault, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = fault.plant(site, monkeypatch)
    checks = quick(site, *given, device=fault.device)
    found = [c for c in checks if c.name.endswith(fault.check) and c.status == fault.status]
    texts = [f"{c.detail}; {c.advice}" for c in found]
    told = "\n".join(f"{c.status} {c.name}: {c.detail}; {c.advice}" for c in checks[5:])
    assert any(all(word in text for word in fault.says) for text in texts), told
    if fault.status == "ok":
        assert [c for c in checks if c.status == "fail"] == []


def test_nan_weights_are_found_when_every_number_is_read(site: Path) -> None:
    path = site / "teacher" / "model.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[0]
    tensors[name].view(-1)[3] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    from flows.doctor_checks import Subject, guarded
    from flows.doctor_models import check_finite, loader

    config = config_of(site)
    subject = Subject(
        name="opd",
        own=config.for_stage(config.stages[0]),
        config=config,
        home=site / "home",
        load=loader(config, site / "home"),
    )
    (check,) = guarded("opd: weights", lambda: check_finite(subject))
    assert check.status == "fail"
    assert f"{path}: {name} holds nan at [0, 3]" in check.detail


def test_a_broken_data_file_is_reported_once(site: Path) -> None:
    save_rows(site, [{"question": None, "answer": "a", "part": "train"}])
    failed = [c for c in quick(site) if c.status == "fail"]
    assert [c.name for c in failed] == ["opd: data"]
    assert "tasks.jsonl line 1" in failed[0].detail


@pytest.mark.parametrize("prefix", ["transformer.", "base.transformer."])
def test_an_adapter_of_turned_weights_fits_its_base(prefix: str) -> None:
    base = {"transformer.h.0.attn.c_attn.weight": (32, 96)}
    name = f"base_model.model.{prefix}h.0.attn.c_attn"
    adapter = {f"{name}.lora_A.weight": (4, 32), f"{name}.lora_B.weight": (96, 4)}
    assert _misfit(adapter, base, turned=True) == ""
    assert "but transformer.h.0.attn" in _misfit(adapter, base, turned=False)
    other = {name.replace("c_attn", "q"): shape for name, shape in adapter.items()}
    assert f"the base has no {prefix}h.0.attn.q.weight" in _misfit(other, base, turned=True)


SERVED = ["stage.opd.objective.support=top_k", "stage.opd.objective.chosen_by=teacher"]


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    """A real server that gives at most 20 candidates of the teacher."""
    model = build_model(BUILD, chat_tokenizer(), seed=1)
    with ModelServer(model=model, tokenizer=chat_tokenizer(), max_model_len=128) as running:
        yield running


def ask(site: Path, server: ModelServer, *given: str) -> tuple[str, ...]:
    """Put a served teacher in place of the local one."""
    text = (site / "mine.toml").read_text()
    text = text.replace(f'path = "{site}/teacher"', f'urls = ["{server.url}"]\nmodel = "tiny"')
    (site / "mine.toml").write_text(text.replace('name = "local"', 'name = "server"'))
    return (*SERVED, *given)


@pytest.mark.parametrize(
    ("given", "check", "status", "says"),
    [
        (["stage.opd.objective.k=8"], "scorer", "ok", "answers with k = 8"),
        (["stage.opd.objective.k=64"], "scorer", "fail", "--max-logprobs 64"),
        (["stage.opd.teacher.model=huge"], "scorer", "fail", "'tiny'"),
        (["sampling.temperature=0.7"], "sampling", "warn", "temperature 0.7, the teacher at"),
        (["sampling.temperature=0.7"], "scorer", "fail", "temperature"),
    ],
)
def test_a_served_teacher_is_greeted_before_the_night(
    site: Path, server: ModelServer, given: list[str], check: str, status: Status, says: str
) -> None:
    found = of_stages(site, *ask(site, server, *given))
    texts = [c.detail for c in found if (c.name, c.status) == (f"opd: {check}", status)]
    assert any(says in text for text in texts), found


@pytest.mark.parametrize("given", ["stage.opd.objective.k=64", "stage.opd.teacher.model=huge"])
def test_a_night_is_refused_for_a_wrong_answer_of_a_server(
    site: Path, server: ModelServer, given: str
) -> None:
    config = config_of(site, *ask(site, server, given))
    with pytest.raises(PreflightError, match=r"^opd: scorer: "):
        doctor.require_ready(site / "home", config)


def test_a_served_teacher_of_another_tokenizer_is_refused(site: Path) -> None:
    other = chat_tokenizer(alphabet=ALPHABET.replace("ab", "ba"))
    model = build_model(BUILD, other, seed=1)
    with ModelServer(model=model, tokenizer=other, max_model_len=128) as foreign:
        found = of_stages(site, *ask(site, foreign, "stage.opd.objective.k=8"))
    assert any(c.name == "opd: scorer" and c.status == "fail" for c in found), found


def test_a_served_teacher_scores_the_longest_sequence_and_two_orders_alike(
    site: Path, server: ModelServer
) -> None:
    found = of_stages(site, *ask(site, server, "stage.opd.objective.k=8"), full=True)
    (orders,) = [c for c in found if c.name == "opd: scorer in two orders"]
    assert orders.status == "ok", orders
    assert "scored 70 tokens with k = 8" in orders.detail
    assert [c for c in found if c.status == "fail"] == []


def test_at_least_twenty_faults_are_planted() -> None:
    assert len({fault.name for fault in FAULTS}) >= 20
    assert {rule.name for rule in doctor._rules(False)} >= {
        fault.check.removeprefix("opd: ") for fault in FAULTS if ": " in fault.check
    }
