"""A skill as the bytes of its file, and back.

The bytes are canonical, so their digest names the whole record. Reading is plain code: a bank of
ten thousand skills is read in about a second, and listing it loads no validation library. What
people write by hand goes through `parse_item`, which names every mistake.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from distill.errors import ConfigError, DataError, SkillBankError
from distill.rundir import digest_bytes
from distill.tables import build_record
from skills.items import Credit, Evidence, Lineage, Safety, Scope, SkillItem


def to_table(item: SkillItem) -> dict[str, Any]:
    """Every field, in the order of the record, as JSON holds it."""
    table: dict[str, Any] = {}
    for name in _NAMES[SkillItem]:
        value = getattr(item, name)
        if name in _PARTS:
            value = _flat(value)
        elif name == "evidence":
            value = [_flat(one) for one in value]
        elif name == "extra":
            value = dict(value)
        table[name] = value
    return table


def encode(item: SkillItem) -> bytes:
    """The content of the skill's file. SkillBankError when the text is not valid Unicode or
    `extra` holds what JSON cannot."""
    try:
        text = json.dumps(to_table(item), indent=1, ensure_ascii=False, allow_nan=False)
        return (text + "\n").encode()
    except (TypeError, ValueError) as error:
        raise SkillBankError(
            f"skill {item.id!r} cannot be stored: {error}; its text must be valid Unicode and its "
            "extra keys plain, finite JSON"
        ) from error


def record_sha(item: SkillItem) -> str:
    """Digest of the whole record, which names its file; `item.sha256` covers only the text."""
    return digest_bytes(encode(item))


def decode(data: bytes, where: str) -> SkillItem:
    """The skill whose file holds `data`. SkillBankError naming `where` when it does not fit."""
    try:
        table = json.loads(data)
        values = dict(table)
        for name, part in _PARTS.items():
            if name in values:
                values[name] = _record(part, values[name])
        values["evidence"] = tuple(_record(Evidence, e) for e in values.get("evidence", ()))
        return SkillItem(**values)
    except (ValueError, TypeError, KeyError) as error:
        raise SkillBankError(
            f"{where} is not a skill of format 1: {error}; restore the file or roll back"
        ) from error


def parse_item(table: Mapping[str, Any], where: str) -> SkillItem:
    """A checked skill from a table that a person or another program wrote. DataError naming the
    key, what was expected and what was found."""
    try:
        return build_record(SkillItem, table, "", lambda key: where).check()
    except ConfigError as error:
        raise DataError(str(error)) from error
    except SkillBankError as error:
        raise DataError(f"{where}: {error}") from error


def _flat(part: Any) -> dict[str, Any]:
    names = _NAMES[type(part)]
    return {n: list(v) if isinstance(v := getattr(part, n), tuple) else v for n in names}


def _record(cls: Any, table: Mapping[str, Any]) -> Any:
    """A newer program may have written fields that this one does not know: they are refused,
    since dropping them would change the record."""
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in table.items()}
    return cls(**values)


_PARTS: dict[str, Any] = {"scope": Scope, "credit": Credit, "safety": Safety, "lineage": Lineage}
_NAMES: dict[Any, tuple[str, ...]] = {
    cls: tuple(field.name for field in fields(cls))
    for cls in (SkillItem, Evidence, *_PARTS.values())
}
