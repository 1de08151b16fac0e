"""Helpers that write plain tars, and read samples back."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cachestream.errors import SampleError
from cachestream.formats.tar import TarSource

RNG = np.random.default_rng(0)

Files = Iterable[tuple[str, bytes]]


def tar_bytes(files: Files, form: int = tarfile.PAX_FORMAT) -> bytes:
    """Return a tar of (name, content) in one of tarfile's formats."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for name, content in files:
            add(archive, name, content)
    return buffer.getvalue()


def add(archive: tarfile.TarFile, name: str, content: bytes = b"", **attributes: Any) -> None:
    """Return one member as bytes; `attributes` are set on its TarInfo."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for attribute, value in attributes.items():
        setattr(member, attribute, value)
    archive.addfile(member, io.BytesIO(content))


def numbered(count: int, nbytes: int = 1000) -> list[tuple[str, bytes]]:
    """Return two files for each sample: its number, and bytes that depend on it."""
    return [
        file
        for n in range(count)
        for file in ((f"{n:05d}.cls", b"%d" % n), (f"{n:05d}.bin", bytes([n % 251]) * nbytes))
    ]


def read_all(source: TarSource) -> dict[str, Mapping[str, Any]]:
    """Return all samples by key. Asserts that each came once, and that none was refused."""
    found: dict[str, Mapping[str, Any]] = {}
    for unit in range(source.num_units):
        samples, problem = read_unit(source, unit)
        assert not problem
        assert not found.keys() & samples.keys()
        found.update(samples)
    return found


def read_unit(source: TarSource, unit: int = 0) -> tuple[dict[str, Mapping[str, Any]], str]:
    """Return the samples of a unit, and the text of the SampleError at their end, or an empty text."""
    found: dict[str, Mapping[str, Any]] = {}
    samples = source.read(unit, RNG)
    try:
        for key, sample in samples:
            assert key not in found
            found[key] = sample
    except SampleError as error:
        return found, str(error)
    return found, ""


def make(path: Path, files: Files, form: int = tarfile.PAX_FORMAT) -> Path:
    """Write a tar of (name, content) to `path`."""
    path.write_bytes(tar_bytes(files, form))
    return path
