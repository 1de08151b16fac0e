"""Checks of the machine: what a cache and its training need of it, each found good or with advice."""

from __future__ import annotations

import os
import resource
import secrets
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
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
_LEAST_FILES: Final = 1024
_WIDTH: Final = 80
# Where the drivers of remotes look for credentials: variables of the environment, and files.
_CREDENTIALS: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "S3": (("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE"), "~/.aws/credentials"),
    "Google": (
        ("GOOGLE_APPLICATION_CREDENTIALS",),
        "~/.config/gcloud/application_default_credentials.json",
    ),
    "Azure": (("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_CONNECTION_STRING"), "~/.azure"),
    "Hugging Face": (("HF_TOKEN",), "~/.cache/huggingface/token"),
}


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
        lines: list[str] = []
        for check in self.checks:
            head = f"{'warning' if check.advice else 'OK':8} {check.name:12} "
            indent = " " * len(head)
            for text, first in ((check.found, head), (check.advice, indent)):
                lines += textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=indent)
        return "\n".join(lines)


def check_machine(
    folder: str, environment: Mapping[str, str], on_progress: Callable[[str], None] = lambda _: None
) -> MachineReport:
    """Check the machine for a cache in `folder`; writes and removes one file of 64 MiB there.

    Raises ConfigError for a missing folder.
    """
    folder = existing_folder(folder)
    on_progress(f"writing {format_size(_TRIAL_BYTES)} into {folder}")
    return MachineReport(folder, tuple(_checks(folder, environment)))


def existing_folder(folder: str) -> str:
    """The absolute path of `folder`; raises ConfigError if there is none."""
    found = os.path.realpath(os.path.expanduser(folder))
    if not os.path.isdir(found):
        raise ConfigError(f"--folder {folder!r}: no such folder; give one on the disk of the cache to be")
    return found


def _checks(folder: str, environment: Mapping[str, str]) -> Iterator[Check]:
    yield Check("versions", ", ".join(f"{name} {found}" for name, found in versions().items()))
    yield _compiled()
    yield Check("device", accelerator() or "no accelerator: batches stay in host memory")
    kind = filesystem_of(folder)
    yield _filesystem(kind)
    free = free_bytes(folder)
    advice = (
        "" if free >= _LEAST_FREE_BYTES else "a cache needs more: free some space, or choose another disk"
    )
    limit = f"a cache without size_limit takes {format_size(0.8 * free)} of it"
    yield Check("space", f"{format_size(free)} free; {limit}", advice)
    if not is_network_filesystem(kind) and free > 2 * _TRIAL_BYTES:
        yield _disk(folder)
    yield _open_files()
    yield Check("credentials", credentials(environment))


def _compiled() -> Check:
    if in_c is not None:
        return Check("compiled", "batches are gathered in C")
    advice = (
        "install a C compiler, then cachestream again: pip install --force-reinstall --no-deps cachestream"
    )
    return Check("compiled", "batches are gathered by torch.index_select, more slowly", advice)


def _filesystem(kind: str) -> Check:
    if is_network_filesystem(kind):
        return Check("filesystem", kind, "a cache is refused on a network filesystem: choose a local disk")
    if kind in ("tmpfs", "ramfs"):
        return Check("filesystem", kind, "a cache in memory takes it from the training: choose a local disk")
    return Check("filesystem", kind or "unknown")


def _disk(folder: str) -> Check:
    bytes_per_s = synced_bytes_per_s(folder)
    slow = bytes_per_s < _LEAST_BYTES_PER_S
    advice = "filling cannot be faster than that: choose a faster disk if the remote is" if slow else ""
    return Check("disk", f"writes {format_size(bytes_per_s)}/s, synced", advice)


def synced_bytes_per_s(folder: str) -> float:
    """Bytes a second at which a file of 64 MiB, which is removed again, is written in `folder` and synced.

    Raises CacheFullError where it does not fit, and CacheError if the disk fails.
    """
    path, data = os.path.join(folder, f".cachestream-{secrets.token_hex(8)}"), os.urandom(1 << 20)
    with translated_disk_errors(path, "writing to measure the disk"):
        try:
            begun_s = time.perf_counter()
            with open(path, "xb") as file:
                file.writelines(data for _ in range(_TRIAL_BYTES >> 20))
                file.flush()
                os.fsync(file.fileno())
            return _TRIAL_BYTES / (time.perf_counter() - begun_s)
        finally:
            Path(path).unlink(missing_ok=True)


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= soft < _LEAST_FILES
    shown = ["no limit" if one == resource.RLIM_INFINITY else f"{one:,}" for one in (soft, hard)]
    return Check(
        "open files", f"{shown[0]}, at most {shown[1]}", f"raise 'ulimit -n' to {_LEAST_FILES}" if few else ""
    )


def credentials(environment: Mapping[str, str]) -> str:
    """The remotes for which credentials are in `environment` or in files; the credentials are not shown."""
    found = []
    for remote, (names, path) in _CREDENTIALS.items():
        places = [name for name in names if environment.get(name)]
        places += [path] if os.path.exists(os.path.expanduser(path)) else []
        found += [f"{remote} ({', '.join(places)})"] if places else []
    return "; ".join(found) or "none found, beside those that storage_options may give"
