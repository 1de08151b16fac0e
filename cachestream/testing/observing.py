"""Observations of the checks: threads, files, another process, the contents of a cache."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any, Final, TypeGuard

import cloudpickle
import numpy as np

from cachestream.sources.base import Source
from cachestream.storage.cache import Cache
from cachestream.storage.shard import MappedShard
from cachestream.worker.processes import import_path, start_python

# Beginnings of what connections that stay open for the next read are.
_POOLED: Final = ("socket:", "anon_inode:", "/dev/", "/proc/", "/memfd:")


def is_source(value: Source | Callable[[], Source]) -> TypeGuard[Source]:
    """Return whether `value` is a source itself; a class of sources is not, although it has the same
    attributes.
    """
    return isinstance(value, Source) and not isinstance(value, type)


class NumberedSource:
    """The first `num_units` of a source, with the unit and offset in their keys: "<unit> <offset> <key>"."""

    def __init__(self, inner: Source, num_units: int) -> None:
        self._inner = inner
        self.num_units = num_units
        self.fingerprint = inner.fingerprint

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
        for offset, (key, sample) in enumerate(self._inner.read(unit, rng)):
            yield f"{unit} {offset} {key}", sample

    @staticmethod
    def place(key: str) -> tuple[int, int]:
        """The unit of a sample, and its place in it, from its key."""
        unit, offset, _ = key.split(" ", 2)
        return int(unit), int(offset)


def cached_keys(cache: Cache) -> Iterator[str]:
    """The keys of all samples in published shards, in the order they were published."""
    folder = os.path.join(cache.path, "shards")
    for name in sorted(os.listdir(folder)):
        with closing(MappedShard(os.path.join(folder, name))) as shard:
            yield from shard.keys()


def threads() -> set[str]:
    """The threads of this process."""
    return {f"{thread.name} ({thread.ident})" for thread in threading.enumerate()}


def open_files() -> set[str]:
    """Open files and pipes of this process, by number and path."""
    found = set()
    with suppress(OSError):  # only Linux tells
        for fd in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{fd}")
                if not target.startswith(_POOLED):
                    found.add(f"{fd} -> {target}")
    return found


def fingerprint_elsewhere(source: Source | Callable[[], Source], timeout_s: float) -> str:
    """The fingerprint as a fresh interpreter finds it."""
    with start_python(__name__, import_path(), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            output = process.communicate(cloudpickle.dumps(source), timeout_s)[0]
        except subprocess.TimeoutExpired:
            output = b""
            process.kill()
    answer = False, f"the process ended with code {process.returncode}; its error is on stderr"
    if output:
        answer = json.loads(output.splitlines()[-1])  # before it, the source may have printed something
    is_fingerprint, text = answer
    if not is_fingerprint:
        raise AssertionError(f"the source could not be opened in another process: {text}")
    return text


def main() -> None:
    """Tell the fingerprint of the source that comes through stdin."""
    try:
        source = pickle.loads(sys.stdin.buffer.read())  # noqa: S301  sent by our own parent
        answer = True, (source if is_source(source) else source()).fingerprint
    except Exception as error:  # noqa: BLE001  a process's main: the parent tells
        answer = False, f"{type(error).__name__}: {error}"
    sys.stdout.write(f"{json.dumps(answer)}\n")
