"""The front matter of a SKILL.md: the part of YAML that such files use, read without surprises.

Every scalar is text (`yes`, `1.0` and dates stay what was written). Strict reading accepts what
StrictYAML accepts: block style, no duplicate keys, no anchors, aliases or tags. Lenient reading
also takes flow style and duplicates, and retries values that only lack quotes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from distill.errors import DataError

Value = str | list["Value"] | dict[str, "Value"]
FENCE = "---"
_KEY = re.compile(
    r"""(?P<key>"(?:[^"\\]|\\.){0,200}"|'(?:[^']|''){0,200}'"""
    r"""|[^\s'"\[\]{}#&*!|>%@`,-][^:#]{0,200}?|-[^\s:#][^:#]{0,200}?)\s{0,9}:(?=\s|$)"""
)
_PLAIN = re.compile(r"[A-Za-z][\w ,.()/+;'-]*", re.ASCII)
_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n", "nan", "inf"}
_ESCAPES = {
    **{"0": "\0", "a": "\a", "b": "\b", "t": "\t", "\t": "\t", "n": "\n", "v": "\v", "f": "\f"},
    **{"r": "\r", "e": "\x1b", " ": " ", '"': '"', "/": "/", "\\": "\\", "N": "\x85"},
    **{"_": "\xa0", "L": "\u2028", "P": "\u2029"},
}
_HEX = {"x": 2, "u": 4, "U": 8}
MAX_DEPTH = 8
MAX_HEAD = 2**16
"""Characters of a front matter; a description has at most 1,024."""
MAX_QUOTED_LINES = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontMatter:
    values: Mapping[str, Value]
    body: str
    """Everything behind the closing line, without the line breaks around it."""
    warnings: tuple[str, ...] = ()


def split(text: str) -> tuple[str, str]:
    """The YAML and the body. The closing `---` counts only where it stands alone on a line."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    lines = text.split("\n")
    if lines[0].rstrip() != FENCE:
        raise DataError(f"it must begin with a line {FENCE}, found {lines[0][:40]!r}")
    for number, line in enumerate(lines[1:], start=1):
        if line.rstrip() == FENCE:
            head = "\n".join(lines[1:number])
            if len(head) > MAX_HEAD:
                raise DataError(f"the front matter has more than {MAX_HEAD} characters")
            return head, "\n".join(lines[number + 1 :])
    raise DataError(f"the front matter has no closing line {FENCE}")


def read(text: str, *, strict: bool) -> FrontMatter:
    """The front matter and body of a file. DataError naming the line when it cannot be read."""
    head, body = split(text)
    body = body.strip("\n")
    if strict:
        if FENCE in head:
            raise DataError(
                f"the front matter holds {FENCE} inside a value, which other readers take for its "
                "end; rephrase it"
            )
        return FrontMatter(values=parse(head, strict=True), body=body)
    try:
        reader = _Reader(head, strict=False)
        return FrontMatter(values=reader.top(), body=body, warnings=tuple(reader.warnings))
    except DataError as error:
        reader = _Reader(quoted(head), strict=False)
        try:
            values = reader.top()
        except DataError:
            raise error from None
        warning = f"read with quotes put around plain values, because {error}"
        return FrontMatter(values=values, body=body, warnings=(warning, *reader.warnings))


def parse(yaml: str, *, strict: bool) -> dict[str, Value]:
    return _Reader(yaml, strict=strict).top()


def quoted(yaml: str) -> str:
    """The same with quotes around every plain value on one line, which cures a stray colon."""
    lines = []
    for line in yaml.split("\n"):
        found = re.match(r"(\s*)([A-Za-z_][\w .-]{0,200}?):\s+(\S.*)$", line.rstrip())
        first = found[3][0] if found else "|"
        broken = first in "\"'" and found is not None and found[3][-1] != first
        if found and (broken or first not in "\"'|>[{"):
            line = f"{found[1]}{found[2]}: {json.dumps(found[3], ensure_ascii=False)}"
        lines.append(line)
    return "\n".join(lines)


def write(values: Mapping[str, str | Mapping[str, str]]) -> str:
    """Block style with quotes where needed; two levels. DataError for what a reader of such files
    would take for the end of the front matter."""
    lines = []
    for key, value in values.items():
        if isinstance(value, str):
            lines.append(f"{_scalar(key)}: {_scalar(value)}")
        elif value:
            lines.append(f"{_scalar(key)}:")
            lines += [f"  {_scalar(k)}: {_scalar(v)}" for k, v in value.items()]
    text = "\n".join(lines)
    if FENCE in text:
        raise DataError(f"a value holds {FENCE}, which other readers take for the end")
    return text


def _scalar(text: str) -> str:
    plain = _PLAIN.fullmatch(text) and text.casefold() not in _WORDS and text == text.strip()
    if plain:
        return text
    made = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else _escape(c) for c in made)


def _escape(c: str) -> str:
    if "\ud800" <= c <= "\udfff":
        raise DataError("a value holds half of a surrogate pair, which is not text")
    return f"\\u{ord(c):04x}" if ord(c) <= 0xFFFF else f"\\U{ord(c):08x}"


@dataclass(slots=True)
class _Line:
    number: int
    indent: int
    text: str


@dataclass(slots=True)
class _Reader:
    yaml: str
    strict: bool
    warnings: list[str] = field(default_factory=list)
    _lines: list[str] = field(init=False)
    _at: int = 0

    def __post_init__(self) -> None:
        self._lines = self.yaml.split("\n")

    def top(self) -> dict[str, Value]:
        line = self._peek()
        if line is None:
            return {}
        if line.indent:
            raise self._wrong(line, "expected a key at the start of the line")
        made = self._mapping(0, 0)
        if (rest := self._peek()) is not None:
            raise self._wrong(rest, "expected `key: value`")
        return made

    def _peek(self) -> _Line | None:
        """The next line that says something; comments and blank lines are passed over."""
        while self._at < len(self._lines):
            raw = self._lines[self._at].rstrip()
            text = raw.lstrip(" ")
            if text and not text.startswith("#"):
                if text.startswith("\t"):
                    raise DataError(f"line {self._at + 1}: a tab indents; use spaces")
                return _Line(self._at + 1, len(raw) - len(text), text)
            self._at += 1
        return None

    def _mapping(self, indent: int, depth: int) -> dict[str, Value]:
        if depth > MAX_DEPTH:
            raise DataError(f"line {self._at + 1}: nested deeper than {MAX_DEPTH} levels")
        made: dict[str, Value] = {}
        while (line := self._peek()) is not None and line.indent == indent:
            if line.text.startswith("- ") or line.text == "-":
                raise self._wrong(line, "expected `key: value`, found a list entry")
            found = _KEY.match(line.text)
            if found is None:
                raise self._wrong(line, "expected `key: value`")
            key = self._key(found["key"], line)
            if key in made:
                if self.strict:
                    raise self._wrong(line, f"the key {key!r} stands there twice")
                self.warnings.append(
                    f"line {line.number}: {key!r} stands there twice; the last won"
                )
            self._at += 1
            made[key] = self._value(line.text[found.end() :].strip(), indent, depth, line)
        line = self._peek()
        if line is not None and line.indent > indent:
            raise self._wrong(line, "it is indented more than the keys around it")
        return made

    def _key(self, text: str, line: _Line) -> str:
        return self._quoted(text, line)[0] if text[0] in "\"'" else text

    def _value(self, text: str, indent: int, depth: int, line: _Line) -> Value:
        first = text[:1]
        if not text or first == "#":
            return self._nested(indent, depth)
        if first in "|>":
            return self._literal(text, indent, line)
        if first in "\"'":
            return self._long_quoted(text, line)
        if first in "[{":
            if self.strict:
                raise self._wrong(line, "flow style ([...] or {...}) is not allowed; use lines")
            return self._flow(text, line)
        if first in "&*!%@`":
            raise self._wrong(line, f"a value must not begin with {first!r}; quote it")
        return self._plain(text, indent, line)

    def _nested(self, indent: int, depth: int) -> Value:
        line = self._peek()
        if line is None:
            return ""
        if line.text == "-" or line.text.startswith("- "):
            return self._list(line.indent, depth + 1) if line.indent >= indent else ""
        if line.indent > indent:
            return (
                self._mapping(line.indent, depth + 1)
                if _KEY.match(line.text)
                else self._below(indent, line)
            )
        return ""

    def _below(self, indent: int, line: _Line) -> Value:
        self._at += 1
        return self._value(line.text, indent, 0, line)

    def _list(self, indent: int, depth: int) -> Value:
        made: list[Value] = []
        while (line := self._peek()) is not None and line.indent == indent:
            if not (line.text == "-" or line.text.startswith("- ")):
                break
            rest = line.text[1:].strip()
            if rest and rest[0] not in "\"'[{" and _KEY.match(rest):
                # `- key: value` opens a mapping that is indented as far as the key.
                inner = indent + len(line.text) - len(line.text[1:].lstrip())
                self._lines[self._at] = " " * inner + line.text[1:].lstrip()
                made.append(self._mapping(inner, depth + 1))
                continue
            self._at += 1
            made.append(self._value(rest, indent, depth, line))
        return made

    def _plain(self, text: str, indent: int, line: _Line) -> str:
        parts = [text]
        while self._at < len(self._lines):
            raw = self._lines[self._at].rstrip()
            below = raw.lstrip(" ")
            if (below and len(raw) - len(below) <= indent) or below.startswith("#"):
                break
            parts.append(below)
            self._at += 1
        kept = [re.split(r"\s#", part, maxsplit=1)[0].rstrip() for part in parts]
        if any(re.search(r":(\s|$)", part) for part in kept):
            raise self._wrong(line, "a plain value must not hold a colon and a space; quote it")
        return _fold(kept)

    def _literal(self, text: str, indent: int, line: _Line) -> str:
        header = re.fullmatch(r"([|>])([+-]?)(\d?)([+-]?)(?:\s+#.*)?", text)
        if header is None:
            raise self._wrong(line, f"{text[:20]!r} does not open a block of text")
        rows: list[str] = []
        while self._at < len(self._lines):
            raw = self._lines[self._at].rstrip("\r")
            if raw.strip() and len(raw) - len(raw.lstrip(" ")) <= indent:
                break
            rows.append(raw)
            self._at += 1
        filled = [r for r in rows if r.strip()]
        margin = indent + int(header[3]) if header[3] else 0
        margin = margin or min((len(r) - len(r.lstrip(" ")) for r in filled), default=0)
        rows = [r[margin:] if r.strip() else "" for r in rows]
        body = "\n".join(rows) if header[1] == "|" else _fold_block(rows)
        keep = header[2] or header[4]
        if keep == "+":
            return body + "\n"
        return body.rstrip("\n") + ("" if keep == "-" or not filled else "\n")

    def _long_quoted(self, text: str, line: _Line) -> str:
        parts = [text]
        while True:
            try:
                value, rest = self._quoted(_fold(parts), line)
                break
            except EOFError:
                if self._at >= len(self._lines) or len(parts) > MAX_QUOTED_LINES:
                    raise self._wrong(line, "a quote is never closed") from None
                parts.append(self._lines[self._at].strip())
                self._at += 1
        if rest.strip() and not rest.strip().startswith("#"):
            raise self._wrong(line, f"text follows the closing quote: {rest.strip()[:20]!r}")
        return value

    def _quoted(self, text: str, line: _Line) -> tuple[str, str]:
        """The value of a quoted scalar and what follows it. EOFError when it is not closed."""
        if text[0] == "'":
            found = re.match(r"'((?:[^']|'')*)'(?!')", text)
            if found is None:
                raise EOFError
            return found[1].replace("''", "'"), text[found.end() :]
        out: list[str] = []
        at = 1
        while at < len(text):
            c = text[at]
            if c == '"':
                return _pairs("".join(out)), text[at + 1 :]
            if c != "\\":
                out.append(c)
                at += 1
                continue
            code = text[at + 1 : at + 2]
            if not code:
                raise EOFError
            size = _HEX.get(code, 0)
            digits = text[at + 2 : at + 2 + size]
            if size and re.fullmatch(rf"[0-9a-fA-F]{{{size}}}", digits):
                if int(digits, 16) > 0x10FFFF:
                    raise self._wrong(line, f"\\{code}{digits} is not a character")
                out.append(chr(int(digits, 16)))
            elif code in _ESCAPES:
                out.append(_ESCAPES[code])
            else:
                raise self._wrong(line, f"unknown escape \\{code}")
            at += 2 + size
        raise EOFError

    def _flow(self, text: str, line: _Line) -> Value:
        """Flow style that is also JSON; anything else stays the text that it is."""
        while self._at < len(self._lines) and text.count(text[0]) > text.count(
            "]" if text[0] == "[" else "}"
        ):
            text += " " + self._lines[self._at].strip()
            self._at += 1
        try:
            return _texts(json.loads(text))
        except ValueError:
            pass
        if text[0] == "[" and text.endswith("]") and "{" not in text and "[" not in text[1:]:
            entries = [entry.strip() for entry in text[1:-1].split(",")]
            return [e.strip("\"'") for e in entries if e]
        raise self._wrong(line, "flow style that is not JSON; quote the value")

    def _wrong(self, line: _Line, trouble: str) -> DataError:
        return DataError(f"line {line.number} ({line.text[:40]!r}): {trouble}")


def _fold(parts: Sequence[str]) -> str:
    """Lines of one scalar: a single break is a space, each blank line a break."""
    out, blank = "", 0
    for place, part in enumerate(parts):
        if not part:
            blank += 1
        else:
            out += ("\n" * blank if blank else " " if place else "") + part
            blank = 0
    return out


def _fold_block(rows: Sequence[str]) -> str:
    out, last = "", ""
    for row in rows:
        if not row:
            out += "\n"
        elif not out or out.endswith("\n") or row[0] == " " or last[:1] == " ":
            out += ("\n" if out and not out.endswith("\n") else "") + row
        else:
            out += " " + row
        last = row
    return out


def _pairs(text: str) -> str:
    """Joins escaped surrogate pairs, as JSON writes them."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _texts(value: object) -> Value:
    if isinstance(value, dict):
        return {str(k): _texts(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_texts(v) for v in value]
    return value if isinstance(value, str) else json.dumps(value)
