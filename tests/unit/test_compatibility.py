"""Which objective, teacher, view and reference go together, refused before any model is loaded."""

from __future__ import annotations

import pytest

from distill.config import Layer, load
from distill.errors import ConfigError
from flows import wiring
from flows.configs import load_config

NIGHT = """
[model]
name = "m"
path = "nowhere"
kind = "adapter"

[data]
name = "world"
domains = ["rule"]

[sampling]
num_samples = 4
max_new_tokens = 8

[[stage]]
name = "s"
kind = "on_policy"
target = "student"
"""


def night(*changes: str):
    return load([Layer(origin="night.toml", text=NIGHT)], changes)


SELF = ("teacher.name=self_teacher", "view.name=with_answer")
LOCAL = ("teacher.name=local", "teacher.path=somewhere")
REFERENCE = ("reference.name=self_teacher",)
HINDSIGHT = ("teacher.name=self_teacher", "view.name=with_skill", "analyst.name=rules")
SEED = (*HINDSIGHT, "objective.name=seed", "objective.kl_coefficient=0")
GRPO = ("objective.name=grpo",)
BANK = ("skills.bank=main",)
TURNS = ("sampling.rows=turns",)
EMBEDDED = (*BANK, "skills.show=true", "skills.mode=embedding")
LABELS = ("stage.s.kind=sft", "objective.name=sft", "analyst.name=rules")
GROWING = ("skills.show=true", "skills.evolve_every=5")

LEGAL = {
    "OPD": (*LOCAL, "objective.name=opd"),
    "OPD over candidates": (*LOCAL, "objective.name=opd", "objective.support=top_k"),
    "GKD": (*LOCAL, "objective.name=gkd", "objective.beta=0.5"),
    "ExOPD": (*LOCAL, *REFERENCE, "objective.name=g_opd"),
    "G-OPD at scale 1 needs no reference": (*LOCAL, "objective.name=g_opd", "objective.scale=1.0"),
    "PowerOPD": (*LOCAL, "objective.name=power_opd"),
    "OPSD": (*SELF, "objective.name=opsd"),
    "SDFT": (*SELF, "teacher.weights=ema", "teacher.rate=0.02", "objective.name=sdft"),
    "SDPO": (
        *("teacher.name=self_teacher", "teacher.weights=trust_region"),
        *("view.name=with_peer_success", "objective.name=sdpo"),
    ),
    "RLSD": (*SELF, "teacher.weights=snapshot", "objective.name=rlsd"),
    "AntiSD": (*SELF, "view.name=with_verdict", "objective.name=anti_sd"),
    "OPSA": ("objective.name=opsa",),
    "OmniOPD": (
        *("teacher.name=text", "teacher.path=somewhere", *REFERENCE),
        "objective.name=omni_opd",
    ),
    "GRPO": ("objective.name=grpo",),
    "GRPO with a reference": (*REFERENCE, "objective.name=grpo", "objective.kl_coefficient=0.1"),
    "Dr. GRPO": ("objective.name=dr_grpo",),
    "DAPO": ("objective.name=dapo",),
    "a sum": (*LOCAL, 'objective.terms=[{name="grpo"}, {name="gkd", coefficient=0.1, beta=0.5}]'),
    "SEED": SEED,
    "SEED with a reference": (*HINDSIGHT, *REFERENCE, "objective.name=seed"),
    "SEED by the student itself": (*SEED, "analyst.name=policy", "analyst.format=slot"),
    "SEED by another model": (
        *(*SEED, "analyst.name=model"),
        'analyst.writer={name="text", path="somewhere"}',
    ),
    "SEED by a model of the hub": (
        (*SEED, "analyst.name=model", 'analyst.writer={name="text", path="owner/model"}')
    ),
    "a slot without skills of turns": (
        *(*SEED, *TURNS, "view.scope=episode_step", "analyst.name=policy"),
        *("analyst.format=slot", "skills.max_step_skills=0"),
    ),
    "rules need no place to write": (
        *(*SEED, *TURNS, "view.scope=episode_step", "analyst.format=slot"),
    ),
    "labels in a slot": (*LABELS, "analyst.format=slot"),
    "an embedding model of the hub": (*GRPO, *EMBEDDED, "skills.embedder=sentence:owner/m#last"),
    "OPID over turns": (
        *(*HINDSIGHT, *TURNS, "objective.name=opid", "objective.kl_coefficient=0"),
        "view.scope=episode_step",
    ),
    "hindsight that is kept": (*SEED, *BANK, "skills.keep=true"),
    "a bank that stays as it is": (*GRPO, *BANK, "skills.show=true"),
    "a bank that begins with skills": (
        *(*GRPO, *BANK, "skills.show=true"),
        "skills.start=package:calls_half.jsonl",
    ),
    "a bank that grows": (*GRPO, *BANK, *GROWING, "analyst.name=rules"),
    "hindsight and a bank that grows": (*SEED, *BANK, *GROWING, "skills.keep=true"),
    "credit of single turns": (*GRPO, *TURNS, "objective.credit=gigpo"),
    "one teacher per domain": (
        "teacher.name=routed",
        'teacher.teachers={rule={name="local", path="a"}, other={name="self_teacher"}}',
        "objective.name=opd",
    ),
    "a mixture of teachers": (
        "teacher.name=mixture",
        'teacher.teachers={a={name="local", path="a"}, b={name="local", path="b"}}',
        "teacher.weights={a=0.5, b=0.5}",
        "objective.name=gkd",
    ),
}

ILLEGAL = {
    "no teacher": (("objective.name=opd",), r"needs a teacher; set teacher.name to one of local"),
    "no reference": (
        (*LOCAL, "objective.name=g_opd"),
        r"needs a frozen reference; set reference.name",
    ),
    "a reference that nobody reads": (
        (*LOCAL, *REFERENCE, "objective.name=g_opd", "objective.scale=1.0"),
        r"reads no reference; remove the section",
    ),
    "a reference that moves": (
        (*LOCAL, *REFERENCE, "reference.weights=live", "objective.name=g_opd"),
        r"a reference must be frozen",
    ),
    "a view that shows nothing": (
        (*LOCAL, "objective.name=rlsd"),
        r"knows more than the student, but view.name is 'plain'; choose one of with_answer",
    ),
    "a self-teacher without a view": (
        ("teacher.name=self_teacher", "objective.name=opd"),
        r"only pulls the student back .* choose one of the views with_answer",
    ),
    "a text teacher that should score": (
        ("teacher.name=text", "teacher.path=a", "objective.name=opd"),
        r"needs logprobs from its teacher, but 'text' offers text",
    ),
    "a default teacher that only writes": (
        (
            "teacher.name=routed",
            'teacher.teachers={rule={name="local", path="a"}}',
            'teacher.default={name="text", path="b"}',
            "objective.name=opd",
        ),
        r"teacher.default only writes text and cannot score tokens",
    ),
    "a scoring teacher that should write": (
        (*LOCAL, *REFERENCE, "objective.name=omni_opd"),
        r"needs text from its teacher, but 'local' offers",
    ),
    "a view for a teacher that only writes": (
        (
            *("teacher.name=text", "teacher.path=a", *REFERENCE),
            *("objective.name=omni_opd", "view.name=with_answer"),
        ),
        r"would be ignored",
    ),
    "one reply per prompt": (
        ("objective.name=grpo", "sampling.num_samples=1"),
        r"num_samples must be at least 2, found 1",
    ),
    "one reply and a peer": (
        (*SELF, "view.name=with_peer_success", "objective.name=sdpo", "sampling.num_samples=1"),
        r"'with_peer_success' needs other replies",
    ),
    "several updates on continuations": (
        (
            *("teacher.name=text", "teacher.path=a", *REFERENCE),
            *("objective.name=omni_opd", "trainer.epochs=2"),
        ),
        r"one update per batch; trainer.epochs x trainer.minibatches is 2",
    ),
    "imitation of one's own words": (
        (*LOCAL, 'objective.terms=[{name="sft"}, {name="gkd"}]'),
        r"'sft' only learns from worked solutions",
    ),
    "the same term twice": (
        (*LOCAL, 'objective.terms=[{name="gkd"}, {name="gkd"}]'),
        r"an objective of its own",
    ),
    "a term without a name": (
        ("objective.terms=[{coefficient=1.0}]",),
        r"objective.terms\[0\] needs a name",
    ),
    "a term with a foreign option": (
        (*LOCAL, 'objective.terms=[{name="gkd", alpha=2}]'),
        r"unknown key 'objective.terms\[0\].alpha'",
    ),
    "k1 as a loss": (
        (
            *LOCAL,
            *("objective.name=gkd", "objective.support=sampled", "objective.estimator=k1"),
        ),
        r"k1 has no gradient in expectation .* use the objective opd",
    ),
    "a raw support for the reverse KL": (
        (*LOCAL, "objective.name=gkd", "objective.support=top_k", "objective.rest=raw"),
        r"falls as the student moves mass out of the support",
    ),
    "a whitened distillation advantage": (
        (*LOCAL, "objective.name=opd", "objective.group=zscore"),
        r"unknown key 'objective.group'",
    ),
    "weights that are no role": (
        (*SELF, "teacher.weights=best", "objective.name=opsd"),
        r"teacher.weights: expected one of 'base', 'live', 'ema', 'snapshot', 'trust_region'",
    ),
    "a rate outside its range": (
        (*SELF, "teacher.weights=ema", "teacher.rate=0", "objective.name=opsd"),
        r"teacher.rate must be within \(0, 1\], got 0",
    ),
    "a mixture with a label too many": (
        (
            "teacher.name=mixture",
            'teacher.teachers={a={name="local", path="a"}}',
            "teacher.weights={a=0.5, b=0.5}",
            "objective.name=gkd",
        ),
        r"must have the labels",
    ),
    "a domain without a teacher": (
        (
            "teacher.name=routed",
            'teacher.teachers={other={name="local", path="a"}}',
            "objective.name=opd",
        ),
        r"no teacher answers for the domain 'rule'.*teacher.default",
    ),
    "an objective that is no dataclass": (
        ("objective.name=distill.errors:ConfigError",),
        r"expected a dataclass whose fields are its options",
    ),
    "credit of turns that share a row": (
        (*GRPO, "objective.credit=gigpo"),
        r'gives credit to single turns; set sampling.rows = "turns"',
    ),
    "skills of turns that share a row": (
        (*SEED, "view.scope=episode_step"),
        r"view.scope = 'episode_step' shows skills of single turns; set sampling.rows = \"turns\"",
    ),
    "skills of turns alone that share a row": (
        (*SEED, "view.scope=step"),
        r'view.scope = .step. .* or view.scope = "episode"',
    ),
    "a view of skills that nobody writes": (
        ("teacher.name=self_teacher", "view.name=with_skill", "objective.name=opsd"),
        r"'with_skill' shows what an analyst writes; set analyst.name to one of rules, policy",
    ),
    "an analyst that nobody reads": (
        (*GRPO, "analyst.name=rules"),
        r"nothing reads what the analyst 'rules' writes; set view.name = \"with_skill\"",
    ),
    "an unknown analyst": ((*SEED, "analyst.name=oracle"), r"analyst.*'oracle'.*rules"),
    "an option of another analyst": ((*SEED, "analyst.attempts=3"), r"analyst.attempts"),
    "a writer without a name": (
        (*SEED, "analyst.name=model", 'analyst.writer={path="somewhere"}'),
        r"analyst.writer must be a table with a name, one of black_box, text",
    ),
    "skills in the prompt without a bank": (
        (*GRPO, "skills.show=true"),
        r"skills.show needs a bank; set skills.bank to its name",
    ),
    "kept skills without a bank": ((*SEED, "skills.keep=true"), r"skills.keep needs a bank"),
    "looks without a bank": (
        (*GRPO, "analyst.name=rules", "skills.evolve_every=5"),
        r"skills.evolve_every needs a bank",
    ),
    "first skills without a bank": ((*GRPO, "skills.start=a.jsonl"), r"skills.start needs a bank"),
    "a bank that grows by nobody": (
        (*GRPO, *BANK, *GROWING),
        r"skills.evolve_every needs somebody who writes; set analyst.name",
    ),
    "a bank that keeps what nobody writes": (
        (*GRPO, *BANK, "skills.keep=true"),
        r"skills.keep needs somebody who writes; set analyst.name",
    ),
    "a bank that grows unseen": (
        (*GRPO, *BANK, "skills.evolve_every=5", "analyst.name=rules"),
        r"measures new skills in the acting prompt; set skills.show = true",
    ),
    "kept hindsight that no view reads": (
        (*GRPO, *BANK, *GROWING, "analyst.name=rules", "skills.keep=true"),
        r"skills.keep keeps what hindsight taught, but no view reads hindsight",
    ),
    "notes that are lent to nobody": (
        (*SEED, "skills.lend=true", "skills.outcomes=success"),
        r"skills.lend gives notes to failures, but skills.outcomes is 'success'",
    ),
    "a table of words that there is not": (
        (*GRPO, *BANK, "skills.show=true", "skills.rules=chess"),
        r"skills.rules must be one of .*alfworld.*'chess'",
    ),
    "an embedder of no kind": (
        (*GRPO, *BANK, "skills.show=true", "skills.mode=embedding", "skills.embedder=big"),
        r"skills.embedder is student, sentence:PATH, .* found 'big'",
    ),
    "an embedder without a path": (
        (*GRPO, *BANK, "skills.show=true", "skills.mode=embedding", "skills.embedder=sentence:"),
        r"skills.embedder is student, sentence:PATH, .* found 'sentence:'",
    ),
    "an embedding model that is not there": (
        (*GRPO, *EMBEDDED, "skills.embedder=sentence:./nowhere#cls"),
        r"skills.embedder: there is no folder './nowhere'; expected one that exists, or a hub name",
    ),
    "a model for vectors that is not there": (
        (*GRPO, *EMBEDDED, "skills.embedder=policy:/a/b/c"),
        r"skills.embedder: there is no folder '/a/b/c'; .*package:NAME, or a hub name",
    ),
    "a bank outside of its folder": (
        (*GRPO, 'skills.bank="../x"', "skills.show=true"),
        r"skills.bank: the name of a bank has 1 to 64 letters.* got '../x'",
    ),
    "labels for a bank that cannot have its name": (
        (*LABELS, 'skills.bank="a/b"', "skills.show=true"),
        r"skills.bank: the name of a bank has 1 to 64 letters.* got 'a/b'",
    ),
    "an analyst that is never asked": (
        (*SEED, "analyst.name=policy", "analyst.attempts=0"),
        r"analyst.attempts must be at least 1, got 0",
    ),
    "a slot for the skills of turns": (
        (*SEED, *TURNS, "view.scope=episode_step", "analyst.name=policy", "analyst.format=slot"),
        r"analyst.format = 'slot' holds one text .* view.scope = 'episode_step'.* \"json\"",
    ),
    "labels in a slot for the skills of turns": (
        (*LABELS, "analyst.format=slot", "view.name=with_skill", "view.scope=step"),
        r"analyst.format = 'slot' holds one text .* view.scope = 'step'",
    ),
    "a writer that is not there": (
        (*SEED, "analyst.name=model", 'analyst.writer={name="text", path="/nowhere/w"}'),
        r"analyst.writer.path: there is no folder '/nowhere/w'; .*stage:NAME, .*or a hub name",
    ),
    "a writer's adapter that is not there": (
        (*SEED, "analyst.name=model", 'analyst.writer={name="text", adapter="a/b"}'),
        r"analyst.writer.adapter: there is no folder 'a/b'; expected .*exists, or stage:NAME$",
    ),
    "first skills that are not packaged": (
        (*GRPO, *BANK, "skills.show=true", "skills.start=package:none.jsonl"),
        r"none.jsonl does not exist",
    ),
    "truncated replies": (
        (*LOCAL, "objective.name=opd", "sampling.top_p=0.9"),
        r"untruncated distribution",
    ),
    "a template without its place": (
        (*SELF, "objective.name=opsd", "view.template=nothing"),
        r"\{answer\}",
    ),
}


@pytest.mark.parametrize("changes", LEGAL.values(), ids=LEGAL.keys())
def test_what_belongs_together_is_accepted(changes):
    wiring.check(night(*changes))


@pytest.mark.parametrize(("changes", "message"), ILLEGAL.values(), ids=ILLEGAL.keys())
def test_what_cannot_mean_anything_is_refused_with_the_legal_choices(changes, message):
    with pytest.raises(ConfigError, match=message):
        wiring.check(night(*changes))


def test_a_value_that_every_stage_sets_for_itself_is_refused_with_where_to_write_it():
    with pytest.raises(
        ConfigError, match=r"trainer\.lr has no effect.*stage\.opd\.trainer\.lr=1e-05"
    ):
        wiring.check(load_config(["tiny", "trainer.lr=1e-5"]))
    with pytest.raises(ConfigError, match=r"objective\.name has no effect"):
        wiring.check(load_config(["tiny", "objective.name=opd"]))
    wiring.check(load_config(["tiny", "stage.opd.trainer.lr=1e-5"]))
    wiring.check(load_config(["tiny", "curriculum.kappa=1.0", "traffic.explore=0.5"]))
    wiring.check(load_config(["tiny", "sampling.num_samples=2"]))


def test_terms_take_the_place_of_a_presets_objective():
    terms = 'stage.opd.objective.terms=[{name="opd"}, {name="gkd", coefficient=0.1}]'
    config = load_config(["tiny", terms])
    wiring.check(config)
    stage = config.stage("opd")
    assert wiring.build_objective(config.for_stage(stage)).name == "opd+gkd"
