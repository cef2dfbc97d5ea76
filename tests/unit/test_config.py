"""Configuration: layers, origins, overrides of one stage, and errors that name the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from distill.config import Config, Layer, differences, explain, load
from distill.errors import ConfigError
from flows.configs import load_config, presets, to_toml
from flows.init import write_config

NIGHT = """
[model]
name = "toy"
[model.build]
hidden_size = 32

[objective]
name = "gkd"
beta = 0.5

[trainer]
steps = 10

[[stage]]
name = "base"
kind = "sft"
target = "base"
[stage.objective]
name = "sft"

[[stage]]
name = "opd"
kind = "on_policy"
target = "student"
[stage.model]
path = "stage:base"
[stage.trainer]
lr = 0.01
"""


def night(*overrides: str, more: str = "") -> Config:
    layers = [Layer(origin="night.toml", text=NIGHT)]
    if more:
        layers.append(Layer(origin="more.toml", text=more))
    return load(layers, overrides)


WRONG = [
    ("trainer.stps=3", "command line: unknown key 'trainer.stps', did you mean 'steps'?"),
    ("trainers.steps=3", "unknown key 'trainers', did you mean 'trainer'?"),
    (
        "model.build.hiden_size=3",
        "unknown key 'model.build.hiden_size', did you mean 'hidden_size'",
    ),
    ("stage.opd.trainer.stps=3", "unknown key 'stage.opd.trainer.stps', did you mean 'steps'?"),
    ("stage.opd.gate.margin=3", "unknown key 'stage.opd.gate'"),
    ("stage.opb.cache=true", "no stage is called 'opb', did you mean 'opd'?"),
    ("trainer.steps=ten", "trainer.steps: expected an integer, found 'ten' (a string)"),
    ("trainer.steps=true", "trainer.steps: expected an integer, found True (true or false)"),
    ("trainer.steps=0", "trainer.steps: expected at least 1, found 0"),
    ("trainer.lr=nan", "trainer.lr: expected a finite number"),
    ("trainer.betas=[0.9, 1.5]", "trainer.betas: expected at most 1, found 1.5"),
    ("trainer.betas=[0.9]", "trainer.betas: expected 2"),
    ("trainer=3", "trainer: expected a table, found 3"),
    ("model.dtype=f16", "model.dtype: expected one of 'float32', 'bfloat16', found 'f16'"),
    ("model.stop=7", "model.stop: expected a list, found 7"),
    ("model.name=a/b", "model.name: expected a plain folder name"),
    ("objective.when=1979-05-27", "objective.when: expected text, a number"),
    ("reference.role=base", "[reference] has options (role) but no name"),
    ("evals.k=[8]", "pass@8 needs at least 8 replies per task, evals.samples is 4"),
    ("stage.opd.model.path=stage:opd", "'stage:opd' must name an earlier stage"),
    ("stage=3", "expected [[stage]] tables"),
    ("trainer.steps", "expected key=value with a dotted key"),
]


@pytest.mark.parametrize(("override", "message"), WRONG, ids=[w[0] for w in WRONG])
def test_a_wrong_value_is_named_with_its_origin_and_the_way_out(
    override: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        night(override)
    assert message in str(caught.value)
    assert str(caught.value).startswith(("command line", "night.toml"))
    assert "\n" not in str(caught.value)


def test_an_unknown_key_lists_the_valid_ones_and_the_file() -> None:
    with pytest.raises(ConfigError, match=r"more\.toml: unknown key 'gate\.margins'.*min_gain"):
        night(more="[gate]\nmargins = 0.1")


def test_text_that_is_not_toml_names_the_file() -> None:
    with pytest.raises(ConfigError, match=r"more\.toml: not valid TOML"):
        night(more="[gate\n")


def test_later_layers_win_and_every_value_knows_its_origin() -> None:
    config = night("trainer.lr=1e-5", more="[trainer]\nsteps = 20\nlr = 1.0")
    found = {e.key: (e.value, e.origin) for e in explain(config)}
    assert found["trainer.lr"] == (1e-5, "command line")
    assert found["trainer.steps"] == (20, "more.toml")
    assert found["model.build.hidden_size"] == (32, "night.toml")
    assert found["trainer.batch"] == (16, "default")
    assert found["stage.opd.trainer.lr"] == (0.01, "night.toml")


def test_a_bare_word_is_a_string_and_toml_values_keep_their_types() -> None:
    config = night("run.preset=my-run", "model.stop=['<end>']", "model.path=org/name")
    assert config.run.preset == "my-run"
    assert config.model.stop == ("<end>",)
    assert config.model.path == "org/name"
    assert night("run.home=/a folder/b = c").run.home == "/a folder/b = c"


def test_an_override_reaches_one_stage_by_name_and_leaves_the_others() -> None:
    config = night("stage.opd.trainer.steps=5", more="[stage.base.trainer]\nsteps = 7")
    steps = {s.name: config.for_stage(s).trainer.steps for s in config.stages}
    assert steps == {"base": 7, "opd": 5}
    assert config.trainer.steps == 10


def test_a_stage_sees_its_own_values_over_those_of_the_night() -> None:
    config = night()
    own = config.for_stage(config.stage("opd"))
    assert (own.trainer.lr, own.trainer.steps) == (0.01, 10)
    assert own.model.path == "stage:base"
    assert own.model.build is not None
    assert own.objective.options == {"beta": 0.5}
    assert [s.name for s in own.stages] == ["opd"]


def test_another_name_drops_the_options_of_the_old_one() -> None:
    config = night("stage.opd.objective.name=opd")
    assert config.for_stage(config.stage("opd")).objective.options == {}
    assert night("objective.name=grpo").objective.options == {}
    assert night("objective.name=gkd").objective.options == {"beta": 0.5}


def test_a_list_of_stages_replaces_the_earlier_list() -> None:
    more = '[[stage]]\nname = "only"\nkind = "sft"\ntarget = "student"'
    assert [s.name for s in night(more=more).stages] == ["only"]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ('[[stage]]\nkind = "sft"', "needs a name"),
        ('[[stage]]\nname = "a"\ntarget = "base"', "stage.a.kind is missing"),
        ('[[stage]]\nname = "a"\n[[stage]]\nname = "a"', "two stages are called 'a'"),
    ],
)
def test_a_malformed_stage_is_refused(stages: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        night(more=stages)


def test_a_stage_without_any_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a table \[model\.build\]"):
        load([Layer(origin="a", text='[[stage]]\nname="a"\nkind="sft"\ntarget="student"')])


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_packaged_preset_parses_and_survives_both_round_trips(name: str) -> None:
    config = load_config([name])
    assert config.run.preset == name
    assert config.last_student().name in ("opd", "seed")
    assert Config.from_dict(config.to_dict()) == config
    again = load([Layer(origin="copy", text=to_toml(config, f"distill nightly {name}"))])
    assert differences(config, again) == []


def test_the_digest_depends_on_every_value_and_on_nothing_else() -> None:
    config = night("trainer.lr=0.5")
    assert config.digest() == night(more="[trainer]\nlr = 0.5").digest()
    assert config.digest() != night("trainer.lr=0.25").digest()
    assert config.digest() != night("trainer.lr=0.5", "stage.opd.cache=true").digest()
    assert Config.from_dict(config.to_dict()).digest() == config.digest()
    assert Config().digest() == load([]).digest()


def test_differences_name_the_keys_that_changed() -> None:
    changed = night("trainer.lr=0.5", "stage.opd.trainer.lr=2", "objective.name=opd")
    assert differences(night(), changed) == [
        "objective.name",
        "objective.beta",
        "trainer.lr",
        "stage.opd.trainer.lr",
    ]


def test_what_init_writes_is_a_valid_night_and_is_never_overwritten_unasked(tmp_path: Path) -> None:
    path = tmp_path / "my night!.toml"
    write_config(path, model="org/name", data='odd "name".jsonl', overwrite=False)
    config = load_config([str(path)])
    assert (config.model.path, config.data.name) == ("org/name", "jsonl")
    assert config.data.options["path"] == 'odd "name".jsonl'
    with pytest.raises(ConfigError, match="--yes"):
        write_config(path, model="other", data="d", overwrite=False)
    write_config(path, model="other", data="data_folder", overwrite=True)
    assert load_config([str(path)]).data.name == "dataset"


def test_a_source_that_is_neither_preset_nor_file_names_the_presets() -> None:
    with pytest.raises(ConfigError, match=r"'tinny' is neither .* did you mean 'tiny'"):
        load_config(["tinny"])
