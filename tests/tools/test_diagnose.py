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
from cachestream.tools.diagnose import Stages, _each_s, diagnose
from cachestream.tools.forecast import RunPlan, setup_of
from tests.support.proxy import FaultyProxy
from tests.support.s3 import S3Server

NOTHING: Final = Totals(**{field.name: 0 for field in fields(Totals)})
# Each stage but reading takes no longer than a millisecond.
SECONDS: Final = {
    "read": 0.01,
    "decode": 0.001,
    "transform": 0.0005,
    "pack": 0.0002,
    "write": 0.0001,
    "transfer": 0.00002,
}
REMOTE: Final = Stages(
    source="s3://bucket/train",
    list_s=0.5,
    num_units=1_000_000,
    is_listing=False,
    num_samples=1_000_000,
    fetched_bytes=123_456,
    cached_bytes=150_000,
    fill_per_s=320.4,
    seconds=SECONDS,
    bytes_per_s=32e6,
    alone_bytes_per_s=10e6,
    device="cpu",
    cores=4,
    workers=4,
)


def slow(stage: str) -> Stages:
    """Stages of which `stage` takes longer than reading."""
    return replace(REMOTE, seconds={**SECONDS, stage: 0.1}, device="cuda")


FIGURES: Final = {
    "remote": REMOTE,
    "network": replace(REMOTE, alone_bytes_per_s=30e6),
    "disk": slow("write"),
    **{stage: slow(stage) for stage in ("decode", "transform", "pack", "transfer")},
}
ODD: Final = {
    "no transform": replace(REMOTE, seconds={**SECONDS, "transform": 0.0}),
    "endless": replace(REMOTE, num_units=None, num_samples=None),
    "a listing that goes on": replace(REMOTE, is_listing=True, num_samples=None),
    "samples that fail": replace(REMOTE, skipped=3, failure="3 skipped, most often: transform: no"),
}


@pytest.mark.parametrize("binds", list(FIGURES))
def test_the_stage_that_lets_the_fewest_through_is_the_verdict(binds: str) -> None:
    verdict = FIGURES[binds].to_dict()["verdict"]
    assert verdict["binds"] == binds
    assert "{" not in " ".join([verdict["because"], *verdict["what_next"]])


@pytest.mark.parametrize("name", [*FIGURES, *ODD])
def test_findings_are_shown_in_eighty_columns_and_told_as_plain_json(name: str) -> None:
    stages = {**FIGURES, **ODD}[name]
    lines = str(stages).splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith(f"Verdict: {stages.binds}. ") for line in lines)
    assert lines[-1] == stages.failure or not stages.failure
    assert ("transform" in " ".join(lines[3:10])) == bool(stages.seconds["transform"])
    told = json.loads(json.dumps(stages.to_dict(), allow_nan=False))
    assert told["verdict"]["samples_per_s"] == min(filter(None, told["samples_per_s"].values()))


def test_every_stage_has_a_line_with_its_own_figures() -> None:
    rows = {line.split()[0]: " ".join(line.split()) for line in str(REMOTE).splitlines() if line.strip()}
    assert rows["list"] == "list 500 once, before the first sample"
    assert rows["read"] == "read 10 400 32 MB/s; one read alone 10 MB/s"
    assert rows["decode"] == "decode 1 4,000"
    assert rows["write"] == "write 0.1 40,000"
    assert rows["transfer"] == "transfer 0.02 50,000 no accelerator"


def spent(**counted: Any) -> Totals:
    return replace(NOTHING, **counted)


def test_a_stage_takes_the_time_that_was_counted_for_it() -> None:
    alone = spent(dropped=100, cpu_s=0.1)
    many = spent(samples=1000, fetch_wait_s=6.0, transform_s=2.0, pack_s=1.0, publish_s=0.5, cpu_s=4.0)
    found = _each_s(many, alone, 1.0)
    assert found == pytest.approx(
        {"read": 0.005, "decode": 0.001, "transform": 0.002, "pack": 0.001, "write": 0.0005}
    )


def test_threads_that_decode_beside_the_packing_are_not_taken_for_packing() -> None:
    alone = spent(dropped=100, cpu_s=0.3)  # 3 ms for a sample
    many = spent(samples=1000, pack_s=4.0, cpu_s=4.0)  # nothing was waited for: the processor was busy
    found = _each_s(many, alone, 1.0)
    assert found["decode"] == pytest.approx(0.003)
    assert found["pack"] == pytest.approx(0.004 * 4 / 7)
    assert _each_s(many, alone, 0.25)["decode"] == pytest.approx(0.00075), "the other cores are free"
    assert _each_s(NOTHING, NOTHING, 1.0)["pack"] == 0.0


def advice(stages: Stages, bandwidth_bytes_per_s: float | None = None) -> str:
    """The advice of a plan over a source of which `stages` were measured."""
    run = {"size_limit": 10**12, "batch_size": 32, "step_s": 1.0, "duration_s": 60.0}
    setup = setup_of(stages, 10_000, bandwidth_bytes_per_s, **run)
    return " ".join(RunPlan.of(setup, stages).advice)


def test_a_plan_says_that_the_processor_holds_up_the_filling() -> None:
    assert "the processor holds up" not in advice(REMOTE)
    assert "the processor holds up" not in advice(slow("decode"), bandwidth_bytes_per_s=1e6), "the link does"
    assert "more cores, or a cheaper transform" in advice(slow("decode"))
    assert "num_workers=4 would bring more" in advice(replace(slow("decode"), workers=2))


# --- the real thing


def look(source: Any, transform: Callable[[Any], Any] | None = None, **options: Any) -> Stages:
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
    assert found.binds == "remote", f"{found}\n{found.to_dict()}"
    assert found.alone_bytes_per_s <= 2 * 20_000
    assert found.fetched_bytes == pytest.approx(20_000, rel=0.1)


@pytest.mark.slow  # what else the machine does at that time is a part of what it finds
def test_a_network_that_is_narrow_is_found(
    s3_bucket: Path, s3_server: S3Server, s3_proxy: FaultyProxy
) -> None:
    s3_proxy.bytes_per_s = 200_000
    found = look(s3_source(s3_bucket, s3_server, s3_proxy.port, 100, 40_000), seconds=6.0)
    assert found.binds == "network", f"{found}\n{found.to_dict()}"


@pytest.mark.slow  # what else the machine does at that time is a part of what it finds
def test_a_decoder_that_is_slow_is_found(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (150, 200, 3), dtype=np.uint8)
    for number in range(60):
        Image.fromarray(pixels).resize((2400, 1800)).save(tmp_path / f"{number}.jpg", quality=85)
    found = look(lambda: cs.open_source(tmp_path, resize=1200, crop=32), seconds=4.0)
    assert found.binds == "decode", f"{found}\n{found.to_dict()}"


@pytest.mark.e2e
def test_a_source_without_a_sample_is_given_up_at_once() -> None:
    class Empty:
        fingerprint = "empty"
        num_units = 3

        def read(self, unit: int, _rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
            yield from ()

    with pytest.raises(SourceError, match="no usable sample"):
        look(Empty())
