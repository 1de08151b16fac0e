"""Hooks of the build of the site: pages that lie outside of this folder, links to them, the command line, plain text.

The pages are written for the repository, and each link leads to a file of it. For the site, the files in
`PUBLISHED` become pages, links to them are changed, and links to other files become plain text. Every page is
also written as Markdown at its own path, for the links of `llms.txt`.
"""

from __future__ import annotations

import ast
import inspect
import json
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).parents[1]
PUBLISHED: Final = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/RESULTS.md": "results.md",
    "examples/README.md": "examples/index.md",
}
LISTED: Final = {
    "decisions/README.md": sorted(
        f"decisions/{page.name}" for page in (ROOT / "docs" / "decisions").glob("[0-9]*.md")
    ),
    "examples/index.md": sorted(
        f"examples/{script.stem}.md"
        for script in (ROOT / "examples").iterdir()
        if script.suffix in {".py", ".ipynb"}
    ),
}
ORIGINS: Final = {page: origin for origin, page in PUBLISHED.items() if page != "index.md"}
FENCE: Final = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK: Final = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
NOT_RUN: Final = re.compile(r"^<!-- not run: .*? -->\n", re.MULTILINE)
OBJECT: Final = re.compile(r"^::: ([\w.]+)\n((?:    .*\n|\n(?=    ))*)", re.MULTILINE)
INTEGRATIONS: Final = "cachestream.integrations."  # not imported: their frameworks take seconds to load
COMMANDS: Final = "<!-- the commands -->\n"

logger = get_plugin_logger("cachestream")
_plain: dict[str, str] = {}  # the Markdown of each page, by its path


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the decisions and the examples, which are found by looking, to the navigation."""
    config.nav = with_pages(config.nav)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside of this folder: texts of the repository, and the examples."""
    for page, origin in ORIGINS.items():
        files.append(File.generated(config, page, content=(ROOT / origin).read_text(encoding="utf-8")))
    for script in sorted((ROOT / "examples").glob("*.py")):
        text = f"---\nhide: [toc]\n---\n\n# {script.name}\n\n```python\n{script.read_text(encoding='utf-8')}```\n"
        files.append(File.generated(config, f"examples/{script.stem}.md", content=text))
    for notebook in sorted((ROOT / "examples").glob("*.ipynb")):
        files.append(File.generated(config, f"examples/{notebook.stem}.md", content=cells_of(notebook)))
    return files


def on_nav(nav: Any, config: MkDocsConfig, files: Files) -> Any:
    """Report public names that the reference leaves out, or that have no docstring; strict builds then fail."""
    for problem in undocumented():
        logger.warning(problem)
    return nav


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    path = page.file.src_uri
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, "\n".join(command_line()))
    markdown = rewrite_links(NOT_RUN.sub("", markdown), path)
    _plain[path] = OBJECT.sub(lambda found: describe(found[1], yaml.safe_load(found[2] or "{}")), markdown)
    return markdown


def on_post_build(config: MkDocsConfig) -> None:
    """Write the pages as Markdown, and those that `llms.txt` names as one file."""
    listed = LINK.findall((ROOT / "docs" / "llms.txt").read_text(encoding="utf-8"))
    whole = "\n\n".join(_plain[path] for _, _, path in listed if path in _plain)
    for path, text in [*_plain.items(), ("llms-full.txt", whole)]:
        target = Path(config.site_dir, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")


def cells_of(notebook: Path) -> str:
    """The cells of a notebook as Markdown."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    texts = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    return "\n\n".join(f"```python\n{text}\n```" if kind == "code" else text for kind, text in texts) + "\n"


# --- The navigation ---------------------------------------------------------------------------------------


def with_pages(nav: Any) -> Any:
    """Return `nav` with the pages of a folder after the page that `LISTED` names."""
    if isinstance(nav, dict):
        return {title: with_pages(value) for title, value in nav.items()}
    if isinstance(nav, list):
        return [page for entry in nav for page in (with_pages(entry), *LISTED.get(str(entry), []))]
    return nav


# --- Links ------------------------------------------------------------------------------------------------


def rewrite_links(markdown: str, page: str) -> str:
    """Change the links of the page `page` to files outside of this folder."""
    origin = ORIGINS.get(page) or (page if page.startswith("examples/") else f"docs/{page}")

    def changed(link: re.Match[str]) -> str:
        bang, text, to = link.groups()
        if re.match(r"[a-z]+:|#", to):
            return link[0]
        path, mark, anchor = to.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
        published = published_as(target)
        if published is None:
            if not (ROOT / target).exists():
                logger.warning("%s: the link to %s leads nowhere", page, to)
            return text
        return f"{bang}[{text}]({posixpath.relpath(published, posixpath.dirname(page))}{mark}{anchor})"

    pieces, end = [], 0
    for fence in FENCE.finditer(markdown):
        pieces += [LINK.sub(changed, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*pieces, LINK.sub(changed, markdown[end:])])


def published_as(target: str) -> str | None:
    """Return the page of a file of the repository, or None."""
    if target in PUBLISHED:
        return PUBLISHED[target]
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    if re.fullmatch(r"examples/\w+\.(py|ipynb)", target):
        return target.rpartition(".")[0] + ".md"
    return "examples/index.md" if target == "examples" else None


# --- The reference ----------------------------------------------------------------------------------------


def referenced() -> set[str]:
    """The names that the pages of the reference show."""
    pages = (ROOT / "docs" / "reference").glob("*.md")
    return {found[1] for page in pages for found in OBJECT.finditer(page.read_text(encoding="utf-8"))}


def undocumented() -> Iterator[str]:
    """The problems of the reference: public names that are not in it or have no docstring, and unknown names."""
    package = import_module("cachestream")
    public = {f"cachestream.{name}" for name in package.__all__}
    shown = referenced()
    for name in sorted(public - shown):
        yield f"{name} is public, and in no page of docs/reference"
    for name in sorted(public | {name for name in shown if not name.startswith(INTEGRATIONS)}):
        try:
            value = find(name)
        except (ImportError, AttributeError):
            yield f"{name} is in docs/reference, and does not exist"
            continue
        if not own_docstring(value):
            yield f"{name} has no docstring"
        for member, described in public_members(value):
            if not own_docstring(described):
                yield f"{name}.{member} has no docstring"


def find(name: str) -> Any:
    """Import the object of a dotted name."""
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def own_docstring(value: Any) -> str:
    """The docstring of `value` itself, not that of its base."""
    text = vars(value).get("__doc__") if isinstance(value, type) else getattr(value, "__doc__", None)
    return inspect.cleandoc(text) if text else ""


def public_members(value: Any) -> Iterator[tuple[str, Any]]:
    """The methods and properties that a class itself defines; overridden ones inherit their description."""
    if not isinstance(value, type):
        return
    inherited = {name for base in value.__mro__[1:] for name in vars(base)}
    for name, member in vars(value).items():
        if name.startswith("_") or name in inherited:
            continue
        described = getattr(member, "__func__", member)  # of a class method or a static one
        if inspect.isfunction(described) or isinstance(described, property):
            yield name, described


def describe(name: str, block: Mapping[str, Any]) -> str:
    """The description of `name` as plain Markdown: its signature, its docstring, and those of its members.

    `block` is what the page says of it, as mkdocstrings reads it: the members to show.
    """
    if name.startswith(INTEGRATIONS):
        heading = block.get("options", {}).get("heading", name)
        return f"## {heading}\n\n{docstring_in_file(name)}\n"
    value = find(name)
    parts = [
        f"## {name}\n",
        f"```python\n{name.rpartition('.')[2]}{signature(value)}\n```\n",
        own_docstring(value),
    ]
    for member, described in public_members(value):
        if is_shown(member, block.get("options", {})):
            parts.append(f"\n### {name}.{member}{signature(described)}\n\n{own_docstring(described)}")
    return "\n".join(parts) + "\n"


def is_shown(member: str, options: Mapping[str, Any]) -> bool:
    left_out = [pattern[1:] for pattern in options.get("filters", []) if pattern.startswith("!")]
    return member in options.get("members", [member]) and not any(
        re.search(each, member) for each in left_out
    )


def docstring_in_file(name: str) -> str:
    """The docstring of `name`, without importing its module."""
    module, _, attribute = name.rpartition(".")
    tree = ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == attribute:
            return ast.get_docstring(node) or ""
    return ""


def signature(value: Callable[..., Any] | property) -> str:
    if isinstance(value, property):
        return ""
    try:
        return re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(value)))  # annotations are texts
    except (TypeError, ValueError):
        return ""


# --- The command line -------------------------------------------------------------------------------------


def command_line() -> Iterator[str]:
    """What every command says of itself."""
    from typer.testing import CliRunner

    from cachestream.cli.app import app

    runner = CliRunner(env={"COLUMNS": "88", "TERMINAL_WIDTH": "88", "NO_COLOR": "1"})
    for command in app.registered_commands:
        name = str(command.name or getattr(command.callback, "__name__", ""))
        told = runner.invoke(app, [name, "--help"], prog_name="cachestream").output
        # The names of the variables follow from those of the options.
        told = re.sub(r"\s*\[env\s+var:\s+CACHESTREAM_\w+\]|env\s+var:\s+CACHESTREAM_\w+;\s+", "", told)
        yield f"\n## {name}\n\n```text\n{told.strip()}\n```\n"
