"""The documentation is true: its Python runs, its links lead somewhere, the commands it names exist.

A page's ```python blocks run as one script, top to bottom, in an empty folder and a process of its
own. `<!-- not run: reason -->` on the line before a block leaves it out.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from cachestream.cli.app import app
from tests.support.forked import fork_script
from tests.support.interpreters import QUICK

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = sorted(
    {
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("benchmarks/*.md"),
        *ROOT.glob("examples/*.md"),
    }
)
NOT_RUN: Final = re.compile(r"<!-- not run: \S.*-->")
LINK: Final = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE: Final = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
PAGE_TIMEOUT_S: Final = 300


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def script_of(text: str) -> str:
    """The page's Python blocks on the lines where they stand, so that tracebacks name the page's lines."""
    script, inside, skipped, previous = [], False, False, ""
    for line in text.splitlines():
        if inside and line.startswith("```"):
            inside = False
        elif not inside and line.startswith("```python"):
            inside, skipped = True, bool(NOT_RUN.search(previous))
            script.append("")
            continue
        script.append(line if inside and not skipped else "")
        previous = line if line.strip() else previous
    return "\n".join(script) + "\n"


PAGES_THAT_RUN: Final = [
    page
    for page in sorted([*ROOT.glob("docs/guide/**/*.md"), *ROOT.glob("docs/cookbook/*.md")])
    if script_of(page.read_text(encoding="utf-8")).strip()
]


def anchors(page: Path) -> set[str]:
    """The anchors of a page: of its headings, as GitHub makes them, and of the names that the reference describes."""
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return made | set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))


def test_the_script_of_a_page_keeps_line_numbers_and_leaves_out_what_is_marked() -> None:
    page = "# t\n```python\na = 1\n```\n<!-- not run: needs a GPU -->\n```python\nb\n```\n```bash\nls\n```\n"
    assert script_of(page).rstrip("\n") == "\n\na = 1"
    assert script_of(page.replace("<!-- not run: needs a GPU -->", "-")).splitlines()[6] == "b"


@pytest.mark.e2e
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("page", PAGES_THAT_RUN, ids=page_id)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    script = tmp_path / f"page_{page.stem}.py"  # not the name of a package that it imports
    script.write_text(script_of(page.read_text(encoding="utf-8")), encoding="utf-8")
    done = fork_script(script, cwd=tmp_path, environment={"PYTHONPATH": QUICK}, timeout_s=PAGE_TIMEOUT_S)
    assert done.returncode == 0, f"{page_id(page)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.e2e
def test_the_python_of_the_readme_runs_in_a_new_interpreter(tmp_path: Path) -> None:
    (tmp_path / "readme.py").write_text(script_of((ROOT / "README.md").read_text(encoding="utf-8")), "utf-8")
    command = [sys.executable, "-W", "error", "readme.py"]
    subprocess.run(command, cwd=tmp_path, stdin=subprocess.DEVNULL, timeout=PAGE_TIMEOUT_S, check=True)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_link_inside_the_documentation_leads_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def code_of(page: Path) -> list[str]:
    """The blocks and the inline pieces of code of a page."""
    text = page.read_text(encoding="utf-8")
    blocks = [block.partition("\n")[2] for block in CODE.findall(text)]
    return [*blocks, *re.findall(r"`([^`\n]+)`", CODE.sub("", text))]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_command_that_a_page_names_exists(page: Path) -> None:
    named = {
        name for piece in code_of(page) for name in re.findall(r"^cachestream ([a-z]+)", piece, re.MULTILINE)
    }
    commands = {command.callback.__name__ for command in app.registered_commands if command.callback}
    assert named <= commands


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_make_target_that_a_page_names_exists(page: Path) -> None:
    named = {name for piece in code_of(page) for name in re.findall(r"\bmake ((?!PYTHON)[a-z0-9-]+)", piece)}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))
    assert named <= targets


def test_the_overview_of_sources_leads_to_the_page_of_each() -> None:
    linked = LINK.findall((ROOT / "docs" / "guide" / "sources.md").read_text(encoding="utf-8"))
    assert {"files.md", "tables.md", "shards.md", "arrays.md"} <= {link.partition("#")[0] for link in linked}


def test_the_index_of_decisions_names_every_decision() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    pages = sorted(page.name for page in folder.glob("[0-9]*.md"))
    assert pages
    assert [page for page in pages if f"]({page})" not in index] == []
