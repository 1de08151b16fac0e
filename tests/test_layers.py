"""Holds the architecture: who may import whom, and the few things that only one module may do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[1]
PACKAGE: Final = ROOT / "cachestream"

# What each layer may import besides itself. Whatever is not named here stands on top and may import all.
FOUNDATIONS: Final = frozenset(
    {"config", "errors", "linux", "permutation", "repr_html", "schema", "shard_format", "tracing"}
)
BELOW: Final[dict[str, frozenset[str]]] = {
    **dict.fromkeys(FOUNDATIONS, FOUNDATIONS),
    "transport": FOUNDATIONS,
    "listing": FOUNDATIONS | {"transport"},
    "sources": FOUNDATIONS | {"transport", "listing"},
    "formats": FOUNDATIONS | {"sources"},
    "storage": FOUNDATIONS,
    "worker": FOUNDATIONS | {"transport", "listing", "sources", "storage"},
    "training": FOUNDATIONS | {"storage"},
}
# Who may do what others may not, as prefixes of module names.
ONLY: Final[dict[str, tuple[str, ...]]] = {
    "torch": ("training", "integrations", "demo"),
    "torch.distributed": ("training.ranks", "training.rendezvous", "integrations", "demo"),
    "sqlite3": ("storage",),
    "typer": ("cli",),
    "rich": ("cli",),
    "matplotlib": ("tools.plots",),
    **dict.fromkeys(("bokeh", "jinja2", "prometheus_client", "tornado"), ("dashboard",)),
    **dict.fromkeys(
        ("accelerate", "lightning", "pytorch_lightning", "ray", "transformers"), ("integrations",)
    ),
}
# `Cache.snapshot` returns a class of a layer above: see docs/decisions/0019.
TYPES_FROM_ABOVE: Final = {("storage.cache", "training")}
MAY_IMPORT_THE_PACKAGE: Final = ("storage.cache", "sources.open", "cli", "demo", "tools", "integrations")


@dataclass(frozen=True, slots=True)
class Import:
    """One import statement: of `target`, in `module` at `line`; `at_run_time` unless for types only."""

    module: str
    target: str
    line: int
    at_run_time: bool
    in_function: bool

    def __str__(self) -> str:
        return f"cachestream/{self.module.replace('.', '/')}.py:{self.line} imports {self.target}"


@cache
def _modules() -> dict[str, ast.Module]:
    """Module name below the package ("" for the package itself) to syntax tree."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return found


def _is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def _imports(module: str, tree: ast.Module) -> Iterator[Import]:
    def visit(node: ast.AST, at_run_time: bool, in_function: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            named = [f"{node.module}.{alias.name}" for alias in node.names]
            modules = [name for name in named if _is_module(name)]
            targets = modules if len(modules) == len(named) else [f"{node.module}", *modules]
        else:
            targets = []
        for target in targets:
            yield Import(module, target, getattr(node, "lineno", 0), at_run_time, in_function)
        typed = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr):  # an import is a statement: ten times fewer nodes
                yield from visit(child, at_run_time and not typed, inside)

    yield from visit(tree, True, False)


@cache
def _all_imports() -> list[Import]:
    return [found for name, tree in _modules().items() for found in _imports(name, tree)]


@cache
def _internal_imports() -> list[Import]:
    modules = _modules()
    return [
        found
        for found in _all_imports()
        if found.module and found.target.removeprefix("cachestream.") in modules
    ]


def _names(target: str, what: str) -> bool:
    return target == what or target.startswith(f"{what}.")


def test_every_layer_imports_only_the_layers_below_it() -> None:
    wrong = []
    for found in _internal_imports():
        layer = found.module.split(".")[0]
        target = found.target.removeprefix("cachestream.").split(".")[0]
        allowed = not found.at_run_time and (found.module, target) in TYPES_FROM_ABOVE
        if layer in BELOW and target != layer and target not in BELOW[layer] and not allowed:
            wrong.append(str(found))
    assert not wrong


# What formats may use, built in or of other packages; the shards of a cache are a format of our own.
FOR_FORMATS: Final = ("cachestream.sources.api", "cachestream.testing")
OF_CACHES: Final = ("cachestream.schema", "cachestream.shard_format")


def test_formats_use_what_those_of_other_packages_may_use() -> None:
    plugins = sorted((ROOT / "plugins").glob("*/cachestream_*.py"))
    trees = {f"plugins.{path.stem}": ast.parse(path.read_text(encoding="utf-8")) for path in plugins}
    trees |= {name: tree for name, tree in _modules().items() if _names(name, "formats")}
    assert len(trees) > 15
    wrong = []
    for name, tree in trees.items():
        allowed = (*FOR_FORMATS, "cachestream.formats", *(OF_CACHES if name == "formats.cache" else ()))
        for found in _imports(name, tree):
            inside = found.target.startswith("cachestream.")
            if inside and not any(_names(found.target, one) for one in allowed):
                wrong.append(str(found))
    assert not wrong


def test_only_the_lazy_package_imports_the_integrations() -> None:
    """They stand on top, so that nothing needs a framework to be there."""
    wrong = [found for found in _internal_imports() if _names(found.target, "cachestream.integrations")]
    assert not [str(found) for found in wrong if not _names(found.module, "integrations")]


def test_the_core_reaches_ray_through_one_door_and_nobody_uses_private_names_of_ray() -> None:
    """`cachestream.ray` stands on top: `worker.cluster` names it, and loads it where a worker is to use Ray."""
    wrong = [
        str(found)
        for found in _all_imports()
        if _names(found.target, "cachestream.ray") and not _names(found.module, "ray")
    ]
    for name, tree in _modules().items():
        if name != "worker.cluster" and not _names(name, "ray"):
            texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
            wrong += [name for text in texts if isinstance(text, str) and "cachestream.ray" in text]
        if _names(name, "ray"):
            source = ast.unparse(tree)
            wrong += re.findall(r"ray\._\w+|_raylet|ray\.internal|_generator_backpressure\w*", source)
    assert not wrong


def test_modules_do_not_import_one_another_in_a_circle() -> None:
    graph: dict[str, set[str]] = {name: set() for name in _modules()}
    for found in _internal_imports():
        if found.at_run_time:
            graph[found.module].add(found.target.removeprefix("cachestream."))
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import one another: {' -> '.join(error.args[1])}")


def test_no_function_imports_a_module_of_this_package() -> None:
    assert not [str(found) for found in _internal_imports() if found.in_function]


def test_only_modules_with_a_recorded_reason_import_the_package_itself() -> None:
    wrong = [
        str(found)
        for found in _all_imports()
        if found.target == "cachestream" and not found.module.startswith(MAY_IMPORT_THE_PACKAGE)
    ]
    assert not wrong


@pytest.mark.parametrize("what", sorted(ONLY))
def test_a_library_is_imported_only_where_it_belongs(what: str) -> None:
    wrong = [
        str(found)
        for found in _all_imports()
        if _names(found.target, what)
        and found.at_run_time
        and not any(_names(found.module, allowed) for allowed in ONLY[what])
    ]
    assert not wrong


def test_only_the_command_line_reads_the_environment() -> None:
    """And what knows the job: torchrun and Ray tell nowhere else whether ranks start again, and where a cluster is."""
    wrong = []
    for name, tree in _modules().items():
        if name in {"cli.app", "training.ranks", "ray.connection"}:
            continue
        for node in ast.walk(tree):
            read = (isinstance(node, ast.Attribute) and node.attr in {"environ", "environb", "getenv"}) or (
                isinstance(node, ast.ImportFrom)
                and node.module == "os"
                and any(alias.name in {"environ", "getenv"} for alias in node.names)
            )
            if read:
                wrong.append(f"cachestream/{name.replace('.', '/')}.py:{getattr(node, 'lineno', 0)}")
    assert not wrong


def test_storage_is_the_only_door_to_the_catalogue() -> None:
    """Others get typed values: no transaction, no statement and no key of a table stands outside it."""
    wrong = []
    for name, tree in _modules().items():
        if _names(name, "storage"):
            continue
        for node in ast.walk(tree):
            opens = (
                isinstance(node, ast.Attribute)
                and node.attr in {"transaction", "reading"}
                and ast.unparse(node.value).endswith("catalogue")
            )
            takes = isinstance(node, ast.alias) and node.name == "Tables"
            if opens or takes:
                wrong.append(f"cachestream/{name.replace('.', '/')}.py:{getattr(node, 'lineno', 0)}")
    assert not wrong


def test_the_map_of_layers_names_what_exists() -> None:
    """A folder that is renamed would otherwise fall out of the rules above."""
    parts = {name.split(".")[0] for name in _modules() if name}
    assert set(BELOW) <= parts


def test_the_page_on_the_architecture_names_what_exists_and_every_folder() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`([a-z_/]+(?:\.py|\.c|/))`", page)
    assert len(named) > 50
    assert not [name for name in named if not (PACKAGE / name).exists()]
    folders = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")} - {"."}
    assert not [folder for folder in folders if f"{folder.partition('/')[0]}/" not in page]


# The attributes of a cache that its other modules use, and that users do not have.
INTERNAL_ATTRIBUTES: Final = frozenset({"catalogue", "directory", "filling", "reservations", "take_snapshot"})


def test_the_tests_of_the_contract_know_only_public_names() -> None:
    """`tests/contract` must outlive every module of the package: it uses what users have."""
    pending, seen = sorted((ROOT / "tests" / "contract").glob("*.py")), set[Path]()
    problems = []
    while pending:
        path = pending.pop()
        if path in seen:
            continue
        seen.add(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            problems += [f"{where} imports {name}" for name in names if _is_internal(name)]
            pending += [found for name in names if (found := _test_module(name))]
            if isinstance(node, ast.Attribute) and "contract" in path.parts:
                private = node.attr.startswith("_") and not node.attr.startswith("__")
                of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
                if (private and not of_self) or node.attr in INTERNAL_ATTRIBUTES:
                    problems.append(f"{where} uses .{node.attr}")
    assert not problems, "\n".join(problems)


def _is_internal(name: str) -> bool:
    public = ("cachestream.testing", "cachestream.integrations", "cachestream.sources.api")
    return name.startswith("cachestream.") and not name.startswith(public)


def _test_module(name: str) -> Path | None:
    path = ROOT / Path(*name.split(".")).with_suffix(".py")
    return path if name.startswith("tests.") and path.is_file() else None
