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
from cachestream.errors import ConfigError, SourceError, SourceUnavailableError
from cachestream.sources.files import FileSource
from cachestream.tools.diagnose import diagnose as diagnosis
from cachestream.tools.diagnose import probing
from cachestream.tools.diagnose.diagnose import diagnose
from cachestream.tools.diagnose.findings import Findings
from cachestream.tools.diagnose.stages import Crowd, LoaderRate, Stages, Written, judge
from cachestream.transport import metering
from tests.support.proxy import FaultyProxy
from tests.support.s3 import S3Server

TIMEOUT_S: Final = 180
COMMAND: Final = [sys.executable, "-m", "cachestream.cli.app", "diagnose"]

# --- figures


CROWD: Final = Crowd(
    reads=32,
    num_samples=3200,
    fetched_bytes=320_000_000,
    seconds=1.0,
    busy_cores=0.3,
    wanted_cores=0.4,
    decoding=0.01,
)
# Each stage lets 3200 samples/s and more through, on four cores; one read alone brings 100.
EVEN: Final = Stages(
    list_s=0.5,
    num_units=1_000_000,
    is_listing=False,
    num_samples=100,
    fetched_bytes=10_000_000,
    read_s=1.0,
    read_cpu_s=0.001,
    decode_s=0.001,
    transform_s=0.001,
    transform_cpu_s=0.001,
    pack_s=0.001,
    written=Written(100, 15_000_000, 0.005),
    crowd=CROWD,
    delivery=LoaderRate(50_000.0, 7.5e9, 12e9, "cpu"),
    cores=4,
    workers=4,
    has_turbo=False,
)
HELD: Final = replace(
    CROWD, num_samples=32, fetched_bytes=3_200_000
)  # no more than one alone brings, a third of it
BUSY: Final = replace(CROWD, busy_cores=3.9, wanted_cores=4.2, decoding=0.9)
FIGURES: Final = {
    "remote": EVEN,
    "network": replace(EVEN, crowd=HELD),
    "machine": replace(EVEN, crowd=replace(HELD, machine_cores=3.9)),
    "requests": replace(EVEN, read_cpu_s=0.9, crowd=replace(CROWD, busy_cores=1.0, wanted_cores=1.1)),
    "decode": replace(EVEN, decode_s=10.0, crowd=BUSY),
    "transform": replace(EVEN, transform_s=10.0, transform_cpu_s=9.9),
    "pack": replace(EVEN, pack_s=10.0),
    "disk": replace(EVEN, written=Written(100, 15_000_000, 10.0)),
    "transfer": replace(EVEN, delivery=LoaderRate(10.0, 1.5e6, 12e9, "cuda")),
}
ODD: Final = {
    "nothing but a function": replace(
        EVEN,
        num_units=None,
        fetched_bytes=0,
        read_s=0.0,
        read_cpu_s=0.0,
        transform_s=None,
        transform_cpu_s=0.0,
        crowd=replace(CROWD, fetched_bytes=0, decoding=None, busy_cores=1.0),
    ),
    "nothing written": replace(EVEN, written=None, delivery=None),
    "a listing that goes on": replace(EVEN, is_listing=True, list_s=300.0),
    "nothing came at once": replace(EVEN, crowd=replace(CROWD, num_samples=0, fetched_bytes=0, decoding=None)),
    "one unit": replace(EVEN, num_units=1, crowd=replace(CROWD, reads=1)),
    "no time at all": replace(EVEN, read_s=0.0, read_cpu_s=0.0, decode_s=0.0, transform_s=0.0, transform_cpu_s=0.0, pack_s=0.0),
}  # fmt: skip


@pytest.mark.parametrize("binds", list(FIGURES))
def test_the_stage_that_lets_the_fewest_through_is_the_verdict(binds: str) -> None:
    verdict = judge(FIGURES[binds])
    assert verdict.binds == binds
    assert verdict.because
    assert verdict.what_next


@pytest.mark.parametrize("name", [*FIGURES, *ODD])
def test_findings_are_shown_in_eighty_columns_and_told_as_plain_json(name: str) -> None:
    stages = {**FIGURES, **ODD}[name]
    found = Findings("s3://bucket/train", stages, judge(stages), "/tmp", ("A note.",), 3, "ValueError: no")
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 80
    assert f"Verdict: {found.verdict.binds}." in str(found)
    assert "3 skipped, the first because: ValueError: no" in lines
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert told["verdict"]["binds"] == found.verdict.binds
    assert told["stages"]["crowd"]["reads"] == stages.crowd.reads


def test_every_stage_has_a_line_with_its_own_figures() -> None:
    shown = str(Findings("s3://bucket/train", EVEN, judge(EVEN), "/scratch"))
    rows = {line.split()[0]: " ".join(line.split()) for line in shown.splitlines() if line.strip()}
    assert rows["read"] == "read 10 ms 3,200 320 MB/s by 32 at once; one alone 10 MB/s"
    assert rows["decode"] == "decode 10 µs 400,000 on 4 cores"
    assert rows["transform"] == "transform 10 µs 400,000 one at a time in 4 processes"
    assert rows["write"] == "write 50 µs 20,000 3 GB/s into /scratch, synced"
    assert rows["transfer"] == "transfer 20 µs 50,000 7.5 GB/s, 62% of memcpy, no CUDA device"
    assert [name for name in rows if name in {"list", "read", "decode", "transform", "pack", "write", "transfer"}] == [
        "list", "read", "decode", "transform", "pack", "write", "transfer",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("crowd", "has_more"),
    [
        ({}, False),
        ({"busy_cores": 1.0}, True),  # one interpreter has no more
        ({"busy_cores": 2.0, "wanted_cores": 2.1}, False),  # its lock is let go, and cores are free
        ({"busy_cores": 2.0, "wanted_cores": 3.5}, True),  # others have the cores
        ({"decoding": 0.6}, True),
        ({"decoding": None}, False),
        ({"seconds": 0.01, "num_samples": 32, "fetched_bytes": 3_200_000}, True),  # too short to tell
    ],
)
def test_reads_that_something_else_held_up_are_not_the_remotes(crowd: dict[str, Any], has_more: bool) -> None:
    stages = replace(EVEN, crowd=replace(CROWD, **crowd))
    assert stages.remote_has_more is has_more
    assert (judge(stages).binds in ("remote", "network", "machine")) is not has_more
    assert (" > 3,200" in str(Findings("x", stages, judge(stages), "/tmp"))) is has_more


def test_large_units_of_which_few_samples_came_are_counted_by_their_bytes() -> None:
    crowd = replace(CROWD, num_samples=3, fetched_bytes=50_000_000)
    assert replace(EVEN, crowd=crowd).read_per_s == pytest.approx(500)


def test_a_source_that_lets_one_call_at_a_time_through_does_so_in_each_process() -> None:
    crowd = replace(CROWD, num_samples=100, fetched_bytes=0, decoding=None)
    stages = replace(EVEN, fetched_bytes=0, crowd=crowd)
    assert stages.read_per_s == pytest.approx(400)
    assert replace(stages, crowd=replace(crowd, num_samples=3200)).read_per_s == pytest.approx(3200)


def test_other_programs_are_blamed_only_for_reads_that_do_not_help_one_another() -> None:
    crowded = replace(CROWD, machine_cores=4.0)
    assert judge(replace(EVEN, crowd=crowded)).binds == "remote"  # many reads brought more all the same
    verdict = judge(replace(EVEN, crowd=replace(HELD, machine_cores=3.8, busy_cores=0.3)))
    assert "other programs keep 3.5 of 4 cores busy" in verdict.because
    assert judge(replace(EVEN, crowd=replace(HELD, machine_cores=1.0))).binds == "network"


def test_what_is_next_fits_what_was_seen() -> None:
    def steps(stages: Stages) -> str:
        return " / ".join(judge(stages).what_next)

    assert "--workers above 4" in steps(FIGURES["remote"])
    assert "too many requests" in steps(replace(EVEN, crowd=replace(CROWD, slowed_down=2)))
    assert "--workers" not in steps(replace(EVEN, crowd=replace(CROWD, slowed_down=2)))
    assert "only 20 units" in steps(replace(EVEN, num_units=20, crowd=replace(CROWD, reads=20)))
    assert "cachestream[jpeg]" in steps(FIGURES["decode"])
    assert "cachestream[jpeg]" not in steps(replace(FIGURES["decode"], has_turbo=True))
    assert "--workers above 2" in steps(replace(FIGURES["decode"], workers=2))
    assert "--workers above 4" in steps(replace(FIGURES["transform"], transform_cpu_s=0.1))  # it waits
    assert "leave out the transform" in steps(FIGURES["pack"])
    assert "leave out the transform" not in steps(replace(FIGURES["pack"], transform_s=None))


# --- the real thing


@pytest.fixture(autouse=True)
def short_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast batches come is not what these tests are about."""
    monkeypatch.setattr(diagnosis, "_TRANSFER_S", 0.05)


def look(source: Any, transform: Callable[[Any], Any] | None = None, **options: Any) -> Findings:
    """A short look at `source`, which is a Source or a function that opens it."""
    opener = source if callable(source) else lambda: cs.open_source(source)
    return diagnose("the source", opener, transform, **{"seconds": 0.4, "workers": 1, **options})


class Numbers:
    """Samples that cost nothing."""

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.full(100, index)}


def burn(sample: Any) -> Any:
    """A tenth of a second of the processor, however busy it is."""
    until_s = time.thread_time() + 0.1
    while time.thread_time() < until_s:
        pass
    return sample


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
    assert found.stages.read_s >= found.stages.num_samples * 1.5
    assert found.stages.fetched_bytes == found.stages.num_samples * 20_000


@pytest.mark.slow  # what else the machine does at that time is a part of what it finds
def test_a_network_that_is_narrow_is_found(
    s3_bucket: Path, s3_server: S3Server, s3_proxy: FaultyProxy
) -> None:
    put_files(s3_bucket, 100, 40_000)
    s3_proxy.bytes_per_s = 200_000
    found = look(s3_source(s3_bucket, s3_server, s3_proxy.port), seconds=4.0)
    assert found.stages.crowd.machine_cores is not None
    expected = "machine" if found.stages.others_crowd else "network"
    assert found.verdict.binds == expected, f"{found}\n{found.stages}"


def test_objects_on_their_way_when_the_time_is_up_are_counted(
    s3_bucket: Path, s3_server: S3Server, s3_proxy: FaultyProxy
) -> None:
    put_files(s3_bucket, 100, 100_000)
    s3_proxy.bytes_per_s = 1_000_000
    found = look(s3_source(s3_bucket, s3_server, s3_proxy.port), seconds=5.0, workers=2)
    crowd = found.stages.crowd
    assert crowd.reads == 32
    assert crowd.num_samples >= 20, "those that were read at once come together, after 3.2 s"
    assert crowd.num_samples / crowd.seconds <= 15, "of the ten a second that the network lets through"


def test_what_the_cores_did_holds_what_this_process_did() -> None:
    before_s, until_s = probing.machine_s(), time.thread_time() + 0.5
    assert before_s is not None
    while time.thread_time() < until_s:
        pass
    after_s = probing.machine_s()
    assert after_s is not None
    assert after_s - before_s > 0.25  # counted in hundredths of a second, by looking who runs


@pytest.mark.slow  # what else the machine does at that time is a part of what it finds
def test_a_decoder_that_is_slow_is_found(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (150, 200, 3), dtype=np.uint8)
    large = Image.fromarray(pixels).resize((2400, 1800))
    for number in range(12):
        large.save(tmp_path / f"{number}.jpg", quality=85)
    found = look(lambda: cs.open_source(tmp_path, resize=1200, crop=32))
    assert found.verdict.binds == "decode", f"{found}\n{found.stages}"
    assert found.stages.fetched_bytes == found.stages.num_samples * os.path.getsize(tmp_path / "0.jpg")


def test_a_transform_that_is_slow_is_found() -> None:
    found = look(Numbers(), burn)
    # The disk of a busy machine may take longer still to write a few samples: that is not what this is about.
    verdict = judge(replace(found.stages, written=None, delivery=None))
    assert verdict.binds == "transform", f"{found}\n{found.stages}"
    assert "keeps the processor busy" in verdict.because
    assert found.stages.transform_cpu_s >= found.stages.num_samples * 0.1


@pytest.mark.slow
def test_a_transform_that_waits_is_found() -> None:
    def wait(sample: Any) -> Any:
        threading.Event().wait(0.1)
        return sample

    found = look(Numbers(), wait)
    assert found.verdict.binds == "transform", f"{found}\n{found.stages}"
    assert "waits" in found.verdict.because


@pytest.mark.slow
def test_a_dataset_that_waits_is_the_remote_it_reads_from() -> None:
    class Waiting(Numbers):
        def __getitem__(self, index: int) -> dict[str, Any]:
            threading.Event().wait(0.1)
            return super().__getitem__(index)

    found = look(Waiting())
    assert found.verdict.binds == "remote", f"{found}\n{found.stages}"
    assert found.stages.fetched_bytes == 0


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


@pytest.mark.parametrize("make", [_tars, _parquet, _array, _function], ids=lambda make: make.__name__)
def test_every_kind_of_source_is_measured_to_the_end_and_leaves_nothing(
    make: Callable[[Path], Any], tmp_path: Path
) -> None:
    data, folder = tmp_path / "data", tmp_path / "folder"
    data.mkdir()
    folder.mkdir()
    found = look(make(data), folder=str(folder))
    stages = found.stages
    assert stages.num_samples > 0
    assert stages.pack_s > 0
    assert stages.written is not None
    assert stages.written.num_samples >= stages.num_samples or stages.written.num_bytes > 64_000_000
    assert stages.delivery is not None
    assert not found.notes
    assert not found.skipped
    assert not list(folder.iterdir())
    assert metering._on_fetched is metering._ignore


def test_only_the_first_names_of_a_large_listing_are_asked_for(s3_bucket: Path, s3_server: S3Server) -> None:
    put_files(s3_bucket, 30, 100)
    options = s3_server.storage_options
    found = look(lambda: FileSource(f"s3://{s3_bucket.name}", storage_options=options, first_names=10))
    assert (found.stages.num_units, found.stages.is_listing) == (10, True)
    assert "10 units and more" in str(found)


def test_what_cannot_be_used_is_counted_and_told(tmp_path: Path) -> None:
    for number in range(6):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{number}.png")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    found = look(tmp_path)
    assert found.skipped == 1
    assert "broken.png" in found.failure
    assert "1 skipped" in str(found)


def test_a_source_of_which_nothing_can_be_used_says_why(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(b"no picture")
    with pytest.raises(SourceError, match=r"the source: none of 3 units .*\.png"):
        look(tmp_path)


def test_a_transform_that_always_fails_says_so_without_secrets() -> None:
    with pytest.raises(
        SourceError, match=r"none of the first 20 samples .*ValueError: not with me"
    ) as caught:
        look(Numbers(), fail)
    assert "hunter2" not in str(caught.value)


def test_a_transform_that_drops_all_is_measured_without_the_stages_that_follow() -> None:
    found = look(Numbers(), lambda _sample: None)
    assert (found.stages.written, found.stages.delivery) == (None, None)
    assert "dropped all samples" in str(found)


class Lost:
    """A remote that does not answer the first `times` reads."""

    fingerprint, num_units = "lost", 1000

    def __init__(self, times: int) -> None:
        self.left = times

    def read(self, unit: int, _rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
        self.left -= 1
        if self.left >= 0:
            raise SourceUnavailableError("the remote is away")
        yield str(unit), {"x": np.zeros(10)}


def test_a_remote_that_is_away_for_a_moment_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "AGAIN_S", 0.05)
    assert look(Lost(3)).stages.num_samples > 0


def test_a_remote_that_stays_away_is_given_up_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "PATIENCE_S", 0.3)
    with pytest.raises(SourceUnavailableError, match=r"no sample came .*the remote is away"):
        look(Lost(1 << 30))


def test_a_transform_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "PATIENCE_S", 0.3)
    monkeypatch.setattr(probing, "LEAVE_S", 0.1)
    let_go = threading.Event()

    def hang(_sample: Any) -> None:
        let_go.wait(TIMEOUT_S)

    try:
        with pytest.raises(SourceUnavailableError, match="the transform comes to an end"):
            look(Numbers(), hang)
    finally:
        let_go.set()


def test_a_verdict_is_given_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "_MIN_FREE", "1000PB")
    found = look(Numbers(), burn, folder=str(tmp_path))
    assert found.verdict.binds == "transform"
    assert "Not measured: writing and loading" in str(found)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [{"folder": "/no/such/folder"}, {"workers": 0}])
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        look(Numbers(), **options)


# --- the command line


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A folder with a module of the user's own."""
    (tmp_path / "mine.py").write_text(
        "data = [{'x': i} for i in range(500)]\n\ndef same(sample):\n    return sample\n"
    )
    return tmp_path


def cli(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
    )  # fmt: skip


def test_the_command_prints_data_on_stdout_and_progress_on_stderr(mine: Path) -> None:
    result = cli("mine:data", "--transform", "mine:same", "--seconds", 0.3, "--json", cwd=mine)
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["source"] == "mine:data"
    assert told["stages"]["num_units"] == 500
    assert told["samples_per_s"].keys() == {"read", "decode", "transform", "pack", "write", "transfer"}
    assert told["verdict"]["what_next"]
    steps = [line.split()[0] for line in result.stderr.splitlines()]
    assert [step for step in steps if step in {"listing", "reading", "writing"}] == [
        "listing", "reading", "reading", "writing",
    ]  # fmt: skip


def test_a_source_that_cannot_be_opened_ends_the_command_with_one_clear_line(
    mine: Path, s3_bucket: Path, s3_server: S3Server
) -> None:
    options = ("--storage-option", f"endpoint_url={s3_server.endpoint_url}", "--storage-option", "key=wrong")
    result = cli(f"s3://{s3_bucket.name}/", *options, "--storage-option", "secret=hunter2", cwd=mine)
    assert (result.returncode, result.stdout) == (1, "")
    assert s3_bucket.name in result.stderr
    assert "Traceback" not in result.stderr
    assert "hunter2" not in result.stderr


def test_ctrl_c_leaves_nothing_behind(mine: Path) -> None:
    folder = mine / "folder"
    folder.mkdir()
    command = [*COMMAND, "mine:data", "--seconds", "0.2", "--folder", str(folder)]
    with subprocess.Popen(
        command, cwd=mine, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
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
