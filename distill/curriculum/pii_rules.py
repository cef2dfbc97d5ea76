"""What personal data and secrets look like, with checksums, and where they stand in a text.

A number counts only if it passes the check that its kind has: Luhn and issuer for cards, mod 97 and
the country's length for IBANs, the ranges that were ever issued for social security numbers. Phone
numbers have no checksum; they count with a leading `+`, in the written form of a country (North
America, a trunk 0 with groups, Chinese mobiles) or after a word such as "phone".

Every dotted quad with parts up to 255 is an address, since a version such as 192.0.2.4 cannot be
told apart, except after `v`, `version` or a comparison (`==192.0.2.4`), and except those that name
no machine of anybody: 127.*, 0.*, 255.* and ::1.

Look-alikes are folded first: full-width and other digits, invisible characters between letters,
dashes and spaces of all widths. Rules are guarded by cheap searches, so that a text without
anything costs a few microseconds per KB.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from distill.curriculum.pii_folding import fold
from distill.curriculum.pii_numbers import find_cards, find_ibans, find_phones


class Span(NamedTuple):
    """`text[start:end]` is personal data or a secret of this kind."""

    start: int
    end: int
    kind: str


class View(NamedTuple):
    """One text, as the rules read it; all four have a position per character of `text`."""

    text: str
    """Folded."""
    lower: bytes
    """ASCII letters in lower case, `?` for what Latin-1 cannot hold."""
    classes: bytes
    """`0` for a digit, `A` for a letter, else as it is."""
    runs: bytes
    """`w` for letters, digits, `_`, `-` and `.`, else a space."""


Place = tuple[int, int]
Rule = Callable[[View], Iterator[Span]]

KINDS: dict[str, str] = {
    "PRIVATE_KEY": "a private key",
    "CREDENTIALS": "a name and password in an address",
    "JWT": "a key or token",
    "AWS_KEY": "a key or token",
    "API_KEY": "a key or token",
    "SECRET": "a password",
    "EMAIL": "an e-mail address",
    "IBAN": "an account number",
    "CARD": "a card number",
    "SSN": "an identity number",
    "IP": "a network address",
    "MAC": "a network address",
    "PHONE": "a phone number",
}
"""Kind -> what it is. Where two overlap, the earlier of this table gives the name."""

_DIGITS, _LETTERS = b"0123456789", bytes(range(65, 91)) + bytes(range(97, 123))
_CLASSES = bytes(48 if i in _DIGITS else 65 if i in _LETTERS else i for i in range(256))
_RUNS = bytes(119 if i in _DIGITS + _LETTERS + b"_-." else 32 for i in range(256))
_LONG = b"w" * 16
_NAME = "A-Za-z0-9\u00c0-\u024f\u0370-\u052f"
"""Letters of names and hosts: Latin, Greek, Cyrillic. Other scripts often stand right beside an
address, without a space."""


def find(text: str) -> list[Span]:
    """All personal data and secrets of a text, from left to right, none overlapping another."""
    if len(text) < 6 or (len(text) <= 64 and _is_plain(text)):
        return []
    folded, places = fold(text)
    data = folded.encode("latin-1", "replace")
    view = View(folded, data.lower(), data.translate(_CLASSES), data.translate(_RUNS))
    digits = view.classes.count(b"0")
    found: list[Span] = []
    for least, signs, rule in RULES:
        if digits < least:
            continue
        for sign in signs:
            if sign in view.lower:
                break
        else:
            if signs:
                continue
        found += rule(view)
    if not found:
        return []
    merged = _merge(found)
    if places is None:
        return merged
    return [Span(int(places[a]), int(places[b - 1]) + 1, kind) for a, b, kind in merged]


_MARKS = re.compile(r"[^A-Za-z0-9 _./,-]|\d(?:[^\d]{0,3}\d){3}|[\w.-]{16}|pass|\bis\b|bearer", re.I)
_HEX_NAME = re.compile(
    r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
    r"|(?!key-|dapi)(?:[a-z]+[-_])?(?:[0-9]{0,6}+[a-f])+[0-9]{0,6}"
)
"""UUIDs, and hexadecimal ids without seven digits in a row."""


def _is_plain(text: str) -> bool:
    """Whether a short text cannot match any rule: names of models, tags, roles, UUIDs."""
    return _MARKS.search(text) is None or _HEX_NAME.fullmatch(text) is not None


def value_of(kind: str, text: str) -> str:
    """The value without its spelling: equal for two ways to write the same one."""
    folded, _ = fold(text)
    if kind in ("CARD", "PHONE", "SSN"):
        return re.sub(r"\D", "", folded)
    if kind == "IBAN":
        return re.sub(r"[ -]", "", folded).upper()
    if kind == "EMAIL":
        folded = re.sub(_AT.pattern.decode(), "@", _DOT.sub(".", folded), flags=re.I)
    return folded.casefold() if kind in ("EMAIL", "IP", "MAC") else folded


def _merge(found: list[Span]) -> list[Span]:
    """Overlapping ones as one, under the name that stands first in KINDS."""
    rank = {kind: place for place, kind in enumerate(KINDS)}
    merged: list[Span] = []
    for span in sorted(found):
        if merged and span.start < merged[-1].end:
            last = merged[-1]
            kind = min(last.kind, span.kind, key=rank.__getitem__)
            merged[-1] = Span(last.start, max(last.end, span.end), kind)
        else:
            merged.append(span)
    return merged


_BEGIN = re.compile(rb"-----begin [a-z0-9 ]*private key(?: block)?-----")
_END = re.compile(rb"-----end [a-z0-9 ]*private key(?: block)?-----")
_ARMOUR = re.compile(rb"(?:(?:\\+[nr]|\s)*[a-z0-9+/=,.:-]{16,})*(?:(?:\\+[nr]|\s)*[a-z0-9+/=]+=)?")


def _private_keys(view: View) -> Iterator[Span]:
    """Whole blocks; of a block that was cut off, as much as still looks like one."""
    for begin in _BEGIN.finditer(view.lower):
        end = _END.search(view.lower, begin.end())
        if end is None:
            end = _ARMOUR.match(view.lower, begin.end())
        yield Span(begin.start(), end.end() if end else begin.end(), "PRIVATE_KEY")


_USERINFO = re.compile(r"://([^\s/?#\"'<>\\\[\]]{1,300})@")


def _credentials(view: View) -> Iterator[Span]:
    if "@" in view.text and "://" in view.text:
        for match in _USERINFO.finditer(view.text):
            if match.group(1) != "git":  # the user of everybody's repositories
                yield Span(*match.span(1), "CREDENTIALS")


_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"(?P<JWT>eyJ[\w-]{8,}\.[\w-]*\.[\w-]*(?:\.[\w-]+){0,2})"
    r"|(?P<AWS_KEY>(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}(?![A-Za-z0-9]))"
    r"|(?P<API_KEY>(?:sk|pk|rk)[-_](?=[\w-]*\d)[\w-]{18,}"  # OpenAI, Anthropic, Stripe, Langfuse
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|gl(?:pat|ptt|dt|rt|soat)-[\w-]{16,}"
    r"|xox[abeoprs]-[\w-]{10,}|xapp-[\w-]{10,}|AIza[\w-]{30,}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,}"
    r"|hf_[A-Za-z0-9]{20,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{16,}|SG\.[\w-]{16,}\.[\w-]{16,}"
    r"|do[opr]_v1_[a-f0-9]{32,}|dapi[a-f0-9]{32}|gsk_[A-Za-z0-9]{20,}|xai-[A-Za-z0-9]{20,}"
    r"|r8_[A-Za-z0-9]{30,}|sh(?:pat|pca|ppa|pss)_[a-fA-F0-9]{32}|whsec_[\w+/=]{20,}"
    r"|pplx-[A-Za-z0-9]{20,}|nvapi-[\w-]{20,}|lin_api_[A-Za-z0-9]{20,}|fig[dou]_[\w-]{20,}"
    r"|(?:SK|AC)[0-9a-f]{32}(?![A-Za-z0-9])|key-[0-9a-f]{32}|sq0[a-z]{3}-[\w-]{20,}"
    r"|ATATT3[\w=-]{20,}|AGE-SECRET-KEY-1[A-Z0-9]{50,}|\d{8,10}:AA[\w-]{32,34}))",
    re.ASCII,
)
"""Keys by the prefixes that their issuers gave them for exactly this purpose."""


def _tokens(view: View) -> Iterator[Span]:
    """Keys stand in long words; only there are the prefixes tried. UUIDs are passed over."""
    done = 0
    start = view.runs.find(_LONG)
    while start >= 0:
        end = view.runs.find(b" ", start)
        end = len(view.runs) if end < 0 else end
        named = end - start == 36 and view.classes[start + 8] == view.classes[start + 13] == 45
        if not named and (b"0" in view.classes[start:end] or not view.text[start:end].islower()):
            after = min(len(view.runs), end + 8)
            for match in _TOKEN.finditer(view.text, max(done, start - 12), after):
                yield Span(*match.span(), match.lastgroup or "API_KEY")
        done = end
        start = view.runs.find(_LONG, end)


_VALUE = rb"[\\\"']{0,3}\s{0,2}(?:[:=]|=>)\s{0,2}[\\\"']{0,3}"
_STRONG = rb"(?=[^\s\"']*[0-9!$%&#@^*])([^\s\"'\\,;()\[\]{}<>]{6,}+)(?![(\[])"
_MIXED = rb"(?=[^\s\"']*[0-9])(?=[^\s\"']*[a-z])([^\s\"'\\,;()\[\]{}<>]{8,}+)(?![(\[])"
_KEYED = {
    b"pass": re.compile(
        rb"pass(?:word|wd|code|phrase)(?:" + _VALUE + rb"|\s+is:?\s+['\"]?)" + _STRONG
    ),
    b"pwd": re.compile(rb"pwd" + _VALUE + _STRONG),
    b"secret": re.compile(rb"secret(?:[ _-]?(?:access[ _-]?)?key)?" + _VALUE + _MIXED),
    b"api": re.compile(rb"api[ _-]?key(?:" + _VALUE + rb"|\s+is:?\s+['\"]?)" + _MIXED),
    b"token": re.compile(rb"token" + _VALUE + _MIXED),
    b"accountkey=": re.compile(rb"accountkey=([a-z0-9+/=]{40,})"),
    b"bearer": re.compile(rb"bearer\s+(?=[^\s\"']*[0-9])([a-z0-9._~+/=-]{16,})"),
    b"authorization": re.compile(
        rb"authorization[\\\"']{0,3}\s{0,2}[:=]\s{0,2}[\\\"']{0,3}(?:basic|token|apikey)\s+"
        rb"([a-z0-9._~+/=:-]{8,})"
    ),
}
"""Values that a word before them calls secret, by the plain letters that each begins with."""


def _keyed(view: View) -> Iterator[Span]:
    for letters, pattern in _KEYED.items():
        if letters in view.lower:
            for match in pattern.finditer(view.lower):
                yield Span(*match.span(1), "SECRET")


_HOST = re.compile(rf"(?:[{_NAME}_-]+\.)+[{_NAME}](?:[{_NAME}-]*[{_NAME}])")
_AT = re.compile(rb"\s?[\[(]\s?at\s?[\])]\s?|(%(?:25)*40|&(?:#0*64|#x0*40|commat);)")
_DOT = re.compile(r"\s?[\[(]\s?dot\s?[\])]\s?|%(?:25)*2e|&(?:#0*46|#x0*2e|period);", re.I)
_AT_SIGNS = (b"at)", b"at]", b"%40", b"2540", b"&#", b"&commat;")
_LOCAL = re.compile(rf"[{_NAME}._%+'-]")
_URL = re.compile(r"://[^\s/?#]*\Z")


def _emails(view: View) -> Iterator[Span]:
    """Addresses, also with `[at]` or encoded. The part before the `@` is read backwards."""
    text = view.text
    place = text.find("@")
    while place >= 0:
        host = _HOST.match(text, place + 1)
        start = _local_part(text, place) if host else place
        if host and start < place and not _is_login(text, start, place):
            yield Span(start, host.end(), "EMAIL")
        place = text.find("@", place + 1)
    if any(sign in view.lower for sign in _AT_SIGNS):
        for match in _AT.finditer(view.lower):
            written = text[match.end() : match.end() + 200]
            host = _HOST.match(_DOT.sub(".", written))
            start = _local_part(text, match.start())
            if host and match.group(1) and host.group().rpartition(".")[2][0].isdigit():
                continue  # x%403.14
            if host and start < match.start():
                name, length = host.group(), host.end()
                while length < len(written) and name not in _DOT.sub(".", written[:length]):
                    length += 1
                yield Span(start, match.end() + length, "EMAIL")


def _local_part(text: str, end: int) -> int:
    start = end
    while start > max(0, end - 64) and _LOCAL.match(text, start - 1):
        start -= 1
    while start < end and text[start] in ".'-%+":
        start += 1
    return start


def _is_login(text: str, start: int, at: int) -> bool:
    """Whether it is the login of an address such as ssh://x@host or git@host:path."""
    return text[start:at] == "git" or _URL.search(text[max(0, start - 300) : start]) is not None


_SSN = b"000-00-0000"
_NAMED_SSN = (
    re.compile(rb"ssn[^0-9\n]{0,12}([0-9]{3}([ .]?)[0-9]{2}\2[0-9]{4})(?![0-9])"),
    re.compile(rb"social security[^0-9\n]{0,16}([0-9]{3}([ .]?)[0-9]{2}\2[0-9]{4})(?![0-9])"),
)


def _social_security(view: View) -> Iterator[Span]:
    place = view.classes.find(_SSN)
    while place >= 0:
        end = place + len(_SSN)
        around = view.classes[max(0, place - 1) : place] + view.classes[end : end + 1]
        if not set(around) & set(b"0A_-") and _was_issued(view.text[place:end]):
            yield Span(place, end, "SSN")
        place = view.classes.find(_SSN, place + 1)
    for pattern in _NAMED_SSN:
        for match in pattern.finditer(view.lower):
            if _was_issued(match.group(1).decode("latin-1")):
                yield Span(*match.span(1), "SSN")


def _was_issued(text: str) -> bool:
    digits = re.sub(r"\D", "", text)
    area, group, serial = digits[:3], digits[3:5], digits[5:]
    return area not in ("000", "666") and area < "900" and group != "00" and serial != "0000"


_QUAD = re.compile(rb"0\.0{1,3}\.0{1,3}\.0{1,3}(?![0A_]|\.0)")
_VERSION = re.compile(rb"(?:[=~<>!^]=?|\bv|\bversions?:?|\brelease|\bver\.?) ?\Z")
_COLONS = re.compile(rb":(?::|[0-9a-f]{1,4}:(?::|[0-9a-f]{1,4}:))")


def _addresses(view: View) -> Iterator[Span]:
    quads = _QUAD.finditer(view.classes) if b"0.0" in view.classes else ()
    for match in quads:
        start, end = match.span()  # from the last digit of the first part
        while start > 0 and view.classes[start - 1] == 48:
            start -= 1
        parts = [int(part) for part in view.text[start:end].split(".")]
        before = view.lower[max(0, start - 10) : start]
        if before and view.classes[start - 1] in b"A_.":
            continue
        if max(parts) < 256 and parts[0] not in (0, 127, 255) and not _VERSION.search(before):
            yield Span(start, end, "IP")
    for start, end in _hex_runs(view) if b":" in view.lower else ():
        if _is_ipv6(view.text[start:end]):
            yield Span(start, end, "IP")


def _hex_runs(view: View) -> Iterator[Place]:
    """Whole runs of hexadecimal digits and colons with enough colons for an address."""
    done = 0
    for match in _COLONS.finditer(view.lower):
        if match.start() < done:
            continue
        start, end = match.span()
        while start > 0 and view.lower[start - 1] in b"0123456789abcdef:":
            start -= 1
        while end < len(view.lower) and view.lower[end] in b"0123456789abcdef:.":
            end += 1
        done = end
        while end > start and view.lower[end - 1] in b":." and view.lower[end - 2 : end] != b"::":
            end -= 1
        around = view.classes[max(0, start - 1) : start] + view.classes[end : end + 1]
        if not set(around) & set(b"0A_"):
            yield start, end


def _is_ipv6(text: str) -> bool:
    """A valid address with enough in it not to be a name such as a::b or a time of day."""
    groups = [group for group in text.split(":") if group]
    first = groups[0] if groups else ""
    telling = len(groups) >= 3 or (len(groups) == 2 and len(first) == 4 and not first.isalpha())
    if not telling or not any(char.isdigit() for char in text):
        return False
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


_MAC = (
    re.compile(rb":[0-9a-f]{2}:[0-9a-f]{2}:[0-9a-f]{2}:[0-9a-f]{2}:"),
    re.compile(rb"-[0-9a-f]{2}-[0-9a-f]{2}-[0-9a-f]{2}-[0-9a-f]{2}-"),
)
_WHOLE_MAC = re.compile(
    rb"(?<![0-9a-z:_-])[0-9a-f]{2}([:-])(?:[0-9a-f]{2}\1){4}[0-9a-f]{2}(?![\w:-])"
)


def _hardware(view: View) -> Iterator[Span]:
    for pattern in _MAC:
        for match in pattern.finditer(view.lower):
            whole = _WHOLE_MAC.match(view.lower, max(0, match.start() - 2))
            if whole and len(set(whole.group())) > 2:  # not 00:00:... or ff:ff:...
                yield Span(*whole.span(), "MAC")


def _numbers(view: View) -> Iterator[Span]:
    for start, end in find_cards(view.text, view.classes):
        yield Span(start, end, "CARD")
    for start, end in find_phones(view.text, view.lower, view.classes):
        yield Span(start, end, "PHONE")


def _accounts(view: View) -> Iterator[Span]:
    for start, end in find_ibans(view.text, view.classes):
        yield Span(start, end, "IBAN")


RULES: tuple[tuple[int, tuple[bytes, ...], Rule], ...] = (
    (0, (b"-----begin",), _private_keys),
    (0, (b"://",), _credentials),
    (0, (), _tokens),
    (0, tuple(_KEYED), _keyed),
    (0, (b"@", *_AT_SIGNS), _emails),
    (0, (b":", b"-"), _hardware),
    (1, (), _addresses),
    (7, (), _numbers),
    (7, (), _accounts),
    (9, (), _social_security),
)
"""(digits that a text must have at least, signs of which it must have one, rule)."""
