"""The comparison with other loaders: its table, its checks, and our own loaders through it at a tiny size."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.measure import run_rounds
from benchmarks.peers import ours
from benchmarks.peers.__main__ import measure
from benchmarks.peers.entries import ENTRIES, Entry
from benchmarks.peers.one import epoch_rates
from benchmarks.peers.report import markdown
from benchmarks.peers.workload import WORKLOADS, Batch, Workload, scaled

TINY = {name: scaled(name, 0.02) for name in WORKLOADS}
OURS = [entry for entry in ENTRIES if entry.kind == "ours"]


@pytest.mark.parametrize("name", list(TINY))
def test_our_loaders_deliver_every_sample_of_a_workload_in_every_epoch(name: str, tmp_path: Path) -> None:
    work = TINY[name]
    ours.prepare(tmp_path / "cache", work)
    for entry in OURS:
        with ours.deliver(tmp_path / "cache", work, 0, entry.option) as epochs:
            assert all(rate > 0 for rate in epoch_rates(epochs, work, enough_s=0))


def test_the_table_is_made_from_processes_and_tells_what_failed(tmp_path: Path) -> None:
    entries = [
        Entry("loader", "ours", "EpochLoader", (0,), "ours"),
        Entry("absent", "no_such_peer", workers=(0,)),
    ]
    results = measure(entries, ["B"], rounds=1, scale=0.01, folder=tmp_path)
    assert set(results) == {("loader", "B", 0)}
    table = markdown(entries, ["B"], results)
    assert "| what | B, k samples/s: 0 workers |" in table
    assert "| absent | failed | – | – |" in table


def test_the_best_number_of_workers_is_bold_and_ours_is_compared_with_the_fastest_peer() -> None:
    entries = [*OURS, Entry("slow", "files"), Entry("fast", "memmap")]
    loader, dataset = (entry.title for entry in OURS)
    rates = {dataset: (4e3, 4e3, 2e3), "slow": (1e3, 1.5e3, 1e3), "fast": (4e3, 2e3, 4e3)}
    results = {(title, "B", i): rate for title, by in rates.items() for i, rate in enumerate(by)}
    table = markdown(entries, ["B"], results | {(loader, "B", 0): 8e3})
    assert "| slow | 1 | **1.5** | 1 |" in table
    assert "B: `EpochLoader` reaches 5.33 × slow; 2 × fast." in table
    assert (
        "B, 2 workers: `DataLoader(EpochDataset)` is 0.5 × the fastest peer under a DataLoader (fast)."
        in table
    )


@pytest.mark.parametrize(("ran", "other"), [OURS, OURS[::-1]], ids=["loader", "dataset"])
def test_only_what_ran_of_ours_is_named_in_the_comparison(ran: Entry, other: Entry) -> None:
    results = {(ran.title, "B", 0): 8e3, ("slow", "B", 0): 1e3}
    table = markdown([ran, Entry("slow", "files")], ["B"], results)
    assert f"B: `{ran.option}" in table
    assert other.option not in table.replace("under a DataLoader", "")


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
    assert run_rounds(commands, 2, keep_going=True) == {"good": {"figure": 2.0}}
    with pytest.raises(subprocess.CalledProcessError, match="status 3"):
        run_rounds(commands, 1)
