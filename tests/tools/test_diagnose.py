"""`cachestream diagnose`: the verdict by figures, and by real sources that are slow in one way each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from PIL import Image

import cachestream as cs
from cachestream.errors import SourceError
from cachestream.storage.telemetry import Totals
from cachestream.tools.bench import Throughput
from cachestream.tools.diagnose import Findings, MeasuredRun, Stages, diagnose, judge
from tests.support.proxy import FaultyProxy
from tests.support.s3 import S3Server

NOTHING: Final = Totals(**{field.name: 0 for field in fields(Totals)})


def run(samples: int, reads: float, seconds: float = 1.0, **spent: float) -> MeasuredRun:
    """A worker that read `samples` of 100 kB in `seconds`."""
    numbers: Any = {"fetched_bytes": 100_000 * samples, **spent}
    return MeasuredRun(samples, seconds, reads, replace(NOTHING, **numbers))


# Each stage lets 3200 samples/s and more through, on four cores; one read alone brings 100.
EVEN: Final = Stages(
    list_s=0.5,
    num_units=1_000_000,
    is_listing=False,
    num_samples=1_000_000,
    fetched_bytes=100_000,
    alone=run(100, 1, fetch_wait_s=1.0, cpu_s=0.01),
    together=run(3200, 32, fetch_wait_s=3.8, transform_s=0.05, pack_s=0.05, cpu_s=0.3),
    cached_bytes=150_000,
    write_bytes_per_s=3e9,
    delivered=Throughput(100, 15_000_000, 0.002),
    device="cpu",
    cores=4,
    workers=4,
)
FIGURES: Final = {
    "remote": EVEN,
    "network": replace(EVEN, together=run(150, 32, fetch_wait_s=3.8, cpu_s=0.1)),
    "decode": replace(
        EVEN,
        alone=run(10, 1, fetch_wait_s=1.0, cpu_s=1.0),
        together=run(40, 32, fetch_wait_s=4.0, cpu_s=4.0),
    ),
    "transform": replace(EVEN, together=run(40, 0, transform_s=4.0)),
    "pack": replace(EVEN, together=run(40, 0, pack_s=4.0, cpu_s=4.0)),
    "disk": replace(EVEN, write_bytes_per_s=1.5e6),
    "transfer": replace(EVEN, delivered=Throughput(100, 15_000_000, 10.0), device="cuda"),
}
ODD: Final = {
    "all was done at once": replace(EVEN, together=run(10, 0, 0.0)),
    "endless": replace(EVEN, num_units=None, num_samples=None),
    "a listing that goes on": replace(EVEN, is_listing=True, num_samples=None),
}


@pytest.mark.parametrize("binds", list(FIGURES))
def test_the_stage_that_lets_the_fewest_through_is_the_verdict(binds: str) -> None:
    verdict = judge(FIGURES[binds])
    assert verdict.binds == binds
    assert "{" not in " ".join([verdict.because, *verdict.what_next])


def test_small_objects_of_a_remote_are_asked_for_and_hardly_decoded() -> None:
    small = replace(NOTHING, fetched_bytes=20_000, fetch_wait_s=1.0, cpu_s=1.0)
    stages = replace(FIGURES["decode"], alone=MeasuredRun(10, 1.0, 1, small), fetched_bytes=2_000)
    assert judge(stages, "s3://bucket/train").binds == "requests"
    assert judge(stages, "/data/train").binds == "decode"


@pytest.mark.parametrize("name", [*FIGURES, *ODD])
def test_findings_are_shown_in_eighty_columns_and_told_as_plain_json(name: str) -> None:
    stages = {**FIGURES, **ODD}[name]
    found = Findings("s3://bucket/train", stages, judge(stages), 3, "ValueError: no")
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 80
    assert f"Verdict: {found.verdict.binds}." in str(found)
    assert "3 skipped, the first because: ValueError: no" in lines
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["verdict"]["binds"] == judge(stages).binds


def test_every_stage_has_a_line_with_its_own_figures() -> None:
    shown = str(Findings("s3://bucket/train", EVEN, judge(EVEN)))
    rows = {line.split()[0]: " ".join(line.split()) for line in shown.splitlines() if line.strip()}
    assert rows["read"] == "read 9.9 3,200 320 MB/s by 32 at once; one alone 10 MB/s"
    assert rows["decode"] == "decode 0.1 40,000 cores: 4"
    assert rows["transform"] == "transform 0.0156 256,000 sampling processes: 4"
    assert rows["write"] == "write 0.05 20,000 3 GB/s, synced"
    assert rows["transfer"] == "transfer 0.02 50,000 7.5 GB/s, no accelerator"


# --- the real thing


def look(source: Any, transform: Callable[[Any], Any] | None = None, **options: Any) -> Findings:
    opener = source if callable(source) else lambda: cs.open_source(source)
    return diagnose("the source", opener, transform, **{"seconds": 0.3, "workers": 1, **options})


def s3_source(bucket: Path, server: S3Server, port: int, count: int, size_bytes: int) -> Callable[[], Any]:
    for number in range(count):
        (bucket / f"{number:04d}.bin").write_bytes(np.random.default_rng(number).bytes(size_bytes))
    return lambda: cs.open_source(f"s3://{bucket.name}", storage_options=server.options_through(port))


@pytest.mark.slow  # what else the machine does at that time is a part of what it finds
def test_a_remote_that_is_far_away_is_found(
    s3_bucket: Path, s3_server: S3Server, s3_proxy: FaultyProxy
) -> None:
    s3_proxy.latency_s = 0.5
    found = look(s3_source(s3_bucket, s3_server, s3_proxy.port, 100, 20_000), seconds=6.0)
    assert found.verdict.binds == "remote", f"{found}\n{found.stages}"
    assert found.stages.seconds["read"] >= 0.5
    assert found.stages.fetched_bytes == pytest.approx(20_000, rel=0.1)


@pytest.mark.slow  # what else the machine does at that time is a part of what it finds
def test_a_network_that_is_narrow_is_found(
    s3_bucket: Path, s3_server: S3Server, s3_proxy: FaultyProxy
) -> None:
    s3_proxy.bytes_per_s = 200_000
    found = look(s3_source(s3_bucket, s3_server, s3_proxy.port, 100, 40_000), seconds=6.0)
    assert found.verdict.binds == "network", f"{found}\n{found.stages}"


@pytest.mark.slow  # what else the machine does at that time is a part of what it finds
def test_a_decoder_that_is_slow_is_found(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (150, 200, 3), dtype=np.uint8)
    for number in range(60):
        Image.fromarray(pixels).resize((2400, 1800)).save(tmp_path / f"{number}.jpg", quality=85)
    found = look(lambda: cs.open_source(tmp_path, resize=1200, crop=32), seconds=4.0)
    assert found.verdict.binds == "decode", f"{found}\n{found.stages}"


@pytest.mark.e2e
def test_a_source_without_a_sample_is_given_up_at_once() -> None:
    class Empty:
        fingerprint = "empty"
        num_units = 3

        def read(self, unit: int, _rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
            yield from ()

    with pytest.raises(SourceError, match="no usable sample"):
        look(Empty())
