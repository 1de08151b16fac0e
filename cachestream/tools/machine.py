"""Checks of the machine: what a cache and its training need of it, each found good or with advice."""

from __future__ import annotations

import os
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from cachestream.config import format_size
from cachestream.errors import ConfigError
from cachestream.linux import filesystem_of, is_network_filesystem
from cachestream.storage.layout import free_bytes
from cachestream.storage.os_errors import translated_disk_errors
from cachestream.tools.versions import versions
from cachestream.training.batches.memory import in_c
from cachestream.training.batches.transfer import accelerator

_TRIAL_BYTES: Final = 64 << 20
_LEAST_FREE_BYTES: Final = 1 << 30
_LEAST_BYTES_PER_S: Final = 100e6
_IN_MEMORY: Final = ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True)
class Check:
    """One property of the machine: `found`, and `advice` unless it is good."""

    name: str
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class MachineReport:
    """All checks of the machine, for the cache that would lie in `folder`."""

    folder: str
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return not any(check.advice for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        return {"folder": self.folder, "ok": self.ok, "checks": [asdict(check) for check in self.checks]}

    def __str__(self) -> str:
        """Lines of 80 columns."""
        lines: list[str] = []
        for check in self.checks:
            head = f"{'warning' if check.advice else 'OK':8} {check.name:12} "
            indent = " " * len(head)
            for text, first in ((check.found, head), (check.advice, indent)):
                lines += textwrap.wrap(text, 80, initial_indent=first, subsequent_indent=indent)
        return "\n".join(lines)


def check_machine(folder: str) -> MachineReport:
    """Check the machine for a cache in `folder`; writes and removes one file of 64 MiB there.

    Raises ConfigError for a missing folder.
    """
    folder = existing_folder(folder)
    return MachineReport(folder, tuple(_checks(folder)))


def existing_folder(folder: str) -> str:
    """The absolute path of `folder`; raises ConfigError if there is none."""
    found = os.path.realpath(os.path.expanduser(folder))
    if not os.path.isdir(found):
        raise ConfigError(f"--folder {folder!r}: no such folder; give one on the disk of the cache to be")
    return found


def _checks(folder: str) -> Iterator[Check]:
    yield Check("versions", ", ".join(f"{name} {found}" for name, found in versions().items()))
    again = "install a C compiler, then: pip install --force-reinstall --no-deps cachestream"
    how, advice = ("in C", "") if in_c is not None else ("by torch.index_select, more slowly", again)
    yield Check("compiled", f"batches are gathered {how}", advice)
    yield Check("device", accelerator() or "no accelerator: batches stay in host memory")
    kind, free = filesystem_of(folder), free_bytes(folder)
    is_local = not is_network_filesystem(kind)
    other = "choose a local disk: a network filesystem is refused, one in memory takes it from the training"
    yield Check("filesystem", kind or "unknown", "" if is_local and kind not in _IN_MEMORY else other)
    limit = f"a cache without size_limit takes {format_size(0.8 * free)} of it"
    more = "" if free >= _LEAST_FREE_BYTES else "free some space, or choose another disk"
    yield Check("space", f"{format_size(free)} free; {limit}", more)
    if is_local and free > 2 * _TRIAL_BYTES:
        rate = synced_bytes_per_s(folder)
        slow = "" if rate >= _LEAST_BYTES_PER_S else "filling is not faster than that: choose a faster disk"
        yield Check("disk", f"writes {format_size(rate)}/s, synced", slow)


def synced_bytes_per_s(folder: str) -> float:
    """Bytes a second at which a file of 64 MiB, which is removed again, is written in `folder` and synced.

    Raises CacheFullError where it does not fit, and CacheError if the disk fails.
    """
    data, translated = os.urandom(1 << 20), translated_disk_errors(folder, "writing to measure the disk")
    with translated, tempfile.NamedTemporaryFile(prefix=".cachestream-", dir=folder) as file:
        begun_s = time.perf_counter()
        file.writelines(data for _ in range(_TRIAL_BYTES >> 20))
        file.flush()
        os.fsync(file.fileno())
        return _TRIAL_BYTES / (time.perf_counter() - begun_s)
