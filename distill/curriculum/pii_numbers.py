"""Card, account and phone numbers in a text, by checksum where there is one.

`classes` is the text with `0` for every digit and `A` for every letter: runs of digits are found in
it without trying every position.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

Place = tuple[int, int]

_CARD_RUN = re.compile(rb"000[0 -]{9,}0(?![A_])")
_GROUP = re.compile(rb"0+")
_UUID = re.compile(r"[0-9a-fA-F]{4}-\Z")
_CARD_LENGTHS = (13, 19)
_ISSUERS = re.compile(
    r"4(?:\d{12}|\d{15}|\d{18})\Z|(?:5[1-5]|222[1-9]|22[3-9]\d|2[3-6]\d\d|27[01]\d|2720)\d{12,14}\Z"
    r"|3[47]\d{13}\Z|3(?:0[0-5]|[689]\d)\d{11,16}\Z|(?:6011|64[4-9]|65|62|35)\d{12,17}\Z"
    r"|220[0-4]\d{12,15}\Z|(?:50|5[6-9]|6)\d{14,17}\Z"
)
"""Visa, Mastercard, American Express, Diners, Discover, UnionPay, JCB, Mir, Maestro."""


def find_cards(text: str, classes: bytes) -> Iterator[Place]:
    """Numbers of 13 to 19 digits in groups of three or more, also inside a longer row of groups."""
    if b"000" not in classes:
        return
    for run in _CARD_RUN.finditer(classes):
        start = run.start()
        if start and classes[start - 1] in b"A_.":
            continue
        if _UUID.search(text, max(0, start - 5), start):
            continue
        groups = [g.span() for g in _GROUP.finditer(classes, run.start(), run.end())]
        first = 0
        while first < len(groups):
            last = _card_from(text, groups, first)
            if last is not None:
                yield groups[first][0], groups[last][1]
            first = first + 1 if last is None else last + 1


def _card_from(text: str, groups: list[Place], first: int) -> int | None:
    """The last group of the longest card number that begins with group `first`."""
    digits, found = "", None
    for last in range(first, len(groups)):
        start, end = groups[last]
        if end - start < 2 or (last > first and start - groups[last - 1][1] > 1):
            break
        digits += text[start:end]
        if len(digits) > _CARD_LENGTHS[1]:
            break
        if len(digits) >= _CARD_LENGTHS[0] and is_card(digits):
            found = last
    return found


def is_card(digits: str) -> bool:
    """Whether digits without separators are a card number: its issuer's shape, and Luhn's check."""
    return _ISSUERS.match(digits) is not None and len(set(digits)) > 1 and passes_luhn(digits)


def passes_luhn(digits: str) -> bool:
    """The check digit of payment cards (ISO/IEC 7812)."""
    values = [int(digit) for digit in reversed(digits)]
    return sum(v if i % 2 == 0 else sum(divmod(2 * v, 10)) for i, v in enumerate(values)) % 10 == 0


_IBAN_LENGTHS = {
    code: int(length)
    for length, codes in (
        ("15", "NO"),
        ("16", "BE BI"),
        ("18", "DK FI FO GL NL SD FK"),
        ("19", "MK SI"),
        ("20", "AT BA EE KZ LT LU XK MN"),
        ("21", "CH HR LI LV"),
        ("22", "BG BH CR DE GB GE IE ME RS VA"),
        ("23", "AE GI IL IQ OM SO TL"),
        ("24", "AD CZ ES MD PK RO SA SE SK TN VG"),
        ("25", "LY PT ST"),
        ("26", "IS TR"),
        ("27", "BJ CM DJ FR GR IT MC MR SM BF CF CG CI GA GN GW KM ML NE SN TD TG MG DZ"),
        ("28", "AL AZ BY CY DO GT HU LB NI PL SV HN MA"),
        ("29", "BR EG PS QA UA"),
        ("30", "JO KW MU YE"),
        ("31", "MT SC"),
        ("33", "RU"),
        ("32", "LC"),
    )
    for code in codes.split()
}
"""Registered lengths; an account number of another country or length is none."""
_IBAN_START = re.compile(rb"AA00(?=[ -]?[A0])")


def find_ibans(text: str, classes: bytes) -> Iterator[Place]:
    """International account numbers, in one piece or in groups, in either case."""
    if b"AA00" not in classes:
        return
    for match in _IBAN_START.finditer(classes):
        start = match.start()
        if start and classes[start - 1 : start] in (b"A", b"0", b"_"):
            continue
        length = _IBAN_LENGTHS.get(text[start : start + 2].upper())
        if length is None:
            continue
        end, compact = start, ""
        while end < len(text) and len(compact) < length:
            if classes[end] in b"A0":
                compact += text[end]
            elif text[end] not in " -" or text[end - 1] in " -":
                break
            end += 1
        if is_iban(compact) and classes[end : end + 1] not in (b"A", b"0"):
            yield start, end


def is_iban(compact: str) -> bool:
    """Whether letters and digits without separators are an account number (ISO 13616, mod 97)."""
    compact = compact.upper()
    if _IBAN_LENGTHS.get(compact[:2]) != len(compact) or not compact.isalnum():
        return False
    moved = compact[4:] + compact[:4]
    return int("".join(str(int(char, 36)) for char in moved)) % 97 == 1


_PHONE_RUN = re.compile(rb"0[0 ().\-/]{6,}")
_INTERNATIONAL = re.compile(
    r"(?<![\w+])(?:\+[1-9]|(?<![.-])00[1-9]\d{0,2}[ .\-/(])(?:[ ().\-/]{0,3}\d){6,14}(?!\d)",
    re.ASCII,
)
_NORTH_AMERICA = re.compile(
    r"(?<![\w.+/-])(?:1[ .-])?(?:\([2-9]\d\d\) ?|[2-9]\d\d([ .-]))\d{3}[ .-]\d{4}(?![\w/-]|\.\d)",
    re.ASCII,
)
_TRUNK = re.compile(
    r"(?<![\w.+/-])(?<!\d )(?:\(0[1-9]\d{0,4}\) ?|0[1-9]\d{0,4}[ /.-])\d{2,8}"
    r"(?:([ .-])\d{2,4}(?:\1\d{2,4}){0,3})?(?![\w/-]|[ .]\d)",
    re.ASCII,
)
_CHINA = re.compile(
    r"(?<![\w.+-])1[3-9](?:\d{9}|\d([ -])\d{4}\1\d{4})(?!\w|[.-]\d)",
    re.ASCII,
)
_DATE = re.compile(r"\d{1,2}[ ./-]\d{1,2}[ ./-](?:19|20)\d\d")
_NAMED = re.compile(
    rb"(?:(?<![a-z])(?:phone|tel|mobile|whatsapp|cell|fax|handy|telephone|telefon|sms)s?"
    rb"|(?<![a-z_])call)(?:[ -]?(?:number|no|nr|me|us|at|on|is))*[^0-9a-z\n]{0,5}\Z"
)
_PLAIN = re.compile(rb"0[0 ().\-/]*0(?![0A_])")


def find_phones(text: str, lower: bytes, classes: bytes) -> Iterator[Place]:
    """Phone numbers in an international or a common national form, or after a word for one."""
    for run in _PHONE_RUN.finditer(classes):
        shape = run.group()
        digits = shape.count(b"0")
        before = classes[max(0, run.start() - 1) : run.start()]
        if digits < 7 or (digits < 15 and shape.startswith(b"0000-00-00")):
            continue  # dates
        if before in _INSIDE and b" " not in shape and b"(" not in shape:
            continue
        start, end = max(0, run.start() - 2), min(len(text), run.end() + 2)
        yield from _written(text, shape, start, end)
        if _NAMED.search(lower, max(0, run.start() - 30), run.start()):
            plain = _PLAIN.match(classes, run.start())
            if plain and 7 <= plain.group().count(b"0") <= 15:
                yield plain.span()


_INSIDE = (b"A", b"_", b".", b"/", b"-")


def _written(text: str, shape: bytes, start: int, end: int) -> Iterator[Place]:
    """Numbers in a form that only phone numbers have, within `text[start:end]`."""
    if "+" in text[start:end] or "00" in text[start : start + 4]:
        for match in _INTERNATIONAL.finditer(text, start, end):
            if not _DECIMAL.fullmatch(match.group()):
                yield match.span()
    if any(tail in shape for tail in (b"000-0000", b"000 0000", b"000.0000")):
        for match in _NORTH_AMERICA.finditer(text, start, end):
            # Three numbers with spaces between them are often just that.
            exchange = re.sub(r"\D", "", match.group())[-7]
            if match.group(1) != " " or exchange in "23456789":
                yield match.span()
    if not shape.isdigit():
        for match in _TRUNK.finditer(text, start, end):
            length = sum(char.isdigit() for char in match.group())
            if 9 <= length <= 12 and not _DATE.match(match.group()):
                yield match.span()
    if b"00000000000" in shape or b"0000-0000" in shape or b"0000 0000" in shape:
        for match in _CHINA.finditer(text, start, end):
            yield match.span()


_DECIMAL = re.compile(r"\+\d+\.\d+")
"""+1.2345678 is a number."""
