"""The library of distill-nightly: records, seams, maths, engines and the trainer.

Importing this package loads nothing heavy; import the module you need.
"""

__version__ = "0.1.0"
