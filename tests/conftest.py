"""Shared fixtures, a Hypothesis profile, and the search for what a test left: threads, files, processes."""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing.resource_tracker
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import hypothesis
import pytest

pytest_plugins = [name for name in ("tests.support.fixtures",) if importlib.util.find_spec(name)]

# The machine is shared and slow at times: a deadline an example would fail for that alone.
hypothesis.settings.register_profile("quick", deadline=None, print_blob=True, max_examples=20)
hypothesis.settings.register_profile("thorough", deadline=None, print_blob=True, max_examples=300)
hypothesis.settings.load_profile("quick")

# numpy's threads wait busily at the start of every program; workers set the same.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# torch asks the name service for the name of each rank that connects: a question without an answer takes five seconds,
# of which the ranks of a test would wait a few times on a machine without a network.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Started by nohup, or behind "&" in a script, all processes here would ignore Ctrl-C, which some tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

WIND_DOWN_S: Final = 30.0
# Threads that live as long as the interpreter, whoever starts them first.
LASTING_THREADS: Final = ("fsspecIO", "asyncio_", "pytest_timeout", "pin_memory_dummy")
LASTING_FILES: Final = ("/dev/", "/proc/", "socket:", "anon_inode:", "/memfd:")
# The files that take longest: one begun last would leave the other processes of a run with nothing to do.
LONGEST: Final = (
    "test_crashes.py",
    "test_docs.py",
    "test_sharing.py",
    "test_remote_sampling.py",
    "test_worker_full_disk.py",
    "test_worker_recovery.py",
    "test_files_remote.py",
    "test_sources_conformance.py",
    "test_loader_machine.py",
    "test_commands_that_fill.py",
    "test_commands_that_look_ahead.py",
    "test_start_worker.py",
    "test_p04_limit.py",
    "test_p09_resume.py",
    "test_p08_ranks.py",
    "test_worker_failures.py",
    "test_dashboard.py",
    "test_worker_stalls.py",
    "test_lister_pages.py",
    "test_demo.py",
    "test_s3_listing.py",
    "test_p01_any_source.py",
    "test_full_disk.py",
    "test_catalogue_faults.py",
    "test_kills.py",
    "test_secrets.py",
)
LASTING_PROCESSES: Final = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


@pytest.hookimpl(trylast=True)  # after they were put in random order
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what the imports brought out of the search for garbage: a million objects, a second for every search."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(
        50_000
    )  # the search after every 700 objects, the default, takes a twelfth of the time of all tests


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves threads, open files or child processes, after a time to wind down.

    Fixtures of a wider scope exist before the first look, so what they hold is not the test's.
    """
    if not os.path.isdir("/proc/self/fd"):
        yield
        return
    looks: dict[str, Callable[[], set[str]]] = {
        "threads": _threads,
        "open files": _open_files,
        "child processes": _children,
    }
    before = {what: look() for what, look in looks.items()}
    gc.freeze()  # a search for garbage looks at what the test has made, and not at all that was imported since
    yield
    deadline = time.monotonic() + WIND_DOWN_S
    pause = threading.Event()
    while True:
        left = {what: look() - before[what] for what, look in looks.items()}
        left["child processes"] = _described(left["child processes"])
        if not any(left.values()):
            return
        if time.monotonic() > deadline:
            break
        gc.collect()  # what only garbage holds is not left behind: a thread may have held it till now
        pause.wait(0.02)
    kinds = "; ".join(f"{what}: {sorted(names)}" for what, names in left.items() if names)
    pytest.fail(f"{request.node.name} left behind {kinds}", pytrace=False)


def _threads() -> set[str]:
    return {
        f"{thread.name} ({thread.ident})"
        for thread in threading.enumerate()
        if not thread.name.startswith(LASTING_THREADS)
    }


def _open_files() -> set[str]:
    """Open regular files and pipes; sockets belong to connection pools that outlive a test."""
    tracker = getattr(multiprocessing.resource_tracker, "_resource_tracker", None)
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        lasting = target.startswith(LASTING_FILES) or target.endswith(".ttf")  # fonts stay open, once each
        if not lasting and int(fd) != getattr(tracker, "_fd", None):
            found.add(f"{fd} -> {target}")
    return found


def _children() -> set[str]:
    """The numbers of running and unreaped child processes of this one."""
    found = set[str]()
    for task in os.listdir("/proc/self/task"):
        try:
            found.update(Path(f"/proc/self/task/{task}/children").read_text().split())
        except OSError:
            continue
    return found


def _described(pids: set[str]) -> set[str]:
    """Processes with their commands, without those that last. A command changes while its process begins."""
    commands = {pid: _command(pid) for pid in pids}
    return {
        f"{pid} ({command})"
        for pid, command in commands.items()
        if not any(name in command for name in LASTING_PROCESSES)
    }


def _command(pid: str) -> str:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return "ended"
    return line.replace(b"\0", b" ").decode(errors="replace").strip()[:200] or "not reaped"
