"""Where a fault is planted, and the change that plants it, both told by what the code does.

A place is a node of the syntax tree: the innermost one of its kind, in a function of this name, that mentions
certain words. The module does not matter, and neither do layout and comments. A change replaces the text of
that node alone; the rest of the file stays as it is, byte for byte.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

__all__ = [
    "Change",
    "Edit",
    "File",
    "Place",
    "after",
    "argument",
    "bare",
    "becomes",
    "block",
    "call",
    "compare",
    "condition",
    "constant",
    "expression",
    "function",
    "inner",
    "left_out",
    "loosened",
    "negated",
    "plus",
    "preceded_by",
    "read_package",
    "returned",
    "returns_at_once",
    "stale",
    "statement",
    "swapped",
    "turned",
]

_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
_TURNED: Final[dict[type[ast.cmpop], str]] = {
    ast.Lt: ">=", ast.GtE: "<", ast.Gt: "<=", ast.LtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
_LOOSENED: Final[dict[type[ast.cmpop], str]] = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}


class Edit(NamedTuple):
    """A piece of a file, from byte `start` to `stop`, and the text that takes its place."""

    start: int
    stop: int
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class File:
    """A module's text."""

    path: Path
    data: bytes
    lines: tuple[int, ...]  # where they start, in bytes

    @classmethod
    def read(cls, path: Path) -> File:
        data, lines = path.read_bytes(), [0]
        for line in data.splitlines(keepends=True):
            lines.append(lines[-1] + len(line))
        return cls(path, data, tuple(lines))

    def named(self, name: str) -> list[ast.AST]:
        """The functions and classes of this name, which is qualified as far as needed."""
        if name.rpartition(".")[2].encode() not in self.data:
            return []
        return [node for path, node in _definitions(self) if path.endswith(f".{name}")]

    def start(self, node: ast.AST) -> int:
        start: int = self.lines[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        return start

    def stop(self, node: ast.AST) -> int:
        stop: int = self.lines[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        return stop

    def text(self, node: ast.AST) -> str:
        return self.data[self.start(node) : self.stop(node)].decode()

    def replaced(self, node: ast.AST, text: str) -> Edit:
        return Edit(self.start(node), self.stop(node), text)

    def edited(self, edits: list[Edit]) -> str:
        data = self.data
        for edit in sorted(edits, reverse=True):
            data = data[: edit.start] + edit.text.encode() + data[edit.stop :]
        return data.decode()


@cache
def _definitions(file: File) -> tuple[tuple[str, ast.AST], ...]:
    """The functions and classes in `file`, each with its qualified name, which begins with a dot."""
    found: list[tuple[str, ast.AST]] = []

    def enter(node: ast.AST, above: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (*_FUNCTIONS, ast.ClassDef)):
                found.append((f"{above}.{child.name}", child))
                enter(child, f"{above}.{child.name}")
            elif not isinstance(child, ast.expr):
                enter(child, above)

    enter(ast.parse(file.data, str(file.path)), "")
    return tuple(found)


@cache
def read_package(package: Path) -> tuple[File, ...]:
    """All modules below `package`."""
    return tuple(File.read(path) for path in sorted(package.rglob("*.py")))


# --- places

Matches: TypeAlias = Callable[[ast.AST], bool]


@dataclass(frozen=True, slots=True)
class Place:
    """The innermost node that `matches` and mentions all `words`, in the function or method `name`.

    `name` is qualified as far as needed ("Cache.clear"). Words are names, attributes, keywords and constants.
    With `part`, that part of the node is meant.
    """

    name: str
    matches: Matches
    words: tuple[str, ...]
    part: Callable[[ast.AST], ast.AST] | None = None

    def find(self, file: File) -> list[ast.AST]:
        """Return the nodes in `file` that are meant."""
        nodes: list[ast.AST] = []
        for root in file.named(self.name):
            fitting = [node for node in ast.walk(root) if self.matches(node)]
            fitting = [node for node in fitting if set(self.words) <= _mentioned(node)]
            outer = {id(one) for one in fitting for two in fitting if one is not two and _is_in(two, one)}
            nodes += [node for node in fitting if id(node) not in outer]
        return [node if self.part is None else self.part(node) for node in nodes]


def _mentioned(node: ast.AST) -> set[str]:
    found: set[str] = set()
    for one in ast.walk(node):
        if isinstance(one, ast.Name):
            found.add(one.id)
        elif isinstance(one, ast.Attribute):
            found.add(one.attr)
        elif isinstance(one, ast.keyword | ast.arg):
            found.add(str(one.arg))
        elif isinstance(one, ast.Constant):
            found.add(str(one.value))
        elif isinstance(one, ast.ExceptHandler) and one.name:
            found.add(one.name)
    return found


def _is_in(inner: ast.AST, outer: ast.AST) -> bool:
    return any(node is inner for node in ast.walk(outer))


def _name_called(node: ast.AST) -> str:
    called = node.func if isinstance(node, ast.Call) else None
    return str(getattr(called, "attr", None) or getattr(called, "id", ""))


def call(where: str, name: str, *words: str) -> Place:
    """The call of `name`."""
    return Place(where, lambda node: _name_called(node) == name, words)


def compare(where: str, *words: str) -> Place:
    """The comparison of these."""
    return Place(where, lambda node: isinstance(node, ast.Compare), words)


def expression(where: str, text: str) -> Place:
    """The expression that reads `text`, in whatever layout."""
    wanted = ast.unparse(ast.parse(text, mode="eval"))
    return Place(where, lambda node: isinstance(node, ast.expr) and ast.unparse(node) == wanted, ())


def constant(where: str, value: object) -> Place:
    """The constant `value`."""
    return Place(where, lambda node: isinstance(node, ast.Constant) and node.value == value, ())


def statement(where: str, *words: str) -> Place:
    """The simple statement that mentions `words`."""

    def is_one(node: ast.AST) -> bool:
        return isinstance(node, ast.stmt) and not hasattr(node, "body")

    return Place(where, is_one, words)


def returned(where: str, *words: str) -> Place:
    """The value of the `return` that mentions `words`."""
    is_one = lambda node: isinstance(node, ast.Return) and node.value is not None  # noqa: E731
    return Place(where, is_one, words, lambda node: node.value)  # type: ignore[attr-defined]


def condition(where: str, *words: str) -> Place:
    """The condition of the `if`, `while` or conditional expression that mentions `words`."""

    def is_one(node: ast.AST) -> bool:
        return isinstance(node, ast.If | ast.While | ast.IfExp) and set(words) <= _mentioned(node.test)

    return Place(where, is_one, (), lambda node: node.test)  # type: ignore[attr-defined]


def block(where: str, *words: str) -> Place:
    """The `with` whose managers mention `words`."""

    def is_one(node: ast.AST) -> bool:
        return isinstance(node, ast.With | ast.AsyncWith) and any(
            set(words) <= _mentioned(item) for item in node.items
        )

    return Place(where, is_one, ())


def function(where: str) -> Place:
    """The function or method itself."""
    name = where.rpartition(".")[2]
    return Place(where, lambda node: isinstance(node, _FUNCTIONS) and node.name == name, ())


# --- changes

Change: TypeAlias = Callable[[File, Any], list[Edit]]


def turned(file: File, node: ast.Compare) -> list[Edit]:
    """Turn a comparison to its opposite: `<` to `>=`, `==` to `!=`."""
    return _compared(file, node, _TURNED)


def loosened(file: File, node: ast.Compare) -> list[Edit]:
    """Move the bound of a comparison by one: `<` to `<=`, `<=` to `<`."""
    return _compared(file, node, _LOOSENED)


def _compared(file: File, node: ast.Compare, by: dict[type[ast.cmpop], str]) -> list[Edit]:
    terms = [node.left, *node.comparators]
    gaps = zip(terms[:-1], node.ops, terms[1:], strict=True)
    return [
        Edit(file.stop(left), file.start(right), f" {by[type(op)]} ")
        for left, op, right in gaps
        if type(op) in by
    ][:1]


def plus(number: int) -> Change:
    """Add `number` to an expression: off by one."""
    return lambda file, node: [file.replaced(node, f"({file.text(node)} + {number})")]


def becomes(text: str) -> Change:
    """Write `text` for an expression or a statement; `{}` stands for what was there."""
    return lambda file, node: [file.replaced(node, text.replace("{}", file.text(node)))]


def negated(file: File, node: ast.expr) -> list[Edit]:
    """Ask for the opposite of a condition."""
    return [file.replaced(node, f"(not ({file.text(node)}))")]


def left_out(file: File, node: ast.stmt) -> list[Edit]:
    """Leave a statement out."""
    return [file.replaced(node, "pass")]


def bare(file: File, node: ast.With) -> list[Edit]:
    """Run the body of a `with` without its first manager, which is a lock or the like."""
    first, *rest = node.items
    if rest:
        return [Edit(file.start(first.context_expr), file.start(rest[0].context_expr), "")]
    end = first.optional_vars or first.context_expr
    colon = file.data.index(b":", file.stop(end))
    return [Edit(file.start(node), colon, "if True")]


def argument(which: int | str, text: str | None) -> Change:
    """Write `text` for an argument of a call, by its position or name; None leaves it out.

    `{}` in it stands for what was there.
    """

    def change(file: File, node: ast.Call) -> list[Edit]:
        given: list[ast.expr | ast.keyword] = [*node.args, *node.keywords]
        place = (
            which
            if isinstance(which, int)
            else [one.arg for one in node.keywords].index(which) + len(node.args)
        )
        old = given[place].value if isinstance(given[place], ast.keyword) else given[place]  # type: ignore[union-attr]
        if text is not None:
            return [file.replaced(old, text.replace("{}", file.text(old)))]
        rest = ", ".join(file.text(one) for one in given if one is not given[place])
        return [Edit(file.stop(node.func), file.stop(node), f"({rest})")]

    return change


def inner(which: int = 0) -> Change:
    """Write an argument of a call for the call: what it does is left out."""
    return lambda file, node: [file.replaced(node, file.text(node.args[which]))]


def swapped(one: int, other: int) -> Change:
    """Swap two arguments of a call, or two elements of a tuple."""

    def change(file: File, node: ast.Call | ast.Tuple) -> list[Edit]:
        parts = node.args if isinstance(node, ast.Call) else node.elts
        return [
            file.replaced(parts[one], file.text(parts[other])),
            file.replaced(parts[other], file.text(parts[one])),
        ]

    return change


def returns_at_once(text: str) -> Change:
    """Have a function begin with `return text`."""

    def change(file: File, node: ast.FunctionDef) -> list[Edit]:
        has_text = ast.get_docstring(node) is not None
        at = node.body[1 if has_text and len(node.body) > 1 else 0]
        return [Edit(file.start(at), file.start(at), f"return {text}\n{' ' * at.col_offset}")]

    return change


def stale(file: File, node: ast.FunctionDef) -> list[Edit]:
    """Have a function answer as it did the first time it got the same arguments."""
    at = file.start(node)
    return [Edit(at, at, f"@__import__('functools').cache\n{' ' * node.col_offset}")]


def preceded_by(text: str) -> Change:
    """Write another statement before a statement."""
    return lambda file, node: [
        file.replaced(node, f"{text}\n{' ' * node.col_offset}{{}}".replace("{}", file.text(node)))
    ]


def after(other: Place) -> Change:
    """Move a statement behind another one of its function."""

    def change(file: File, node: ast.stmt) -> list[Edit]:
        (target,) = other.find(file)
        stop = file.stop(target)
        indent = " " * target.col_offset  # type: ignore[attr-defined]
        return [Edit(stop, stop, f"\n{indent}{file.text(node)}"), file.replaced(node, "pass")]

    return change
