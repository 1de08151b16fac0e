"""The status as a person reads it: the right figures, in words that fit a line."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from rich.console import Console

from cachestream.cli.display import status_view
from cachestream.cli.facts import Activity, RateWindow, one_line, rates_between, remaining_s
from cachestream.storage.status import CacheStatus, WorkerStatus
from cachestream.storage.tables import FailureRow
from cachestream.storage.telemetry import Totals
from tests.support.loader_report import LOADER

NOTHING = Totals(**{field.name: 0 for field in dataclasses.fields(Totals)})


def totals(**values: Any) -> Totals:
    return dataclasses.replace(NOTHING, **values)


def worker(uptime_s: float = 100.0, pid: int = 7, **values: Any) -> WorkerStatus:
    return WorkerStatus(pid, uptime_s, 0, ("fetching", "fetching", "writing"), totals(**values))


def status(**values: Any) -> CacheStatus:
    return CacheStatus(
        **{
            "path": "/scratch/train",
            "cache_id": "c",
            "size_bytes": 143 * 10**9,
            "size_limit": 200 * 10**9,
            "min_free": 10**9,
            "eviction": "lru",
            "num_shards": 812,
            "num_samples": 81_234,
            "leases": 0,
            "leased_bytes": 0,
            "reserved_bytes": 0,
            "evicted_shards": 0,
            "evicted_samples": 0,
            "evicted_unused_samples": 0,
            "epoch_waits": 0,
            "snapshots": 0,
            "schema": None,
            "source": None,
            "num_units": 1000,
            "fill_state": "filling",
            "fill_message": "",
            "pass_number": 1,
            "pass_done": 0.25,
            "skipped": 0,
            "failures": (),
            "quarantined": 0,
            "worker": None,
            **values,
        }
    )


def drawn(shown: CacheStatus, rates: Activity | None = None, width: int = 100) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115  closed below
    console.print(status_view(shown, rates))
    console.file.close()
    return console.export_text()


def test_rates_are_of_the_last_seconds_not_of_the_whole_run() -> None:
    window, rates = RateWindow(), None
    assert window.add(0, status(worker=worker(samples=1_000_000))) is None
    for second in range(1, 32):
        counts = worker(samples=1_000_000 + 50 * second, fetched_bytes=10**6 * second)
        rates = window.add(second, status(worker=counts))
    assert rates == Activity(50, 0, 0, 1e6)
    assert window.add(32, None) is None
    assert window.add(33, status(worker=worker(samples=5))) is None


def test_rates_are_of_what_lived_through_both_looks() -> None:
    then = status(worker=worker(samples=100, fetched_bytes=5_000), loaders=(LOADER,))
    later = worker(samples=160, fetched_bytes=25_000)
    more = (dataclasses.replace(LOADER, samples=900), dataclasses.replace(LOADER, rank=1, samples=400))
    now = status(worker=later, loaders=more, evicted_samples=20)
    assert rates_between(0, then, 10, now) == Activity(6.0, 40.0, 2.0, 2_000.0)
    other = status(worker=dataclasses.replace(later, pid=8), loaders=more[1:])
    assert rates_between(0, now, 10, other) == Activity(0.0, 0.0, 0.0, 0.0)
    splits = [
        status(loaders=tuple(dataclasses.replace(LOADER, samples=count) for count in counts))
        for counts in ((500, 30), (900, 40))
    ]
    assert rates_between(0, splits[0], 10, splits[1]) == Activity(0.0, 41.0, 0.0, 0.0), "of one process"
    assert rates_between(0, splits[0], 10, then) == Activity(0.0, 0.0, 0.0, 0.0), "one has gone"
    assert rates_between(3, now, 3, now) is None


def test_the_time_that_is_left_follows_from_the_units_done() -> None:
    assert remaining_s(status(worker=worker(uptime_s=100, units=250), pass_done=0.25)) == pytest.approx(300)


@pytest.mark.parametrize(
    "values",
    [{"worker": None}, {"pass_done": None}, {"num_units": None}, {"pass_done": 1.0}, {"worker": worker()}],
)
def test_no_time_is_promised_where_nothing_is_known_of_it(values: dict[str, Any]) -> None:
    assert remaining_s(status(**{"worker": worker(units=10), **values})) is None


def test_the_bottleneck_comes_first_and_shares_add_up() -> None:
    stages = totals(fetch_wait_s=6.0, transform_s=3.0, publish_s=1.0, cpu_s=4.0).shares
    assert stages[:3] == [("remote", 0.5), ("transform", 0.3), ("decoding", 0.1)]
    assert sum(share for _, share in stages) == pytest.approx(1)
    assert totals(fetch_wait_s=1.0, cpu_s=3.0).shares[0] == ("decoding", 1.0)
    assert NOTHING.shares == []


def test_the_view_tells_space_progress_worker_and_what_was_skipped() -> None:
    failures = tuple(FailureRow("sample", f"reason {n}", 10 - n, "") for n in range(7))
    text = drawn(
        status(
            worker=worker(units=250, fetch_wait_s=9, transform_s=1),
            skipped=49,
            failures=failures,
            leases=2,
            leased_bytes=40 * 10**9,
            evicted_samples=17,
            evicted_unused_samples=5,
            snapshots=5,
        ),
        Activity(1234.4, 0, 0, 40e6),
    )
    for piece in (
        "/scratch/train  filling",
        "143 GB of 200 GB",
        "81,234 in 812 shards, 17 evicted so far, 5 of them unused",
        "25.0% of 1,000 units, about 5 min left",
        "5 snapshots taken, 2 in use, which hold 40 GB",
        "2 fetching, 1 writing",
        "1,234 samples/s, 40 MB/s fetched",
        "remote 90%, transform 10%",
        "10 × sample: reason 0",
        "2 more reasons",
    ):
        assert piece in text
    assert "reason 5" not in text


def test_names_with_brackets_are_shown_as_they_are() -> None:
    text = drawn(status(path="/data/[bold]x", schema="{image: uint8[3, 8, 8]}", source="files:[red]a"))
    assert "/data/[bold]x" in text
    assert "uint8[3, 8, 8]" in text
    assert "files:[red]a" in text


def test_an_endless_source_and_an_empty_cache_have_a_view() -> None:
    assert "endless" in drawn(status(pass_done=None, num_units=None))
    empty = drawn(status(pass_number=0, pass_done=None, num_shards=0, num_samples=0, fill_state="none"))
    assert "pass" not in empty
    assert "0 in 0 shards" in empty


def test_the_reason_of_a_failure_stands_at_the_top() -> None:
    lines = drawn(status(fill_state="failed", fill_message="the disk is gone")).splitlines()
    assert "failed" in lines[0]
    assert "the disk is gone" in lines[1]


def test_a_narrow_view_sets_the_figures_below_the_bars() -> None:
    def lines(width: int) -> list[str]:
        return [line for line in drawn(status(), width=width).splitlines() if "143 GB of 200 GB" in line]

    assert "25.0% of 1,000 units" in drawn(status(), width=40)
    assert ["━" in line for line in lines(40)] == [False]
    assert ["━" in line for line in lines(80)] == [True]


def test_the_line_for_logs_holds_the_essentials() -> None:
    line = one_line(status(skipped=3, worker=worker()), Activity(5, 7, 0, 2e6))
    assert "\n" not in line
    assert "81234 samples in 812 shards, 143 GB of 200 GB, filling, pass 1 25%, 3 skipped" in line
    assert line.endswith("5 samples/s, 2 MB/s fetched, 7 samples/s trained on")


def test_a_full_disk_shows_in_the_status_and_in_a_line_of_it() -> None:
    full = status(disk_message="the disk has 0 B left")
    assert "the disk has 0 B left" in drawn(full)
    assert one_line(full).endswith("; the disk has 0 B left")


def test_what_a_worker_of_another_version_does_is_not_made_up() -> None:
    console = Console(width=100, record=True)
    console.print(status_view(status(worker=dataclasses.replace(worker(), states=(), totals=NOTHING))))
    shown = console.export_text()
    assert "pid 7, up 1 min; processes: unknown, of another version of cachestream" in shown
    assert "samples/s" not in shown
