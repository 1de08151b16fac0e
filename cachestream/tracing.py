"""A timeline of the work of all processes, in the Trace Event Format, which Perfetto and Chrome show.

Each traced process keeps its events and appends them to a file of its own, twice a second. The end of the
trace makes one file of these. All times are of CLOCK_MONOTONIC, which the processes of a machine share.

The format: "Trace Event Format" (Google, 2016); complete events ("X") and names ("M"), in microseconds.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cachestream.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["trace"]

_FLUSH_S: Final = 0.5
SHORTEST_S: Final = 100e-6  # of an event, which costs about 2.5e-6 s
_MOST_EVENTS: Final = 1_000_000  # of a process: 150 MB

logger = logging.getLogger("cachestream")


class _Recorder:
    """The events of this process, and the file of the trace's `folder` that they go to. Thread-safe."""

    def __init__(self, folder: str, process: str) -> None:
        self.folder = folder
        self._path = os.path.join(folder, f"{os.getpid()}.jsonl")
        self._lock = threading.Lock()
        self._lines = [_name("process_name", process, 0)]  # JSON, without the events since the last flush
        self._events: list[tuple[str, float, float, int, dict[str, int]]] = []
        self._threads: set[int] = set()
        self._count = 0
        self._flushed_s = time.monotonic()

    def add(
        self, name: str, began_s: float, ended_s: float, args: dict[str, int], thread: int, thread_name: str
    ) -> None:
        with self._lock:
            self._count += 1
            if self._count > _MOST_EVENTS:
                return
            if thread not in self._threads:
                self._threads.add(thread)
                self._lines.append(
                    _name("thread_name", thread_name or threading.current_thread().name, thread)
                )
            self._events.append((name, began_s, ended_s, thread, args))
            if ended_s - self._flushed_s >= _FLUSH_S:
                self._flush()

    def flush(self) -> None:
        """Append the recorded events to the file; a trace that has ended, or a full disk, ends recording."""
        with self._lock:
            if self._count > _MOST_EVENTS:
                logger.warning("the trace leaves out %d events of this process", self._count - _MOST_EVENTS)
            self._flush()

    def _flush(self) -> None:
        global _recorder
        pid, (lines, self._lines), (events, self._events) = os.getpid(), (self._lines, []), (self._events, [])
        self._flushed_s = time.monotonic()
        for name, began_s, ended_s, thread, args in events:  # json.dumps would take four times as long
            began_us, ended_us = int(1e6 * began_s), int(1e6 * ended_s)
            shown = str(args).replace("'", '"')
            lines.append(
                f'{{"ph": "X", "name": "{name}", "pid": {pid}, "tid": {thread}, "ts": {began_us}, '
                f'"dur": {ended_us - began_us}, "args": {shown}}}\n'
            )
        try:
            # Not made here: a folder that is gone means that the trace has ended.
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with open(fd, "w", encoding="utf-8") as file:
                file.writelines(lines)
        except OSError as error:
            _recorder = None
            if not isinstance(error, FileNotFoundError):
                logger.warning("%s: the trace of this process ends: %s", self._path, error)


def _name(kind: str, name: str, thread: int) -> str:
    return (
        json.dumps({"ph": "M", "name": kind, "pid": os.getpid(), "tid": thread, "args": {"name": name}})
        + "\n"
    )


_recorder: _Recorder | None = None  # of this process; None while it is not traced


def _forget() -> None:
    """End recording in a forked child, whose events would be taken for those of its parent."""
    global _recorder
    _recorder = None


os.register_at_fork(after_in_child=_forget)


def is_on() -> bool:
    """Return whether this process is traced."""
    return _recorder is not None


def add(name: str, began_s: float, ended_s: float, **args: int) -> None:
    """Record that `name` ran in this thread from `began_s` to `ended_s`, times of CLOCK_MONOTONIC, if this
    process is traced. `args` are shown beside the event.
    """
    recorder = _recorder
    if recorder is not None and ended_s - began_s >= SHORTEST_S:
        recorder.add(name, began_s, ended_s, args, threading.get_native_id(), "")


def add_of_thread(
    name: str, began_s: float, ended_s: float, thread: int, thread_name: str, args: dict[str, int]
) -> None:
    """Record what ran in the thread with the system's number `thread`."""
    recorder = _recorder
    if recorder is not None and ended_s - began_s >= SHORTEST_S:
        recorder.add(name, began_s, ended_s, args, thread, thread_name)


def span(name: str, **args: int) -> AbstractContextManager[None]:
    """Record that `name` runs during the `with` block, if this process is traced."""
    return nullcontext() if _recorder is None else _span(name, args)


@contextmanager
def _span(name: str, args: dict[str, int]) -> Iterator[None]:
    began_s = time.monotonic()
    try:
        yield
    finally:
        add(name, began_s, time.monotonic(), **args)


def folder() -> str:
    """The folder of the running trace, for `join` in other processes; "" without one."""
    return "" if _recorder is None else _recorder.folder


def join(folder: str, process: str) -> None:
    """Record the events of this process, whose name is `process`, in the trace of `folder`; "" is none."""
    global _recorder
    if folder:
        _recorder = _Recorder(folder, process)


def flush() -> None:
    """Write what has been recorded."""
    if _recorder is not None:
        _recorder.flush()


class Trace:
    """A running trace, made by `trace`; its file will be `path`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        global _recorder
        if _recorder is not None:
            raise ConfigError("trace(): this process is traced already; close the first trace before another")
        self.path = Path(path).expanduser().absolute()
        if self.path.is_dir():
            raise ConfigError(f"{path}: a folder; give the name of a file, such as 'run.json'")
        try:
            # In the folder of the file: the file comes into being whole, by a rename.
            self._folder = tempfile.mkdtemp(prefix=f".{self.path.name}-", dir=self.path.parent)
        except OSError as error:
            raise ConfigError(f"{path}: the trace cannot be written there: {error}") from error
        self._pid = os.getpid()
        _recorder = _Recorder(self._folder, "main process")
        atexit.register(self.close)

    def close(self) -> None:
        """End the trace and write the file; a second call does nothing.

        Workers that go on end their part by themselves. Raises ConfigError if the file cannot be written.
        """
        atexit.unregister(self.close)
        if self._pid != os.getpid() or not os.path.isdir(self._folder):
            return
        flush()
        _forget()
        try:
            whole = Path(self._folder) / "whole"
            with whole.open("w", encoding="utf-8") as file:
                file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
                file.write(",\n".join(_lines(self._folder)))
                file.write("\n]}\n")
            whole.replace(self.path)
        except OSError as error:
            raise ConfigError(f"{self.path}: the trace cannot be written: {error}") from error
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Trace {self.path}>"


def _lines(folder: str) -> Iterator[str]:
    """The events of all processes, without the torn last line of one that was killed."""
    for part in sorted(Path(folder).glob("*.jsonl")):
        with suppress(FileNotFoundError), part.open(encoding="utf-8") as file:
            yield from (line[:-1] for line in file if line.endswith("}\n"))


def trace(path: str | os.PathLike[str]) -> Trace:
    """Record a timeline of this process, and of the workers that it starts from now on, into the file `path`.

        with cs.trace("run.json"):
            for batch in cs.stream("s3://bucket/train", batch_size=64): ...

    Open the file in https://ui.perfetto.dev or chrome://tracing. Of each process and thread it shows when and
    for how long it did: `list`, `read`, `decode`, `transform`, `pack` and `publish` in workers; `snapshot`,
    `prepare`, `gather`, `transfer` and `wait` in the trainer. Times are in microseconds of one clock.

    Without `with`, call `close()` of the trace, which is returned; otherwise the end of the process writes
    the file. A worker that runs already is not traced: give its own command `--trace`. Left out are work of
    less than 0.1 ms, the last half second of a process that goes on or is killed, and what a process does
    after a million events.

    Raises ConfigError if the file cannot be written, or if this process is traced already.
    """
    return Trace(path)
