"""The comparison with other loaders: its figures, its checks, and our own loaders through it at a tiny size."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.measure import run_rounds
from benchmarks.peers import ours
from benchmarks.peers.entries import ENTRIES, Entry
from benchmarks.peers.one import epoch_rates
from benchmarks.peers.report import figures_of
from benchmarks.peers.workload import WORKLOADS, Batch, Workload, scaled

TINY = {name: scaled(name, 0.02) for name in WORKLOADS}
OURS = [entry for entry in ENTRIES if entry.kind == "ours"]


def test_every_loader_has_a_module() -> None:
    for module in {entry.module for entry in ENTRIES} - {"memcpy"}:
        assert importlib.util.find_spec(f"benchmarks.peers.{module}")


@pytest.mark.e2e
@pytest.mark.parametrize("name", [pytest.param("A", marks=pytest.mark.slow), "B"])
def test_our_loaders_deliver_every_sample_of_a_workload_in_every_epoch(name: str, tmp_path: Path) -> None:
    work = TINY[name]
    ours.prepare(tmp_path / "cache", work)
    for entry in OURS:
        with ours.deliver(tmp_path / "cache", work, 0, entry.option) as epochs:
            assert all(rate > 0 for rate in epoch_rates(epochs, work, enough_s=0))


@pytest.mark.slow
def test_figures_come_from_processes_and_what_failed_is_left_out(tmp_path: Path) -> None:
    from benchmarks.peers.__main__ import measure  # loads what draws the page

    entries = [
        Entry("loader", "ours", "EpochLoader", (0,), "ours"),
        Entry("absent", "no_such_peer", workers=(0,)),
    ]
    rates = measure(entries, ["B"], rounds=1, scale=0.01, folder=tmp_path)
    assert set(rates) == {("loader", "B", 0)}
    [figure] = figures_of(entries, ["B"], rates)
    assert figure == "loader / B, 0 workers"


def test_ours_is_compared_with_the_limit_and_the_best_of_the_peers_in_each_round() -> None:
    entries = [
        Entry("limit", "limits", "one thread", (0,), "limit"),
        *OURS,
        Entry("cache", "lit"),
        Entry("by hand", "memmap", "batched"),
        Entry("per item", "memmap", "per item"),
        Entry("no DataLoader", "threads", kind="loader"),
    ]
    loader, dataset = (entry.title for entry in OURS)
    by_workers = {
        dataset: ([4e3, 4e3], [4e3, 5e3], [2e3, 2e3]),
        "cache": ([1e3, 1e3], [1.5e3, 1e3], [1e3, 2e3]),
        "by hand": ([4e3, 2e3], [2e3, 2e3], [4e3, 8e3]),
        "per item": ([1e3, 1e3], [1e3, 1e3], [1e3, 1e3]),
        "no DataLoader": ([9e3, 9e3], [9e3, 9e3], [9e3, 9e3]),
    }
    rates = {(title, "B", i): values for title, rows in by_workers.items() for i, values in enumerate(rows)}
    figures = figures_of(
        entries, ["B"], rates | {(loader, "B", 0): [8e3, 6e3], ("limit", "B", 0): [8e3, 8e3]}
    )
    assert figures["cache / B, 1 worker"] == [1.5, 1.0]
    assert figures["B_loader_to_gather"] == [1.0, 0.75]
    assert figures["B_loader_to_memmap"] == [2.0, 0.75]
    assert figures["B_loader_to_caching_peer"] == [8 / 1.5, 3.0]
    assert figures["B_dataset_to_peer"] == [0.5, 0.25]


def test_only_what_ran_is_compared() -> None:
    entries = [*OURS, Entry("slow", "lit")]
    assert [*figures_of(entries, ["B"], {("slow", "B", 0): [1e3]})] == ["slow / B, 0 workers"]


class _Wrong:
    """Epochs of workload B that are not what was written."""

    def __init__(self, work: Workload, how: str) -> None:
        order = torch.randperm(work.samples)
        self.ids = {"missing": order[1:], "in order": order.sort().values}.get(how, order)
        self.values = (self.ids % 251).to(torch.uint8)[:, None].repeat(1, work.length)
        if how == "damaged":
            self.values[5, 3] += 1

    def __iter__(self) -> Iterator[Batch]:
        cuts = tuple(range(256, len(self.ids), 256))
        return iter(
            zip(torch.tensor_split(self.values, cuts), torch.tensor_split(self.ids, cuts), strict=True)
        )


@pytest.mark.parametrize(
    ("how", "complaint"),
    [("missing", "1199 different ones"), ("in order", "not shuffled"), ("damaged", "never written")],
)
def test_a_delivery_of_something_else_is_noticed(how: str, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        epoch_rates(_Wrong(TINY["B"], how), TINY["B"])


def test_a_command_that_fails_stops_the_rounds_unless_they_keep_going() -> None:
    commands = {"bad": ["-c", "raise SystemExit(3)"], "good": ["-c", "print('{\"figure\": 2}')"]}
    told: list[tuple[str, int]] = []
    found = run_rounds(
        commands, 2, keep_going=True, on_run=lambda name, figures: told.append((name, len(figures["figure"])))
    )
    assert found == {"good": {"figure": [2.0, 2.0]}}
    assert told == [("good", 1), ("good", 2)]
    with pytest.raises(subprocess.CalledProcessError, match="status 3"):
        run_rounds(commands, 1)
