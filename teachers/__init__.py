"""Teachers and what they may see. They implement the seams of `distill` and know only it."""
