"""Environments, graders, evaluation suites, the gate and the report."""
