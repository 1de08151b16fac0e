"""Arrays are read whole, whatever the layout of their file, and windows reach the last element."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
