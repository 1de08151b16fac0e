"""The site: its reference is complete, its pages are short and begin with their use, and its lists name them all."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest

import cachestream

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"
GUIDE: Final = sorted(DOCS.glob("guide/**/*.md"))
LONGEST_PAGE: Final = 200
LONGEST_README: Final = 83
MOST_PAGES: Final = {"guide": 14, "cookbook": 10, "decisions": 21}  # the decisions and their list
LONGEST_DECISION: Final = 60
LONGEST_CHANGELOG: Final = 60


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    """The hooks of the build, which need MkDocs."""
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("hooks_of_docs", DOCS / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_is_in_the_reference_once() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in DOCS.glob("reference/*.md"))
    shown = re.findall(r"^::: cachestream\.(\w+)$", pages, re.MULTILINE)
    assert sorted(shown) == cachestream.__all__


@pytest.mark.e2e
def test_every_public_name_and_its_members_have_docstrings(hooks: ModuleType) -> None:
    assert list(hooks.undocumented()) == []


def test_a_missing_docstring_is_reported(hooks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class Bare:
        def method(self) -> None: ...

    monkeypatch.setattr(cachestream, "Bare", Bare, raising=False)
    monkeypatch.setattr(cachestream, "__all__", [*cachestream.__all__, "Bare"])
    assert list(hooks.undocumented()) == [
        "cachestream.Bare is public, and in no page of docs/reference",
        "cachestream.Bare has no docstring",
        "cachestream.Bare.method has no docstring",
    ]


@pytest.mark.parametrize("page", GUIDE, ids=page_id)
def test_a_page_of_the_guide_is_short_and_begins_with_its_use(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= LONGEST_PAGE
    assert lines[0].startswith("# ")
    assert lines[2].startswith("After this page ")


@pytest.mark.parametrize("folder", MOST_PAGES)
def test_there_are_no_more_pages_than_somebody_reads(folder: str) -> None:
    assert len(list(DOCS.glob(f"{folder}/**/*.md"))) <= MOST_PAGES[folder]


def test_a_decision_takes_a_page_and_the_changelog_too() -> None:
    for page in DOCS.glob("decisions/[0-9]*.md"):
        assert len(page.read_text(encoding="utf-8").splitlines()) <= LONGEST_DECISION, page.name
    assert len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()) <= LONGEST_CHANGELOG


def test_the_readme_is_short_and_shows_its_picture_and_commands_early() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) < LONGEST_README
    (picture,) = [number for number, line in enumerate(lines) if line.startswith("![")]
    assert picture < len(lines) / 2
    assert {"make demo", "make test"} <= {line.partition(" #")[0].strip() for line in lines[:8]}


def test_the_readme_and_the_first_page_of_the_site_show_the_same_program() -> None:
    pages = [
        (folder / name).read_text(encoding="utf-8")
        for folder, name in ((ROOT, "README.md"), (DOCS, "index.md"))
    ]
    first, second = (re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL) for page in pages)
    assert first == second


def test_the_list_for_language_models_names_every_page_and_no_other() -> None:
    listed = re.findall(
        r"^- \[[^\]]+\]\(([^)]+)\)", (DOCS / "llms.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
    pages = [page for folder in ("guide", "cookbook", "reference") for page in DOCS.glob(f"{folder}/**/*.md")]
    expected = {page.relative_to(DOCS).as_posix() for page in pages}
    assert set(listed) == expected | {"architecture.md", "decisions/README.md"}
    assert len(listed) == len(set(listed))


def test_the_citation_names_the_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {cachestream.__version__}\n" in citation


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("guide/cache.md", "[a](epochs.md#ddp)", "[a](epochs.md#ddp)"),
        ("guide/cache.md", "[a](../../benchmarks/RESULTS.md#b)", "[a](../results.md#b)"),
        ("guide/files.md", "[a](../../examples/windows.py)", "[a](../examples/windows.md)"),
        ("examples/index.md", "[a](photographs.ipynb)", "[a](photographs.md)"),
        ("results.md", "![a](../docs/waste.png)", "![a](waste.png)"),
        ("results.md", "[records](results)", "records"),
        ("examples/index.md", "[a](../docs/guide/shards.md)", "[a](../guide/shards.md)"),
        ("index.md", "[a](https://example.org/x)", "[a](https://example.org/x)"),
        ("index.md", "```\n[a](nowhere.md)\n```", "```\n[a](nowhere.md)\n```"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(
    hooks: ModuleType, page: str, link: str, expected: str
) -> None:
    assert hooks.rewrite_links(link, page) == expected


def test_the_reference_is_also_plain_text(hooks: ModuleType) -> None:
    text = hooks.describe("cachestream.Cache", {"options": {"filters": ["!^_", "!^clear$"]}})
    assert text.startswith("## cachestream.Cache\n\n```python\nCache(path: str | os.PathLike[str], ")
    assert "### cachestream.Cache.verify(self" in text
    assert "cachestream.Cache.clear" not in text
    assert "### " not in hooks.describe("cachestream.TarSource", {"options": {"members": []}})


def test_the_reference_describes_integrations_without_their_frameworks(hooks: ModuleType) -> None:
    text = hooks.describe("cachestream.integrations.lightning_hooks.DataHooks", {"options": {"heading": "H"}})
    assert text.startswith("## H\n\nA data module")


@pytest.mark.e2e
def test_the_page_of_the_command_line_has_every_command(hooks: ModuleType) -> None:
    text = "\n".join(hooks.command_line())
    assert {"worker", "status", "verify", "diagnose"} <= set(re.findall(r"^## (\w+)$", text, re.MULTILINE))
    assert "--size-limit" in text
    assert "CACHESTREAM_WORKER" not in text


def test_a_notebook_becomes_a_page_of_its_cells(hooks: ModuleType) -> None:
    text = hooks.cells_of(ROOT / "examples" / "photographs.ipynb")
    assert text.startswith("# Photographs from a bucket\n\nFill a cache")
    assert "\n\n```python\nloader.cache\n```\n\n" in text


def test_the_navigation_gets_the_decisions_and_the_examples(hooks: ModuleType) -> None:
    (found,) = hooks.with_pages([{"Project": [{"Decisions": ["decisions/README.md"]}, "architecture.md"]}])
    decisions, architecture = found["Project"]
    assert len(decisions["Decisions"]) == 1 + len(list(DOCS.glob("decisions/[0-9]*.md")))
    assert architecture == "architecture.md"
    assert "examples/train_ddp.md" in hooks.with_pages(["examples/index.md"])
