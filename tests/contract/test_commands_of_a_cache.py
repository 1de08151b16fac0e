"""The commands that look at a cache and change it: status, limit, evict, clear, verify, refetch, plot and bench.

Data goes to stdout, words to stderr; 0 is done, 1 a problem found, 2 wrong use.
"""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from PIL import Image

import cachestream as cs
from tests.contract.commands import DEADLINE_S, call, done, program, refused, told
from tests.contract.conftest import NUM_SAMPLES, numbers_in


@pytest.fixture
def path(new_path: Callable[[], Path]) -> Path:
    return new_path()


@pytest.fixture
def leased(path: Path) -> Iterator[Path]:
    """A cache of which an epoch holds all shards."""
    with cs.Cache(path) as cache, cache.snapshot():
        yield path


# --- status


def test_status_says_in_json_what_it_says_in_python_and_in_words_the_same(path: Path) -> None:
    with cs.Cache(path) as cache:
        status = cache.status()
    assert told("status", path) == json.loads(json.dumps(status.to_dict()))
    shown = done("status", path, COLUMNS="120")
    assert shown.splitlines()[0] == f"{path}  complete"
    for words in (
        f"{NUM_SAMPLES} in {status.num_shards} shards",
        str(status).split(", ")[1],
        "100.0% of 300 units",
        "0 snapshots taken, none in use",
        "lru, 0 B of the disk stay free",
        "{number: int64[], x: float32[1024]}",
        str(status.source),
    ):
        assert words in shown
    assert told("status", CACHESTREAM_CACHE=str(path)) == told("status", path)
    assert json.loads(done("status", path, CACHESTREAM_STATUS_JSON="1")) == told("status", path)


def test_status_names_the_epochs_in_use_and_what_was_skipped(leased: Path) -> None:
    shard = leased / "shards" / "000000000003.safetensors"
    lost = len(numbers_in(shard))
    shard.write_bytes(b"?")
    call("verify", leased, "--repair")
    shown = done("status", leased, COLUMNS="200")
    assert "1 in use, which hold " in shown
    assert "1 damaged shard, put aside" in shown
    assert f"{lost} samples" in shown
    assert f"{lost} × quarantined: " in shown


@pytest.mark.parametrize("width", [20, 40, 200])
def test_status_fits_into_any_width(width: int, path: Path) -> None:
    lines = done("status", path, COLUMNS=str(width)).splitlines()
    assert max(map(len, lines)) <= width


@pytest.mark.e2e
def test_watching_writes_lines_of_json_until_ctrl_c_or_its_reader_goes(path: Path) -> None:
    with (
        program("status", path, "--watch", "--json", "--interval", 0.1) as stopped,
        program("status", path, "--watch", "--interval", 0.1) as left,
    ):
        assert stopped.stdout is not None
        assert left.stdout is not None
        assert left.stderr is not None
        looks = [json.loads(stopped.stdout.readline()) for _ in range(2)]
        assert [one["num_samples"] for one in looks] == [NUM_SAMPLES] * 2
        stopped.send_signal(signal.SIGINT)
        assert stopped.wait(DEADLINE_S) == 0
        assert left.stdout.readline().startswith(f"{NUM_SAMPLES} samples in ")
        left.stdout.close()
        assert left.wait(DEADLINE_S) != 0
        assert left.stderr.read() == ""


@pytest.mark.e2e
def test_watching_on_a_terminal_draws_what_changes(path: Path) -> None:
    terminal, end = pty.openpty()
    drawn = b""
    deadline_s = time.monotonic() + DEADLINE_S

    def await_words(words: bytes) -> None:
        nonlocal drawn
        while words not in drawn:
            assert time.monotonic() < deadline_s, drawn
            if select.select([terminal], [], [], 1)[0]:
                drawn += os.read(terminal, 65536)

    command = [sys.executable, "-m", "cachestream", "status", str(path), "--watch", "--interval", "0.1"]
    try:
        with subprocess.Popen(command, stdin=end, stdout=end, env={**os.environ, "TERM": "xterm"}) as process:
            try:
                await_words(b"300 in ")
                done("evict", path, "--to", "0")
                await_words(b"0 in 0 shards")
                process.send_signal(signal.SIGINT)
                assert process.wait(DEADLINE_S) == 0
            finally:
                process.kill()
    finally:
        os.close(terminal)
        os.close(end)


# --- limit, evict, clear


def test_limit_sets_the_limit_evicts_down_to_it_and_says_what_is_taken(path: Path) -> None:
    result = call("limit", path, "1MB")
    assert (result.returncode, result.stdout) == (0, "")
    with cs.Cache(path) as cache:
        assert cache.size_limit == 1_000_000 >= cache.size_bytes
        assert 0 < cache.num_samples < NUM_SAMPLES
    assert result.stderr.startswith(f"{path}: ")
    assert result.stderr.endswith(" of 1 MB\n")


def test_evict_frees_down_to_a_size_and_clear_removes_all(path: Path) -> None:
    before = told("status", path)["size_bytes"]
    result = call("evict", path, "--to", "1MB")
    after = told("status", path)
    assert (result.returncode, result.stdout) == (0, "")
    assert after["size_bytes"] <= 1_000_000 < before
    assert "freed " in result.stderr
    cleared = call("clear", path)
    assert cleared.stderr == f"removed {after['num_samples']} samples from {path}\n"
    assert (told("status", path)["fill_state"], told("status", path)["num_samples"]) == ("none", 0)
    assert done("clear", path) == ""


def test_what_epochs_hold_stays_and_is_a_problem(leased: Path) -> None:
    assert "more than asked for: epochs in use hold their shards" in refused(1, "evict", leased, "--to", "0")
    assert "more than asked for: epochs in use hold their shards" in refused(1, "limit", leased, "1MB")
    assert "leased by epochs in use; close them" in refused(1, "clear", leased)
    assert told("status", leased)["num_samples"] == NUM_SAMPLES


# --- verify and refetch


def test_verify_finds_damage_and_repairs_it_when_it_is_told_to(path: Path) -> None:
    lost = {number: len(numbers_in(path / "shards" / f"{number:012}.safetensors")) for number in (2, 5)}
    assert done("verify", path) == f"{told('status', path)['num_shards']} shards, 300 samples: all sound\n"
    shard, stranger = path / "shards" / "000000000002.safetensors", path / "shards" / "000000000999.tmp"
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    stranger.touch()
    (path / "shards" / "000000000005.safetensors").unlink()
    found = call("verify", path)
    assert found.returncode == 1
    lines = found.stdout.splitlines()
    assert lines[0].startswith(f"corrupt: {shard}: ")
    assert lines[1:3] == ["missing: shard 5", f"unknown file: {stranger}"]
    assert lines[-1].endswith(
        "1 corrupt, 1 missing, 1 unknown files; run 'cachestream verify CACHE --repair'"
    )
    report = call("verify", path, "--json")
    assert report.returncode == 1
    assert json.loads(report.stdout)["ok"] is False
    assert json.loads(report.stdout)["missing"] == [5]
    assert told("verify", path, "--repair")["repaired"] is True
    keys = {
        "num_shards",
        "num_samples",
        "corrupt",
        "missing",
        "orphans",
        "catalogue_problem",
        "repaired",
        "ok",
    }
    assert told("verify", path).keys() == keys
    assert told("verify", path)["num_samples"] == NUM_SAMPLES - sum(lost.values())
    failures = {failure["example"]: failure for failure in told("status", path)["failures"]}
    assert (failures[str(shard)]["kind"], failures[str(shard)]["count"]) == ("quarantined", lost[2])
    assert sum(failure["count"] for failure in failures.values()) == sum(lost.values())


def test_refetch_brings_recorded_shards_back_byte_for_byte_and_says_what_did_not_come(tmp_path: Path) -> None:
    files, path, transform = tmp_path / "files", tmp_path / "cache", tmp_path / "mine.py"
    files.mkdir()
    transform.write_text("def doubled(sample):\n    return {'array': sample['array'] * 2}\n")
    for number in range(20):
        np.save(files / f"{number:02}.npy", np.full(500, number, np.float32))
    fill = (
        "worker",
        files,
        path,
        "--workers",
        1,
        "--shard-size",
        "8KB",
        "--size-limit",
        "4MB",
        "--min-free",
        0,
    )
    done(*fill, "--transform", "mine:doubled", cwd=tmp_path)
    with cs.Cache(path) as cache, cs.EpochLoader(cache, 5, record=tmp_path / "run") as loader:
        batches = [batch["array"] for batch in loader]
    before = {shard.read_bytes() for shard in (path / "shards").iterdir()}
    done("evict", path, "--to", 0)
    command = ("refetch", tmp_path / "run", files, path, "--transform", "mine:doubled")
    result = call(*command, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, "")
    assert result.stderr == f"{len(before)} shards: 0 were cached, {len(before)} came back, 0 did not\n"
    assert {shard.read_bytes() for shard in (path / "shards").iterdir()} == before
    with cs.Cache(path) as cache, cs.EpochLoader(cache, 5, replay=tmp_path / "run") as loader:
        assert all(a.equal(b["array"]) for a, b in zip(batches, loader, strict=True))
    np.save(files / "00.npy", np.full(500, 77, np.float32))
    done("evict", path, "--to", 0)
    result = call(*command, "--size-limit", "5MB", cwd=tmp_path)
    assert result.returncode == 1
    assert "came back different" in result.stderr
    assert told("status", path)["size_limit"] == 5_000_000
    assert "no manifests of epochs" in refused(2, "refetch", files, files, path)


# --- plot and bench


@pytest.mark.parametrize("ending", ["png", "svg", "pdf", ""])
def test_plot_draws_a_picture_and_prints_its_name(ending: str, path: Path, tmp_path: Path) -> None:
    output = tmp_path / f"growth.{ending}".rstrip(".")
    written = Path(done("plot", path, "-o", output).strip())
    assert written == tmp_path / f"growth.{ending or 'png'}"
    if ending == "svg":
        assert ET.parse(written).getroot().tag.endswith("svg")
    elif ending == "pdf":
        assert written.read_bytes().startswith(b"%PDF-")
    else:
        with Image.open(written) as picture:
            picture.load()
            assert (picture.format, min(picture.size) > 400) == ("PNG", True)
            assert len(picture.convert("RGB").getcolors(1 << 24) or ()) > 20


def test_what_cannot_be_drawn_is_refused_with_the_reason(path: Path, tmp_path: Path) -> None:
    assert "growth.txt" in refused(2, "plot", path, "-o", tmp_path / "growth.txt")
    assert "no/such/growth.png" in refused(2, "plot", path, "-o", tmp_path / "no" / "such" / "growth.png")
    cs.Cache(tmp_path / "new", "2MB").close()
    assert "while a worker runs" in refused(2, "plot", tmp_path / "new", "-o", tmp_path / "new.png")
    assert not list(tmp_path.glob("*.txt")) + list(tmp_path.glob("*.png"))


def test_bench_measures_the_loader_with_the_users_transform_beside_memcpy(path: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def only(batch):\n    return batch['number'].double()\n")
    quick = ("bench", path, "--seconds", 0.1, "--batch-size", 30)
    report = told(*quick, "--batch-transform", "mine:only", "--trace", tmp_path / "bench.json", cwd=tmp_path)
    assert report["num_batches"] >= 10
    assert report["device"] is None or report["device"]["samples_per_s"] > 0
    assert report["bytes_per_s"] == pytest.approx(4104 * report["samples_per_s"])
    assert report["share_of_memcpy"] == pytest.approx(report["bytes_per_s"] / report["memcpy_bytes_per_s"])
    assert report["batch_transform"]["bytes_per_s"] == pytest.approx(
        8 * report["batch_transform"]["samples_per_s"]
    )
    assert json.loads((tmp_path / "bench.json").read_text())["traceEvents"]
    lines = done(*quick).splitlines()
    assert any(line.startswith("loader alone") for line in lines)
    assert max(map(len, lines[1:])) <= 80
    assert "less than a batch of 1000; fill it first, or give a smaller" in refused(
        1, "bench", path, "--batch-size", 1000
    )
    assert "give module:name" in refused(2, *quick, "--batch-transform", "mine:missing", cwd=tmp_path)


# --- wrong use


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["status", "NOTHING"], "holds no cache; 'cachestream worker SOURCE "),
        (["limit", "NOTHING", "5GB"], "holds no cache"),
        (["evict", "NOTHING", "--to", "5GB"], "holds no cache"),
        (["clear", "NOTHING"], "holds no cache"),
        (["verify", "NOTHING"], "holds no cache"),
        (["plot", "NOTHING"], "holds no cache"),
        (["bench", "NOTHING"], "holds no cache"),
        (["refetch", "NOTHING", "CACHE/shards", "CACHE"], "nothing cannot be read"),
        (["status"], "CACHE"),
        (["evict", "CACHE"], "--to"),
        (["evict", "CACHE", "--to", "much"], "--to='much'"),
        (["limit", "CACHE"], "SIZE"),
        (["limit", "CACHE", "10KB"], "too small"),
        (["limit", "CACHE", "much"], "SIZE='much': give bytes"),
        (["status", "CACHE", "--interval", "inf"], "--interval"),
        (["status", "CACHE", "--frob"], "--frob"),
        (["bench", "CACHE", "--seconds", "nan"], "--seconds"),
        (["bench", "CACHE", "--batch-size", "0"], "--batch-size"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_is_one_clear_message_and_changes_nothing(
    arguments: list[str], words: str, filled: Path, tmp_path: Path
) -> None:
    places = {"CACHE": str(filled), "NOTHING": str(tmp_path / "nothing")}
    assert words in refused(
        2, *(places.get(word, word).replace("CACHE", places["CACHE"]) for word in arguments)
    )
    assert not (tmp_path / "nothing").exists()
    with cs.Cache(filled) as cache:
        assert (cache.num_samples, cache.size_limit) == (NUM_SAMPLES, 4_000_000)


@pytest.mark.e2e
def test_outputs_may_be_closed_and_a_full_disk_under_them_is_one_line(filled: Path) -> None:
    command = f"{sys.executable} -m cachestream status {filled} --json"
    script = f"{command} >&-; echo $?; {command} 2>&- <&- | head -c 1; {command} >/dev/full; echo $?"
    result = subprocess.run(
        ["/bin/sh", "-c", script], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert result.stdout == "0\n{1\n"
    assert "No space left on device" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_command_is_installed_under_its_name() -> None:
    if shutil.which("cachestream", path=os.path.dirname(sys.executable)) is None:
        pytest.skip("the package is not installed")
    command = [os.path.join(os.path.dirname(sys.executable), "cachestream"), "--version"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert shown.stdout.splitlines()[0] == f"cachestream {cs.__version__}"
    assert [line.split()[0] for line in shown.stdout.splitlines()][1:3] == ["Python", "torch"]
