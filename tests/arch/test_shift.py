"""Entry t of a per-token array describes token t: the causal shift is written once."""

from __future__ import annotations

import ast

import pytest

from tree import name_of, sources, syntax

HOME = "distill/logprobs.py"


def is_one_off(index: ast.expr) -> bool:
    """`1:` or `:-1`, the two halves of a shift by one position."""
    if not isinstance(index, ast.Slice) or index.step is not None:
        return False
    lower = None if index.lower is None else ast.unparse(index.lower)
    upper = None if index.upper is None else ast.unparse(index.upper)
    return (lower, upper) in {("1", None), (None, "-1")}


def shifts(tree: ast.AST) -> list[int]:
    """Lines that shift an array of two or more dimensions by one position."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Tuple)
        and any(is_one_off(index) for index in node.slice.elts)
    ]


@pytest.mark.parametrize("code", ["x[:, 1:]", "x[:, :-1]", "x[..., :-1]", "x[:, :-1, :]"])
def test_a_shift_is_recognised(code: str) -> None:
    assert shifts(ast.parse(code)) == [1]


@pytest.mark.parametrize("code", ["x[:, 0]", "x[1:]", "x[:, 1:3]", "x[:, -1]", "x[..., ::2]"])
def test_other_slices_are_not_taken_for_a_shift(code: str) -> None:
    assert shifts(ast.parse(code)) == []


def test_the_causal_shift_lives_in_one_file() -> None:
    found = [
        f"{name_of(path)}:{line}"
        for path in sources("distill", "teachers")
        if name_of(path) != HOME
        for line in shifts(syntax(path))
    ]
    assert found == []
