"""`cachestream diagnose`: the verdict by figures, and by real sources that are slow in one way each."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from PIL import Image

import cachestream as cs
from cachestream.cli.main import main
from cachestream.errors import CacheFullError, SourceError, SourceUnavailableError
from cachestream.formats.files import FileSource
from cachestream.tools.diagnose import diagnose as diagnosis
from cachestream.tools.diagnose import probe
from cachestream.tools.diagnose.diagnose import diagnose
from cachestream.tools.diagnose.stages import Findings, Measurement, Stages, Throughput, judge
from cachestream.transport import metering
from tests.support.forked import run_forked
from tests.support.interpreters import QUICK
from tests.support.proxy import FaultyProxy
from tests.support.s3 import S3Server
from tests.worker.sources import FetchedElsewhere

TIMEOUT_S: Final = 180
COMMAND: Final = [sys.executable, "-m", "cachestream", "diagnose"]

# --- figures


def run(reads: int, rate: int, **seconds: float) -> Measurement:
    """A second in which `rate` samples of 100 kB came."""
    times = dict.fromkeys(("read", "decode", "transform", "pack"), 0.001) | {"read": 1.0} | seconds
    cpu_s = times if seconds else times | {"read": 0.001}
    return Measurement(reads, rate, rate * 100_000, 1.0, busy_cores=0.3, wall_s=times, cpu_s=cpu_s)


# Each stage lets 3200 samples/s and more through, on four cores; one read alone brings 100.
EVEN: Final = Stages(
    list_s=0.5,
    num_units=1_000_000,
    is_listing=False,
    alone=run(1, 100),
    together=run(32, 3200),
    written=Throughput(100, 15_000_000, 0.005),
    delivered=Throughput(100, 15_000_000, 0.002),
    device="cpu",
    cores=4,
    workers=4,
)
WAITS: Final = replace(run(1, 100), wall_s=run(1, 100, transform=10.0).wall_s)
FIGURES: Final = {
    "remote": EVEN,
    "network": replace(EVEN, together=run(32, 150)),
    "requests": replace(EVEN, alone=run(1, 100, read=0.9), together=replace(run(32, 400), busy_cores=1.0)),
    "decode": replace(EVEN, alone=run(1, 100, decode=10.0, read=0.001), together=run(32, 40, decode=30.0)),
    "transform": replace(EVEN, alone=WAITS),
    "pack": replace(EVEN, alone=run(1, 100, pack=10.0, read=0.001)),
    "disk": replace(EVEN, written=Throughput(100, 15_000_000, 10.0)),
    "transfer": replace(EVEN, delivered=Throughput(100, 15_000_000, 10.0), device="cuda"),
}
NO_TIME: Final = dict.fromkeys(("read", "decode", "transform", "pack"), 0.0)
NOTHING: Final = Measurement(1, 1, 0, 0.0001, 1.0, NO_TIME, NO_TIME)
ODD: Final = {
    "nothing but a function": replace(EVEN, num_units=None, alone=NOTHING, together=NOTHING),
    "a listing that goes on": replace(EVEN, is_listing=True, list_s=300.0),
    "nothing came at once": replace(EVEN, together=run(32, 0)),
    "one unit": replace(EVEN, num_units=1, together=run(1, 100)),
}


@pytest.mark.parametrize("binds", list(FIGURES))
def test_the_stage_that_lets_the_fewest_through_is_the_verdict(binds: str) -> None:
    verdict = judge(FIGURES[binds])
    assert verdict.binds == binds
    assert verdict.because
    assert verdict.what_next
    assert "{" not in " ".join(verdict.what_next)


@pytest.mark.parametrize("name", [*FIGURES, *ODD])
def test_findings_are_shown_in_eighty_columns_and_told_as_plain_json(name: str) -> None:
    stages = {**FIGURES, **ODD}[name]
    found = Findings("s3://bucket/train", stages, judge(stages), 3, "ValueError: no")
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 80
    assert f"Verdict: {found.verdict.binds}." in str(found)
    assert "3 skipped, the first because: ValueError: no" in lines
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert told["verdict"]["binds"] == found.verdict.binds
    assert told["stages"]["together"]["reads"] == stages.together.reads


def test_every_stage_has_a_line_with_its_own_figures() -> None:
    shown = str(Findings("s3://bucket/train", EVEN, judge(EVEN)))
    rows = {line.split()[0]: " ".join(line.split()) for line in shown.splitlines() if line.strip()}
    assert rows["read"] == "read 10 3,200 320 MB/s by 32 at once; one alone 10 MB/s"
    assert rows["decode"] == "decode 0.01 400,000 cores: 4"
    assert rows["transform"] == "transform 0.01 400,000 sampling processes: 4"
    assert rows["write"] == "write 0.05 20,000 3 GB/s, synced"
    assert rows["transfer"] == "transfer 0.02 50,000 7.5 GB/s, no accelerator"


@pytest.mark.parametrize(
    ("together", "has_more"),
    [
        ({}, False),
        ({"busy_cores": 1.0}, True),  # one interpreter has no more
        ({"busy_cores": 2.0}, False),  # its lock is let go, and cores are free
        ({"busy_cores": 3.5}, True),
        ({"wall_s": {"read": 1.0, "decode": 1.5}}, True),
        ({"seconds": 0.01, "num_samples": 32, "fetched_bytes": 3_200_000}, True),  # too short to tell
    ],
)
def test_reads_that_something_else_held_up_are_not_the_remotes(
    together: dict[str, Any], has_more: bool
) -> None:
    stages = replace(EVEN, together=replace(EVEN.together, **together))
    assert stages.remote_has_more is has_more
    assert (judge(stages).binds in ("remote", "network")) is not has_more
    assert (" > 3,200" in str(Findings("x", stages, judge(stages)))) is has_more


def test_large_units_of_which_few_samples_came_are_counted_by_their_bytes() -> None:
    together = replace(EVEN.together, num_samples=3, fetched_bytes=50_000_000)
    assert replace(EVEN, together=together).rates["read"] == pytest.approx(500)


# --- the real thing


@pytest.fixture(autouse=True)
def short_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the measurement of batches, which these tests are not about."""
    monkeypatch.setattr(diagnosis, "_TRANSFER_S", 0.05)


def look(source: Any, transform: Callable[[Any], Any] | None = None, **options: Any) -> Findings:
    """A short look at `source`, which is a Source or a function that opens it."""
    opener = source if callable(source) else lambda: cs.open_source(source)
    return diagnose("the source", opener, transform, **{"seconds": 0.3, "workers": 1, **options})


class Numbers:
    """Samples that cost nothing."""

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.full(100, index)}


def fail(_sample: Any) -> Any:
    raise ValueError("not with me, s3://user:hunter2@bucket/x")


def put_files(folder: Path, count: int, size_bytes: int) -> None:
    rng = np.random.default_rng(0)
    for number in range(count):
        (folder / f"{number:04d}.bin").write_bytes(rng.bytes(size_bytes))


def s3_source(bucket: Path, server: S3Server, port: int) -> Callable[[], Any]:
    options = server.options_through(port)
    return lambda: cs.open_source(f"s3://{bucket.name}", storage_options=options)


@pytest.mark.slow  # what else the machine does at that time is a part of what it finds
def test_a_remote_that_is_far_away_is_found(
    s3_bucket: Path, s3_server: S3Server, s3_proxy: FaultyProxy
) -> None:
    put_files(s3_bucket, 16, 20_000)
    s3_proxy.latency_s = 1.5
    found = look(s3_source(s3_bucket, s3_server, s3_proxy.port), seconds=12.0)
    assert found.verdict.binds == "remote", f"{found}\n{found.stages}"
    assert found.stages.read_s >= found.stages.alone.num_samples * 1.5
    assert found.stages.alone.fetched_bytes == found.stages.alone.num_samples * 20_000


@pytest.mark.slow  # what else the machine does at that time is a part of what it finds
def test_a_network_that_is_narrow_is_found(
    s3_bucket: Path, s3_server: S3Server, s3_proxy: FaultyProxy
) -> None:
    put_files(s3_bucket, 100, 40_000)
    s3_proxy.bytes_per_s = 200_000
    found = look(s3_source(s3_bucket, s3_server, s3_proxy.port), seconds=4.0)
    assert found.verdict.binds == "network", f"{found}\n{found.stages}"


@pytest.mark.e2e
def test_objects_on_their_way_when_the_time_is_up_are_counted(
    s3_bucket: Path, s3_server: S3Server, s3_proxy: FaultyProxy
) -> None:
    put_files(s3_bucket, 100, 100_000)
    s3_proxy.bytes_per_s = 2_000_000
    found = look(s3_source(s3_bucket, s3_server, s3_proxy.port), seconds=2.5, workers=2)
    together = found.stages.together
    assert together.reads == 32
    assert together.num_samples >= 20, "those that were read at once come together, after 1.6 s"
    assert together.num_samples / together.seconds <= 30, (
        "of the twenty a second that the network lets through"
    )


@pytest.mark.slow  # what else the machine does at that time is a part of what it finds
def test_a_decoder_that_is_slow_is_found(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (150, 200, 3), dtype=np.uint8)
    large = Image.fromarray(pixels).resize((2400, 1800))
    for number in range(12):
        large.save(tmp_path / f"{number}.jpg", quality=85)
    found = look(lambda: cs.open_source(tmp_path, resize=1200, crop=32))
    assert found.verdict.binds == "decode", f"{found}\n{found.stages}"
    assert found.stages.alone.fetched_bytes == found.stages.alone.num_samples * os.path.getsize(
        tmp_path / "0.jpg"
    )


@pytest.mark.e2e
def test_packing_of_tokens_is_measured_and_a_wrong_field_is_told() -> None:
    texts = [{"text": "x" * 70}] * 100
    found = look(texts, cs.pack_tokens(29, "text", tokenizer=lambda text: list(text.encode())))
    stages = found.stages
    assert stages.alone.num_samples >= 2, "of each text two windows, and a rest that is dropped"
    assert stages.alone.cpu_s["decode"] > 0
    assert stages.delivered.num_samples > 0
    assert not found.skipped
    with pytest.raises(SourceError, match=r"no field 'tokens' to pack, but 'text': give pack_tokens\(field="):
        look(texts, cs.pack_tokens(29))


def test_bytes_fetched_in_a_thread_pool_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(3_000_000))
    source = FetchedElsewhere(tmp_path / "a.bin")
    found = probe.Probe(source, [0], None).run(0.01)
    assert found.fetched_bytes == found.num_samples * 3_000_000 > 0


@pytest.mark.slow
def test_a_dataset_that_waits_is_the_remote_it_reads_from() -> None:
    class Waiting(Numbers):
        def __getitem__(self, index: int) -> dict[str, Any]:
            threading.Event().wait(0.1)
            return super().__getitem__(index)

    found = look(Waiting())
    assert found.verdict.binds == "remote", f"{found}\n{found.stages}"
    assert found.stages.alone.fetched_bytes == 0


def _tars(folder: Path) -> Any:
    for number in range(2):
        with tarfile.open(folder / f"{number}.tar", "w") as tar:
            for sample in range(20):
                for extension, data in (("bin", b"x" * 1000), ("cls", b"3")):
                    member = tarfile.TarInfo(f"{sample:03d}.{extension}")
                    member.size = len(data)
                    tar.addfile(member, BytesIO(data))
    return f"{folder}/*.tar"


def _parquet(folder: Path) -> Any:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table({"a": np.arange(5000)})
    parquet.write_table(table, folder / "t.parquet", row_group_size=1000)
    return folder / "t.parquet"


def _array(folder: Path) -> Any:
    np.save(folder / "a.npy", np.zeros((100, 32, 32), np.float32))
    return cs.ArraySource(folder / "a.npy", window=(8, 32, 32))


def _function(_folder: Path) -> Any:
    def draw(rng: np.random.Generator) -> Any:
        return {"x": rng.random(10)}

    return lambda: cs.open_source(draw)


@pytest.mark.e2e
@pytest.mark.parametrize("make", [_tars, _parquet, _array, _function], ids=lambda make: make.__name__)
def test_every_kind_of_source_is_measured_to_the_end_and_leaves_nothing(
    make: Callable[[Path], Any], tmp_path: Path
) -> None:
    data, folder = tmp_path / "data", tmp_path / "folder"
    data.mkdir()
    folder.mkdir()
    found = look(make(data), folder=str(folder))
    stages = found.stages
    assert stages.alone.num_samples > 0
    assert stages.alone.wall_s["pack"] > 0
    assert stages.delivered.num_samples > 0
    assert not found.skipped
    assert not list(folder.iterdir())
    assert metering._on_fetched is metering._ignore


@pytest.mark.e2e
def test_only_the_first_names_of_a_large_listing_are_asked_for(s3_bucket: Path, s3_server: S3Server) -> None:
    put_files(s3_bucket, 30, 100)
    options = s3_server.storage_options
    found = look(lambda: FileSource(f"s3://{s3_bucket.name}", storage_options=options, first_names=10))
    assert (found.stages.num_units, found.stages.is_listing) == (10, True)
    assert "10 units and more" in str(found)


@pytest.mark.e2e
def test_what_cannot_be_used_is_counted_and_told(tmp_path: Path) -> None:
    for number in range(6):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{number}.png")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    found = look(tmp_path)
    assert found.skipped == 1
    assert "broken.png" in found.failure
    assert "1 skipped" in str(found)
    with pytest.raises(SourceError, match=r"the source: no usable sample .*broken\.png"):
        look(tmp_path / "broken.png")


@pytest.mark.e2e
def test_what_fails_is_counted_once_where_the_only_unit_is_read_again() -> None:
    class OneBad:
        """One unit of three samples, the first of which cannot be stored."""

        fingerprint = "one bad"
        num_units = 1

        def read(self, unit: int, _rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
            yield "bad", {"x": object()}
            yield from ((str(number), {"x": np.zeros(10)}) for number in range(2))

    assert look(OneBad()).skipped == 1


@pytest.mark.parametrize("num_units", [0, 3])
def test_a_source_without_a_sample_is_given_up_at_once(num_units: int) -> None:
    class Empty:
        fingerprint = "empty"

        def __init__(self) -> None:
            self.num_units = num_units

        def read(self, unit: int, _rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
            yield from ()

    began_s = time.monotonic()
    with pytest.raises(SourceError, match="no usable sample"):
        look(Empty())
    assert time.monotonic() - began_s < probe.PATIENCE_S / 2


def test_a_transform_that_always_fails_says_so_without_secrets() -> None:
    with pytest.raises(SourceError, match=r"no usable sample .*ValueError: not with me") as caught:
        look(Numbers(), fail)
    assert "hunter2" not in str(caught.value)


class Lost:
    """A remote that answers none of the first reads."""

    fingerprint, num_units, left = "lost", 1000, 3

    def read(self, unit: int, _rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
        self.left -= 1
        if self.left >= 0:
            raise SourceUnavailableError("the remote is away")
        yield str(unit), {"x": np.zeros(10)}


@pytest.mark.e2e
def test_a_remote_that_is_away_for_a_moment_is_read_after_it() -> None:
    found = look(Lost())
    assert found.stages.alone.num_samples > 0
    assert (found.skipped, found.failure) == (3, "the remote is away")


@pytest.mark.e2e
def test_a_transform_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PATIENCE_S", 0.3)
    monkeypatch.setattr(probe, "LEAVE_S", 0.1)
    let_go = threading.Event()

    def hang(_sample: Any) -> None:
        let_go.wait(TIMEOUT_S)

    try:
        with pytest.raises(SourceError, match="the transform ends"):
            look(Numbers(), hang)
    finally:
        let_go.set()


@pytest.mark.e2e
def test_a_folder_without_space_is_an_error_that_names_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "_MIN_FREE", "1000PB")
    with pytest.raises(CacheFullError, match="try --folder"):
        look(Numbers(), folder=str(tmp_path))
    assert not list(tmp_path.iterdir())


# --- the command line


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A folder with a module of the user's own."""
    (tmp_path / "mine.py").write_text(
        "data = [{'x': i} for i in range(500)]\n\ndef same(sample):\n    return sample\n"
    )
    return tmp_path


def cli(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run_forked(main, ("diagnose", *arguments), cwd=cwd, timeout_s=TIMEOUT_S)


@pytest.mark.e2e
@pytest.mark.usefixtures("forked")
def test_a_source_that_cannot_be_opened_ends_the_command_with_one_clear_line(
    mine: Path, s3_bucket: Path, s3_server: S3Server
) -> None:
    options = ("--storage-option", f"endpoint_url={s3_server.endpoint_url}", "--storage-option", "key=wrong")
    result = cli(f"s3://{s3_bucket.name}/", *options, "--storage-option", "secret=hunter2", cwd=mine)
    assert (result.returncode, result.stdout) == (1, "")
    assert s3_bucket.name in result.stderr
    assert "Traceback" not in result.stderr
    assert "hunter2" not in result.stderr


@pytest.mark.e2e
def test_ctrl_c_leaves_nothing_behind(mine: Path) -> None:
    folder = mine / "folder"
    folder.mkdir()
    command = [*COMMAND, "mine:data", "--seconds", "0.2", "--folder", str(folder)]
    with subprocess.Popen(
        command,
        cwd=mine,
        env={**os.environ, "PYTHONPATH": QUICK},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            seen = iter(process.stderr.readline, "")
            assert any(re.match("writing into a temporary folder", line) for line in seen)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
    assert not list(folder.iterdir())
    assert process.returncode in (
        128 + signal.SIGINT,
        -signal.SIGINT,
        0,
    )  # the others: it was done, or ending
