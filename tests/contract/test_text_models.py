"""What every model that only writes text promises, and how a stage gets its own."""

from __future__ import annotations

import pytest

from distill.config import Layer, load
from distill.engines.hf import HFEngine
from distill.engines.scripted import ScriptedEngine
from distill.errors import ConfigError, TeacherError
from distill.models import char_tokenizer, save_weights
from distill.objectives import GRPO
from distill.objectives.omni_opd import OmniOPD
from distill.objectives.opd import OPD
from distill.objectives.terms import Sum
from distill.policy import Policy
from distill.tokens import Chat
from distill.types import Message, Sampling
from endpoint import serve
from flows import teaching
from flows.compatibility import check_on_policy
from flows.night import Student
from helpers import make_chat, make_model, make_policy
from teachers.black_box import BlackBoxModel, BlackBoxOptions
from teachers.text import LocalTextModel
from teachers.writing import split_text

KEYS = ("k0", "k1", "k2")


def say(*texts: str) -> tuple[Message, ...]:
    """A conversation that begins with the user."""
    roles = ("user", "assistant")
    return tuple(Message(role=roles[i % 2], content=t) for i, t in enumerate(texts))


PROMPTS = [say("ab="), say("copy:xyz", "xy"), say("q")]


def sampling(**changes):
    return Sampling(**({"max_new_tokens": 5, "keys": KEYS} | changes))


@pytest.fixture
def black_box():
    with serve() as endpoint:
        yield BlackBoxModel(BlackBoxOptions(url=endpoint.url, model="m"))


@pytest.fixture
def local():
    chat = make_chat()
    return LocalTextModel(HFEngine(make_policy(), pad_id=chat.pad_id, max_batch=4), chat)


@pytest.fixture
def scripted():
    return LocalTextModel(ScriptedEngine(lambda p, g: [*p[-2:], 5 + g, 1]), make_chat())


@pytest.fixture(params=["black_box", "local", "scripted"])
def model(request):
    return request.getfixturevalue(request.param)


def test_every_prompt_gets_exactly_its_number_of_texts(model):
    for n in (1, 3):
        found = model.complete(PROMPTS, n, sampling())
        assert [len(texts) for texts in found] == [n, n, n]
        assert all(isinstance(text, str) for texts in found for text in texts)


def test_the_answers_stand_in_the_order_of_the_prompts(model):
    together = model.complete(PROMPTS, 2, sampling())
    alone = [
        model.complete([p], 2, sampling(keys=(key,)))[0]
        for p, key in zip(PROMPTS, KEYS, strict=True)
    ]
    assert together == alone
    assert together[0] != together[1] != together[2]


def test_equal_keys_write_equal_texts(model):
    assert model.complete(PROMPTS, 3, sampling()) == model.complete(PROMPTS, 3, sampling())


@pytest.mark.parametrize("name", ["black_box", "local"])
def test_another_key_is_another_draw(name, request):
    model = request.getfixturevalue(name)
    ours = model.complete(PROMPTS, 3, sampling(max_new_tokens=12))
    theirs = model.complete(PROMPTS, 3, sampling(max_new_tokens=12, keys=("x", "y", "z")))
    assert all(left != right for left, right in zip(ours, theirs, strict=True))


def test_texts_are_counted_in_tokens(model):
    for written in model.write(PROMPTS, 2, sampling()):
        assert len(written.texts) == 2
        assert 2 <= written.num_tokens <= 10


def test_no_prompts_are_no_texts(model):
    assert model.complete([], 3, sampling(keys=())) == []


@pytest.mark.parametrize(
    ("prompts", "n", "changes", "words"),
    [
        (PROMPTS, 0, {}, "n and sampling.max_new_tokens"),
        (PROMPTS, 1, {"max_new_tokens": 0}, "n and sampling.max_new_tokens"),
        (PROMPTS, 1, {"keys": ("a",)}, r"one key per prompt \(3\), got 1"),
        ([()], 1, {"keys": ("a",)}, "at least one message"),
    ],
)
def test_an_impossible_request_is_refused(model, prompts, n, changes, words):
    with pytest.raises(ConfigError, match=words):
        model.complete(prompts, n, sampling(**changes))


def test_a_local_model_continues_the_ids_of_the_begun_reply():
    chat, seen = make_chat(), []

    def script(prompt, sample):
        seen.append(tuple(prompt))
        return chat.replies(["zz"])[0]

    model = LocalTextModel(ScriptedEngine(script), chat)
    assert model.complete([say("copy:xyz", "xy")], 1, sampling(keys=("k",))) == [["zz"]]
    assert seen == [(*chat.prompt(say("copy:xyz")), *chat.replies(["xy"])[0][:-1])]


def test_a_greedy_local_model_goes_on_where_its_own_reply_was_cut(local):
    greedy = sampling(temperature=0.0, keys=(), max_new_tokens=8)
    ((whole,),) = local.complete([say("ab=")], 1, greedy)
    ((rest,),) = local.complete([say("ab=", whole[:3])], 1, greedy)
    assert len(whole) > 3
    assert rest.startswith(whole[3:])


def test_a_reply_to_nothing_and_an_engine_that_writes_too_few_are_refused():
    class Lazy(ScriptedEngine):
        def generate(self, prompts, sampling):
            return [group[:1] for group in super().generate(prompts, sampling)]

    model = LocalTextModel(Lazy(lambda p, g: [5, 1]), make_chat())
    with pytest.raises(TeacherError, match="should write 2 texts"):
        model.complete([say("a")], 2, sampling(keys=("k",)))
    with pytest.raises(TeacherError, match="continue a reply to nothing"):
        model.complete([(Message(role="assistant", content="a"),)], 1, sampling(keys=("k",)))


def test_text_before_and_after_a_cut_joins_to_the_whole():
    chat = make_chat()
    ids = chat.replies(["abcdef"])[0]
    assert split_text(chat, ids, 2) == ("ab", "cdef")
    assert split_text(chat, ids, 0) == ("", "abcdef")

    class Bytes:
        """Decodes single bytes, as byte-level tokenizers do."""

        chat_template, eos_token_id, pad_token_id = None, 256, 256

        def decode(self, ids, skip_special_tokens=False):
            return bytes(ids).decode("utf-8", errors="replace")

    raw = "aé b".encode()
    assert split_text(Chat(Bytes()), (*raw, 256), 2) == ("a", "é b")


# -- from configuration to a stage ------------------------------------------------------------

REST = """
[model]
build = {}
[objective]
name = "omni_opd"
[[stage]]
name = "own"
kind = "on_policy"
target = "student"
"""
REFERENCE = '[reference]\nname = "self_teacher"\n'
BLACK_BOX = '[teacher]\nname = "black_box"\nurl = "http://127.0.0.1:9/v1"\nmodel = "m"\n'
SMALL = {"num_chunks": 2, "num_continuations": 3, "chunk_length": 4}


def config_of(text):
    return load([Layer(origin="test", text=text + REST)])


def surroundings(text, locate=None):
    student = Student(policy=make_policy(), chat=make_chat())
    return teaching.Surroundings(config=config_of(text), student=student, locate=locate)


def test_a_text_only_teacher_never_scores_and_audits_where_it_is_needed():
    made = surroundings(BLACK_BOX)
    assert made.teacher() is None
    assert made.audit(GRPO(), lambda _: None) is None
    total = Sum(parts=((GRPO(), 1.0), (OmniOPD(**SMALL), 0.5)))
    for objective in (OmniOPD(**SMALL), total):
        auditor = made.audit(objective, lambda _: None)
        assert isinstance(auditor.model, BlackBoxModel)
        sizes = (auditor.num_chunks, auditor.num_continuations, auditor.chunk_length)
        assert sizes == (2, 3, 4)


def test_an_objective_that_reads_scores_is_refused_beside_a_text_only_teacher():
    check_on_policy(config_of(BLACK_BOX + REFERENCE), OmniOPD(**SMALL), "here")
    with pytest.raises(ConfigError, match=r"needs logprobs from its teacher.*offers text"):
        check_on_policy(config_of(BLACK_BOX), OPD(), "here")


@pytest.mark.parametrize(
    "text",
    [
        '[teacher]\nname = "routed"\n[teacher.teachers.d]\nname = "text"\npath = "x"\n',
        '[teacher]\nname = "mixture"\nweights = {a = 1.0}\n[teacher.teachers.a]\n'
        'name = "black_box"\nurl = "http://127.0.0.1:9/v1"\nmodel = "m"\n',
    ],
)
def test_a_text_only_teacher_inside_another_is_refused(text):
    config = config_of(text)
    with pytest.raises(ConfigError, match="only writes text and cannot score"):
        teaching.capabilities(config, teaching.teacher_options(config, config.teacher))


def test_a_text_only_reference_is_refused():
    made = surroundings(BLACK_BOX.replace("[teacher]", "[reference]"))
    with pytest.raises(ConfigError, match="reference only writes text"):
        made.reference()


@pytest.mark.parametrize("alphabet", [None, "_$^zyxwvutsrqponmlkjihgfedcba"])
def test_a_local_text_teacher_writes_with_its_own_tokenizer(alphabet, tmp_path):
    chat = make_chat()
    tokenizer = chat.tokenizer if alphabet is None else char_tokenizer(alphabet)
    save_weights(Policy(make_model(3), base="t"), tokenizer, tmp_path)
    made = surroundings(
        '[teacher]\nname = "text"\npath = "somewhere"\n', lambda path, revision: tmp_path
    )
    assert made.teacher() is None
    model = made.audit(OmniOPD(**SMALL), lambda _: None).model
    twin = Chat(tokenizer, max_length=64)
    expected = LocalTextModel(HFEngine(make_policy(3), pad_id=0), twin)
    prompts = [say("ab", "c")]
    asked = sampling(keys=("k",))
    assert model.complete(prompts, 4, asked) == expected.complete(prompts, 4, asked)


@pytest.mark.parametrize("options", ["", 'path = "a"\nadapter = "b"\n'])
def test_a_local_text_teacher_is_either_a_model_or_an_adapter(options):
    with pytest.raises(ConfigError, match=r"either teacher\.path, a model, or teacher\.adapter"):
        surroundings(f'[teacher]\nname = "text"\n{options}').teacher()
