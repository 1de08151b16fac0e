"""ArraySource on files written by numpy, zarr and h5py: the windows' values, and the bytes fetched."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from cachestream.errors import CacheStreamError, ConfigError, SampleError, SourceError
from cachestream.formats.files import FileSource
from cachestream.sources.arrays import ArraySource
from cachestream.sources.open import open_source

h5py: Any = pytest.importorskip("h5py")
zarr: Any = importlib.import_module("zarr") if importlib.util.find_spec("zarr") else None
needs_zarr = pytest.mark.skipif(zarr is None, reason="zarr 3 needs Python 3.11")

ROOT: Final = Path(__file__).parents[2]
IMAGE: Final = np.random.default_rng(0).normal(size=(300, 400, 3)).astype(np.float32)
MASK: Final = (IMAGE[..., 0] > 0).astype(np.uint8)
CHUNK: Final = (50, 40, 3)


def write_zarr(path: Path, array: npt.NDArray[Any], chunks: tuple[int, ...], **options: Any) -> None:
    if zarr is None:
        pytest.skip("zarr 3 needs Python 3.11")
    zarr.create_array(str(path), shape=array.shape, chunks=chunks, dtype=array.dtype, **options)[...] = array


def write_hdf5(path: Path, array: npt.NDArray[Any], **options: Any) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("image", data=array, **options)


# The functions that write IMAGE, by the name of the file.
WRITERS: Final[dict[str, Callable[[Path], object]]] = {
    "c.npy": lambda path: np.save(path, IMAGE),
    "fortran.npy": lambda path: np.save(path, np.asfortranarray(IMAGE)),
    "swapped.npy": lambda path: np.save(path, IMAGE.astype(">f4")),
    "v3.zarr": lambda path: write_zarr(path, IMAGE, CHUNK),
    "raw.zarr": lambda path: write_zarr(path, IMAGE, CHUNK, compressors=None),
    "gzip.zarr": lambda path: write_zarr(path, IMAGE, CHUNK, compressors=[zarr.codecs.GzipCodec()]),
    "blosc.zarr": lambda path: write_zarr(path, IMAGE, CHUNK, compressors=[zarr.codecs.BloscCodec()]),
    "sharded.zarr": lambda path: write_zarr(path, IMAGE, CHUNK, shards=(150, 200, 3)),
    "v2.zarr": lambda path: write_zarr(path, IMAGE, CHUNK, zarr_format=2),
    "v2f.zarr": lambda path: write_zarr(path, IMAGE, CHUNK, zarr_format=2, order="F"),
    "plain.h5": lambda path: write_hdf5(path, IMAGE),
    "chunked.h5": lambda path: write_hdf5(path, IMAGE, chunks=CHUNK),
    "gzip.hdf5": lambda path: write_hdf5(path, IMAGE, chunks=CHUNK, compression="gzip", shuffle=True),
    "lzf.h5": lambda path: write_hdf5(path, IMAGE, chunks=CHUNK, compression="lzf"),
    "checked.h5": lambda path: write_hdf5(path, IMAGE, chunks=CHUNK, compression="gzip", fletcher32=True),
    "swapped.h5": lambda path: write_hdf5(path, IMAGE.astype(">f4"), chunks=CHUNK, shuffle=True),
    "scaled.h5": lambda path: write_hdf5(path, (IMAGE * 100).astype(np.int32), chunks=CHUNK, scaleoffset=0),
}
if zarr is None:
    for unwritten in [name for name in WRITERS if name.endswith(".zarr")]:
        del WRITERS[unwritten]
CHUNKED: Final = [name for name in WRITERS if name not in ("c.npy", "fortran.npy", "swapped.npy", "plain.h5")]


@pytest.fixture(scope="module", autouse=True)
def zarr_has_threads(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Start the threads that zarr keeps from its first write on, before tests look for leaked threads."""
    if zarr is not None:
        write_zarr(tmp_path_factory.mktemp("zarr") / "a.zarr", MASK, (10, 10))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arrays")
    for name, write in WRITERS.items():
        write(folder / name)
    return folder


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def read(source: ArraySource, unit: int = 0, seed: int | None = None) -> tuple[str, dict[str, Any]]:
    ((key, sample),) = source.read(unit, rng(unit if seed is None else seed))
    return key, sample


# --- what windows hold -------------------------------------------------------------------------


@pytest.mark.e2e
@pytest.mark.parametrize("dtype", ["?", "u1", "i2", "u2", "f2", "i4", "u4", "i8", "u8", "f8", "c8", "c16"])
def test_every_type_that_a_cache_can_hold_comes_as_it_is(tmp_path: Path, dtype: str) -> None:
    values = rng().integers(0, 2, (40, 6)).astype(dtype)
    np.save(tmp_path / "a.npy", values)
    write_zarr(tmp_path / "a.zarr", values, (7, 4))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["plain"] = values
        file.create_dataset("packed", data=values, chunks=(7, 4), compression="gzip", shuffle=True)
    for name in ("a.npy", "a.zarr", "a.h5::/plain", "a.h5::/packed"):
        source = ArraySource(f"{tmp_path}/{name}", window=9, windows="grid")
        for unit in range(source.num_units or 0):
            _, sample = read(source, unit)
            (start,) = sample["start"]
            assert sample["array"].dtype == values.dtype
            np.testing.assert_array_equal(sample["array"], values[start : start + 9])


@needs_zarr
def test_a_zarr_array_is_read_where_an_event_loop_runs(written: Path) -> None:
    """A notebook runs one."""
    source = ArraySource(written / "v3.zarr", window=(10, 10))

    async def read_there() -> tuple[str, dict[str, Any]]:
        return read(source)

    (key, sample), (same_key, same) = read(source), asyncio.run(read_there())
    assert key == same_key
    np.testing.assert_array_equal(sample["array"], same["array"])


@needs_zarr
def test_chunks_that_were_never_written_hold_the_fill_value(tmp_path: Path) -> None:
    zarr.create_array(str(tmp_path / "a.zarr"), shape=(100,), chunks=(10,), dtype="f4", fill_value=7)[:20] = 1
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (100,), "f4", chunks=(10,), fillvalue=7)[:20] = 1
        file.create_dataset("none", (100,), "f4", fillvalue=7)
    for name, ones in (("a.zarr", 5), ("a.h5::x", 5), ("a.h5::none", 0)):
        source = ArraySource(f"{tmp_path}/{name}", window=30, stride=15, windows="grid")
        expected = [1] * ones + [7] * (30 - ones)
        assert read(source, 1)[1]["array"].tolist() == expected
        assert read(source, 3)[1]["array"].tolist() == [7] * 30


@pytest.mark.e2e
def test_a_store_that_vanished_is_not_taken_for_fill_values(tmp_path: Path) -> None:
    write_zarr(tmp_path / "a.zarr", IMAGE, CHUNK)
    source = ArraySource(tmp_path / "a.zarr", window=10)
    (tmp_path / "a.zarr").rename(tmp_path / "b.zarr")
    with pytest.raises(SourceError, match="no Zarr array here"):
        read(source)


# --- places ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["c.npy", pytest.param("sharded.zarr", marks=needs_zarr), "gzip.hdf5"])
def test_a_grid_holds_each_window_once_and_every_element(written: Path, name: str) -> None:
    source = ArraySource(written / name, window=(128, 150), windows="grid")
    assert source.num_units == 3 * 3
    seen = np.zeros(IMAGE.shape[:2], int)
    keys = set()
    for unit in range(9):
        key, sample = read(source, unit)
        y, x = sample["start"]
        seen[y : y + 128, x : x + 150] += 1
        np.testing.assert_array_equal(sample["array"], IMAGE[y : y + 128, x : x + 150])
        keys.add(key)
    assert seen.min() == 1
    assert len(keys) == 9


def test_windows_and_places_follow_the_unit_and_its_generator_alone(written: Path) -> None:
    source = ArraySource(written / "c.npy", window=10)
    assert read(source, 3, seed=1)[1]["start"] == read(source, 3, seed=1)[1]["start"]
    assert len({int(read(source, 3, seed=seed)[1]["start"][0]) for seed in range(50)}) > 30


# --- several arrays ----------------------------------------------------------------------------


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Write three images, the third twice as high, and a mask for each."""
    for number in range(3):
        image = np.concatenate([IMAGE] * 2) if number == 2 else IMAGE
        np.save(tmp_path / f"image{number}.npy", np.moveaxis(image, 2, 0) + number)
        write_zarr(tmp_path / f"mask{number}.zarr", (image[..., 0] > 0).astype(np.uint8), (64, 64))
    return tmp_path


@pytest.mark.e2e
def test_arrays_of_a_dict_are_read_at_one_place(pairs: Path) -> None:
    source = open_source(
        {"image": f"{pairs}/image*.npy", "mask": f"{pairs}/mask{{0..2}}.zarr"},
        window={"image": (None, 64, 32), "mask": (64, 32)},
    )
    assert isinstance(source, ArraySource)
    places = set()
    for unit in range(40):
        key, sample = read(source, unit)
        assert set(sample) == {"image", "mask", "start", "index"}
        assert sample["image"].shape == (3, 64, 32)
        index = sample["index"]
        np.testing.assert_array_equal(sample["image"][0] - index > 0, sample["mask"] > 0)
        y, x = sample["start"]
        assert key == f"image{index}.npy[{y}:{y + 64},{x}:{x + 32}]#{unit}"
        places.add((index, y))
    assert {index for index, _ in places} == {0, 1, 2}
    assert max(y for index, y in places if index == 2) > 300


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("weights", "shares"),
    [(None, [0.218, 0.218, 0.564]), ("equal", [1 / 3] * 3), ([1, 0, 3], [0.25, 0, 0.75])],
)
def test_weights_say_how_often_an_array_is_drawn(pairs: Path, weights: Any, shares: list[float]) -> None:
    source = ArraySource(f"{pairs}/mask*.zarr", window=(64, 32), weights=weights)
    drawn = [source._locate_window(unit, rng(unit))[0] for unit in range(2000)]
    np.testing.assert_allclose(np.bincount(drawn, minlength=3) / 2000, shares, atol=0.04)


@pytest.mark.e2e
def test_a_grid_over_several_arrays_holds_each_window_of_each_once(pairs: Path) -> None:
    source = ArraySource(f"{pairs}/mask*.zarr", window=(100, 100), windows="grid")
    assert source.num_units == 12 + 12 + 24
    found = [read(source, unit) for unit in range(48)]
    assert len({key for key, _ in found}) == 48
    assert np.bincount([sample["index"] for _, sample in found]).tolist() == [12, 12, 24]


def test_arrays_are_looked_at_when_they_are_drawn_where_weights_are_given(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", IMAGE)
    np.save(tmp_path / "b.npy", IMAGE[:5])
    (tmp_path / "c.npy").write_bytes(b"garbage")
    np.save(tmp_path / "d.npy", IMAGE.astype(np.float64))
    source = ArraySource(f"{tmp_path}/*.npy", window=10, weights="equal")
    reasons = set()
    for unit in range(60):
        try:
            assert read(source, unit)[1]["index"] == 0
        except SampleError as error:
            reasons.add(str(error))
    assert len(reasons) == 3
    for text in ("smaller than the window", "not a usable .npy file", "the same types"):
        assert any(text in reason for reason in reasons)
    with pytest.raises(ConfigError, match=r"smaller than the window.*leave it out, or give weights="):
        ArraySource([tmp_path / "a.npy", tmp_path / "b.npy"], window=10)


# --- what is fetched ---------------------------------------------------------------------------


def chunk_bytes_touched(sample: dict[str, Any], window: tuple[int, int]) -> int:
    counts = [
        -(-(int(at) + size) // length) - int(at) // length
        for at, size, length in zip(sample["start"], window, CHUNK[:2], strict=True)
    ]
    return math.prod(counts) * math.prod(CHUNK) * 4


@pytest.mark.parametrize("name", CHUNKED)
def test_only_the_chunks_that_a_window_touches_are_fetched(
    written: Path, name: str, fetched: list[int]
) -> None:
    source = ArraySource(written / name, window=(20, 30))
    read(source)
    for unit in range(1, 6):
        fetched.clear()
        _, sample = read(source, unit)
        index_bytes = 24 * 16 * 4 if name == "sharded.zarr" else 0
        assert 0 < sum(fetched) <= 1.05 * chunk_bytes_touched(sample, (20, 30)) + index_bytes


def test_a_contiguous_window_costs_its_own_bytes_and_one_read(tmp_path: Path, fetched: list[int]) -> None:
    np.save(tmp_path / "a.npy", np.arange(1_000_000, dtype=np.float32))
    source = ArraySource(tmp_path / "a.npy", window=4096)
    for unit in range(5):
        fetched.clear()
        read(source, unit)
        assert sum(fetched) == 4 * 4096


def test_rows_far_apart_are_read_one_by_one(tmp_path: Path, fetched: list[int]) -> None:
    array = np.arange(100 * 100_000, dtype=np.int32).reshape(100, 100_000)
    np.save(tmp_path / "a.npy", array)
    source = ArraySource(tmp_path / "a.npy", window=(10, 1000))
    fetched.clear()
    _, sample = read(source)
    y, x = sample["start"]
    np.testing.assert_array_equal(sample["array"], array[y : y + 10, x : x + 1000])
    assert sum(fetched) == 10 * 1000 * 4


# --- processes, threads, the protocol ----------------------------------------------------------


@pytest.mark.e2e
def test_many_hdf5_files_are_read_from_many_threads_with_few_open(tmp_path: Path) -> None:
    for number in range(40):
        write_hdf5(tmp_path / f"{number:02d}.h5", np.full((20, 4), number), chunks=(5, 4), compression="lzf")
    source = ArraySource(f"{tmp_path}/*.h5", window=3, windows="grid")
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda unit: read(source, unit)[1], range(source.num_units or 0)))
    assert all((sample["array"] == sample["index"]).all() for sample in found)
    assert len(os.listdir("/proc/self/fd")) - before <= 40


def read_in_fork(source: ArraySource) -> bool:
    return all((read(source, unit)[1]["array"] == 1).all() for unit in range(4))


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("ending", ["npy", pytest.param("zarr", marks=needs_zarr), "h5"])
def test_a_fork_reads_with_files_of_its_own(tmp_path: Path, ending: str) -> None:
    ones = np.ones((40, 8), np.int16)
    if ending == "h5":
        write_hdf5(tmp_path / "a.h5", ones, chunks=(10, 8), compression="lzf")
    elif ending == "zarr":
        write_zarr(tmp_path / "a.zarr", ones, (10, 8))
    else:
        np.save(tmp_path / "a.npy", ones)
    source = ArraySource(tmp_path / f"a.{ending}", window=5)
    assert read_in_fork(source)
    child = os.fork()
    if child == 0:
        os._exit(0 if read_in_fork(source) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert read_in_fork(source)


def test_an_hdf5_file_that_the_user_holds_open_is_read_too(written: Path) -> None:
    for name in ("gzip.hdf5", "lzf.h5"):
        with h5py.File(written / name, "r") as file:
            _, sample = read(ArraySource(written / name, window=10))
            assert file["image"].shape == IMAGE.shape
        assert sample["array"].shape == (10, 400, 3)


@pytest.mark.e2e
def test_heavy_libraries_are_loaded_only_for_what_needs_them(written: Path) -> None:
    script = """
import sys
import cachestream.sources.open as remote
print([name for name in ("zarr", "h5py", "pyarrow", "torch") if name in sys.modules])
remote.open_source(sys.argv[1] + "/c.npy", window=5)
print([name for name in ("zarr", "h5py", "pyarrow", "torch") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(written)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["[]", "[]"]


@pytest.mark.parametrize(("name", "extra"), [("v3.zarr", "zarr"), ("plain.h5", "hdf5")])
def test_a_missing_library_is_named_with_the_extra_that_brings_it(
    written: Path, name: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(module: str) -> Any:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr("importlib.import_module", refuse)
    with pytest.raises(ConfigError, match=rf"pip install 'cachestream\[{extra}\]'"):
        ArraySource(written / name, window=5)


# --- choosing and refusing ---------------------------------------------------------------------


@pytest.mark.e2e
@needs_zarr
def test_the_ending_or_a_window_chooses_arrays(written: Path) -> None:
    assert type(open_source(written / "c.npy")) is FileSource
    assert type(open_source(written / "c.npy", window=5)) is ArraySource
    for url in ("v3.zarr", "v3.zarr/", "plain.h5::/image", "plain.h5::image", "gzip.hdf5"):
        assert type(open_source(f"{written}/{url}", window=5)) is ArraySource
        with pytest.raises(ConfigError, match="needs window="):
            open_source(f"{written}/{url}")
    source = open_source([written / "c.npy", written / "v3.zarr", written / "plain.h5"], window=5)
    assert repr(source) == "<ArraySource c.npy and 2 more, endless>"


def test_a_dataset_of_a_relative_file_is_another_in_another_folder(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(written, tmp_path / "copy")
    found = []
    for folder in (written, tmp_path / "copy"):
        monkeypatch.chdir(folder)
        found.append(ArraySource("plain.h5::/image", window=5).fingerprint)
        assert found[-1] == ArraySource(f"{folder}/plain.h5::/image", window=5).fingerprint
    assert found[0] != found[1]


def test_options_that_cannot_work_are_config_errors(written: Path) -> None:
    image = written / "c.npy"
    np.save(written / "mask.npy", MASK[:-1])
    np.save(written / "text.npy", np.array(["a", "b"]))
    np.save(written / "one.npy", np.array(1.0))
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (image, {"window": 301}, "is smaller than the window"),
        (image, {"window": (2, 2, 2, 2)}, "has 4 axes"),
        (image, {"window": 5, "windows": "all"}, "'random' or 'grid'"),
        (image, {"window": 5, "windows": "grid", "num_units": 5}, "leave out"),
        (image, {"window": 5, "windows": "grid", "weights": "equal"}, "leave out"),
        (image, {"window": 5, "num_units": 0}, "1 or more"),
        (image, {"window": 5, "stride": 0}, "stride=0"),
        (image, {"window": 5, "weights": [1, 2]}, "give 1 numbers"),
        (image, {"window": 5, "weights": "random"}, "'equal'"),
        (image, {"window": {"a": 5}}, "give one for each"),
        ([], {"window": 5}, "takes the URL"),
        ({}, {"window": 5}, "at least one"),
        ({"start": image}, {"window": 5}, "no name for an array"),
        ({"image": image, "mask": written / "mask.npy"}, {"window": (5, 5)}, "the same lengths"),
        ({"image": image, "mask": [image, image]}, {"window": 5}, "equally many"),
        (written / "text.npy", {"window": 1}, "dtype <U1"),
        (written / "one.npy", {"window": 1}, "single value"),
        ("x.dat", {"window": 1}, r"ArraySource reads .*\.npy"),
        (f"{written}/plain.h5::/image", {"window": 5, "dataset": "image"}, "not both"),
    ]
    for arrays, options, message in cases:
        with pytest.raises(ConfigError, match=message):
            ArraySource(arrays, **options)


@pytest.mark.e2e
@needs_zarr
def test_what_is_not_there_is_an_error_that_names_what_is(tmp_path: Path) -> None:
    group = zarr.create_group(str(tmp_path / "g.zarr"))
    group.create_array("inner/image", shape=(10,), dtype="i4")
    group = zarr.create_group(str(tmp_path / "g2.zarr"), zarr_format=2)
    group.create_array("inner/image", shape=(10,), dtype="i4")
    zarr.consolidate_metadata(str(tmp_path / "g2.zarr"))
    with h5py.File(tmp_path / "two.h5", "w") as file:
        file["a"], file["deep/b"] = np.arange(10), np.arange(10)
    for url, message in [
        ("none.npy", "not found"),
        ("none.zarr", "no Zarr array here"),
        ("none.h5", "not found"),
        ("*.npy", "nothing found"),
        ("g.zarr", "a Zarr group.*one of: inner$"),
        ("g2.zarr", "a Zarr group.*one of: inner/image$"),
        ("two.h5", "several datasets.*/a, /deep/b"),
        ("two.h5::/c", "no such dataset.*/a, /deep/b"),
    ]:
        with pytest.raises(SourceError, match=message):
            ArraySource(f"{tmp_path}/{url}", window=1)
    assert read(ArraySource(f"{tmp_path}/g.zarr/inner/image", window=3))[0].startswith("g.zarr/inner/image[")
    source = ArraySource(tmp_path / "two.h5", window=10, dataset="deep/b")
    assert read(source)[0] == "two.h5::/deep/b[0:10]#0"


@pytest.mark.parametrize("name", ["c.npy", "plain.h5", "chunked.h5", "lzf.h5"])
def test_a_file_that_is_replaced_is_read_as_it_is_now_or_refused(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    source = ArraySource(tmp_path / name, window=10)
    read(source)
    spare = tmp_path / f"new-{name}"
    for array, fits in ((IMAGE + 1, True), (IMAGE[:100], False)):
        np.save(spare, array) if name.endswith("npy") else write_hdf5(spare, array)
        os.replace(spare, tmp_path / name)
        if fits:
            _, sample = read(source)
            (start,) = sample["start"]
            if name != "lzf.h5":  # HDF5 itself reads this file, which it keeps open
                np.testing.assert_array_equal(sample["array"], IMAGE[start : start + 10] + 1)
        elif name != "lzf.h5":
            with pytest.raises(SampleError, match="replaced by another array"):
                read(source)


# --- malformed ---------------------------------------------------------------------------------


def damaged(data: bytes, generator: np.random.Generator) -> bytes:
    """Return `data` truncated, or with some bits flipped."""
    if generator.random() < 0.3:
        return data[: int(generator.integers(0, len(data)))]
    broken = bytearray(data)
    for _ in range(int(generator.integers(1, 4))):
        # Damage is most harmful in the first bytes, which hold the header.
        at = int(generator.integers(0, min(len(broken), 400) if generator.random() < 0.7 else len(broken)))
        broken[at] ^= 1 << int(generator.integers(0, 8))
    return bytes(broken)


def read_damaged(path: Path) -> str:
    """Read some windows. Return the text of the CacheStreamError, or the path if there was none."""
    try:
        source = ArraySource(path, window=(20, 20))
        for unit in range(3):
            read(source, unit)
    except CacheStreamError as error:
        return str(error)
    return str(path)


SMALL: Final = np.arange(100 * 60, dtype=np.int32).reshape(100, 60)


@pytest.mark.e2e
def test_a_damaged_npy_file_brings_errors_of_ours_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, SMALL)
    whole = path.read_bytes()
    for seed in range(150):
        path.write_bytes(damaged(whole, rng(seed)))
        assert str(path) in read_damaged(path)


@pytest.mark.e2e
@pytest.mark.parametrize("options", [{}, {"shards": (50, 60)}, {"zarr_format": 2}], ids=str)
def test_a_damaged_zarr_array_brings_errors_of_ours_alone(tmp_path: Path, options: dict[str, Any]) -> None:
    path = tmp_path / "a.zarr"
    write_zarr(path, SMALL, (25, 30), **options)
    files = [file for file in path.rglob("*") if file.is_file()]
    for seed in range(60):
        file = files[seed % len(files)]
        whole = file.read_bytes()
        file.write_bytes(damaged(whole, rng(seed)))
        assert str(path) in read_damaged(path)
        file.write_bytes(whole)


def test_a_zarr_array_that_declares_enormous_chunks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    write_zarr(path, SMALL, (25, 30))
    document = json.loads((path / "zarr.json").read_text())
    document["shape"] = [1 << 40, 1 << 40]
    document["chunk_grid"]["configuration"]["chunk_shape"] = [1 << 30, 1 << 30]
    (path / "zarr.json").write_text(json.dumps(document))
    with pytest.raises(SampleError, match="more than can be decoded"):
        ArraySource(path, window=(1, 1))


FUZZ_HDF5: Final = """
import sys
from pathlib import Path
from tests.sources.test_arrays import damaged, read_damaged, rng
path = Path(sys.argv[1])
whole = path.read_bytes()
for seed in range(int(sys.argv[2])):
    path.write_bytes(damaged(whole, rng(seed)))
    assert str(path) in read_damaged(path)
print("done")
"""


@pytest.mark.e2e
@pytest.mark.parametrize("packing", [{}, {"chunks": (25, 30), "compression": "gzip"}], ids=["plain", "gzip"])
def test_a_damaged_hdf5_file_brings_errors_of_ours_alone(tmp_path: Path, packing: dict[str, Any]) -> None:
    """In a process of its own: HDF5 is a C library, and damaged files may crash it."""
    write_hdf5(tmp_path / "a.h5", SMALL, **packing)
    done = subprocess.run(
        [sys.executable, "-c", FUZZ_HDF5, str(tmp_path / "a.h5"), "120"],
        cwd=ROOT, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr[-3000:]


def test_a_remote_hdf5_file_may_not_lead_to_files_of_this_machine(tmp_path: Path) -> None:
    write_hdf5(tmp_path / "secret.h5", np.arange(10))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["link"] = h5py.ExternalLink(str(tmp_path / "secret.h5"), "/image")
        file.create_dataset("raw", (10,), "i4", external=[(str(tmp_path / "secret.h5"), 0, 40)])
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/arrays/a.h5", (tmp_path / "a.h5").read_bytes())
    try:
        for name in ("link", "raw"):
            with pytest.raises(SourceError, match=r"refused|no such dataset"):
                ArraySource(f"memory://arrays/a.h5::/{name}", window=5)
    finally:
        memory.rm("/arrays", recursive=True)


@needs_zarr
@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("dtype", [str, "U5"])
def test_zarr_arrays_of_texts_are_refused_as_other_dtypes_are(
    tmp_path: Path, zarr_format: int, dtype: Any
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a data type that the Zarr specification does not contain yet
        array = zarr.create_array(
            str(tmp_path / "a.zarr"), shape=(4,), chunks=(2,), dtype=dtype, zarr_format=zarr_format
        )
        array[:] = "x"
        with pytest.raises(ConfigError, match=r"a\.zarr: has dtype .*; windows are of numbers or bools"):
            ArraySource(tmp_path / "a.zarr", window=2)
