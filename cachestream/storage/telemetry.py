"""Live counters of the running worker and of loaders, and the history of the cache's size, in small files.

Each sampling process writes its own slot, without locks and without SQL; the supervisor watches the slots,
and any process may read them. Each loader writes a file of its own. Nothing here needs to survive a crash.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import time
import weakref
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from cachestream.errors import CacheError
from cachestream.linux import open_private
from cachestream.repr_html import table
from cachestream.storage.layout import Directory, replace_file
from cachestream.storage.locks import HeldFile, is_held, lock_file, remove_unheld
from cachestream.storage.os_errors import translated_disk_errors

READS_AT_ONCE: Final = 64  # units that one process reads at once, at most
MAIN: Final = (
    READS_AT_ONCE  # the place of the main thread among the reads, after those of the fetching threads
)
PROCESSES_AT_MOST: Final = 128

# State of a sampling process.
STARTING, FETCHING, WRITING, NO_SPACE, NO_REMOTE, ENDED, NOTHING_FREE = range(7)
STATE_NAMES: Final = (
    "starting",
    "fetching",
    "writing",
    "waiting for space",
    "waiting for the remote",
    "ended",
    "waiting for the other caches",
)

_SLOT: Final = np.dtype(
    [
        ("pid", "<i8"),
        ("state", "<i8"),
        ("beat_s", "<f8"),  # monotonic time of the last progress of the main thread
        ("samples", "<i8"),
        ("units", "<i8"),
        ("fetched_bytes", "<i8"),
        ("unit_bytes", "<i8"),  # fetched for `units`
        ("written_bytes", "<i8"),
        ("failures", "<i8"),
        ("dropped", "<i8"),
        ("committed", "<i8"),  # samples done, cached or not, according to the catalogue
        ("retries", "<i8"),
        ("fetch_wait_s", "<f8"),
        ("transform_s", "<f8"),
        ("pack_s", "<f8"),
        ("publish_s", "<f8"),
        ("space_wait_s", "<f8"),
        ("cpu_s", "<f8"),  # of the processor, in all threads of the process
        ("pass_id", "<i8"),
        ("bandwidth_bytes_per_s", "<f8"),  # the limit of the worker, 0: none
        ("transforming", "<i8"),  # position + 1 of the unit being transformed, 0: none
        ("reads", "<i8", (READS_AT_ONCE + 1,)),  # positions + 1 being read, 0: none
        ("read_beats_s", "<f8", (READS_AT_ONCE + 1,)),  # monotonic time of the last progress of each
        ("silence", "S256"),  # the last message about a remote that does not answer and blocks all, or empty
        ("refusal", "S256"),  # the disk's error for the last write, UTF-8; empty once one succeeds
    ]
)
_HEAD: Final = np.dtype(
    [("magic", "<i8"), ("pid", "<i8"), ("started_s", "<f8"), ("processes", "<i8"), ("restarts", "<i8")]
)
# Identifies the layout of the slots; that of the head never changes. A worker may outlive a package upgrade.
_MAGIC: Final = zlib.crc32(repr((_SLOT.descr, STATE_NAMES, "no pid after the end")).encode())
_SLOTS: Final = PROCESSES_AT_MOST + 1
_SIZE: Final = _HEAD.itemsize + _SLOTS * _SLOT.itemsize

Slot = Any  # a numpy record of _SLOT, in the map of a board or private


def private_slot() -> Slot:
    """A slot that no other process sees."""
    return np.zeros(1, _SLOT)[0]


def board_text(words: str) -> bytes:
    """Encode `words` for a slot, which truncates them; what is not UTF-8, as in paths, becomes "?"."""
    return words.encode("utf-8", "replace")


def _first_text(texts: npt.NDArray[Any]) -> str:
    """The first of the slots' `texts` that is not empty; "" if all are."""
    return next((bytes(text).decode("utf-8", "ignore") for text in texts if text), "")


@dataclass(frozen=True, slots=True)
class Totals:
    """The counters of all sampling processes together, since the worker started."""

    samples: int
    units: int
    fetched_bytes: int
    unit_bytes: int
    written_bytes: int
    failures: int
    dropped: int
    retries: int
    fetch_wait_s: float
    transform_s: float
    pack_s: float
    publish_s: float
    space_wait_s: float
    cpu_s: float

    def since(self, before: Totals) -> Totals:
        """The counts since `before`."""
        return Totals(*(getattr(self, one.name) - getattr(before, one.name) for one in fields(Totals)))

    @property
    def done(self) -> int:
        """The samples that were read, used or not."""
        return self.samples + self.dropped + self.failures

    @property
    def read_cpu_s(self) -> float:
        """The processor's time for reading and decoding, which happen in threads beside the rest."""
        return max(0.0, self.cpu_s - self.transform_s - self.pack_s)

    @property
    def spent_s(self) -> dict[str, float]:
        """The time of the sampling processes in each stage.

        The wait for samples is one for decoding as far as the processor was busy meanwhile.
        """
        decode_s = min(self.fetch_wait_s, self.read_cpu_s)
        return {
            "remote": self.fetch_wait_s - decode_s,
            "decoding": decode_s,
            "transform": self.transform_s,
            "packing": self.pack_s,
            "disk": self.publish_s,
            "waiting for space": self.space_wait_s,
        }

    @property
    def shares(self) -> list[tuple[str, float]]:
        """The stages of sampling by their share of the time, the largest first; empty before any work."""
        whole_s = sum(self.spent_s.values())
        ordered = sorted(self.spent_s.items(), key=lambda item: -item[1])
        return [(stage, spent_s / whole_s) for stage, spent_s in ordered] if whole_s > 0 else []


class Run(NamedTuple):
    """One run of a supervisor: its process id, and the monotonic time of its start."""

    pid: int
    started_s: float


def unfinished_run(path: str) -> Run | None:
    """The run on the board at `path`, if its supervisor runs or was killed; None if it ended in order."""
    try:
        with open(path, "rb", opener=open_private) as file:
            head = np.frombuffer(file.read(_HEAD.itemsize), _HEAD)[0]
    except (OSError, ValueError, IndexError):
        return None
    return (
        Run(int(head["pid"]), float(head["started_s"])) if head["pid"] and head["magic"] == _MAGIC else None
    )


class Board:
    """The live counters of a worker, in the file `path`: a slot for each process, after a head.

    With `read_only`, a copy of the counters at this moment; the file must exist.
    """

    def __init__(self, path: str, *, read_only: bool = False) -> None:
        data: bytes | mmap.mmap
        with (
            translated_disk_errors(path),
            open(path, "rb" if read_only else "a+b", opener=open_private) as file,
        ):
            if read_only:
                data = file.read(_SIZE).ljust(_SIZE, b"\0")  # another version's may be shorter
            else:
                if os.fstat(file.fileno()).st_size < _SIZE:
                    os.posix_fallocate(file.fileno(), 0, _SIZE)
                data = mmap.mmap(file.fileno(), _SIZE)
        self._head = np.frombuffer(data, _HEAD, 1)
        self._slots = np.frombuffer(data, _SLOT, _SLOTS, _HEAD.itemsize)

    def reset(self, pid: int, processes: int, now_s: float) -> None:
        """Start over for a new supervisor."""
        self._slots[:] = np.zeros(1, _SLOT)
        self._head[0] = (_MAGIC, pid, now_s, processes, 0)

    def end(self) -> None:
        """Record that the supervisor ends in order. The pid of one that is killed stays."""
        self._head["pid"] = 0

    @property
    def pid(self) -> int:
        """The supervisor's process id; 0 once it has ended in order."""
        return int(self._head["pid"][0])

    @property
    def processes(self) -> int:
        """The number of slots in use; 0 if another version of the package writes them."""
        return int(self._head["processes"][0]) if self._head["magic"][0] == _MAGIC else 0

    @property
    def started_s(self) -> float:
        return float(self._head["started_s"][0])

    @property
    def restarts(self) -> int:
        return int(self._head["restarts"][0])

    def count_restart(self) -> None:
        self._head["restarts"] += 1

    def slot(self, index: int) -> Slot:
        """The slot of sampling process `index`: reading and writing its fields is live."""
        return self._slots[index]

    @property
    def sharing_slot(self) -> Slot:
        """The slot of the process that shares the filling with other caches: only its state is in use."""
        return self._slots[PROCESSES_AT_MOST]

    def clear_reads(self, index: int) -> None:
        """Clear the units that a dead process was reading, for its successor."""
        slot = self._slots[index]
        slot["reads"] = 0
        slot["transforming"] = 0

    def states(self) -> list[str]:
        return [STATE_NAMES[int(s)] for s in self._slots["state"][: self.processes]]

    def refusal(self) -> str:
        """The disk's error for a process that waits for space; "" if none waits because of one."""
        slots = self._slots[: self.processes]
        waiting = (slots["state"] == NO_SPACE) | (slots["state"] == WRITING)  # as during a retry
        return _first_text(slots["refusal"][waiting])

    def silence(self) -> str:
        """The remote that a process waits for and that does not answer; "" if all answer."""
        return _first_text(self._slots["silence"][: self.processes])

    def bandwidth_bytes_per_s(self) -> float | None:
        """The bandwidth limit of the worker; None without one."""
        return float(self._slots["bandwidth_bytes_per_s"][: self.processes].max(initial=0.0)) or None

    def totals(self) -> Totals:
        slots = self._slots[: self.processes]
        return Totals(*(slots[field.name].sum().item() for field in fields(Totals)))


EPOCHS_REPORTED: Final = 64
_LOADER_PREFIX: Final = "loader-"
_JSON: Final = json.JSONDecoder()
_MOST_READS, _READ_AGAIN_S = 20, 0.001  # of a report that is being written


class SourceStats(NamedTuple):
    """One source of a mixture: the samples `drawn` by all ranks of the cache since the loader was made, their
    `share` of all, and those `repeated`: drawn again in a pass over the snapshot.
    """

    drawn: int
    share: float
    repeated: int


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """Statistics of an `EpochLoader`. Counts are of this rank, except `epoch_samples` and `reuse_factor`.

    `samples`, `batches`, `skipped` (samples of damaged shards) and `wait_s` (time the trainer waited for
    data) are since the loader was made. `wait_share`: the share of waiting in the time since the first
    iteration; `epoch_wait_share`: the share in this epoch. `gap_s`: the time spent in the loader between the
    last batch of the previous epoch and the first of this one. `samples_per_s`: the rate of this epoch,
    training included. `epoch_samples`: the samples that the passes of the epoch so far were drawn from, in
    `shards` shards. `reuse_factor`: samples drawn over (expected) distinct samples drawn, so far.
    `prepare_s`: the duration of the last preparation. `mixture`: the sources of a mixture, by name.
    """

    epoch: int
    epoch_samples: int
    shards: int
    samples: int
    batches: int
    skipped: int
    wait_s: float
    wait_share: float
    epoch_wait_share: float
    gap_s: float
    samples_per_s: float
    reuse_factor: float
    prepare_s: float
    mixture: Mapping[str, SourceStats] = field(default_factory=dict, kw_only=True)

    def _repr_html_(self) -> str:
        rows = {
            "drawn from": f"{self.epoch_samples} samples in {self.shards} shards",
            "delivered": f"{self.samples} samples in {self.batches} batches",
            "skipped": self.skipped,
            "rate": f"{self.samples_per_s:.0f} samples/s",
            "waiting": f"{self.wait_share:.1%}, in this epoch {self.epoch_wait_share:.1%}",
            "reuse": f"{self.reuse_factor:.2f} times" if self.samples else "–",
        }
        if self.mixture:
            rows["mixture"] = ", ".join(f"{name} {one.share:.1%}" for name, one in self.mixture.items())
        return table(f"Loader, epoch {self.epoch}", rows)


@dataclass(frozen=True, slots=True)
class LoaderReport(LoaderStats):
    """A loader that lives, as it last reported itself.

    `epochs`: the last epochs, oldest first: number, samples, and the time of its beginning since 1970.
    """

    pid: int
    rank: int
    ranks: int
    reported_s: float
    epochs: tuple[tuple[int, int, float], ...]


class LoaderFile:
    """The file in which one loader reports, locked until `close`, or until its process ends."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._file: HeldFile | None = None
        self._closed = False

    def write(self, report: LoaderReport) -> None:
        """Replace the report. A disk that refuses it ends the reports, and not the training."""
        if self._closed:
            return
        try:
            if self._file is None:
                self._file = self._open()
            if self._file is not None:
                # Not asdict, which copies all epochs one by one.
                numbers = {field.name: getattr(report, field.name) for field in fields(report)}
                self._file.write(json.dumps(numbers).encode())
        except CacheError:
            self.close()

    def _open(self) -> HeldFile | None:
        forget_dead_loaders(self._directory)
        name = f"{_LOADER_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        file = lock_file(self._directory.worker_file(name))
        if file is not None:
            weakref.finalize(self, file.release, unlink=True)
        return file

    def close(self) -> None:
        """Remove the file."""
        self._closed = True
        if self._file is not None:
            self._file.release(unlink=True)


def _loader_files(directory: Directory) -> list[str]:
    with translated_disk_errors(directory.worker, "listing it"):
        names = os.listdir(directory.worker)
    return [directory.worker_file(name) for name in names if name.startswith(_LOADER_PREFIX)]


def forget_dead_loaders(directory: Directory) -> None:
    """Remove the reports of loaders whose process was killed."""
    for path in _loader_files(directory):
        remove_unheld(path)


def _read_report(path: str) -> LoaderReport | None:
    """The report at `path`; None if its loader is gone, or has never written one whole.

    A read beside a write may find a part of the next report: then it is read once more.
    """
    for _ in range(_MOST_READS):
        with suppress(OSError, ValueError, TypeError, KeyError):
            with open(path, encoding="utf-8", opener=open_private) as file:
                numbers, _end = _JSON.raw_decode(file.read())  # what follows is of an earlier, longer report
            epochs = tuple((number, samples, began_s) for number, samples, began_s in numbers.pop("epochs"))
            mixture = {name: SourceStats(*row) for name, row in numbers.pop("mixture", {}).items()}
            return LoaderReport(**numbers, epochs=epochs, mixture=mixture) if is_held(path) else None
        if not is_held(path):
            return None
        time.sleep(_READ_AGAIN_S)
    return None


def read_loaders(directory: Directory) -> list[LoaderReport]:
    """The reports of all loaders that live, by rank. One that was never written whole is left out."""
    found = [report for path in _loader_files(directory) if (report := _read_report(path)) is not None]
    return sorted(found, key=lambda report: (report.rank, report.pid))


ROWS_AT_MOST: Final = 1024
ROW: Final = np.dtype(
    [
        ("time_s", "<f8"),  # since the epoch, for plots only
        ("samples", "<i8"),
        ("size_bytes", "<i8"),
        ("limit_bytes", "<i8"),
        ("written_samples", "<i8"),
        ("evicted_samples", "<i8"),
        ("fetched_bytes", "<i8"),
        ("snapshots", "<i8"),
    ]
)


class History:
    """Appends to the history at `path`; one writer, the supervisor.

    The history spans the whole life of the cache: rows are further apart as it grows older, and when the file
    is full, every other row is dropped.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._first_s = self._last_s = 0.0
        self._rows = 0
        self._keep(read_history(path))  # a torn last row would shift all that follow

    def append(self, *numbers: int) -> None:
        """Add a row: the columns of ROW after the time. Skipped while the last row is recent."""
        now_s = self._clock()
        # Without this, thinning would halve the old rows again and again, until only the last hour is left.
        # A clock that was set back must not end the recording.
        if self._rows and 0 <= now_s - self._last_s < (self._last_s - self._first_s) / ROWS_AT_MOST:
            return
        row = np.array([(now_s, *numbers)], ROW)
        if self._rows >= ROWS_AT_MOST:
            self._keep(read_history(self._path)[::2])
        with translated_disk_errors(self._path), open(self._path, "ab", opener=open_private) as file:
            file.write(row.tobytes())
        self._rows += 1
        self._last_s = now_s
        self._first_s = self._first_s or now_s

    def _keep(self, rows: npt.NDArray[Any]) -> None:
        with translated_disk_errors(self._path):
            replace_file(self._path, rows.tobytes())
        self._rows = len(rows)
        if len(rows):
            self._first_s, self._last_s = float(rows["time_s"][0]), float(rows["time_s"][-1])


def read_history(path: str) -> npt.NDArray[Any]:
    """The rows so far, oldest first, without a torn last row."""
    try:
        with open(path, "rb", opener=open_private) as file:
            data = file.read()
    except FileNotFoundError:
        data = b""
    return np.frombuffer(data[: len(data) // ROW.itemsize * ROW.itemsize], ROW)
