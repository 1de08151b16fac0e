"""The positions and bytes of windows, against numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestream.errors import ConfigError
from cachestream.formats.hdf5 import touched
from cachestream.sources import array_windows
from cachestream.sources.array_windows import WindowGrid, plan_bands, window_of


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Draw the shape of an array, and the start and the size of a window in it."""
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    size = [draw(st.integers(1, length)) for length in shape]
    start = [draw(st.integers(0, length - one)) for length, one in zip(shape, size, strict=True)]
    return shape, start, size


def area(start: list[int], size: list[int]) -> tuple[slice, ...]:
    return tuple(slice(one, one + count) for one, count in zip(start, size, strict=True))


@given(cuts(), st.sampled_from([0, 4, 40, 10_000]))
def test_bands_hold_the_window_and_little_else(
    cut: tuple[list[int], list[int], list[int]], gap_bytes: int
) -> None:
    shape, start, size = cut
    array = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    data = array.tobytes()
    bands = plan_bands(shape, 4, start, size, gap_bytes)
    found: list[npt.NDArray[np.int32]] = [
        np.ndarray(bands.shape, np.int32, data[one : one + bands.nbytes], 0, bands.strides)
        for one in bands.starts
    ]
    np.testing.assert_array_equal(np.concatenate(found).reshape(size), array[area(start, size)])
    if gap_bytes == 0:
        assert bands.is_dense(4)
        assert bands.nbytes * len(bands.starts) == 4 * math.prod(size)
    else:
        assert bands.nbytes * len(bands.starts) <= (4 * math.prod(size)) * (1 + gap_bytes / 4)


def test_a_band_of_far_apart_bytes_does_not_grow_past_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_windows, "MAX_BAND_BYTES", 1000)
    bands = plan_bands((100, 100), 4, (0, 0), (100, 50), 10_000)
    assert (len(bands.shape), bands.nbytes, len(bands.starts)) == (1, 200, 100)
    assert plan_bands((100, 100), 4, (0, 0), (100, 100), 0).nbytes == 40_000  # nothing else in it


@given(cuts(), st.lists(st.integers(1, 5), min_size=4, max_size=4))
def test_the_chunks_touched_make_up_the_window(
    cut: tuple[list[int], list[int], list[int]], lengths: list[int]
) -> None:
    shape, start, size = cut
    chunk = lengths[: len(shape)]
    array = np.arange(math.prod(shape)).reshape(shape)
    window = set(array[area(start, size)].ravel().tolist())
    for index in touched(chunk, start, size):
        first = [number * length for number, length in zip(index, chunk, strict=True)]
        content = set(array[area(first, chunk)].ravel().tolist())
        assert window & content, "no chunk in vain"
        window -= content
    assert not window


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 25))
def test_the_places_of_a_grid_reach_every_element_in_order(length: int, size: int, stride: int) -> None:
    places = WindowGrid.of([length], [min(size, length)], stride, None)
    starts = [places.at(number)[0] for number in range(places.count)]
    assert starts == sorted(set(starts))
    assert (starts[0], starts[-1]) == (0, length - min(size, length))
    if stride <= size:
        reached = {element for start in starts for element in range(start, start + min(size, length))}
        assert reached == set(range(length))


def test_draws_are_spread_over_all_places_alike() -> None:
    places = WindowGrid.of([13, 9], [10, 9], 1, None)
    rng = np.random.default_rng(0)
    drawn = [places.draw(rng) for _ in range(4000)]
    assert {place[1] for place in drawn} == {0}
    counts = np.bincount([place[0] for place in drawn])
    assert len(counts) == 4
    assert counts.min() > 900


def test_jitter_moves_places_within_the_array() -> None:
    places = WindowGrid.of([100, 100], [10, 10], 10, (3, 0))
    rng = np.random.default_rng(0)
    moved = [places.move(places.at(number), rng) for number in range(places.count)]
    off = [(at[0] - start[0], at[1] - start[1]) for at, start in
           zip(moved, map(places.at, range(places.count)), strict=True)]  # fmt: skip
    assert {first for first, _ in off} == set(range(-3, 4))
    assert {second for _, second in off} == {0}
    assert all(0 <= one <= 90 for at in moved for one in at)


@pytest.mark.parametrize(
    ("window", "message"),
    [
        (0, "give a length"), (True, "give a length"), ("64", "give a length"), ((1.5, 2), "give a length"),
        ((2, 2, 2), "has 3 axes, a.npy has 2"), ((None, None), "is all of"), ((), "is all of"),
    ],
)  # fmt: skip
def test_a_window_that_cannot_be_is_a_config_error(window: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        window_of(window, 2, "a.npy")


@pytest.mark.parametrize(("stride", "jitter"), [(0, None), ((1, 2, 3), None), (1, -1), (1, "2"), (1.5, None)])
def test_strides_and_jitter_that_cannot_be_are_config_errors(stride: Any, jitter: Any) -> None:
    with pytest.raises(ConfigError, match="give an int"):
        WindowGrid.of([10, 10], [2, 2], stride, jitter)
