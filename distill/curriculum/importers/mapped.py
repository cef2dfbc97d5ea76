"""Any other log, through a table of the user's: field of a turn -> path in the row.

    fields     {"session_id": "meta.conv", "messages": "payload.messages", "served.model": "model",
                "verdict.user.thumb": "thumb"}
    constants  {"served.provider": "home", "scene": "support"}, where the row has nothing

`fields.TARGETS` lists the fields; `fields.pick` says how paths are written. Without a `source_id`
the id is a digest of the row.
"""

from __future__ import annotations

from collections.abc import Iterable

from distill.curriculum.importers.base import Context, Found, Row, digest_of
from distill.curriculum.importers.fields import check_targets, gather, read_values
from distill.errors import ConfigError


class Mapped:
    name = "mapped"

    def recognises(self, row: Row) -> bool:
        return False

    def read(self, row: Row, context: Context) -> Iterable[Found]:
        """One turn. ConfigError when the table names a field that turns do not have."""
        fields = context.options.get("fields") or {}
        constants = context.options.get("constants") or {}
        if not fields:
            raise ConfigError(
                "format mapped: expected a mapping of fields of a turn to paths in a row, found "
                'none; try mapping = {messages = "messages", source_id = "id"}'
            )
        check_targets(fields, "mapping")
        check_targets(constants, "constants")
        values = read_values(gather(row, fields, constants), context.tiers, context.options)
        consent = values.pop("consent", True)
        source_id = values.pop("source_id", None) or digest_of(row)
        own = {key: value for key, value in context.options.items() if key != "fields"}
        plain = Context(
            source=context.source,
            tiers=context.tiers,
            consent=context.consent and consent,
            raw_sha256=context.raw_sha256,
            now_ms=context.now_ms,
            options=own,
        )
        return [plain.turn(row, source_id=source_id, format=self.name, **values)]
