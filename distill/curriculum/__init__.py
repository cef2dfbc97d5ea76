"""From routing logs to a curriculum: records, importers, cleaning, outcomes, demand and stages.

The way of a turn: `reading` finds records in files, `importers` give them one shape, `store` keeps
them, `build` makes turns with outcomes, scores and stages of them. No torch at import.
"""
