"""The command as a process: signals, closed outputs, terminals, folders that are gone, odd names."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from cachestream.cli.app import _open
from cachestream.cli.main import main
from cachestream.storage.telemetry import ROW
from tests.cli.support import (
    COUNT,
    TIMEOUT_S,
    cli,
    cli_here,
    done,
    refused,
    running,
)
from tests.support.caches import fill
from tests.support.forked import run_forked

pytestmark = pytest.mark.usefixtures("forked")


@pytest.mark.e2e
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


def in_a_folder_that_is_gone() -> None:
    """The command line after its current folder was removed."""
    os.chdir(folder := tempfile.mkdtemp())
    os.rmdir(folder)
    main()


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


@pytest.mark.e2e
def test_the_command_line_does_not_load_torch() -> None:
    code = "import sys, cachestream.cli.app; print('torch' in sys.modules)"
    assert done(run_code(code)) == "False\n"


@pytest.mark.e2e
def test_a_command_whose_current_folder_is_gone_works_with_absolute_paths_or_says_so(
    images: Path, cache: Path
) -> None:
    filling = ("worker", images, cache, "--workers", 1, "--size-limit", "20MB", "--transform", "copy:copy")
    gone = "import os, tempfile; os.chdir(folder := tempfile.mkdtemp()); os.rmdir(folder);"
    begun = f"from cachestream.cli.main import main; main({[str(word) for word in filling]!r})"
    done(run_code(gone + begun))
    for arguments, code in ((("status", "cache"), 1), (("worker", images, "cache"), 2)):
        shown = refused(run_forked(in_a_folder_that_is_gone, arguments, timeout_s=TIMEOUT_S), code)
        assert "current folder" in shown


def as_somebody_else() -> None:
    """Open a cache as a user without rights; prints the error."""
    os.setgroups([])
    os.setegid(65534)
    os.seteuid(65534)
    try:
        _open(sys.argv[1])
    except Exception as error:  # noqa: BLE001  whatever it is, the test reads it
        sys.stdout.write(str(error))


@pytest.mark.e2e
@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes somebody else")
def test_a_cache_that_is_somebody_elses_is_not_called_none(cache: Path) -> None:
    fill(cache, 1, 8).close()
    shown = done(run_forked(as_somebody_else, [cache], timeout_s=TIMEOUT_S))
    assert "Permission denied" in shown
    assert "holds no cache" not in shown


@pytest.mark.e2e
def test_a_path_that_is_no_title_is_plotted_into_the_file_that_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cache = Path(os.fsdecode(os.fsencode(tmp_path) + rb"/a$\\q$\xff"))
    fill(cache, 1, 8).close()
    (cache / "worker" / "history").write_bytes(np.zeros(3, ROW).tobytes())
    made = done(cli_here(capfd, "plot", cache, "-o", tmp_path / "growth")).strip()
    assert made == str(tmp_path / "growth.png")
    assert Path(made).exists()


@pytest.mark.e2e
def test_a_path_that_the_output_has_no_letters_for_is_written_with_escapes(tmp_path: Path) -> None:
    cache = tmp_path / "kä\N{SNOWMAN}sh"
    fill(cache, 1, 8).close()
    shown = cli("status", cache, environment={"PYTHONIOENCODING": "ascii", "COLUMNS": "500"})
    assert "k\\xe4\\u2603sh" in done(shown)


@pytest.mark.e2e
def test_folders_whose_names_are_not_utf8_are_read_and_filled_and_gone_on_with(
    images: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, cache = (os.fsdecode(os.fsencode(tmp_path) + name) for name in (b"/remote\xff", b"/cache\xe9"))
    shutil.copytree(images, source)
    for _ in range(2):
        done(cli("worker", source, cache, "--workers", 1, "--size-limit", "20MB", "--min-free", 0))
        told = json.loads(done(cli_here(capfd, "status", cache, "--json")))
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


@pytest.mark.e2e
def test_ctrl_c_while_the_command_is_being_loaded_ends_it_quietly() -> None:
    result = run_code(INTERRUPTED)
    assert (result.returncode, result.stdout, result.stderr) == (128 + signal.SIGINT, "", "")


@pytest.mark.e2e
def test_a_command_that_is_started_deaf_to_ctrl_c_stays_so() -> None:
    deaf = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    assert done(run_code(deaf + INTERRUPTED)).startswith("cachestream ")
