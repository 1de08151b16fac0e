"""Listings are stored whole or not at all: killed at any step, on a disk that refuses any step, and by whoever comes next."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachestream.errors import CacheError, CacheFullError
from cachestream.formats.files import FileSource
from cachestream.listing.names import Names, Page, file_names, read_mark
from cachestream.sources.base import IncrementalSource
from cachestream.storage.cache import Cache
from cachestream.storage.publish import Publisher
from cachestream.storage.reservations import Owner
from cachestream.worker.listings import Listings, keep_names, open_store, store_rest
from tests.storage.steps import Crash, Steps, copy_of, crash_everywhere, steps_of
from tests.storage.support import Line, assert_sound, fork, new_cache

FIRST = 20
PAGE = 15
NAMES = [f"folder-{number // PAGE}/{number:03d}-{'x' * (number % 7)}.bin" for number in range(60)]


@dataclass(frozen=True)
class Listed:
    """A source whose names are NAMES: listed at once, or the first of them only."""

    first: int = len(NAMES)
    fingerprint: str = "listed"
    num_units: int = len(NAMES)
    first_names: Names = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "first_names", Names(NAMES[: self.first]))

    @property
    def listing_digest(self) -> str:
        return self.first_names.digest

    @property
    def is_listing(self) -> bool:
        return self.first < len(NAMES)

    def more_names(self, last: str) -> Iterator[Page]:
        rest = [name for name in NAMES if name > last]
        for start in range(0, len(rest), PAGE):
            yield Page(rest[start : start + PAGE], is_last=start + PAGE >= len(rest))

    def complete(self) -> None:
        raise NotImplementedError

    def over(self, names: Any) -> Listed:
        raise NotImplementedError

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
        raise NotImplementedError


@contextmanager
def space_of(cache: Cache) -> Iterator[Publisher]:
    """Space in the cache, as a process that fills it alone has it."""
    with Owner.temporary(cache.directory, "listing") as owner:
        yield Publisher(cache.directory, cache.catalogue, cache.reservations, owner.name)


def keeps(cache: Cache, line: Line) -> None:
    with suppress(CacheError), space_of(cache) as space:
        keep_names(Listed(), cache.directory, space)
    line.say("kept")


def lists(cache: Cache, line: Line) -> None:
    store_pages(Listed(FIRST), cache, line)


def walks(cache: Cache, line: Line) -> None:
    store_pages(walked(cache), cache, line)


def walked(cache: Cache) -> FileSource:
    """Files of these names on this machine, of which the first are listed."""
    source = FileSource(Path(cache.path).parent / "tree", first_names=FIRST, label=None)
    assert source.is_listing
    return source


def store_pages(source: IncrementalSource, cache: Cache, line: Line) -> None:
    with (
        space_of(cache) as space,
        open_store(source, cache.directory, space, lambda _: True, is_next=False, may_evict=True) as store,
    ):
        for page in source.more_names(store.last):  # each by itself: `store_rest` waits for more of them
            store.add(page.names, is_complete=page.is_last)
            line.say(f"listed {store.writer.mark.count}")


ACTIONS: dict[str, Callable[[Cache, Line], None]] = {"keep": keeps, "list": lists, "walk": walks}


def strays(cache: Cache) -> list[str]:
    """Files of listings that no mark knows."""
    mark = read_mark(Listings(cache.directory).current)
    known = {"listing.json", *(() if mark is None else file_names(mark.stem))}
    return [
        name
        for name in os.listdir(cache.directory.worker)
        if name.startswith("listing") and name not in known
    ]


def stored(cache: Cache) -> list[str]:
    """The stored names: the first of them, or all of them, and nothing else."""
    names = list(Listings(cache.directory).load())
    assert names == NAMES[: len(names)]
    assert Listings(cache.directory).is_complete == (len(names) == len(NAMES))
    return names


def go_on(cache: Cache, what: str) -> None:
    """Whoever comes next stores the rest, and clears away what nobody knows."""
    if what == "keep":
        with space_of(cache) as space:
            keep_names(Listed(), cache.directory, space)
    else:
        Listings(cache.directory).clean()  # as the supervisor does before it starts another
        source: IncrementalSource = walked(cache) if what == "walk" else Listed(FIRST)
        with (
            space_of(cache) as space,
            open_store(
                source, cache.directory, space, lambda _: True, is_next=False, may_evict=True
            ) as store,
        ):
            store_rest(source, store)
    assert stored(cache) == NAMES
    assert not strays(cache)
    assert_sound(cache)


@pytest.fixture
def template(fast_path: Path) -> Path:
    for name in NAMES:
        (fast_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (fast_path / "tree" / name).touch()
    path = fast_path / "template"
    with new_cache(path, "4MB"):
        return path


@pytest.mark.e2e
@pytest.mark.parametrize("what", ["list", pytest.param("walk", marks=pytest.mark.slow), "keep"])
def test_a_process_that_is_killed_at_any_step_leaves_names_that_are_whole(
    template: Path, fast_path: Path, what: str
) -> None:
    def check(cache: Cache, crash: Crash) -> None:
        count = len(stored(cache))
        if crash.said:
            told = len(NAMES) if what == "keep" else int(crash.said[-1].split()[1])
            assert count >= told, "what was acknowledged is there"
        go_on(cache, what)

    steps = crash_everywhere(template, fast_path, ACTIONS[what], check)
    assert {"half written", "replace worker/.json", "fsync worker/.ends"} <= set(steps)


def refused(number: int) -> Callable[[str], None]:
    def fail(name: str) -> None:
        if name.split(maxsplit=1)[0].isupper():  # a statement
            full = number == errno.ENOSPC
            raise sqlite3.OperationalError("database or disk is full" if full else "disk I/O error")
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("number", "for_ever"),
    [
        pytest.param(errno.EIO, False, id="EIO once"),
        pytest.param(errno.ENOSPC, True, id="ENOSPC for ever"),
        pytest.param(errno.EIO, True, id="EIO for ever", marks=pytest.mark.slow),
        pytest.param(errno.ENOSPC, False, id="ENOSPC once", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("what", ACTIONS)
def test_a_disk_that_refuses_any_step_costs_no_name(
    template: Path, fast_path: Path, what: str, number: int, for_ever: bool
) -> None:
    """Names of a source that was listed at once are kept or not, which is no error; to list goes on later."""
    names = steps_of(template, fast_path, ACTIONS[what])

    def try_all(line: Line) -> None:
        for last in range(len(names)):
            cache = Cache(copy_of(template, fast_path))
            cache.close()  # its next connection is a counted one
            steps = Steps(last, refused(number), for_ever=for_ever)
            undo = steps.install()
            error: CacheError | None = None
            try:
                ACTIONS[what](cache, Silent())
            except CacheError as caught:
                error = caught
            steps.last = None
            undo()
            with cache:
                if what == "keep":
                    assert error is None, error
                    assert for_ever or not strays(cache)
                elif error is not None:
                    assert isinstance(error, CacheFullError) == (number == errno.ENOSPC), error
                stored(cache)
                go_on(cache, what)
            line.say(f"{names[last]} → {error or 'no error'}")

    child = fork(try_all)
    heard = []
    while text := child.hear():
        heard.append(text)
    assert child.wait() == 0, f"after: {heard[-1:]}, failing step {names[len(heard) : len(heard) + 1]}"
    assert len(heard) == len(names)


class Silent(Line):
    """Nobody is told."""

    def __init__(self) -> None:
        pass

    def say(self, text: str) -> None:
        del text
