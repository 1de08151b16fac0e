"""From whatever names the data to its source: files, datasets, functions, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import json
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cachestream.errors import ConfigError, SampleError, SourceUnavailableError
from cachestream.sources.base import Source
from cachestream.sources.datasets import CallableSource, DatasetSource, IterableSource
from cachestream.sources.files import FileSource
from cachestream.sources.open import open_source
from cachestream.sources.parquet import ParquetSource
from cachestream.sources.tar import TarSource
from cachestream.sources.tfrecord import TFRecordSource
from cachestream.sources.user_code import fingerprint_of
from cachestream.transport import metering
from tests.sources.tars import tar_bytes

RNG = np.random.default_rng(0)
ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(slots=True)
class Slotted:
    size: int

    def __call__(self, rng: np.random.Generator) -> Any:
        return rng.random(self.size)

    def draw(self, rng: np.random.Generator) -> Any:
        return self(rng)


@dataclasses.dataclass(slots=True)
class Further(Slotted):
    __more: int = 4


class Squares:
    """A map-style dataset."""

    def __init__(self, length: int = 5) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int]:
        if index == 3:
            raise KeyError("three is missing")
        if index == 4:
            raise ConnectionResetError("reset by peer")
        return index, index * index


class Numbers:
    """An iterable dataset: no length, no index."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Table:
    """As pandas: [x] is a column."""

    iloc = None

    def __len__(self) -> int:
        return 1

    def __getitem__(self, name: str) -> list[int]:
        return [1]


def slow_network(_: np.random.Generator) -> None:
    raise TimeoutError("no answer")


def draw(rng: np.random.Generator) -> dict[str, Any]:
    return {"x": rng.random(3)}


def scaled(rng: np.random.Generator, scale: float) -> dict[str, Any]:
    return {"x": rng.random(3) * scale}


# --- choosing ----------------------------------------------------------------------------------


def test_paths_urls_and_lists_become_file_sources(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"1")
    for what in (
        tmp_path,
        str(tmp_path),
        [tmp_path / "a.bin"],
        (str(tmp_path / "a.bin"),),
        f"{tmp_path}/*.bin",
    ):
        source = open_source(what)
        assert type(source) is FileSource
        assert isinstance(source, Source)
        assert source.num_units == 1


def test_datasets_functions_and_sources_are_told_apart() -> None:
    assert type(open_source(Squares())) is DatasetSource
    assert type(open_source([{"x": 1}, {"x": 2}])) is DatasetSource
    assert type(open_source(np.zeros((3, 2)))) is DatasetSource
    assert type(open_source(Numbers())) is IterableSource
    assert type(open_source(draw)) is CallableSource
    assert type(open_source(functools.partial(draw))) is CallableSource
    source = open_source(draw, num_units=3)
    assert open_source(source) is source


def test_torch_datasets_are_read_without_conversion() -> None:
    data = pytest.importorskip("torch.utils.data")
    torch = pytest.importorskip("torch")
    source = open_source(data.TensorDataset(torch.arange(4), torch.arange(4) * 2))
    ((key, sample),) = source.read(3, RNG)
    assert (key, [int(value) for value in sample]) == ("3", [3, 6])

    class Endless(data.IterableDataset):  # type: ignore[misc,name-defined]
        def __iter__(self) -> Iterator[int]:
            return iter(())

    assert type(open_source(Endless())) is IterableSource


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ((number for number in range(3)), "an iterator .generator., which can be gone through only once"),
        ([], "an empty list"),
        ({"a": 1}, "a dict"),
        ({1, 2}, "a set"),
        (Table(), "a table .Table."),
        (7, "int"),
        (None, "NoneType"),
        (b"bytes", "bytes"),
        (Squares, "type"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_read_is_refused_with_a_way_out(what: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"open_source\(\) cannot read {message}.*(give|wrap)"):
        open_source(what)


@pytest.mark.parametrize("url", ["a.tar", "{a,b}.tar", "*.tar", "a.tar.gz", "b.TGZ"])
def test_tars_packed_or_not_are_read_as_archives(url: str, tmp_path: Path) -> None:
    for name in ("a.tar", "b.tar", "a.tar.gz", "b.TGZ"):
        (tmp_path / name).write_bytes(bytes(1024))
    source = open_source(tmp_path / url, samples_per_visit=None)
    assert type(source) is TarSource


@pytest.mark.parametrize(
    ("names", "what", "kind"),
    [
        (["a.tar", "b.tar"], "", TarSource),
        (["a.tar", "b.tar"], "*", TarSource),
        (["b.tar.gz", "c.tgz"], "{b.tar.gz,c.tgz}", TarSource),
        (["_SUCCESS", "part-0.parquet", "part-1.snappy.parquet"], "", ParquetSource),
        ([".part-0.parquet.crc", "part-0.parquet"], "", ParquetSource),
        (["m-train.tfrecord-00000-of-00002", "m-train.tfrecord-00001-of-00002"], "", TFRecordSource),
        (["m-train.tfrecord-00000-of-00001"], "m-train.tfrecord-00000-of-00001", TFRecordSource),
        (
            ["m-train.tfrecord-00000-of-00002", "m-train.tfrecord-00001-of-00002"],
            "m-train.tfrecord-*",
            TFRecordSource,
        ),
        (
            ["m.tfrecord-00000-of-00002", "m.tfrecord-00001-of-00002"],
            "m.tfrecord-{00000..00001}-of-00002",
            TFRecordSource,
        ),
        (["a.jpg", "b.tar.jpg"], "", FileSource),
        (["a-2024.npy", "b-2025.npy"], "", FileSource),
    ],
)
def test_a_folder_or_wildcard_is_read_as_what_it_holds(
    names: list[str], what: str, kind: type, tmp_path: Path
) -> None:
    for name in names:
        if name.endswith(".parquet"):
            pq.write_table(pa.table({"i": [1, 2]}), tmp_path / name)
        else:
            (tmp_path / name).write_bytes(b"")
    given = str(tmp_path / what)
    assert type(open_source(given)) is kind
    assert type(open_source(given, format="files")) is FileSource


def test_archives_beside_other_files_are_not_read_as_a_sample_each(tmp_path: Path) -> None:
    for name in ("README.md", "a.tar", "b.tar"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(
        ConfigError, match=r"holds tar files beside others \(README.md, b.tar\): give format='tar'"
    ):
        open_source(str(tmp_path))
    tars = open_source(str(tmp_path), format="tar")
    assert tars.num_units == 2
    assert (
        type(open_source(str(tmp_path), extensions=(".tar",))) is FileSource
    )  # asked for by a word of its own


def test_a_folder_takes_the_options_of_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar_bytes([("1.txt", b"1"), ("2.txt", b"2")]))
    assert type(open_source(tmp_path, samples_per_visit=10)) is TarSource
    with pytest.raises(ConfigError, match=r"no argument 'columns'; it takes crop, decoders"):
        open_source(tmp_path, columns=["x"])
    with pytest.raises(ConfigError, match=r"no argument 'sample_per_visit'; do you mean 'samples_per_visit'"):
        open_source(tmp_path, sample_per_visit=10)
    pq.write_table(pa.table({"i": [1, 2], "j": [3, 4]}), tmp_path / "b.parquet")
    with pytest.raises(ConfigError, match="holds tar files beside others"):
        open_source(tmp_path, samples_per_visit=10)
    (tmp_path / "a.tar").rename(tmp_path / "a.jpg")
    (tmp_path / "b.parquet").rename(tmp_path / "c.jpg")
    with pytest.raises(
        ConfigError, match=r"no argument 'samples_per_visit'; it takes crop, encoding, extensions"
    ):
        open_source(tmp_path, samples_per_visit=10)


def test_an_unknown_option_is_refused_and_a_peers_is_translated(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"1")
    with pytest.raises(ConfigError, match=r"no argument 'lable'; do you mean 'label'\?"):
        open_source(tmp_path, lable=None)
    with pytest.raises(ConfigError, match=r"no argument 'storage_option'.*'storage_options'"):
        open_source(tmp_path, storage_option={})
    with pytest.raises(ConfigError, match=r"no argument 'label'; it takes num_units, thread_safe"):
        open_source(draw, label=None)
    with pytest.raises(ConfigError, match="no options beside a Source: label"):
        open_source(open_source(draw), label=None)


# --- datasets ----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [open_source, TarSource])
def test_a_command_in_place_of_a_url_is_refused_unread_and_untold(make: Any) -> None:
    with pytest.raises(
        ConfigError, match="'pipe:' URLs name a command, and none is run: give the URL"
    ) as caught:
        make("pipe:curl -H canary https://host/train-{000000..000003}.tar")
    assert "canary" not in str(caught.value)


def test_a_dataset_is_read_by_index_and_its_errors_become_ours() -> None:
    source = pickle.loads(pickle.dumps(open_source(Squares())))
    assert source.num_units == 5
    assert list(source.read(2, RNG)) == [("2", (2, 4))]
    with pytest.raises(SampleError, match=r"Squares\[3\] raised KeyError: 'three is missing'"):
        list(source.read(3, RNG))
    with pytest.raises(SourceUnavailableError, match=r"Squares\[4\] raised ConnectionResetError"):
        list(source.read(4, RNG))


def test_a_datasets_fingerprint_names_its_class_length_and_own_fingerprint() -> None:
    plain = open_source(Squares(5))
    named = Squares(5)
    named.fingerprint = "v2"  # type: ignore[attr-defined]
    assert plain.fingerprint == "dataset:tests.sources.test_open.Squares[5]"
    assert open_source(Squares(6)).fingerprint != plain.fingerprint
    assert open_source(named).fingerprint == plain.fingerprint + ":v2"


@pytest.mark.parametrize("what", [Squares(0), Numbers(), Table(), {"a": 1}, "text"])
def test_a_dataset_without_samples_or_index_is_refused(what: Any) -> None:
    with pytest.raises(ConfigError):
        DatasetSource(what)


class Overlap:
    """Counts the calls in progress."""

    def __init__(self, patience_s: float) -> None:
        self.now = self.peak = 0
        self.patience_s = patience_s
        self.together = threading.Barrier(4)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        self.now += 1
        self.peak = max(self.peak, self.now)
        try:
            self.together.wait(self.patience_s)
        except threading.BrokenBarrierError:
            pass
        self.now -= 1
        return index


@pytest.mark.parametrize(("thread_safe", "peak"), [(False, 1), (True, 4)])
def test_calls_into_a_dataset_overlap_only_if_it_is_thread_safe(thread_safe: bool, peak: int) -> None:
    dataset = Overlap(60.0 if thread_safe else 0.2)
    source = DatasetSource(dataset, thread_safe=thread_safe)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda unit: list(source.read(unit, RNG)), range(4)))
    assert dataset.peak == peak


def test_who_waits_for_a_slow_call_shows_life() -> None:
    started, finish = threading.Event(), threading.Event()

    def slow(_: np.random.Generator) -> int:
        started.set()
        finish.wait(120)
        return 1

    source = CallableSource(slow)
    beat = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(lambda: list(source.read(0, RNG)))
        assert started.wait(60)
        metering.install(lambda _: beat.set())
        try:
            second = pool.submit(lambda: list(source.read(1, RNG)))
            assert beat.wait(60)
            assert not second.done()
        finally:
            metering.install(None)
            finish.set()
        assert first.result(60) == [("0", 1)]
        assert second.result(60) == [("1", 1)]


# --- functions ---------------------------------------------------------------------------------


def test_a_function_is_endless_or_makes_passes_and_is_reproducible() -> None:
    source = open_source(draw)
    assert source.num_units is None
    assert open_source(draw, num_units=9).num_units == 9
    ((key, first),) = source.read(10**12, np.random.default_rng(5))
    ((_, again),) = source.read(10**12, np.random.default_rng(5))
    assert key == "1000000000000"
    assert np.array_equal(first["x"], again["x"])


def test_a_function_may_return_none_to_skip_and_its_errors_fail_the_sample() -> None:
    assert list(CallableSource(lambda _: None).read(0, RNG)) == []
    with pytest.raises(SampleError, match=r"<lambda>\(rng\) for unit 7 raised ZeroDivisionError"):
        list(CallableSource(lambda _: 1 // 0).read(7, RNG))
    with pytest.raises(SourceUnavailableError):
        list(CallableSource(slow_network).read(7, RNG))


@pytest.mark.parametrize("fn", [lambda: 1, lambda a, b: a + b, 3, lambda *, rng: rng])
def test_a_function_that_cannot_take_a_generator_is_refused(fn: Any) -> None:
    with pytest.raises(ConfigError, match=r"fn\(rng\)"):
        CallableSource(fn)


@pytest.mark.parametrize("num_units", [0, -1, True])
def test_a_pass_without_units_is_refused(num_units: int) -> None:
    with pytest.raises(ConfigError, match="num_units"):
        CallableSource(draw, num_units=num_units)


def test_a_functions_fingerprint_changes_with_its_code_constants_and_bound_values() -> None:
    def windows(size: int, scale: float = 1.0) -> Any:
        return lambda rng: rng.random(size) * scale

    variants = [
        lambda rng: rng.random(3),
        lambda rng: rng.random(4),
        lambda rng: rng.normal(3),
        lambda rng: [rng.random(3) for _ in range(2)],
        lambda rng: [rng.random(3) + 1 for _ in range(2)],
        windows(3),
        windows(4),
        windows(3, 2.0),
        functools.partial(scaled, scale=1),
        functools.partial(scaled, scale=2),
        draw,
        len,
        Squares(5).__getitem__,
        Squares(6).__getitem__,
    ]
    assert len({fingerprint_of(fn) for fn in variants}) == len(variants)
    assert fingerprint_of(windows(3)) == fingerprint_of(windows(3))


def test_a_functions_fingerprint_changes_with_all_that_is_bound_to_it() -> None:
    """Defaults of keywords, attributes in slots and NumPy's numbers as well."""

    def sized(number: Any) -> Any:
        return lambda rng, *, size=number: rng.random(size)

    def closed(value: Any) -> Any:
        return lambda rng: rng.random(value)

    numbers = (np.int64(3), np.int64(4), np.int32(3), np.float32(0.5), np.float64(0.5), np.bool_(True))
    variants = [
        sized(3),
        sized(4),
        sized((3, 4)),
        *map(closed, numbers),
        closed(Slotted(3)),
        closed(Slotted(4)),
        *(
            bound
            for each in (Slotted(3), Slotted(4), Further(3), Further(3, 5))
            for bound in (each, each.draw)
        ),
        Squares(np.int64(5)).__getitem__,  # type: ignore[arg-type]
        Squares(np.int64(6)).__getitem__,  # type: ignore[arg-type]
    ]
    assert len({fingerprint_of(fn) for fn in variants}) == len(variants)
    assert fingerprint_of(Further(3, 5)) == fingerprint_of(Further(3, 5))


def test_a_functions_fingerprint_does_not_change_as_it_is_used() -> None:
    path = Path("a") / "b"
    fn: Any = lambda _: str(path)  # noqa: E731
    before = fingerprint_of(fn)
    assert hash(path)
    assert fn(RNG) == "a/b"
    assert fingerprint_of(fn) == before


SCRIPT = """
import functools, json
from cachestream.sources.user_code import fingerprint_of

WORDS = {"a", "b", "c"}

def sample(rng, words=("x", 2), scale=0.5):
    inner = lambda n: n in {"cat", "dog", "bird", "fish"}
    return [inner(w) for w in words if w not in {"p", "q", "r"}]

class Draw:
    def __call__(self, rng):
        return rng.random()

print(json.dumps([fingerprint_of(f) for f in (sample, Draw(), functools.partial(sample, scale=2))]))
"""


def test_a_fingerprint_is_the_same_in_every_process() -> None:
    found = [
        json.loads(subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, env={"PYTHONHASHSEED": seed},
                                  capture_output=True, check=True, timeout=180).stdout)
        for seed in ("1", "2", "3")
    ]  # fmt: skip
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == 3


SPAWNING: Final = """
import json, multiprocessing
from cachestream.sources.user_code import fingerprint_of

def sample(rng):
    return rng.random()

class Draw:
    def __call__(self, rng):
        return rng.random()

def tell(pipe):
    pipe.send([fingerprint_of(sample), fingerprint_of(Draw())])

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=tell, args=(theirs,))
    process.start()
    print(json.dumps([ours.recv(), [fingerprint_of(sample), fingerprint_of(Draw())]]))
    process.join()
"""


def test_a_function_of_the_main_script_is_the_same_in_a_process_that_it_spawns(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(SPAWNING)
    done = subprocess.run(
        [sys.executable, tmp_path / "main.py"], capture_output=True, check=True, timeout=180
    )
    spawned, here = json.loads(done.stdout)
    assert spawned == here


def test_opening_sources_loads_neither_torch_nor_any_driver() -> None:
    script = (
        "import sys, cachestream.sources.open as o; o.open_source('cachestream');"
        "print([m for m in ('torch', 's3fs', 'aiobotocore', 'botocore', 'aiohttp', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=True, timeout=180
    )
    assert done.stdout.strip() == b"[]"


def test_listing_is_done_once_and_not_by_the_children(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.bin").write_bytes(b"1")
    source = open_source(tmp_path)
    (tmp_path / "9.bin").write_bytes(b"1")
    assert pickle.loads(pickle.dumps(source)).num_units == 3
    start = time.process_time()
    for _ in range(1000):
        pickle.loads(pickle.dumps(source))
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("a.tfrecord", {"features": ["a"]}, r"features= is a list: give a dict"),
        ("a.parquet", {"nulls": ["n"]}, r"nulls= is a list: give a dict, such as \{'age': -1\}"),
        ("a.parquet", {"decode_images": "bin"}, r"decode_images='bin': give a list of columns"),
        ("a.txt", {"storage_options": "anon"}, r"storage_options= is a str: give a dict"),
        ("a.tar", {"samples_per_visit": "10"}, r"samples_per_visit='10': give a whole number"),
    ],
)
def test_options_of_another_type_are_refused(
    name: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ConfigError, match=message):
        open_source(str(tmp_path / name), **options)
