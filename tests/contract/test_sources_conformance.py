"""P1: every format, wherever it lies, gives the samples that were written, each once, through stops and kills too."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import pytest

import cachestream as cs
from cachestream.testing import CHECKS, SourceChecks
from tests.contract.formats import FORMATS, ON_S3, Samples, plain, read, serve_folder
from tests.support.s3 import S3Server

MATRIX: Final = [
    (name, place) for name in FORMATS for place in ("disk", "http", *(("s3",) if name in ON_S3 else ()))
]
# Whose protocol is checked: one of each reader, and of streams, ranges and whole files on remotes.
PROTOCOL: Final = [
    *((name, "disk") for name in FORMATS if name in ON_S3),
    *((name, "http") for name in ("images", "tar", "npy")),
    ("tar", "s3"),
]
# Those that workers read on remotes; on the disk they read all.
FEW: Final = ("images", "tar", "hdf5", "jsonl", "tfrecord", "mds")
# Those that start processes are made of all formats together.
IN_PROCESSES: Final = (SourceChecks.check_fingerprint, SourceChecks.check_round_trip)
PASS_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Data:
    """The data of all formats: written once, and served from three places."""

    expected: Mapping[str, Samples]
    places: Mapping[str, tuple[str, Mapping[str, Any] | None]]
    secrets: tuple[str, ...]

    def open(self, name: str, place: str) -> cs.Source:
        url, options = self.places[place]
        return FORMATS[name].open(f"{url}/{name}", options)

    def samples(self, name: str, place: str) -> Samples:
        """The samples that must come; on the web, keys are escaped as the URLs are."""
        return [
            (quote(key, safe="/#:[],") if place == "http" else key, plain(sample))
            for key, sample in self.expected[name]
        ]

    def all_formats(self, place: str) -> tuple[cs.Source, dict[str, Any]]:
        """A mix in which each unit of one format of each reader comes once a pass, and its samples by key."""
        formats = [
            name for name, where in MATRIX if where == place and name in (ON_S3 if place == "disk" else FEW)
        ]
        sources = {name.replace("-", "_"): self.open(name, place) for name in formats}
        mixed = cs.mix({name: (source, source.num_units or 0) for name, source in sources.items()})
        return mixed, {
            f"{name.replace('-', '_')}/{key}": sample
            for name in formats
            for key, sample in self.samples(name, place)
        }


@pytest.fixture(scope="module")
def data(s3_server: S3Server) -> Iterator[Data]:
    folder = s3_server.bucket("formats")
    for name in FORMATS:
        (folder / name).mkdir()
    with serve_folder(s3_server.root) as url:
        yield Data(
            {name: written.write(folder / name) for name, written in FORMATS.items()},
            {
                "disk": (str(folder), None),
                "s3": ("s3://formats", s3_server.storage_options),
                "http": (f"{url}/formats", None),
            },
            (s3_server.key, s3_server.secret),
        )


@pytest.mark.parametrize(("name", "place"), MATRIX)
def test_a_format_gives_the_samples_that_were_written(name: str, place: str, data: Data) -> None:
    expected = data.samples(name, place)
    source = data.open(name, place)
    found = [(key, plain(sample)) for key, sample in read(source)]
    if not FORMATS[name].in_order:
        expected, found = sorted(expected, key=str), sorted(found, key=str)
    assert [key for key, _ in found] == [key for key, _ in expected]
    assert found == expected


@pytest.mark.parametrize(("name", "place"), PROTOCOL)
def test_a_source_of_a_format_keeps_the_protocol(name: str, place: str, data: Data) -> None:
    checks = SourceChecks(lambda: data.open(name, place), data.secrets, max_units=4)
    for check in CHECKS:
        if check not in IN_PROCESSES:
            check(checks)


@dataclass(slots=True)
class Gated:
    """A transform that makes all samples alike, and after `most` of a process waits until `gate` is there."""

    gate: str
    most: int
    seen: int = 0

    def __call__(self, sample: Any) -> dict[str, str]:
        self.seen += 1
        pause = threading.Event()
        while self.seen > self.most and not os.path.exists(self.gate):
            pause.wait(0.01)
        return {"value": repr(plain(sample))}


def contents(cache: cs.Cache) -> list[tuple[str, str]]:
    """All cached samples: keys and values."""
    with cs.EpochLoader(cache, 64, shuffle=False, drop_last=False, with_keys=True) as loader:
        return sorted(pair for batch in loader for pair in zip(batch["__key__"], batch["value"], strict=True))


def stop(cache: cs.Cache, worker: cs.Worker) -> None:
    worker.stop()


def kill(cache: cs.Cache, worker: cs.Worker) -> None:
    status = cache.status().worker
    assert status is not None
    os.kill(status.pid, signal.SIGKILL)
    worker.stop()


@pytest.mark.parametrize(
    ("place", "end"),
    [
        ("disk", stop),
        pytest.param("s3", kill, marks=pytest.mark.e2e),
        pytest.param("http", stop, marks=pytest.mark.e2e),
    ],
)
def test_a_worker_that_ends_in_mid_pass_and_a_cache_that_lost_half_are_completed(
    place: str, end: Callable[[cs.Cache, cs.Worker], None], data: Data, tmp_path: Path
) -> None:
    source, samples = data.all_formats(place)
    expected = sorted((key, repr(sample)) for key, sample in samples.items())
    transform = Gated(str(tmp_path / "gate"), len(samples) // 2)
    options: Any = {"num_workers": 1, "transform": transform, "shard_size": "4KB"}
    with cs.Cache(tmp_path / "cache", "100MB", min_free=0) as cache:
        worker = cs.start_worker(cache, source, **options)
        cache.wait(len(samples) // 8, timeout_s=PASS_TIMEOUT_S)
        end(cache, worker)
        part = cache.num_samples
        assert len(samples) // 8 <= part <= len(samples) // 2
        (tmp_path / "gate").touch()

        with cs.start_worker(cache, source, **options) as worker:  # goes on with the pass
            assert worker.wait(PASS_TIMEOUT_S)
        assert contents(cache) == expected

        cache.evict(to=cache.size_bytes // 2)
        assert cache.num_samples < len(samples)
        with cs.start_worker(cache, source, **options) as worker:  # fetches what is gone
            assert worker.wait(PASS_TIMEOUT_S)
        assert contents(cache) == expected
