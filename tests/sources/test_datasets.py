"""Iterables of torch, WebDataset and Hugging Face: each sample once, split the way each library splits."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
import webdataset as wds
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import cachestream as cs
from cachestream.errors import ConfigError, SampleError, SourceUnavailableError
from cachestream.sources.datasets import IterableSource
from cachestream.testing.checks import check_source
from tests.worker.support import DEADLINE_S

# WebDataset leaves the files it reads to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
TARS: Final = 4
SAMPLES: Final = 10


class Numbers(IterableDataset[dict[str, int]]):
    """0 … count - 1, split among the workers of a DataLoader as torch's documentation shows."""

    def __init__(self, count: int = 40) -> None:
        self.count = count

    def __iter__(self) -> Iterator[dict[str, int]]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, self.count, step):
            again = get_worker_info()
            assert (again is None) == (info is None)
            assert again is None or info is None or again.id == info.id
            yield {"x": number}


class Sized(Numbers):
    """One with a length is an iterable all the same."""

    def __len__(self) -> int:
        return self.count


class Plain:
    """Anything whose iter() begins anew."""

    def __iter__(self) -> Iterator[tuple[int, str]]:
        for number in range(5):
            yield number, str(number)


class Torn:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __iter__(self) -> Iterator[int]:
        yield 1
        raise self.error


def make(shard: int, shards: int) -> Iterator[dict[str, int]]:
    for number in range(shard, 30, shards):
        yield {"x": number}


def write_tars(folder: Path) -> str:
    for number in range(TARS):
        with wds.TarWriter(str(folder / f"{number}.tar")) as writer:
            for sample in range(SAMPLES):
                name = f"{number}-{sample}"
                writer.write({"__key__": name, "txt": name, "cls": sample, "npy": np.full(3, sample)})
    return f"{folder}/{{0..{TARS - 1}}}.tar"


def pipeline(urls: str) -> Any:
    return wds.WebDataset(urls, shardshuffle=False).decode()


def stream(folder: Path) -> Any:
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("tqdm").tqdm.monitor_interval = 0  # its progress bars start a thread that stays
    for number in range(3):
        rows = [json.dumps({"x": 10 * number + i, "text": f"row {i}"}) for i in range(10)]
        (folder / f"{number}.jsonl").write_text("\n".join(rows), encoding="utf-8")
    files = [str(folder / f"{number}.jsonl") for number in range(3)]
    return datasets.load_dataset(
        "json", data_files=files, split="train", streaming=True, cache_dir=str(folder / "hf")
    )


def samples_of(source: cs.Source, unit: int) -> list[tuple[str, Any]]:
    return list(source.read(unit, np.random.default_rng(unit)))


def values(source: cs.Source, name: str = "x") -> list[list[Any]]:
    """The field of all samples, shard by shard."""
    return [[sample[name] for _, sample in samples_of(source, unit)] for unit in range(source.num_units or 0)]


@pytest.mark.e2e
@pytest.mark.parametrize(
    "kind",
    ["torch", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("webdataset", "hugging face"))],
)
def test_every_kind_of_iterable_keeps_the_protocol(kind: str, tmp_path: Path) -> None:
    if kind == "torch":
        check_source(lambda: cs.IterableSource(Numbers(12), shards=3))
    elif kind == "webdataset":
        urls = write_tars(tmp_path)
        check_source(lambda: cs.open_source(pipeline(urls)))
    else:
        streamed = stream(tmp_path)
        check_source(lambda: cs.open_source(streamed))


def test_what_is_not_split_and_functions_that_split_themselves_are_read_whole() -> None:
    assert values(cs.open_source(Sized(4))) == [[0, 1, 2, 3]]
    assert samples_of(cs.open_source(Plain()), 0) == [(f"0/{i}", (i, str(i))) for i in range(5)]
    assert values(cs.IterableSource(make, shards=4)) == [list(range(shard, 30, 4)) for shard in range(4)]
    assert values(cs.IterableSource(make)) == [list(range(30))]


# --- their own sharding


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_shards_of_a_torch_dataset_are_those_of_a_loader_with_as_many_workers(shards: int) -> None:
    found = values(IterableSource(Numbers(40), shards=shards))
    assert sorted(number for shard in found for number in shard) == list(range(40))
    workers = 0 if shards == 1 else shards
    if shards < 3:  # a real DataLoader, whose processes take their time
        loader = DataLoader(Numbers(40), batch_size=None, num_workers=workers)
        assert sorted(int(sample["x"]) for sample in loader) == list(range(40))
    assert [shard[0] for shard in found] == list(range(shards))


@pytest.mark.e2e
def test_threads_that_read_shards_at_once_are_each_told_their_own() -> None:
    source = IterableSource(Numbers(4000), shards=8)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda unit: samples_of(source, unit), range(8)))
    for shard, samples in enumerate(found):
        assert [sample["x"] for _, sample in samples] == list(range(shard, 4000, 8))
    assert get_worker_info() is None


def test_a_torch_dataset_is_one_shard_unless_it_is_said_to_split() -> None:
    assert IterableSource(Numbers()).num_units == 1
    assert values(cs.open_source(Numbers(5))) == [[0, 1, 2, 3, 4]]


def test_the_shards_of_a_webdataset_are_its_tars(tmp_path: Path) -> None:
    source = cs.open_source(pipeline(write_tars(tmp_path)))
    assert source.num_units == TARS
    assert values(source, "txt") == [[f"{tar}-{i}" for i in range(SAMPLES)] for tar in range(TARS)]
    (key, sample), *_ = samples_of(source, 2)
    assert key == "2/0/2-0"
    assert sorted(sample) == ["cls", "npy", "txt"]
    beside = sorted(sample["txt"] for sample in pipeline(f"{tmp_path}/{{0..{TARS - 1}}}.tar"))
    assert sorted(text for shard in values(source, "txt") for text in shard) == beside


def test_a_webdataset_that_does_not_split_by_worker_is_one_shard(tmp_path: Path) -> None:
    whole = wds.WebDataset(write_tars(tmp_path), shardshuffle=False, workersplitter=None).decode()
    source = cs.open_source(whole)
    assert source.num_units == 1
    assert len(samples_of(source, 0)) == TARS * SAMPLES


@pytest.mark.e2e
def test_a_pipeline_of_stages_with_lambdas_goes_to_the_background(tmp_path: Path) -> None:
    stages = pipeline(write_tars(tmp_path)).map(lambda sample: {"y": 2 * sample["cls"]}).to_tuple("y")
    with cs.Cache(tmp_path / "cache", size_limit="20MB", min_free=0) as cache:
        with cs.start_worker(cache, stages, num_workers=2) as worker:
            assert worker.wait(DEADLINE_S)
        with cache.snapshot() as dataset:
            found = Counter(int(dataset[i][0]) for i in range(len(dataset)))
    assert found == {2 * i: TARS for i in range(SAMPLES)}


@pytest.mark.e2e
def test_the_shards_of_a_hugging_face_stream_are_its_own(tmp_path: Path) -> None:
    streamed = stream(tmp_path)
    source = cs.open_source(streamed)
    assert source.num_units == streamed.num_shards == 3
    assert values(source) == [[10 * shard + i for i in range(10)] for shard in range(3)]
    fewer = cs.IterableSource(streamed, shards=2)
    assert sorted(number for shard in values(fewer) for number in shard) == list(range(30))
    with pytest.raises(ConfigError, match=r"shards=4.*has 3 shards"):
        cs.IterableSource(streamed, shards=4)


@pytest.mark.e2e
def test_a_hugging_face_stream_keeps_its_filters_maps_and_shuffle(tmp_path: Path) -> None:
    streamed = stream(tmp_path).filter(lambda row: row["x"] % 2 == 0).map(lambda row: {"x": -row["x"]})
    source = cs.open_source(streamed.shuffle(seed=1, buffer_size=5))
    found = values(source)
    assert sorted(number for shard in found for number in shard) == sorted(
        -number for number in range(0, 30, 2)
    )
    assert found == values(source)
    assert found != [sorted(shard, reverse=True) for shard in found]


def test_images_of_a_stream_have_the_shape_that_all_sources_give() -> None:
    class Pictures:
        def __iter__(self) -> Iterator[Any]:
            for mode in ("RGB", "L", "P", "RGBA"):
                yield {"image": Image.new(mode, (5, 4), 100 if mode != "RGB" else (100, 50, 0))}

    shapes = [
        (sample["image"].shape, sample["image"].dtype)
        for _, sample in samples_of(IterableSource(Pictures()), 0)
    ]
    assert shapes == [((3, 4, 5), np.uint8)] * 4


# --- resuming, errors, what is refused


@pytest.mark.e2e
def test_a_stream_goes_on_after_a_stop_with_the_sample_after_the_last(tmp_path: Path) -> None:
    stopped = tmp_path / "stopped"

    class Slow:
        def __iter__(self) -> Iterator[dict[str, int]]:
            for number in range(300):
                # Before the stop it never comes to the end, however late that is.
                threading.Event().wait(0.003 if number < 60 or stopped.exists() else 0.5)
                yield {"x": number}

    with cs.Cache(tmp_path / "cache", size_limit="20MB", min_free=0) as cache:
        worker = cs.start_worker(cache, Slow(), num_workers=1)
        cache.wait(50, DEADLINE_S)
        worker.stop(DEADLINE_S)
        assert 50 <= cache.num_samples < 300
        stopped.touch()
        with cs.start_worker(cache, Slow(), num_workers=1) as worker:
            assert worker.wait(DEADLINE_S)
        with cache.snapshot() as dataset:
            assert sorted(int(dataset[i]["x"]) for i in range(len(dataset))) == list(range(300))


@pytest.mark.parametrize(
    ("error", "raised"),
    [(KeyError("x"), SampleError), (ConnectionResetError("gone"), SourceUnavailableError)],
)
def test_what_an_iterable_raises_comes_with_its_place(error: Exception, raised: type[Exception]) -> None:
    samples = IterableSource(Torn(error)).read(0, np.random.default_rng(0))
    assert next(samples) == ("0/0", 1)
    with pytest.raises(raised, match="Torn, shard 0 of 1, sample 1 raised"):
        next(samples)


def test_two_reads_of_a_dataset_that_counts_do_not_see_one_another() -> None:
    class Counting:
        def __init__(self) -> None:
            self.read = 0

        def __iter__(self) -> Iterator[int]:
            for _ in range(3):
                self.read += 1
                yield self.read

    source = IterableSource(Counting())
    first, second = (source.read(0, np.random.default_rng(0)) for _ in range(2))
    assert [sample for pair in zip(first, second, strict=True) for _, sample in pair] == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ((number for number in range(3)), {}, "only once"),
        (7, {}, "takes an iterable"),
        ([1, 2], {}, "takes an iterable"),
        (DataLoader(Numbers()), {}, "give its dataset"),
        (Plain(), {"shards": 2}, "nothing would split it"),
        (Numbers(), {"shards": 0}, "1 or more"),
        (Numbers(), {"shards": True}, "whole number"),
        (Numbers(), {"shards": 2, "thread_safe": True}, "variable of the process"),
        (Torn(Exception(threading.Lock())), {}, "cannot be sent"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_read_as_an_iterable_is_refused(given: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        IterableSource(given, **options)


def test_the_fingerprint_names_the_data_and_no_urls(tmp_path: Path) -> None:
    urls = write_tars(tmp_path)
    one, other = (IterableSource(pipeline(found)).fingerprint for found in (urls, f"{tmp_path}/{{0..1}}.tar"))
    assert one == IterableSource(pipeline(urls)).fingerprint != other
    assert str(tmp_path) not in one
    assert IterableSource(make).fingerprint != IterableSource(lambda *_: iter([1])).fingerprint


@pytest.mark.e2e
def test_tensors_of_a_stream_are_cached_as_they_are(tmp_path: Path) -> None:
    class Tensors(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            for number in range(5):
                yield torch.full((2, 3), float(number)), number

    with cs.Cache(tmp_path / "cache", size_limit="20MB", min_free=0) as cache:
        with cs.start_worker(cache, Tensors(), num_workers=1) as worker:
            assert worker.wait(DEADLINE_S)
        with cache.snapshot() as dataset:
            found = [dataset[i] for i in range(len(dataset))]
    assert sorted(int(number) for _, number in found) == list(range(5))
    assert all(torch.equal(x, torch.full((2, 3), float(number))) for x, number in found)


def test_a_sample_of_an_iterable_that_cannot_be_used_is_skipped_and_the_rest_of_its_shard_read() -> None:
    def make(shard: int, shards: int) -> Iterator[Any]:
        for number in range(5):
            broken = Image.new("RGB", (4, 4))
            broken.load = None  # type: ignore[method-assign, assignment]
            yield {"image": broken} if number in (1, 3) else {"x": number}

    source = IterableSource(make)
    found: list[Any] = []
    with pytest.raises(SampleError, match=r"2 problems, the first: .*sample 1 raised") as caught:
        found.extend(source.read(0, np.random.default_rng(0)))
    assert [key for key, _ in found] == ["0/0", "0/2", "0/4"]
    assert caught.value.lost == 2
