"""Front matter is read as YAML says, every scalar as text, and written so that anybody reads it."""

from __future__ import annotations

import random
import time

import pytest

from distill.errors import DataError
from skills.interop.frontmatter import parse, read, split, write

yaml = pytest.importorskip("yaml")

DOCUMENTS = [
    "a: b\nc: d e f # comment\n# whole line\n\ne: yes\nf: 1.0\ng: 2020-01-01\n",
    "a: |\n  x\n   y\n\n  z\nb: >-\n  one\n  two\n\n  three\nc: |+\n  k\n\nd: |-\n  m\n",
    "a: >\n  p\n  q\n\nb: >\n  x\n    more\n  y\n",
    "a:\n  b: c\n  d:\n    e: f\nz: 'it''s'\n",
    "l:\n- a\n- b: c\n  d: e\n- 'q'\nm:\n  - x\n  - y\n",
    'a: one\n  two\n  three\nb: "x\\n\\u00e9\\x41\n  y"\n',
    'a: [x, y, \'z\']\nb: {"k": "v"}\nc: []\n',
    "a: b#c\nd: -x\ne: x-y\nf: a:b\nkey with space: v\n'quoted key': w\na.b: c\n",
    "a:\nb: ''\nc: \"\"\n",
    "a : b\n",
    "a: 'x' # c\n",
    "description: >\n  Folded text,\n  with: colons\n  and # no comment\nname: x\n",
]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_read_as_a_full_yaml_library_reads_them(document: str) -> None:
    assert parse(document, strict=False) == yaml.load(document, Loader=yaml.BaseLoader)


def test_whatever_is_written_is_read_back_by_both_readers() -> None:
    draw = random.Random(0)
    letters = "abc XYZ 019 :#-'\"\\[]{}&*!|>%@`,.()\n\té漢🎉\x85\u2028\ufeff\x00\x7f ?=_/~"

    def text(most: int) -> str:
        return "".join(draw.choice(letters) for _ in range(draw.randint(0, most)))

    num_written = 0
    for _ in range(1000):
        keys = [text(5).strip() or "k" for _ in range(3)]
        values = {"name": text(10), "description": text(30), "metadata": {k: text(9) for k in keys}}
        try:
            written = write(values)
        except DataError:  # three hyphens by chance
            continue
        num_written += 1
        assert parse(written, strict=True) == values
        assert yaml.load(written, Loader=yaml.BaseLoader) == values
    assert num_written > 800


@pytest.mark.parametrize("value", ["true", "no", "null", "~", "1e3", "2020-01-01", "0x10", ".inf"])
def test_words_that_yaml_takes_for_other_types_are_quoted(value: str) -> None:
    assert write({"a": value}) == f'a: "{value}"'
    assert yaml.safe_load(write({"a": value})) == {"a": value}


@pytest.mark.parametrize(
    ("document", "word"),
    [
        ("a: [x]\n", "flow style"),
        ("a: {b: c}\n", "flow style"),
        ("a: b\na: c\n", "twice"),
        ("a: &x b\n", "must not begin with '&'"),
        ("a: *x\n", "must not begin with '\\*'"),
        ("a: !!python/object:os.system x\n", "must not begin with '!'"),
        ("a: b: c\n", "colon"),
        ("a: 'open\n", "never closed"),
        ('a: "\\q"\n', "unknown escape"),
        ('a: "x" y\n', "follows the closing quote"),
        ("a: b\n  c: d\n", "colon"),
        ("a:\n\tb: c\n", "tab"),
        ("just text\n", "expected `key: value`"),
        ("  a: b\n", "start of the line"),
        ("a: |x\n  b\n", "does not open a block"),
        ("- a\n", "list entry"),
    ],
)
def test_strict_reading_names_the_line(document: str, word: str) -> None:
    with pytest.raises(DataError, match=word) as caught:
        parse(document, strict=True)
    assert "line " in str(caught.value)


def test_deep_nesting_is_refused_without_recursing_on() -> None:
    deep = "\n".join("  " * n + "a:" for n in range(500))
    with pytest.raises(DataError, match="nested deeper"):
        parse(deep, strict=False)


@pytest.mark.parametrize(
    "head",
    [
        "a: b\n" * 20_000,
        "a" + " " * 60_000 + "b",
        'a: "' + "\n" * 60_000,
        "a: '" + "x\n" * 30_000,
        "a: [" + "x\n" * 30_000,
        '"' + "\\x" * 30_000,
    ],
)
def test_a_hostile_front_matter_is_refused_within_seconds(head: str) -> None:
    began = time.monotonic()
    with pytest.raises(DataError):
        read(f"---\n{head}\n---\n", strict=False)
    assert time.monotonic() - began < 10


def test_a_long_line_with_a_stray_colon_is_cured_within_seconds() -> None:
    began = time.monotonic()
    value = "b" + " " * 60_000 + "c: d"
    assert read(f"---\na: {value}\n---\n", strict=False).values == {"a": value}
    assert time.monotonic() - began < 10


def test_an_unquoted_colon_is_cured_when_reading_leniently() -> None:
    text = "---\nname: x\ndescription: Use: when it rains # or snows\n---\nBody\n"
    matter = read(text, strict=False)
    assert matter.values == {"name": "x", "description": "Use: when it rains # or snows"}
    assert "quotes" in matter.warnings[0]
    with pytest.raises(DataError, match="colon"):
        read(text, strict=True)


def test_a_key_that_stands_twice_is_a_warning_when_reading_leniently() -> None:
    matter = read("---\na: b\na: c\n---\n", strict=False)
    assert matter.values == {"a": "c"}
    assert "twice" in matter.warnings[0]


def test_what_even_quotes_do_not_cure_is_an_error() -> None:
    with pytest.raises(DataError, match="tab"):
        read("---\na:\n\t- b\n---\n", strict=False)


def test_the_closing_line_counts_only_alone_on_its_line() -> None:
    head, body = split("\ufeff---\r\na: b --- c\r\n--- # no\r\n---\r\nbody\r\n---\r\nmore")
    assert head == "a: b --- c\n--- # no"
    assert body == "body\n---\nmore"


@pytest.mark.parametrize(
    ("text", "word"), [("# x\n", "must begin"), ("", "must begin"), ("---\na: b\n", "no closing")]
)
def test_a_file_without_front_matter_is_an_error(text: str, word: str) -> None:
    with pytest.raises(DataError, match=word):
        split(text)
