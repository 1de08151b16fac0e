"""The exported checks of sources: every source of ours passes them, and each finds what it is there for."""

from __future__ import annotations

import io
import itertools
import os
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import cachestream as cs
from cachestream.testing import checks
from cachestream.testing.checks import CHECKS, SourceChecks, check_source
from tests.support.s3 import S3Server

UNITS: Final = 6
# Those that start processes come last: of a source that breaks another promise they have nothing to tell.
IN_PROCESSES: Final = (SourceChecks.check_fingerprint, SourceChecks.check_round_trip)
CHEAP_FIRST: Final = sorted(CHECKS, key=IN_PROCESSES.__contains__)


@pytest.mark.e2e
def test_a_source_that_does_not_open_in_another_process_is_given_up_at_the_deadline() -> None:
    with pytest.raises(AssertionError, match="not be opened in another process within 3 s"):
        checks.fingerprint_elsewhere(lambda: time.sleep(600), 3.0)  # type: ignore[arg-type,return-value]


# --- sources that keep the protocol --------------------------------------------------------------


def files(folder: Path) -> Callable[[], cs.Source]:
    for number in range(UNITS):
        np.save(folder / f"{number}.npy", np.full(100, number))
    (folder / "broken.npy").write_bytes(b"broken")  # a unit that cannot be used is allowed
    return lambda: cs.FileSource(folder)


def tars(folder: Path) -> Callable[[], cs.Source]:
    write_tars(folder)
    return lambda: cs.TarSource(folder)


def visits_to_tars(folder: Path) -> Callable[[], cs.Source]:
    write_tars(folder)
    return lambda: cs.TarSource(folder, samples_per_visit=3)


def dataset(_: Path) -> Callable[[], cs.Source]:
    return lambda: cs.DatasetSource([{"x": np.arange(number), "y": number} for number in range(UNITS)])


def function(_: Path) -> Callable[[], cs.Source]:
    return lambda: cs.CallableSource(lambda rng: {"x": rng.random(100)})


def counted_function(_: Path) -> Callable[[], cs.Source]:
    return lambda: cs.CallableSource(lambda rng: (rng.random(3), "text"), num_units=UNITS, thread_safe=True)


def write_tars(folder: Path) -> None:
    for number in range(2):
        with tarfile.open(folder / f"{number}.tar", "w") as archive:
            for sample in range(10):
                for extension, data in (("cls", b"%d" % sample), ("bin", bytes(3000))):
                    member = tarfile.TarInfo(f"{sample:03d}.{extension}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))


@pytest.mark.e2e
@pytest.mark.parametrize(
    "made_by",
    [
        pytest.param(files, marks=pytest.mark.slow),  # over S3 below
        pytest.param(tars, marks=pytest.mark.slow),
        visits_to_tars,
        dataset,
        function,
        pytest.param(counted_function, marks=pytest.mark.slow),
    ],
    ids=lambda f: f.__name__,
)
def test_our_sources_keep_the_protocol(
    made_by: Callable[[Path], Callable[[], cs.Source]], tmp_path: Path
) -> None:
    check_source(made_by(tmp_path))


@pytest.mark.e2e
@pytest.mark.parametrize("kind", [pytest.param(cs.FileSource, marks=pytest.mark.slow), cs.TarSource])
def test_sources_over_s3_keep_the_protocol_and_their_secrets(
    kind: Any, s3_server: S3Server, s3_bucket: Path
) -> None:
    if kind is cs.TarSource:
        write_tars(s3_bucket)
    else:
        files(s3_bucket)
    options = s3_server.storage_options
    check_source(
        lambda: kind(f"s3://{s3_bucket.name}", storage_options=options),
        secrets=[s3_server.key, s3_server.secret],
    )


# --- sources that do not -------------------------------------------------------------------------


class Good:
    """A source that keeps every promise; those below break one each."""

    fingerprint = "good"
    num_units: Any = UNITS

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[Any, Any]]:
        if not 0 <= unit < UNITS:
            raise IndexError(unit)
        for number in range(3):
            yield f"{unit}/{number}", {"x": rng.random(4)}


class Nameless(Good):
    fingerprint = ""


class Empty(Good):
    num_units = 0


class Tattletale(Good):
    fingerprint = "s3://key:hunter2@bucket"


class NamedByAddress(Good):
    def __init__(self) -> None:
        self.fingerprint = repr(self)


class NamedByHash(Good):
    def __init__(self) -> None:
        self.fingerprint = f"{hash('a text')}"


class Locked(Good):
    def __init__(self) -> None:
        self.lock = threading.Lock()


class Counting(Good):
    def __init__(self) -> None:
        self.reads = 0

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[Any, Any]]:
        self.reads += 1
        for key, _ in super().read(unit, rng):
            yield key, {"x": self.reads}


class SameKeys(Good):
    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[Any, Any]]:
        for _, sample in super().read(unit, rng):
            yield "sample", sample


class NumberKeys(Good):
    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[Any, Any]]:
        for _, sample in super().read(unit, rng):
            yield unit, sample


class Objects(Good):
    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[Any, Any]]:
        for key, _ in super().read(unit, rng):
            yield key, {"x": None}


class Pairless(Good):
    def read(self, unit: int, rng: np.random.Generator) -> Iterator[Any]:
        for _, sample in super().read(unit, rng):
            yield sample


class Raising(Good):
    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[Any, Any]]:
        yield from super().read(unit, rng)
        raise KeyError(unit)


class Useless(Good):
    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[Any, Any]]:
        raise cs.SampleError(f"unit {unit} cannot be used")


class Boundless(Good):
    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[Any, Any]]:
        yield f"{unit}", {"x": unit}


class SharedState(Good):
    """Threads that read at once see one another's place."""

    def __init__(self) -> None:
        self.barrier: threading.Barrier | None = None
        self.unit = -1

    def __reduce__(self) -> Any:
        return type(self), ()

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[Any, Any]]:
        self.unit = unit
        threading.Event().wait(0.05)  # long enough for the others to begin
        for key, _ in Good.read(self, unit, rng):
            yield key, {"x": self.unit}


class Hoarder(Good):
    """Keeps what it opened when a read is given up."""

    hoard: Final[list[int]] = []

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[Any, Any]]:
        self.hoard.append(os.open(__file__, os.O_RDONLY))
        yield from super().read(unit, rng)
        os.close(self.hoard.pop())


class Forgetful(Good):
    """Gives all its samples where it was made, and fewer in other processes."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[Any, Any]]:
        if os.getpid() == self.pid or unit != 2:
            yield from super().read(unit, rng)


class Abridged(Forgetful):
    """Gives all its samples where it was made, and only the first of each unit in other processes."""

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[Any, Any]]:
        samples = Good.read(self, unit, rng)
        yield from samples if os.getpid() == self.pid else itertools.islice(samples, 1)


class Changing(Good):
    """Units with different fields: the cache refuses all but the first kind."""

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[Any, Any]]:
        for key, sample in super().read(unit, rng):
            yield key, sample if unit % 2 else {"y": 1}


def check_cheaply(source: Any) -> None:
    subject = SourceChecks(source, ("hunter2",))
    for check in CHEAP_FIRST:
        check(subject)


@pytest.mark.e2e
def test_a_good_source_of_the_users_own_passes_and_so_does_each_check_alone() -> None:
    check_source(Good(), max_units=2)
    for check in CHEAP_FIRST[:-1]:
        check(SourceChecks(Good))


@pytest.mark.e2e
def test_all_checks_are_made_and_the_first_promise_that_is_broken_is_told() -> None:
    with pytest.raises(AssertionError, match="fingerprint must be a text"):
        check_source(Nameless)
    with pytest.raises(AssertionError, match=r"samples were refused on their way into the cache.*schema"):
        check_source(Changing)  # which the last one finds


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (object, "object has not all of fingerprint, num_units and read"),
        (Nameless, "fingerprint must be a text"),
        (Empty, "num_units is 0: it must be an int above 0, or None"),
        (Tattletale, "fingerprint holds a secret: redact it"),
        (NamedByAddress, "holds an address.*not by repr"),
        (NamedByHash, "in another process: use no hash"),
        (Locked, r"does not pickle before it was read from .*leave them out in __getstate__"),
        (Counting, "draw all that is random from `rng`, share no state"),
        (SameKeys, "1 keys come more than once, such as .'sample'.: put the unit into the key"),
        (NumberKeys, "yielded the key 0: it must be a text"),
        (Objects, "cannot be stored: field 'x' is None"),
        (Pairless, r"not \(key, sample\)"),
        (Raising, r"raised KeyError: 0; raise cachestream.SampleError"),
        (Useless, "none of the units 0 to 5 has a sample"),
        (Boundless, r"read\(-1\) of 6 units gave 1 samples: raise IndexError"),
        (SharedState, "read by several threads at once"),
        (Hoarder, "left threads .. and files .*test_checks.*close them"),
        (Forgetful, r"units \[2\] gave samples here, and none in the worker's processes"),
        (Abridged, r"of the \d+ samples of unit 0 only \[0\] came"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_source_that_breaks_a_promise_is_told_what_to_mend(
    bad: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if bad is Hoarder:
        monkeypatch.setattr(checks, "_WIND_DOWN_S", 0.5)
    with pytest.raises(AssertionError, match=message) as caught:
        check_cheaply(bad)
    assert "hunter2" not in str(caught.value)
    for fd in Hoarder.hoard:
        os.close(fd)
    Hoarder.hoard.clear()
