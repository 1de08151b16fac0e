"""Small files of every format, for tests of sources."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zarr
from PIL import Image
from tfrecord import TFRecordWriter

__all__ = ["TABLE", "hdf5", "png", "records", "saved_zarr", "stream_of", "tar_of", "write"]


def png(height: int = 6, width: int = 8, value: int = 200) -> bytes:
    sink = io.BytesIO()
    Image.new("RGB", (width, height), (value, 0, 0)).save(sink, "PNG")
    return sink.getvalue()


def tar_of(members: Mapping[str, bytes]) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return sink.getvalue()


def records(*examples: Mapping[str, Any]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        writer = TFRecordWriter(str(path))
        for example in examples:
            writer.write(dict(example))
        writer.close()

    return write


def content(value: Any) -> bytes:
    """The bytes of a file: of texts, bytes, arrays, Arrow tables, and of what a function writes."""
    if isinstance(value, str):
        return value.encode()
    sink = io.BytesIO()
    if isinstance(value, np.ndarray):
        np.save(sink, value)
    elif isinstance(value, pa.Table):
        pq.write_table(value, sink, row_group_size=2)
    else:
        return bytes(value)
    return sink.getvalue()


def write(folder: Path, files: Mapping[str, Any]) -> Path:
    for name, value in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if callable(value):
            value(path)
        else:
            path.write_bytes(content(value))
    return folder


def stream_of(path: Path) -> None:
    with pa.ipc.new_stream(path, TABLE.schema) as writer:
        writer.write_table(TABLE)


def hdf5(path: Path) -> None:
    with h5py.File(path, "w") as stored:
        stored["x"], stored["y"] = np.arange(20), np.arange(20) * 10


def saved_zarr(path: Path) -> None:
    zarr.open_group(path, mode="w").create_array("x", data=np.arange(20), chunks=(8,))


TABLE: Final = pa.table(
    {
        "i": pa.array([1, None, 3], pa.int32()),
        "s": ["a", "b", None],
        "box": [{"x": 1.0, "y": 2.0}] * 3,
        "p": [png()] * 3,
    }
)
