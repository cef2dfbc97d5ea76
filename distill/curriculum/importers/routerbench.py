"""RouterBench: wide tables with the score, answer and price of every model on every prompt.

Columns: `sample_id`, `prompt`, `eval_name`, and per model `<model>` (score from 0 to 1),
`<model>|model_response` and `<model>|total_cost`. `oracle_model_to_route_to`, the cheapest model
that is right, becomes the tag `oracle:MODEL`.
"""

from __future__ import annotations

from collections.abc import Iterable

from distill.curriculum.drops import RowError
from distill.curriculum.importers.base import Context, Found, Row
from distill.curriculum.importers.messages import answer
from distill.curriculum.importers.tables import arm, row_id, win_rates
from distill.curriculum.importers.values import amount, clean, share, text
from distill.curriculum.importers.verdicts import origin_of
from distill.curriculum.records import Verdict

_ENDINGS = ("|total_cost", "|model_response")


class RouterBench:
    name = "routerbench"

    def recognises(self, row: Row) -> bool:
        return ("eval_name" in row or "sample_id" in row) and any(
            isinstance(name, str) and name.endswith(_ENDINGS) for name in row
        )

    def read(self, row: Row, context: Context) -> Iterable[Found]:
        """A turn per model."""
        models = dict.fromkeys(
            name.rpartition("|")[0]
            for name in row
            if isinstance(name, str) and name.endswith(_ENDINGS)
        )
        if not models:
            raise RowError("missing_field", "columns <model>|total_cost or <model>|model_response")
        key = row_id(row, "sample_id")
        oracle = text(row, "oracle_model_to_route_to")
        prediction, tags = win_rates(row, context.options)
        if oracle is not None:
            tags = (f"oracle:{oracle}", *tags)
        suite = text(row, "eval_name")
        found = []
        for model in models:
            score = share(row, model)
            said = row.get(f"{model}|model_response")
            verdict = None
            if score is not None:
                name = suite or "score"
                source = origin_of(name, context.options, default="program")
                verdict = Verdict(source=source, name=name, value=score)
            found.append(
                arm(
                    row,
                    context,
                    format=self.name,
                    key=key,
                    model=clean(model, "column"),
                    said=answer([{"role": "assistant", "content": said}], model) if said else [],
                    verdict=verdict,
                    cost=amount(row, f"{model}|total_cost"),
                    scene=suite,
                    prediction=prediction,
                    tags=tags,
                )
            )
        return found
