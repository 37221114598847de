"""Expressions of claims.toml: arithmetic over questions to the product, and nothing else of Python.

An expression is parsed by Python, every node of it held to a list, and only then evaluated: names are those of the
vocabulary, of `let` and of `for`; no attribute can be reached and nothing but the vocabulary be called.
"""

import ast
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

_ALLOWED = (
    ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Store, ast.Call, ast.keyword, ast.List, ast.Subscript,
    ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.UnaryOp, ast.USub, ast.Not, ast.BoolOp, ast.And, ast.Or,
    ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn, ast.IfExp, ast.Lambda,
    ast.arguments, ast.arg, ast.GeneratorExp, ast.ListComp, ast.comprehension,
)  # fmt: skip
_FILLED = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True)
class Expression:
    text: str
    code: CodeType
    # What it asks for, besides names of its own.
    names: frozenset[str]

    def value(self, names: Mapping[str, Any]) -> Any:
        # Held to the list above when it was read; no builtins, and no attributes to find them by.
        return eval(self.code, {"__builtins__": {}, **names})


def read_expression(text: str, known: Collection[str]) -> Expression:
    """`ValueError` with what is wrong, for whoever knows file and claim."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        raise ValueError(f"'{text}' is no expression: {error.msg}") from None
    own = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    own |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    asked = set[str]()
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED):
            raise ValueError(f"'{text}': {type(node).__name__} is not allowed")
        if isinstance(node, ast.Call) and not isinstance(node.func, ast.Name):
            raise ValueError(f"'{text}': only names of the vocabulary are called")
        if isinstance(node, ast.Name) and node.id not in own:
            if node.id not in known:
                raise ValueError(f"'{text}': {node.id} is not known")
            asked.add(node.id)
    return Expression(text, compile(tree, "<claim>", "eval"), frozenset(asked))


@dataclass(frozen=True)
class Template:
    """A sentence with expressions in braces."""

    words: tuple[str, ...]
    expressions: tuple[Expression, ...]

    def filled(self, value: Callable[[Expression], str]) -> str:
        values = [*map(value, self.expressions), ""]
        return "".join(word + filled for word, filled in zip(self.words, values, strict=True))

    @property
    def names(self) -> frozenset[str]:
        return frozenset().union(*(expression.names for expression in self.expressions))


def read_template(text: str, known: Collection[str]) -> Template:
    pieces = _FILLED.split(text)
    if any("{" in word or "}" in word for word in pieces[::2]):
        raise ValueError(f"'{text}': a brace without its other half")
    return Template(tuple(pieces[::2]), tuple(read_expression(piece, known) for piece in pieces[1::2]))
