"""Personal data and secrets leave a record before it is stored."""

from __future__ import annotations

import json
import random
import string
import sys
import types
from collections.abc import Iterable
from dataclasses import asdict
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest

from distill.curriculum.ner import load_entities
from distill.curriculum.pii import KeyedHash, Numbering, Redactor
from distill.curriculum.pii_numbers import is_card, is_iban, passes_luhn
from distill.curriculum.pii_rules import find
from distill.curriculum.records import (
    Decision,
    Evidence,
    Outcome,
    PolicyStep,
    Prediction,
    RoutingTurn,
    Served,
    Verdict,
)
from distill.errors import ConfigError, DataError

AT = "@"  # put together here, so that the tree holds no address
MAIL = f"jane.doe{AT}mail.example"
JWT = ".".join(["eyJhbGciOiJIUzI1NiJ9", "eyJzdWIiOiIxMjM0NTY3ODkwIn0", "dozjgNryP4J3jVmNHl0w5N_X"])
KEY = "sk-" + "proj-abcdefGHIJ1234567890"
PEM = "-----BEGIN RSA PRIVATE" + " KEY-----\nMIIEowIBAAKCAQEA7\nabc=\n-----END RSA PRIVATE KEY-----"

FOUND = [
    (MAIL, "EMAIL"),
    (f"o'neil+tag{AT}sub.mail.example", "EMAIL"),
    ("jane [at] mail [dot] example", "EMAIL"),
    ("+1 (212) 555-0132", "PHONE"),
    ("+49 30 1234567", "PHONE"),
    ("212-555-0132", "PHONE"),
    ("(415) 555-0199", "PHONE"),
    ("415.555.0199", "PHONE"),
    ("020 7946 0958", "PHONE"),
    ("06 12 34 56 78", "PHONE"),
    ("13800138000", "PHONE"),
    ("4111 1111 1111 1111", "CARD"),
    ("5555-5555-5555-4444", "CARD"),
    ("378282246310005", "CARD"),
    ("DE89 3704 0044 0532 0130 00", "IBAN"),
    ("GB82WEST12345698765432", "IBAN"),
    ("gb82 west 1234 5698 7654 32", "IBAN"),
    (".".join(["10", "20", "30", "40"]), "IP"),
    ("2001:db8::ff00:42:8329", "IP"),
    ("00:1a:2b:3c:4d:5e", "MAC"),
    ("123-45-6789", "SSN"),
    (JWT, "JWT"),
    (KEY, "API_KEY"),
    ("ghp_" + "a1B2" * 9, "API_KEY"),
    ("xoxb-" + "123456789012-abcDEF", "API_KEY"),
    ("AKIA" + "IOSFODNN7EXAMPLE", "AWS_KEY"),
    (PEM, "PRIVATE_KEY"),
]
NOTHING = [
    "4111 1111 1111 1112",  # Luhn
    "1234567890123452",  # Luhn, but no issuer
    "0000 0000 0000 0000",
    "DE89 3704 0044 0532 0130 01",  # mod 97
    "GB82WEST1234569876543",  # length
    "000-12-3456",
    "666-12-3456",
    "900-12-3456",
    "123-00-6789",
    "123-45-0000",
    "v1.2.3.4",
    "version 192.0.2.4",
    "package==192.0.2.4",
    ".".join(("300", "1", "2", "3")),
    "127.0.0.1",
    ".".join("12345"),
    "12:30:45",
    "std::vector<a::b>",
    "00:00:00:00:00:00",
    "2026-09-01 02:10:11,123",
    "05-06-2024 10:20",
    "550e8400-e29b-41d4-a716-446655440000",
    "1788228780000",
    "3.14159265358979",
    "+1.2345678",
    "1,234,567,890",
    f"git{AT}github.com:a/b.git",
    f"{AT}decorator.method",
    "The password is required.",
    "token = tokens[0]",
    "secret = get_secret_v2(name)",
    "max_tokens: 128000",
    "a Bearer of news",
    "sort:52305=",
]


@pytest.mark.parametrize(("value", "kind"), FOUND)
@pytest.mark.parametrize("frame", ["{}", "see {} please", '"{}",', "({})", "{}."])
def test_personal_data_is_found_in_any_surroundings(value: str, kind: str, frame: str) -> None:
    text = frame.format(value)
    redacted, counts = Redactor().redact_text(text)
    assert redacted == frame.format(f"[{kind}_1]")
    assert counts == {kind: 1}


@pytest.mark.parametrize("text", NOTHING)
def test_what_only_looks_alike_stays(text: str) -> None:
    assert Redactor().redact_text(text) == (text, {})
    assert Redactor().redact_text(f"we saw {text} there today")[1] == {}


def test_values_that_a_word_calls_secret_are_found_without_the_word() -> None:
    for text, expected in (
        ("password: hunter22!", "password: [SECRET_1]"),
        ("DB_PASSWORD=hunter22", "DB_PASSWORD=[SECRET_1]"),
        ('{"api_key": "abcd1234efgh"}', '{"api_key": "[SECRET_1]"}'),
        ("Authorization: Bearer abcdef1234567890ab", "Authorization: Bearer [SECRET_1]"),
        ("authorization: basic dXNlcjpwYXNz", "authorization: basic [SECRET_1]"),
        ("call me at 555 01 32 1", "call me at [PHONE_1]"),
        ("SSN 123456789", "SSN [SSN_1]"),
    ):
        assert Redactor().redact_text(text)[0] == expected


def test_an_address_keeps_its_host_and_loses_its_login() -> None:
    text = f"postgres://bob:p{AT}ss{AT}db.example:5432/x"
    assert Redactor().redact_text(text)[0] == f"postgres://[CREDENTIALS_1]{AT}db.example:5432/x"


def test_a_card_beside_other_numbers_is_found_and_they_stay() -> None:
    text = "7742 4111 1111 1111 1111 123"
    assert Redactor().redact_text(text)[0] == "7742 [CARD_1] 123"


@pytest.mark.parametrize("digits", ["4111111111111111", "79927398713", "378282246310005"])
def test_one_changed_digit_breaks_a_check_digit(digits: str) -> None:
    assert passes_luhn(digits)
    for place, digit in enumerate(digits):
        for other in set(string.digits) - {digit}:
            assert not passes_luhn(digits[:place] + other + digits[place + 1 :])


def test_account_numbers_of_ten_countries_pass_and_swapped_digits_do_not() -> None:
    for iban in [
        "AT611904300234573201",
        "BE68539007547034",
        "CH9300762011623852957",
        "DK5000400440116243",
        "ES9121000418450200051332",
        "FR1420041010050500013M02606",
        "NL91ABNA0417164300",
        "NO9386011117947",
        "PL61109010140000071219812874",
        "MT84MALT011000012345MTLCAST001S",
    ]:
        assert is_iban(iban)
        assert not is_iban(iban[:-2] + iban[-1] + iban[-2]) or iban[-1] == iban[-2]
        assert not is_iban(iban + "0")


def test_random_numbers_are_cards_as_often_as_luhn_and_issuers_say() -> None:
    rng = random.Random(1)
    numbers = ["4" + "".join(rng.choices(string.digits, k=15)) for _ in range(3000)]
    assert 0.08 < sum(map(is_card, numbers)) / 3000 < 0.12


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\uff14\uff11\uff11\uff11 1111 1111 1111!", "[CARD_1]!"),
        ("\u0664\u0661\u0661\u0661 1111 1111 1111", "[CARD_1]"),
        ("41\u200b11\u200d1111\u20601111\ufeff1111", "[CARD_1]"),
        (f"jane\u200b{AT}mail\u00ad.example", "[EMAIL_1]"),
        ("jane\uff20mail\uff0eexample", "[EMAIL_1]"),
        ("123\u201345\u20136789", "[SSN_1]"),
        ("\U0001d7d2\U0001d7cf11111111111111", "[CARD_1]"),
        ("+49\u00a030\u2009123\u202f45\u00a067", "[PHONE_1]"),
        ("\u7535\u8bdd13800138000\uff0c\u8c22\u8c22", "\u7535\u8bdd[PHONE_1]\uff0c\u8c22\u8c22"),
        (f"\u90ae\u7bb1jane{AT}mail.example\u8c22", "\u90ae\u7bb1[EMAIL_1]\u8c22"),
    ],
)
def test_look_alike_and_invisible_characters_hide_nothing(text: str, expected: str) -> None:
    assert Redactor().redact_text(text)[0] == expected


def test_text_of_other_scripts_stays_as_it_is_written() -> None:
    text = "Gr\u00f6\u00dfe \u2013 \u201ccaf\u00e9\u201d \uff11\uff12 \u200b\u4e2d\u6587 \ud800"
    assert Redactor().redact_text(text)[0] == text


def test_equal_values_have_equal_numbers_counted_by_first_appearance() -> None:
    other = f"bob{AT}mail.example"
    messages = [
        {"role": "user", "content": f"from {other} to {MAIL}"},
        {"role": "assistant", "content": f"To {MAIL.upper()}?", "reasoning_content": f"{other}"},
        {"role": "user", "content": "4111-1111-1111-1111 or 4111 1111 1111 1111"},
    ]
    redacted, counts = Redactor().redact_messages(messages)
    assert redacted[0]["content"] == "from [EMAIL_1] to [EMAIL_2]"
    assert redacted[1]["content"] == "To [EMAIL_2]?"
    assert redacted[1]["reasoning_content"] == "[EMAIL_1]"
    assert redacted[2]["content"] == "[CARD_1] or [CARD_1]"
    assert counts == {"EMAIL": 4, "CARD": 2}


def test_a_growing_history_stays_equal_from_call_to_call() -> None:
    mails = [f"person{i}{AT}mail.example" for i in (3, 1, 2, 1, 5)]
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": f"{m} and {mails[0]}"}
        for i, m in enumerate(mails)
    ]
    whole, _ = Redactor().redact_messages(messages)
    for length in range(1, len(messages)):
        assert Redactor().redact_messages(messages[:length])[0] == whole[:length]


def test_a_dropped_reasoning_changes_no_number_of_what_is_seen_before_it() -> None:
    answer = {"role": "assistant", "reasoning_content": f"a{AT}b.example", "content": MAIL}
    bare = {k: v for k, v in answer.items() if k != "reasoning_content"}
    with_it = Redactor().redact_messages([answer])[0][0]
    assert with_it["content"] == Redactor().redact_messages([bare])[0][0]["content"]
    assert list(with_it) == list(answer)


def test_placeholders_of_an_earlier_redaction_keep_their_numbers() -> None:
    numbering = Numbering()
    redacted, counts = Redactor().redact_text(f"[EMAIL_3] and {MAIL}", numbering)
    assert redacted == "[EMAIL_3] and [EMAIL_4]"
    assert counts == {"EMAIL": 1}


def test_arguments_of_tool_calls_stay_valid_json_with_their_layout() -> None:
    hidden = MAIL.replace(AT, "\\u0040")
    written = (
        f'{{"to":  "{hidden}", "card": 4111111111111111, "n": 12, '
        f'"deep": {{"\\u006eote": "x\\n4111111111111111"}},\n'
        f' "inner": "{{\\"mail\\": \\"{MAIL}\\"}}", "a": [1.5, 13800138000], '
        '"password": "hunter22!"}'
    )
    call = {"id": "c1", "function": {"name": "send", "arguments": written}}
    (message,), _ = Redactor().redact_messages([{"role": "assistant", "tool_calls": [call]}])
    arguments = message["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments) == {
        "to": "[EMAIL_1]",
        "card": "[CARD_1]",
        "n": 12,
        "deep": {"note": "x\n[CARD_1]"},
        "inner": '{"mail": "[EMAIL_1]"}',
        "a": [1.5, "[PHONE_1]"],
        "password": "[SECRET_1]",
    }
    assert arguments.startswith('{"to":  "[EMAIL_1]", "card": "[CARD_1]", "n": 12')


def test_a_short_number_that_its_name_gives_away_becomes_a_string_in_json() -> None:
    redacted, _ = Redactor().redact_text('{"phone": 5551234}')
    assert redacted == '{"phone": [PHONE_1]}'  # as plain text
    (message,), _ = Redactor().redact_messages([{"role": "tool", "content": '{"phone": 5551234}'}])
    assert json.loads(message["content"]) == {"phone": "[PHONE_1]"}


def test_arguments_that_are_an_object_and_content_in_parts_are_redacted() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": MAIL}, "plain 123-45-6789"]},
        {
            "role": "assistant",
            "tool_calls": [{"function": {"arguments": {MAIL: [4111111111111111]}}}],
        },
        {"role": "tool", "name": MAIL, "content": {"token": "abc12345xyz"}},
    ]
    redacted, _ = Redactor().redact_messages(messages)
    assert redacted[0]["content"] == [{"type": "text", "text": "[EMAIL_1]"}, "plain [SSN_1]"]
    arguments = redacted[1]["tool_calls"][0]["function"]["arguments"]
    assert arguments == {"[EMAIL_1]": ["[CARD_1]"]}
    assert redacted[2] == {"role": "tool", "name": "[EMAIL_1]", "content": {"token": "[SECRET_1]"}}


def test_clean_messages_are_the_same_objects() -> None:
    messages = [{"role": "user", "content": "sort:52305=", "x": [{"y": 1}]}]
    redacted, counts = Redactor().redact_messages(messages)
    assert redacted[0] is messages[0]
    assert not counts


def a_turn(secret: str) -> RoutingTurn:
    return RoutingTurn(
        source="logs",
        source_id=f"id-{secret}",
        format="plain",
        session_id=secret,
        trace_id=f"t {secret}",
        parent_id=secret,
        user=secret,
        scene=secret,
        tags=("team:ops", f"by {secret}"),
        prediction=Prediction(router=secret, router_version=secret),
        decision=Decision(
            policy=(PolicyStep(stage=secret, applied=True, detail={secret: [secret]}),),
            reason=secret,
            requested_model=secret,
        ),
        served=Served(model=secret, provider=secret),
        outcome=Outcome(
            error=f"failed for {secret}",
            finish_reason=secret,
            verdicts=(Verdict(source="user", name=secret, label=f"{secret}!", ts=1788228780000),),
        ),
        messages=(
            {"role": "user", "content": [{"type": "text", "text": secret}], "name": secret},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": f"so {secret}",
                "tool_calls": [
                    {
                        "id": secret,
                        "function": {"name": "f", "arguments": json.dumps({"a": secret})},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": secret, "content": json.dumps([{secret: secret}])},
        ),
        tools=({"function": {"name": "f", "description": f"ask {secret}"}},),
        raw_sha256="ab" * 32,
    )


@pytest.mark.parametrize("secret", [value for value, _ in FOUND if "\n" not in value])
def test_nothing_of_a_planted_secret_is_left_anywhere_in_a_record(secret: str) -> None:
    redactor = Redactor(pseudonym=KeyedHash(b"k" * 16))
    turn, counts = redactor.turn(a_turn(secret))
    assert secret not in repr(asdict(turn))
    assert sum(counts.values()) >= 20
    assert turn.raw_sha256 == "ab" * 32
    assert turn.outcome is not None
    assert turn.outcome.verdicts[0].ts == 1788228780000
    again, more = redactor.turn(turn)
    assert again is turn
    assert not more


def test_a_hashed_id_still_joins_records_and_needs_the_key() -> None:
    redactor = Redactor(pseudonym=KeyedHash(b"k" * 16))
    turn = redactor(RoutingTurn(source="s", source_id=MAIL, format="f", user=MAIL, trace_id="t1"))
    evidence, _ = redactor.evidence(
        Evidence(source="s", ref=MAIL, verdict=Verdict(source="user", name="n", label=MAIL))
    )
    assert turn.source_id == turn.user == evidence.ref
    assert turn.source_id.startswith("h:")
    assert turn.trace_id == "t1"
    assert evidence.verdict.label == "[EMAIL_1]"
    other = Redactor(pseudonym=KeyedHash(b"q" * 16))
    assert other(RoutingTurn(source="s", source_id=MAIL, format="f")).source_id != turn.source_id


def test_without_a_key_an_id_that_needs_one_is_refused() -> None:
    turn = RoutingTurn(source="s", source_id=MAIL, format="f")
    with pytest.raises(ConfigError, match=r"an id holds an e-mail address.*KeyedHash"):
        Redactor().turn(turn)
    with pytest.raises(ConfigError, match="at least 16 bytes"):
        KeyedHash(b"short")


def test_a_redactor_can_be_sent_to_another_process() -> None:
    packed = ForkingPickler.dumps(Redactor(pseudonym=KeyedHash(b"k" * 16)))
    redactor = ForkingPickler.loads(packed)
    assert redactor(a_turn(MAIL)) == Redactor(pseudonym=KeyedHash(b"k" * 16))(a_turn(MAIL))


def test_a_record_that_is_too_deep_to_check_is_refused() -> None:
    deep: Any = MAIL
    for _ in range(200):
        deep = [deep]
    with pytest.raises(DataError, match="nested more than 100"):
        Redactor().redact_messages([{"role": "user", "content": deep}])


def test_redacting_twice_changes_nothing_and_leaves_nothing_on_random_texts() -> None:
    rng = random.Random(7)
    values = [value for value, _ in FOUND]
    noise = [
        *" .,:-_()[]{}\"'\\@/+0189azAZ\n",
        "\u200b",
        "\uff11",
        "[EMAIL_1]",
        "phone ",
        "=",
        "://",
    ]
    for _ in range(600):
        text = "".join(
            rng.choice(values) if rng.random() < 0.25 else rng.choice(noise)
            for _ in range(rng.randint(1, 25))
        )
        once, _ = Redactor().redact_text(text)
        assert find(once) == []
        assert Redactor().redact_text(once)[0] == once


def test_random_texts_between_spaces_lose_exactly_what_was_planted() -> None:
    rng = random.Random(3)
    words = ["walk", "the", "42", "3.5", "a-b", "x_y", "(so)", "end.", "\u4e2d\u6587", "2026-09-01"]
    for _ in range(300):
        parts = [
            rng.choice(FOUND) if rng.random() < 0.3 else (rng.choice(words), "") for _ in range(9)
        ]
        text = " | ".join(value for value, _ in parts)
        redacted, counts = Redactor().redact_text(text)
        assert sum(counts.values()) == sum(bool(kind) for _, kind in parts)
        for (value, kind), left in zip(parts, redacted.split(" | "), strict=True):
            assert left.startswith(f"[{kind}_") if kind else left == value


def names(text: str) -> Iterable[tuple[int, int, str]]:
    for name in ("Jane Doe", "EMAIL"):
        place = text.find(name)
        while place >= 0:
            yield place, place + len(name), "B-PER"
            place = text.find(name, place + 1)


def test_a_recogniser_adds_names_and_never_cuts_a_placeholder() -> None:
    redactor = Redactor(entities=names)
    redacted, counts = redactor.redact_text(f"Jane Doe writes from {MAIL}, says Jane Doe")
    assert redacted == "[PER_1] writes from [EMAIL_1], says [PER_1]"
    assert counts == {"EMAIL": 1, "PER": 2}
    (message,), _ = redactor.redact_messages([{"role": "tool", "content": '{"by": "Jane Doe"}'}])
    assert message["content"] == '{"by": "[PER_1]"}'


def test_a_recogniser_is_named_by_module_or_folder(tmp_path: Path) -> None:
    assert load_entities("json:loads") is json.loads
    for spec, words in (
        ("no-colon", "my_pkg.module:attr or ner:FOLDER"),
        ("no_such_pkg_here:x", "no module 'no_such_pkg_here'"),
        ("json:no_such", "'json' has no 'no_such'"),
        ("string:digits", "should be a function"),
        (f"ner:{tmp_path}", "expected a folder with a token-classification model"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_entities(spec)


@pytest.mark.slow
def test_a_local_model_finds_names_wherever_they_stand(tmp_path: Path) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertForTokenClassification, PreTrainedTokenizerFast

    vocabulary = {"[UNK]": 0, "[PAD]": 1, "Jane": 2, "Doe": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]"
    ).save_pretrained(tmp_path)
    config = BertConfig(
        vocab_size=4,
        hidden_size=4,
        num_hidden_layers=0,
        num_attention_heads=1,
        intermediate_size=4,
        max_position_embeddings=600,
        num_labels=2,
        id2label={0: "O", 1: "PERSON"},
    )
    model = BertForTokenClassification(config)
    with torch.no_grad():
        for parameter in (
            model.bert.embeddings.position_embeddings.weight,
            model.bert.embeddings.token_type_embeddings.weight,
        ):
            parameter.zero_()
        words = torch.tensor([[1.0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0]])
        model.bert.embeddings.word_embeddings.weight.copy_(words)
        model.classifier.weight.copy_(torch.tensor([[9.0, 0, 0, 0], [0, 9, 0, 0]]))
        model.classifier.bias.zero_()
    model.save_pretrained(tmp_path)
    redactor = Redactor(entities=load_entities(f"ner:{tmp_path}"))
    filler = "so and so " * 300
    redacted, _ = redactor.redact_text(f"{filler}Jane Doe {filler}")
    assert redacted == f"{filler}[PERSON_1] {filler}"


def test_a_long_text_is_read_in_windows_that_overlap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pipeline(task: str, **options: Any) -> Any:
        assert task == "token-classification"
        assert options["model"] == str(tmp_path)

        def run(text: str) -> list[dict[str, Any]]:
            assert len(text) <= 1500
            return [
                {"score": score, "start": a, "end": a + 8, "entity_group": "PER"}
                for name, score in (("Jane Doe", 0.9), ("John Roe", 0.2))
                if (a := text.find(name)) >= 0
            ]

        return run

    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    fake = types.SimpleNamespace(pipeline=pipeline)
    monkeypatch.setitem(sys.modules, "transformers", fake)  # type: ignore[arg-type]
    redactor = Redactor(entities=load_entities(f"ner:{tmp_path}"))
    for before in (0, 1346, 1490, 1496, 2990):
        text = f"{'.' * before}Jane Doe and John Roe{'.' * 3000}"
        assert redactor.redact_text(text)[0] == text.replace("Jane Doe", "[PER_1]")


@pytest.mark.parametrize(
    "written",
    [
        "alice%40example.org",
        "alice%2540example.org",
        "alice&#64;example.org",
        "alice&#x40;example&#46;org",
        "alice&commat;example%2Eorg",
    ],
)
def test_an_encoded_address_is_the_address(written: str) -> None:
    redactor = Redactor(pseudonym=KeyedHash(b"k" * 32))
    text, counts = redactor.redact_text(f"alice@example.org, //x.test/?to={written}&a=1")
    assert text == "[EMAIL_1], //x.test/?to=[EMAIL_1]&a=1"
    assert counts == {"EMAIL": 2}
    assert redactor.redact_text("17%403.14")[0] == "17%403.14"


def test_only_the_data_of_an_address_with_data_is_left_as_it_is() -> None:
    redactor = Redactor(pseudonym=KeyedHash(b"k" * 32))
    image = "data:image/png;base64," + "iVBORw0KGgo4111111111111111" * 8 + "=="
    (message,), counts = redactor.redact_messages([{"content": image}])
    assert (message["content"], counts) == (image, {})
    (message,), _ = redactor.redact_messages([{"content": f"{image} to bob@example.org"}])
    assert message["content"] == f"{image} to [EMAIL_1]"
    for fake in ("data:text;base64,hello ", "data: ;base64, ", "data:;base64,"):
        (message,), _ = redactor.redact_messages([{"content": fake + "4111111111111111"}])
        assert message["content"] == fake + "[CARD_1]"
