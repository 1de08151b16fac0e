"""Arrays are found and read whole, whatever the layout of their file, and windows reach the last element."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import cachestream as cs

VALUES = np.arange(60, dtype=np.float32).reshape(6, 10)


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<i8", ">i2", ">u4", "|u1"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_keeps_its_values_in_any_byte_order_and_in_rows_or_columns(
    dtype: str, order: Any, tmp_path: Path
) -> None:
    np.save(tmp_path / "a.npy", np.asarray(VALUES, dtype, order=order))
    np.savez(tmp_path / "b.npz", x=np.asarray(VALUES, dtype, order=order))
    for name, field in (("a.npy", "array"), ("b.npz", "x")):
        ((_, sample),) = cs.open_source(f"{tmp_path}/{name}", format="files").read(
            0, np.random.default_rng(0)
        )
        assert sample[field].tolist() == VALUES.tolist()
        assert sample[field].dtype == np.dtype(dtype).newbyteorder("=")


def test_the_last_window_of_a_grid_ends_with_the_array(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(100))
    source: Any = cs.open_source(f"{tmp_path}/a.npy", window=10, stride=40, windows="grid")
    rng = np.random.default_rng(0)
    firsts = [
        int(sample["array"][0]) for unit in range(source.num_units) for _, sample in source.read(unit, rng)
    ]
    assert sorted(firsts) == [0, 40, 80, 90]


class Busy(MemoryFileSystem):  # type: ignore[misc]
    """A server that has no time at the first request of each kind."""

    protocol = "busy"
    asked: ClassVar[set[str]] = set()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("busy://", "memory://")))

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self._wait("ls")
        return super().ls(path, detail, **options)

    def glob(self, path: str, **options: Any) -> Any:
        self._wait("glob")
        return super().glob(path, **options)

    def _wait(self, name: str) -> None:
        if name not in self.asked:
            self.asked.add(name)
            raise TimeoutError("no time at present")


fsspec.register_implementation("busy", Busy, clobber=True)


def test_a_remote_that_has_no_time_is_asked_for_arrays_again() -> None:
    for name in ("b.npy", "a.npy"):
        with fsspec.open(f"memory://arrays/{name}", "wb") as file:
            np.save(file, np.arange(4))
    with fsspec.open("memory://arrays/g.zarr/.zgroup", "w") as file:
        file.write('{"zarr_format": 2}')
    with fsspec.open("memory://arrays/g.zarr/inside/.zgroup", "w") as file:
        file.write('{"zarr_format": 2}')
    source: Any = cs.open_source("busy://arrays/*.npy", window=2, windows="grid")
    assert source.num_units == 4
    Busy.asked.clear()
    with pytest.raises(cs.SourceError, match=r"a Zarr group, not an array.*one of: inside"):
        cs.open_source("busy://arrays/g.zarr", window=2)
