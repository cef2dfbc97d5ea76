"""What [curriculum] names to take personal data out of turns before a store sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distill.errors import ConfigError

if TYPE_CHECKING:
    from distill.curriculum.pii import Redactor

RULES = ("rules", "none")


def redactor_for(rules: str, entities: str, key: bytes) -> Redactor | None:
    """The redactor of the settings `redact` and `entities`; None for `none`. `key`, at least 16
    bytes, hashes ids that are personal. ConfigError for settings that contradict one another, or a
    recogniser that is not there."""
    from distill.curriculum.ner import load_entities
    from distill.curriculum.pii import KeyedHash, Redactor

    if rules not in RULES:
        raise ConfigError(f"redact: expected {' or '.join(RULES)}, found {rules!r}")
    if rules == "none":
        if entities:
            raise ConfigError(
                f'entities = {entities!r} comes on top of the rules; leave redact = "rules"'
            )
        return None
    own = load_entities(entities) if entities else None
    return Redactor(pseudonym=KeyedHash(key), entities=own)
