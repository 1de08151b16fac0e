"""Kill a process at each of its steps: each call that changes the disk or the catalogue is a step.

A step is counted before it happens, and a write of data twice: before it, and with half of it written.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import cloudpickle

from cachestream.storage.cache import Cache
from cachestream.storage.layout import Directory
from tests.storage.support import Line, assert_books_cover_disk, assert_sound, fork

__all__ = ["Crash", "Steps", "copy_of", "crash_everywhere", "crash_twice", "run_task", "steps_of"]

Action = Callable[[Cache, Line], object]
Mutation = Callable[[], None]
T = TypeVar("T")

_ROOT: Final = Path(__file__).parents[2]
_APART: Final = "from tests.storage.steps import run_task; run_task()"

_CALLS: Final = ("fsync", "rename", "replace", "unlink", "posix_fallocate", "ftruncate", "pwrite")
_QUIET_STATEMENTS: Final = ("SELECT", "PRAGMA", "ROLLBACK", "BEGIN")


class Steps:
    """Counts the steps of this process, and calls `fault(name)` before step number `last`.

    With `for_ever`, also before all later steps, until `last` is set to None.
    """

    def __init__(self, last: int | None, fault: Callable[[str], None], *, for_ever: bool = False) -> None:
        self.last = last
        self.names: list[str] = []
        self._fault = fault
        self._for_ever = for_ever

    def __call__(self, name: str) -> None:
        number = len(self.names)
        self.names.append(name)
        if self.last is not None and (number >= self.last if self._for_ever else number == self.last):
            self._fault(name)

    def install(self) -> Callable[[], None]:
        """Install the step counters. The function that is returned removes them."""
        real = {name: getattr(os, name) for name in (*_CALLS, "open", "write")}
        for name in _CALLS:
            setattr(os, name, self._counted(name, real[name]))
        steps, real_connect, counted = self, sqlite3.connect, _counted_connection(self.statement)

        def counted_open(path: Any, flags: int, *rest: Any, **named: Any) -> int:
            if flags & os.O_CREAT:
                steps(f"create {_kind(_whole(path, named.get('dir_fd')))}")
            opened: int = real["open"](path, flags, *rest, **named)
            return opened

        def counted_write(fd: int, data: Any) -> int:
            view = memoryview(data).cast("B")
            steps("write")
            half: int = real["write"](fd, view[: len(view) // 2])
            steps("half written")
            rest: int = real["write"](fd, view[half:])
            return half + rest

        def connect(*args: Any, **named: Any) -> sqlite3.Connection:
            return real_connect(*args, factory=counted, **named)

        os.open, os.write = counted_open, counted_write
        sqlite3.connect = connect  # type: ignore[assignment]

        def undo() -> None:
            for name, call in real.items():
                setattr(os, name, call)
            sqlite3.connect = real_connect

        return undo

    def statement(self, text: str) -> None:
        words = text.split()
        if words[0] not in _QUIET_STATEMENTS:
            self(" ".join(words[:3]))

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **named: Any) -> Any:
            where = os.readlink(f"/proc/self/fd/{args[0]}") if isinstance(args[0], int) else args[-1]
            self(f"{name} {_kind(_whole(where, named.get('dst_dir_fd', named.get('dir_fd'))))}")
            return real(*args, **named)

        return counted


def _whole(path: Any, folder: int | None) -> str:
    return str(path) if folder is None else os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)


def _kind(path: Any) -> str:
    """The kind of a file: its name without its number."""
    folder, name = os.path.split(str(path))
    return f"{os.path.basename(folder)}/{os.path.splitext(name)[1] or name}"


def die(_name: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Crash:
    """A process that was killed or ended by itself: its output so far, and its steps."""

    said: tuple[str, ...]
    steps: list[str]


def steps_of(
    template: Path, scratch: Path, action: Action, mutation: Mutation | None = None, *, opening: bool = True
) -> list[str]:
    """The steps of `action` on a copy of the cache at `template`, which is open or still to be opened."""
    return _run(copy_of(template, scratch), action, mutation, None, opening=opening).steps


def crash_everywhere(
    template: Path,
    scratch: Path,
    action: Action,
    check: Callable[[Cache, Crash], None],
    *,
    recover: Callable[[Cache], object] = Cache.recover,
    mutation: Mutation | None = None,
    books_hold: bool = True,
) -> list[str]:
    """Run `action` on copies of the cache at `template`, kill it at each step, recover, check the invariants.

    `check(cache, crash)` gets the recovered cache. With `books_hold`, all disk usage must be accounted for
    even before the recovery. Returns the steps. All of it runs in a process without the changes that a test has
    made to modules.
    """
    return _apart(partial(_crash_everywhere, template, scratch, action, check, recover, mutation, books_hold))


def crash_twice(
    template: Path, scratch: Path, action: Action, recovery: Action, check: Callable[[Cache, Crash], None]
) -> None:
    """Kill `action` at each step, and then kill each step of the `recovery` from that."""
    _apart(partial(_crash_twice, template, scratch, action, recovery, check))


def _apart(task: Callable[[], T]) -> T:
    """Run `task` in a new interpreter: a fork takes the longer the more memory there is, and the tests' is large."""
    done = subprocess.run(
        [sys.executable, "-c", _APART],
        input=cloudpickle.dumps(task),
        stdout=subprocess.PIPE,
        cwd=_ROOT,
        check=True,
    )
    result, failure = pickle.loads(done.stdout)
    if failure is not None:
        raise AssertionError(failure)
    found: T = result
    return found


def run_task() -> None:
    """The main function of the process that `_apart` starts."""
    task = pickle.load(sys.stdin.buffer)
    answer: tuple[object, str | None]
    try:
        answer = task(), None
    except AssertionError as error:
        answer = None, str(error)
    sys.stdout.buffer.write(pickle.dumps(answer))


def _crash_everywhere(
    template: Path,
    scratch: Path,
    action: Action,
    check: Callable[[Cache, Crash], None],
    recover: Callable[[Cache], object],
    mutation: Mutation | None,
    books_hold: bool,
) -> list[str]:
    names = steps_of(template, scratch, action, mutation)
    for number in range(len(names) + 1):
        path = copy_of(template, scratch)
        crash = _run(path, action, mutation, number)
        step = names[number] if number < len(names) else "the end"
        try:
            with Cache(path) as cache:
                if books_hold:
                    assert_books_cover_disk(cache)
                recover(cache)
                assert_sound(cache)
                check(cache, crash)
        except AssertionError as error:
            raise AssertionError(
                f"killed before step {number}, '{step}', having said {crash.said}: {error}"
            ) from error
    return names


def _crash_twice(
    template: Path, scratch: Path, action: Action, recovery: Action, check: Callable[[Cache, Crash], None]
) -> None:
    names = steps_of(template, scratch, action)
    for number in range(len(names)):
        killed = _run(copy_of(template, scratch), action, None, number)
        broken = scratch / "broken"
        shutil.copytree(scratch / "crashed", broken)

        def check_both(cache: Cache, crash: Crash, said: tuple[str, ...] = killed.said) -> None:
            check(cache, Crash(said, crash.steps))

        _crash_everywhere(broken, scratch, recovery, check_both, Cache.recover, None, books_hold=True)
        shutil.rmtree(broken)


def _run(
    path: Path, action: Action, mutation: Mutation | None, last: int | None, *, opening: bool = True
) -> Crash:
    """Run `action` in a child, to its end or until step number `last`."""

    def run(line: Line) -> None:
        if opening and path.exists():
            cache = Cache(path)
            cache.close()  # its next connection is a counted one
        else:
            cache = Cache.__new__(Cache)
            cache.directory = Directory(str(path))
        steps = Steps(last, die)
        steps.install()
        if mutation is not None:
            mutation()
        action(cache, line)
        if last is None:
            names, steps.names = steps.names, []
            for name in names:
                line.say(f"step {name}")

    child = fork(run)
    lines = list(_lines(child.hear))
    code = child.wait()
    assert code in (0, -signal.SIGKILL), f"the child failed: {code}, {lines}"
    said = tuple(text for text in lines if not text.startswith("step "))
    return Crash(said, [text.removeprefix("step ") for text in lines if text.startswith("step ")])


def _lines(hear: Callable[[], str]) -> Iterator[str]:
    while text := hear():
        yield text


def copy_of(template: Path, scratch: Path) -> Path:
    path = scratch / "crashed"
    if path.exists():
        shutil.rmtree(path)
    if template.exists():
        shutil.copytree(template, path)
    return path


def _counted_connection(step: Callable[[str], None]) -> type[sqlite3.Connection]:
    """A class of connections that tell each of their statements."""

    class Connection(sqlite3.Connection):
        def execute(self, statement: str, *rest: Any) -> sqlite3.Cursor:
            step(statement)
            return super().execute(statement, *rest)

        def executemany(self, statement: str, *rest: Any) -> sqlite3.Cursor:
            step(statement)
            return super().executemany(statement, *rest)

        def __exit__(self, *error: object) -> Any:  # commits in C
            if error[0] is None and self.in_transaction:
                step("COMMIT")
            return super().__exit__(*error)  # type: ignore[arg-type]

    return Connection
