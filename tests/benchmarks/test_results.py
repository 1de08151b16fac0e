"""The page of results is made from the records, and every benchmark has its place on it."""

from __future__ import annotations

import importlib.util
import json
import statistics
from pathlib import Path

import pytest

from benchmarks import record
from benchmarks.page import PAGE, SECTIONS, render
from benchmarks.record import RESULTS, load
from benchmarks.registry import BENCHMARKS, TURNS


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for records."""
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    return tmp_path


def test_the_page_is_what_the_records_make() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run: make results"


def test_the_page_has_few_sections_and_each_benchmark_is_in_one() -> None:
    assert sorted(name for names in SECTIONS.values() for name in names) == sorted(BENCHMARKS)
    assert PAGE.read_text(encoding="utf-8").count("\n## ") <= 8


def test_every_record_belongs_to_a_benchmark_that_exists() -> None:
    assert {path.stem for path in RESULTS.glob("*.json")} <= {*BENCHMARKS, TURNS}
    for name, benchmark in BENCHMARKS.items():
        module = {"accuracy": "peers.accuracy", "speeds": "peers.accuracy"}.get(name, name)
        assert importlib.util.find_spec(f"benchmarks.{module}")
        assert benchmark.title
        assert benchmark.what.endswith(".")


def test_every_figure_of_a_section_was_measured_and_says_why_where_it_misses_its_target() -> None:
    for name, benchmark in BENCHMARKS.items():
        if found := load(name):
            for figure in benchmark.figures:
                assert figure.name in found.figures
                if figure.misses(statistics.median(found.figures[figure.name])):
                    assert figure.missed, f"say why in benchmarks/registry.py: {name}, {figure.name}"


def test_a_section_shows_target_median_spread_command_and_why_a_target_is_missed(results: Path) -> None:
    record.save("small", {"loader_to_gather": [0.7, 0.5, 0.6], "loader_samples_per_s": [4_444_444.0] * 3})
    page = render(results)
    section = page[page.index("## Small samples") : page.index("## Two ranks")]
    assert "`python -m benchmarks small`, 3 rounds." in section
    assert "| of the gather | ≥ 0.8 | **0.6** | 0.5–0.7 |" in section
    assert "| `EpochLoader` |  | **4,440,000** samples/s | 4,440,000–4,440,000 |" in section
    assert "Missed: *of the gather*. An epoch lasts" in section
    record.save("small", {"loader_to_gather": [0.9]})
    assert "Missed" not in render(results)


def test_what_was_not_measured_is_said_and_the_machine_is_named_once_for_what_was(results: Path) -> None:
    assert render(results).count("Not yet measured on this version") == len(BENCHMARKS) + 1
    for name in ("warm", "small"):
        record.save(name, {"any": [1.0]})
    page = render(results)
    assert page.count("Not yet measured on this version") == len(BENCHMARKS) - 1
    assert page.count(record.machine()) == 1
    assert ": warm, small." in page


def test_figures_without_words_of_their_own_are_shown_under_their_names(results: Path) -> None:
    record.save("warm", {"unfavourable": [0.3, 0.1], "gap_ms": [1.0, 1.0]})
    turns = [{"benchmark": "warm", "figure": "unfavourable", "there": 2.0, "here": 1.0, "rounds": 1}]
    told = {"machine": "one", "date": "today", "there": "a", "here": "b", "rows": turns, "notes": ["A note."]}
    (results / f"{TURNS}.json").write_text(json.dumps(told))
    page = render(results)
    assert "| `unfavourable` |  | **0.2** | 0.1–0.3 |" in page
    assert "| Warm batches | `unfavourable` | 2 | 1 | 0.5 |" in page
    assert "A note." in page


def test_figures_with_a_row_and_a_column_become_a_table(results: Path) -> None:
    record.save("sources", {"tar / S3": [1.0], "tar / local": [2.0, 4.0], "npy / local": [5.0]})
    assert "| | S3 | local |\n|-|-|-|\n| tar | 1 | 3 |\n| npy | – | 5 |" in render(results)


def test_a_record_is_read_as_it_was_written_with_the_rounds_on_one_line(results: Path) -> None:
    path = record.save("warm", {"gap_ms": [1.234567, 2.0]})
    found = load("warm", results)
    assert found is not None
    assert found.figures == {"gap_ms": [1.2346, 2.0]}
    assert found.rounds == 2
    assert '"gap_ms": [1.2346, 2.0]' in path.read_text()
    assert json.loads(path.read_text())["machine"] == record.machine()
