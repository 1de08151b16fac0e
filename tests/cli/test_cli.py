"""The command line as a person and as a script use it: real processes, exit codes, both outputs."""

from __future__ import annotations

import json
import os
import pty
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from PIL import Image

import cachestream as cs
from cachestream import Cache
from cachestream.cli.main import main
from cachestream.storage.status import CacheStatus
from cachestream.storage.telemetry import ROW
from tests.support.caches import fill
from tests.support.forked import run_forked
from tests.support.s3 import S3Server

COUNT: Final = 60
pytestmark = pytest.mark.usefixtures("forked")
TIMEOUT_S: Final = 180  # only what hangs takes so long, also on a busy machine
COMMAND: Final = [sys.executable, "-m", "cachestream"]


def cli(
    *arguments: object, cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    if not any(name.startswith("PYTHON") for name in environment or ()):
        return run_forked(main, arguments, cwd=cwd, environment=environment, timeout_s=TIMEOUT_S)
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def done(result: subprocess.CompletedProcess[str]) -> str:
    """The output of a command that must have succeeded."""
    assert result.returncode == 0, result.stderr
    return result.stdout


def refused(result: subprocess.CompletedProcess[str], code: int) -> str:
    """The one clear line of a command that must have failed with `code`."""
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert not result.stdout
    return result.stderr


@contextmanager
def running(*arguments: object, stdout: Any = subprocess.PIPE) -> Iterator[subprocess.Popen[str]]:
    """The command line in the background, killed at the end if need be."""
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        with process:
            yield process
            process.kill()
    finally:
        process.kill()


def look(cache: Path) -> CacheStatus:
    """The cache as this process sees it."""
    with Cache(cache) as opened:
        return opened.status()


def wait_until(what: str, condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small pictures in two classes."""
    root = tmp_path_factory.mktemp("remote")
    rng = np.random.default_rng(0)
    for number in range(COUNT):
        folder = root / ("cats", "dogs")[number % 2]
        folder.mkdir(exist_ok=True)
        pixels = rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:03d}.png")
    return root


@pytest.fixture
def restored_signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def fill_command(images: Path, cache: Path, *more: object) -> list[object]:
    return ["worker", images, cache, "--size-limit", "50MB", "--min-free", 0, "--workers", 1, *more]


def test_a_cache_is_filled_seen_checked_limited_evicted_and_cleared_from_a_shell(
    images: Path, cache: Path, tmp_path: Path
) -> None:
    filled = cli(*fill_command(images, cache))
    assert done(filled) == ""
    assert f"{COUNT} samples" in filled.stderr
    assert "complete" in filled.stderr

    seen = json.loads(done(cli("status", cache, "--json")))
    assert (seen["num_samples"], seen["fill_state"], seen["pass_done"]) == (COUNT, "complete", 1.0)
    assert seen["worker"] is None
    shown = done(cli("status", cache))
    assert f"{COUNT} in " in shown
    assert "image: uint8[3, 16, 16]" in shown

    assert "all sound" in done(cli("verify", cache))
    assert json.loads(done(cli("verify", cache, "--json")))["ok"] is True

    done(cli("limit", cache, "20MB"))
    assert look(cache).size_limit == 20_000_000

    picture = tmp_path / "growth.png"
    assert done(cli("plot", cache, "-o", picture)).strip() == str(picture)
    with Image.open(picture) as drawn:
        assert min(drawn.size) > 400

    assert "freed" in cli("evict", cache, "--to", 0).stderr
    assert look(cache).num_samples == 0
    done(cli("clear", cache))
    assert look(cache).fill_state == "none"


def test_a_detached_worker_outlives_its_command_until_it_is_stopped(images: Path, cache: Path) -> None:
    done(cli(*fill_command(images, cache, "--detach")))
    try:
        with Cache(cache) as opened:
            assert opened.wait(COUNT, timeout_s=TIMEOUT_S) == COUNT
        assert json.loads(done(cli("status", cache, "--json")))["worker"]["states"]
    finally:
        stopped = cli("stop", cache)
    assert done(stopped) == ""
    assert f"stopped: {COUNT} samples" in stopped.stderr
    assert look(cache).worker is None
    assert "no worker is running" in cli("stop", cache).stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_worker_ends_cleanly_and_goes_on_where_it_stopped(
    images: Path, cache: Path, number: signal.Signals
) -> None:
    slow = fill_command(images, cache, "--bandwidth-limit", "1kB/s", "--shard-size", "4kB")  # a minute
    with running(*slow) as process:
        wait_until("a worker", lambda: (cache / "worker").is_dir() and look(cache).num_samples > 0)
        process.send_signal(number)
        _, shown = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 128 + number
    assert "Traceback" not in shown
    assert 0 < look(cache).num_samples < COUNT
    assert look(cache).worker is None

    done(cli(*fill_command(images, cache)))
    assert look(cache).num_samples == COUNT
    assert json.loads(done(cli("verify", cache, "--json")))["ok"] is True


def test_a_bucket_is_read_with_options_for_its_driver_and_secrets_from_the_environment(
    images: Path, cache: Path, s3_server: S3Server, s3_bucket: Path
) -> None:
    shutil.copytree(images, s3_bucket, dirs_exist_ok=True)
    command = fill_command(Path("SOURCE"), cache)
    command[1] = f"s3://{s3_bucket.name}/"
    options = (f"endpoint_url={s3_server.endpoint_url}", "client_kwargs.region_name=us-east-1")
    more = [word for option in options for word in ("--storage-option", option)]
    secrets = {"AWS_ACCESS_KEY_ID": s3_server.key, "AWS_SECRET_ACCESS_KEY": s3_server.secret}
    filled = cli(*command, *more, environment=secrets)
    assert filled.returncode == 0, filled.stderr
    assert len(filled.stderr.splitlines()) == 1  # what drivers log of themselves is not shown
    assert look(cache).num_samples == COUNT


def test_a_source_and_a_transform_may_be_named_as_module_and_object(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "items = [{'x': i} for i in range(20)]\n"
        "def even(sample):\n    return sample if sample['x'] % 2 == 0 else None\n"
    )
    command = fill_command(Path("mine:items"), cache, "--transform", "mine:even")
    done(cli(*command, cwd=tmp_path))
    assert look(cache).num_samples == 10


def test_images_are_resized_and_cropped_and_the_format_is_named_by_flags_called_as_in_python(
    images: Path, cache: Path
) -> None:
    done(cli(*fill_command(images, cache, "--resize", "12x24", "--crop", 8, "--format", "files")))
    with Cache(cache) as filled, filled.snapshot() as dataset:
        assert len(dataset) == COUNT
        assert tuple(dataset[0]["image"].shape) == (3, 8, 8)
        source = cs.open_source(str(images), resize=(12, 24), crop=8, format="files")
        with cs.start_worker(filled, source) as worker:  # the same source: else it would be refused
            assert worker.wait(TIMEOUT_S)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--resize", "large"), "--resize 'large': give pixels"),
        (("--crop", "0"), "crop=0: give a number of pixels above 0"),
        (("--format", "zip"), "format='zip': give one of"),
    ],
)
def test_flags_of_the_source_that_cannot_be_are_refused_in_one_line(
    images: Path, cache: Path, flags: tuple[str, str], message: str
) -> None:
    assert message in refused(cli(*fill_command(images, cache, *flags)), 2)


def test_a_failing_transform_ends_with_what_was_skipped_and_why(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "items = [{'x': i} for i in range(4)]\n"
        "def odd_only(sample):\n    if sample['x'] % 2: return sample\n    raise ValueError('even!')\n"
    )
    filled = cli(*fill_command(Path("mine:items"), cache, "--transform", "mine:odd_only"), cwd=tmp_path)
    assert filled.returncode == 0, filled.stderr
    assert "2 skipped, most often: transform: ValueError: even! (first: " in filled.stderr
    shown = done(cli("status", cache))
    assert "2 samples" in shown
    assert "ValueError: even!" in shown


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ("return sample['y']", "4 skipped, most often: transform: KeyError: 'y' (first: "),
        ("sample['y'] = 1", "transform returned None for 4 samples, which leaves them out"),
    ],
)
def test_a_worker_whose_transform_left_nothing_says_so_and_ends_as_a_problem(
    tmp_path: Path, cache: Path, broken: str, told: str
) -> None:
    (tmp_path / "mine.py").write_text(
        f"items = [{{'x': i}} for i in range(4)]\ndef broken(sample):\n    {broken}\n"
    )
    filled = cli(*fill_command(Path("mine:items"), cache, "--transform", "mine:broken"), cwd=tmp_path)
    assert filled.returncode == 1
    assert told in filled.stderr
    assert "Traceback" not in filled.stderr


def test_damage_is_found_repaired_and_then_gone(cache: Path) -> None:
    fill(cache, 3, 8).close()
    shard = sorted((cache / "shards").iterdir())[1]
    content = bytearray(shard.read_bytes())
    content[-20] ^= 1
    shard.write_bytes(content)
    found = cli("verify", cache)
    assert found.returncode == 1
    assert f"corrupt: {shard}" in found.stdout
    assert "verify CACHE --repair" in found.stdout
    assert "repaired" in done(cli("verify", cache, "--repair"))
    assert "2 shards, 16 samples: all sound" in done(cli("verify", cache))
    status = look(cache)
    assert status.quarantined == 1
    (failure,) = status.failures
    assert (failure.kind, failure.count, failure.example) == ("quarantined", 8, str(shard))
    assert "mismatch" in failure.reason
    assert "--repair" not in failure.reason  # which is done
    assert "1 damaged shard" in done(cli("status", cache))


def test_what_epochs_hold_stays_and_the_command_says_so(cache: Path) -> None:
    opened = fill(cache, 3, 8)
    _, lease = opened.take_snapshot()
    opened.close()
    try:
        assert "epochs in use hold their shards" in refused(cli("evict", cache, "--to", 0), 1)
        assert "leased by epochs in use" in refused(cli("clear", cache), 1)
        assert "1 in use" in done(cli("status", cache))
    finally:
        lease.release()
    done(cli("evict", cache, "--to", 0))
    assert look(cache).num_shards == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["status", "CACHE"], "holds no cache"),
        (["stop", "CACHE"], "holds no cache"),
        (["verify", "CACHE"], "holds no cache"),
        (["limit", "CACHE", "5GB"], "holds no cache"),
        (["worker", "nowhere://bucket", "CACHE"], "nowhere"),
        (["worker", "/no/such/folder", "CACHE"], "/no/such/folder"),
        (["worker", "no_such_module:thing", "CACHE"], "no_such_module"),
        (["worker", "IMAGES", "CACHE", "--size-limit", "much"], "size_limit='much'"),
        (["worker", "IMAGES", "CACHE", "--size-limit", "10"], "too small"),
        (["worker", "IMAGES", "CACHE", "--order", "backwards"], "order='backwards'"),
        (["worker", "IMAGES", "CACHE", "--workers", "0"], "num_workers=0"),
        (["worker", "IMAGES", "CACHE", "--partition", "2/2"], "partition"),
        (["worker", "IMAGES", "CACHE", "--when-full", "explode"], "when_full='explode'"),
        (["worker", "IMAGES", "CACHE", "--bandwidth-limit", "0"], "bandwidth_limit"),
        (["worker", "IMAGES", "CACHE", "--shard-size", "much"], "shard_size='much'"),
        (["worker", "IMAGES", "CACHE", "--eviction", "oldest"], "eviction='oldest'"),
        (["refetch", "/no/manifest", "IMAGES", "CACHE"], "/no/manifest cannot be read"),
        (["worker", "IMAGES", "CACHE", "--transform", "json:no_such"], "--transform='json:no_such'"),
        (["worker", "IMAGES", "CACHE", "--source-option", "colour=red"], "no argument 'colour'"),
        (["worker", "IMAGES", "CACHE", "--storage-option", "a=1", "--storage-option", "a.b=2"], "'a'"),
        (["stop", "CACHE", "--timeout", "nan"], "--timeout"),
        (["status"], "CACHE"),
        (["frobnicate"], "frobnicate"),
        (["status", "CACHE", "--frob"], "--frob"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_is_one_clear_message_and_leaves_nothing(
    arguments: list[str],
    said: str,
    images: Path,
    cache: Path,
    capsys: pytest.CaptureFixture[str],
    restored_signals: None,
) -> None:
    """In this process, for speed: any exception but the exit would fail the test."""
    places = {"CACHE": str(cache), "IMAGES": str(images)}
    with pytest.raises(SystemExit) as exit_:
        main([places.get(argument, argument) for argument in arguments])
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.out == ""
    # A remote that is missing is a problem found; the rest is wrong use.
    assert exit_.value.code == (1 if "/no/such/folder" in arguments else 2)
    assert not cache.exists()  # what is wrong in itself is found before one is made


def test_what_is_given_for_the_storage_driver_is_not_repeated_in_a_message(cache: Path) -> None:
    for wrong in ("=canary", "canary", "secret=canary"):
        result = cli("worker", "s3://bucket:bad/x", cache, "--storage-option", wrong)
        assert result.returncode in (1, 2)
        assert "canary" not in result.stderr


def test_the_environment_gives_options_and_arguments_win(images: Path, cache: Path) -> None:
    environment = {
        "CACHESTREAM_CACHE": str(cache),
        "CACHESTREAM_WORKER_SIZE_LIMIT": "30MB",
        "CACHESTREAM_WORKER_WORKERS": "1",
        "CACHESTREAM_WORKER_MIN_FREE": "0",
    }
    done(cli("worker", images, environment=environment))
    assert look(cache).size_limit == 30_000_000
    done(cli("worker", images, "--size-limit", "40MB", environment=environment))
    assert look(cache).size_limit == 40_000_000
    assert json.loads(done(cli("status", "--json", environment=environment)))["num_samples"] == COUNT
    environment["CACHESTREAM_STATUS_JSON"] = "1"
    assert json.loads(done(cli("status", environment=environment)))["num_samples"] == COUNT


def test_watching_writes_a_line_of_json_for_each_look_until_ctrl_c(cache: Path) -> None:
    fill(cache, 1, 8).close()
    with running("status", cache, "--watch", "--json", "--interval", 0.1) as process:
        assert process.stdout is not None
        looks = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 0
    assert [look["num_samples"] for look in looks] == [8, 8, 8]


def test_watching_where_nothing_can_be_drawn_over_writes_lines(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(cache, 1, 8).close()
    monkeypatch.setenv("TERM", "dumb")
    master, slave = pty.openpty()
    try:
        with (
            running("status", cache, "--watch", "--interval", 0.1, stdout=slave) as process,
            open(master, "rb", buffering=0, closefd=False) as terminal,
        ):
            seen = b""
            while seen.count(b"8 samples in 1 shard") < 2:
                assert select.select([terminal], [], [], TIMEOUT_S)[0], seen
                seen += terminal.read(65536)
            process.send_signal(signal.SIGINT)
            assert process.wait(TIMEOUT_S) == 0
    finally:
        os.close(master)
        os.close(slave)


def test_watching_on_a_terminal_draws_what_changes_until_ctrl_c(cache: Path) -> None:
    fill(cache, 1, 8).close()
    master, slave = pty.openpty()
    drawn = b""

    def draws(text: bytes) -> bool:
        nonlocal drawn
        if select.select([master], [], [], 0.1)[0]:
            drawn += os.read(master, 65536)
        return text in drawn

    try:
        with running("status", cache, "--watch", "--interval", 0.1, stdout=slave) as process:
            wait_until("8 samples drawn", lambda: draws(b"8 in 1 shard"))
            done(cli("evict", cache, "--to", 0))
            wait_until("no samples drawn", lambda: draws(b"0 in 0 shards"))
            process.send_signal(signal.SIGINT)
            assert process.wait(TIMEOUT_S) == 0
    finally:
        os.close(master)
        os.close(slave)


def test_a_reader_that_goes_away_is_no_traceback(cache: Path) -> None:
    fill(cache, 1, 8).close()
    with running("status", cache, "--watch", "--json", "--interval", 0.1) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(TIMEOUT_S) != 0
        assert process.stderr.read() == ""


def in_a_folder_that_is_gone(*arguments: object) -> str:
    """The command line after its current folder was removed."""
    return (
        "import os, sys, tempfile; folder = tempfile.mkdtemp(); os.chdir(folder); os.rmdir(folder);"
        f"from cachestream.cli.main import main; main({[str(argument) for argument in arguments]!r})"
    )


def run_code(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def test_the_command_line_does_not_load_torch() -> None:
    code = "import sys, cachestream.cli.app; print('torch' in sys.modules)"
    assert done(run_code(code)) == "False\n"


def test_a_command_whose_current_folder_is_gone_works_with_absolute_paths_or_says_so(
    images: Path, cache: Path
) -> None:
    filling = ("worker", images, cache, "--workers", 1, "--size-limit", "20MB", "--transform", "copy:copy")
    done(run_code(in_a_folder_that_is_gone(*filling)))
    assert "current folder" in refused(run_code(in_a_folder_that_is_gone("status", "cache")), 1)
    assert "current folder" in refused(run_code(in_a_folder_that_is_gone("worker", images, "cache")), 2)


def in_a_shell(redirection: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = " ".join(shlex.quote(str(word)) for word in (*COMMAND, *arguments))
    return subprocess.run(
        ["/bin/sh", "-c", f"{command} {redirection}"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def test_outputs_that_are_closed_do_not_matter_and_a_full_disk_under_them_is_one_line(cache: Path) -> None:
    fill(cache, 1, 8).close()
    assert done(in_a_shell(">&-", "status", cache, "--json")) == ""
    assert "8 samples" in done(in_a_shell("2>&- <&-", "verify", cache))
    assert "No space left" in refused(in_a_shell(">/dev/full", "status", cache, "--json"), 1)


def test_a_worker_works_without_standard_error(images: Path, cache: Path) -> None:
    done(in_a_shell("2>&-", *fill_command(images, cache, "--detach")))
    try:
        with Cache(cache) as opened:
            assert opened.wait(COUNT, timeout_s=TIMEOUT_S) == COUNT
    finally:
        cli("stop", cache)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes somebody else")
def test_a_cache_that_is_somebody_elses_is_not_called_none(cache: Path) -> None:
    fill(cache, 1, 8).close()
    code = (
        "import os, cachestream.cli.app as cli\n"
        "os.setgroups([]); os.setegid(65534); os.seteuid(65534)\n"
        f"try: cli._open({str(cache)!r})\n"
        "except Exception as error: print(error)"
    )
    shown = done(run_code(code))
    assert "Permission denied" in shown
    assert "holds no cache" not in shown


def test_a_path_that_is_no_title_is_plotted(tmp_path: Path) -> None:
    cache = Path(os.fsdecode(os.fsencode(tmp_path) + rb"/a$\\q$\xff"))
    fill(cache, 1, 8).close()
    (cache / "worker" / "history").write_bytes(np.zeros(3, ROW).tobytes())
    done(cli("plot", cache, "-o", tmp_path / "growth.png"))


def test_a_path_that_the_output_has_no_letters_for_is_written_with_escapes(tmp_path: Path) -> None:
    cache = tmp_path / "kä\N{SNOWMAN}sh"
    fill(cache, 1, 8).close()
    shown = cli("status", cache, environment={"PYTHONIOENCODING": "ascii", "COLUMNS": "500"})
    assert "k\\xe4\\u2603sh" in done(shown)


def test_folders_whose_names_are_not_utf8_are_read_and_filled_and_gone_on_with(
    images: Path, tmp_path: Path
) -> None:
    source, cache = (os.fsdecode(os.fsencode(tmp_path) + name) for name in (b"/remote\xff", b"/cache\xe9"))
    shutil.copytree(images, source)
    for _ in range(2):
        done(cli("worker", source, cache, "--workers", 1, "--size-limit", "20MB", "--min-free", 0))
        told = json.loads(done(cli("status", cache, "--json")))
        assert (told["num_samples"], told["path"], told["fill_state"]) == (COUNT, cache, "complete")
        assert source in told["source"]
    assert "remote\\udcff" in done(
        cli("status", cache, environment={"PYTHONIOENCODING": "utf-8", "COLUMNS": "500"})
    )
    for name in os.listdir(f"{cache}/worker"):
        assert os.stat(f"{cache}/worker/{name}").st_mode & 0o077 == 0, f"{name} is for its owner alone"


# A module that is loaded for the command line sends what Ctrl-C sends.
INTERRUPTED: Final = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from cachestream.cli.main import main
main(["--version"])
"""


def test_ctrl_c_while_the_command_is_being_loaded_ends_it_quietly() -> None:
    result = run_code(INTERRUPTED)
    assert (result.returncode, result.stdout, result.stderr) == (128 + signal.SIGINT, "", "")


def test_a_command_that_is_started_deaf_to_ctrl_c_stays_so() -> None:
    deaf = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    assert done(run_code(deaf + INTERRUPTED)).startswith("cachestream ")


def test_plotting_tells_the_file_that_it_has_made(cache: Path, tmp_path: Path) -> None:
    fill(cache, 1, 8).close()
    (cache / "worker" / "history").write_bytes(np.zeros(3, ROW).tobytes())
    made = done(cli("plot", cache, "-o", tmp_path / "growth")).strip()
    assert made == str(tmp_path / "growth.png")
    assert Path(made).exists()


def test_plotting_names_the_extra_when_matplotlib_is_missing(cache: Path) -> None:
    fill(cache, 1, 8).close()
    (cache / "worker" / "history").write_bytes(np.zeros(3, ROW).tobytes())
    code = (
        "import sys; sys.modules['matplotlib'] = sys.modules['matplotlib.figure'] = None;"
        f"from cachestream.cli.main import main; main(['plot', {str(cache)!r}])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert "pip install 'cachestream[plot]'" in refused(result, 2)


def test_the_loader_is_measured_beside_memcpy(cache: Path) -> None:
    fill(cache, 4, 64).close()
    told = json.loads(done(cli("bench", cache, "--seconds", 0.2, "--batch-size", 32, "--json")))
    # Samples are 5 float32 and one int64: 28 bytes.
    assert told["bytes_per_s"] == pytest.approx(28 * told["samples_per_s"])
    assert told["num_batches"] >= 8
    assert told["share_of_memcpy"] == pytest.approx(told["bytes_per_s"] / told["memcpy_bytes_per_s"])
    assert told["batch_transform"] is None
    assert (told["device"] is None) is not torch.cuda.is_available()
    assert "less than a batch of 1000" in refused(cli("bench", cache, "--batch-size", 1000), 1)


def test_the_loader_is_measured_with_the_users_work_on_batches_and_shown_in_eighty_columns(
    cache: Path, tmp_path: Path
) -> None:
    fill(cache, 4, 64).close()
    (tmp_path / "mine.py").write_text("def only(batch):\n    return batch['number'].double()\n")
    options = ("--seconds", 0.2, "--batch-size", 32, "--batch-transform")
    told = json.loads(done(cli("bench", cache, *options, "mine:only", "--json", cwd=tmp_path)))
    rate = told["batch_transform"]
    assert rate["bytes_per_s"] == pytest.approx(8 * rate["samples_per_s"])
    shown = done(cli("bench", cache, *options, "mine:only", cwd=tmp_path))
    lines = shown.splitlines()
    assert [line.split("  ")[0] for line in lines[3:7]] == [
        "memcpy, one thread",
        "loader alone",
        "with the batch transform",
        "onto the device",
    ]
    assert torch.cuda.is_available() or "no CUDA device" in lines[6]
    assert lines[7].startswith("disk, random 4.1 kB")
    assert max(map(len, lines[1:])) <= 80
    assert "give module:name" in refused(cli("bench", cache, *options, "mine:missing", cwd=tmp_path), 2)


def test_every_command_explains_itself_and_the_version_is_shown() -> None:
    commands = ["worker", "stop", "status", "limit", "evict", "clear", "verify", "refetch", "plot", "bench"]
    commands += ["diagnose", "demo"]
    listed = done(cli("--help"))
    for command in commands:
        assert f"  {command}" in listed
    assert "CACHESTREAM_WORKER_SIZE_LIMIT" in done(cli("worker", "--help"))
    assert done(cli("--version")).startswith("cachestream 0.")
