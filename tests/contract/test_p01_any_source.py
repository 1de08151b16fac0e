"""P1: any source, no conversion: raw data is sampled as it lies, through to the batches of an epoch."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zarr
from PIL import Image
from tfrecord import TFRecordWriter
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

import cachestream as cs
from tests.contract.formats import plain, read

EACH: Final = 20
WINDOW: Final = 10
ARRAY: Final = np.arange(500 * 3, dtype=np.float32).reshape(500, 3)


def sample(number: int) -> dict[str, Any]:
    return {"n": number, "text": f"é{number}"}


class Numbers(Dataset[dict[str, Any]]):
    """A map-style dataset of torch."""

    def __len__(self) -> int:
        return EACH

    def __getitem__(self, index: int) -> dict[str, Any]:
        return sample(index)


class Stream(IterableDataset[dict[str, Any]]):
    """An iterable one, which splits itself as in a DataLoader."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        yield from map(sample, range(first, EACH, step))


class Own:
    """A source by protocol; `made` holds what has failed once already."""

    fingerprint = "own-v1"
    num_units = 5

    def __init__(self, made: Path | None = None) -> None:
        self.made = made

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
        if not 0 <= unit < self.num_units:
            raise IndexError(unit)
        for i in range(4):
            if self.made is not None and (unit, i) == (1, 2):
                raise cs.SampleError("the rest of unit 1 is broken")
            if self.made is not None and (unit, i) == (3, 1) and not (self.made / "tried").exists():
                (self.made / "tried").touch()
                raise cs.SourceUnavailableError("busy: try again")
            yield f"own/{unit}/{i}", sample(unit * 4 + i)


def write(folder: Path) -> dict[str, tuple[Any, list[str]]]:
    """Write the same samples in every format; a source and the keys of its samples for each name."""
    numbers = range(EACH)
    (folder / "json").mkdir()
    for i in numbers:
        (folder / f"json/{i:02d}.json").write_text(json.dumps(sample(i)))
    with tarfile.open(folder / "a.tar", "w") as archive:
        for i in numbers:
            for extension, data in (("n.json", str(i)), ("text.txt", f"é{i}")):
                member = tarfile.TarInfo(f"{i:02d}.{extension}")
                member.size = len(data.encode())
                archive.addfile(member, io.BytesIO(data.encode()))
    pq.write_table(pa.Table.from_pylist([*map(sample, numbers)]), folder / "a.parquet", row_group_size=6)
    lines = [json.dumps(sample(i)) + "\n" for i in numbers]
    (folder / "a.jsonl").write_text("".join(lines))
    with (folder / "a.csv").open("w", newline="") as sink:
        csv.writer(sink).writerows([("n", "text"), *(sample(i).values() for i in numbers)])
    writer, places = TFRecordWriter(str(folder / "a.tfrecord")), []
    for i in numbers:
        places.append(writer.file.tell())
        writer.write({"n": (i, "int"), "text": (f"é{i}".encode(), "byte")})
    writer.close()
    starts = np.cumsum([0, *map(len, lines[:-1])])
    features: Any = {"n": "scalar", "text": "str"}
    return {
        "files": (cs.open_source(folder / "json"), [f"{i:02d}.json" for i in numbers]),
        "parquet": (cs.open_source(folder / "a.parquet"), [f"a.parquet#{i}" for i in numbers]),
        "lines": (cs.open_source(folder / "a.jsonl"), [f"a.jsonl#{start}" for start in starts]),
        "csv": (cs.open_source(folder / "a.csv"), [f"a.csv#{i}" for i in numbers]),
        "tfrecord": (
            cs.open_source(folder / "a.tfrecord", features=features),
            [f"a.tfrecord#{place}" for place in places],
        ),
        "dataset": (cs.open_source(Numbers()), [str(i) for i in numbers]),
        "list": (cs.open_source([*map(sample, numbers)]), [str(i) for i in numbers]),
        "iterable": (cs.IterableSource(Stream(), shards=3), [f"{i % 3}/{i // 3}" for i in numbers]),
        "function": (cs.CallableSource(lambda _: sample(7), EACH), [str(i) for i in numbers]),
        "own": (Own(), [f"own/{i // 4}/{i % 4}" for i in numbers]),
    }


def test_every_kind_of_source_brings_each_sample_into_the_batches_of_an_epoch_once(tmp_path: Path) -> None:
    sources = write(tmp_path)
    mixed = cs.mix({name: (source, source.num_units) for name, (source, _) in sources.items()})
    expected = {
        f"{name}/{key}": sample(7 if name == "function" else i)
        for name, (_, keys) in sources.items()
        for i, key in enumerate(keys)
    }
    with (
        cs.Cache(tmp_path / "cache", "20MB", min_free=0) as cache,
        cs.start_worker(cache, mixed, num_workers=2) as worker,
    ):
        assert worker.wait(timeout_s=120)
        assert cache.status().failures == ()
        with cs.EpochLoader(cache, 16, drop_last=False, with_keys=True) as loader:
            batches = list(loader)
    found = [
        (key, {"n": n, "text": text})
        for batch in batches
        for key, n, text in zip(batch["__key__"], batch["n"].tolist(), batch["text"], strict=True)
    ]
    assert len(found) == len(expected) == len(sources) * EACH
    assert dict(found) == expected
    assert {batch["n"].dtype for batch in batches} == {torch.int64}


def test_a_tar_is_sampled_by_its_members_names(tmp_path: Path) -> None:
    write(tmp_path)
    found = read(cs.open_source(tmp_path / "a.tar"))
    assert found == [(f"a.tar#{i:02d}", {"n.json": i, "text.txt": f"é{i}"}) for i in range(EACH)]


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same array in three formats; of the module, as writing one starts a thread of zarr that stays."""
    tmp_path, array = tmp_path_factory.mktemp("arrays"), ARRAY
    np.save(tmp_path / "a.npy", array)
    zarr.open_group(tmp_path / "a.zarr", mode="w").create_array("x", data=array, chunks=(64, 3))
    with h5py.File(tmp_path / "a.h5", "w") as stored:
        stored.create_dataset("x", data=array, chunks=(64, 3), compression="gzip")
    return tmp_path


def test_random_windows_of_arrays_are_parts_of_them_at_the_place_that_they_say(
    arrays: Path, tmp_path: Path
) -> None:
    urls = {"npy": "a.npy", "zarr": "a.zarr/x", "h5": "a.h5::/x"}
    sources = {
        name: cs.open_source(f"{arrays}/{url}", window=WINDOW, num_units=EACH) for name, url in urls.items()
    }
    assert cs.open_source(f"{arrays}/a.npy", window=WINDOW).num_units is None  # endless
    with (
        cs.Cache(tmp_path / "cache", "20MB", min_free=0) as cache,
        cs.start_worker(cache, cs.mix({n: (s, 1) for n, s in sources.items()}), num_workers=1) as worker,
    ):
        assert worker.wait(timeout_s=120)
        with cs.EpochLoader(cache, 3 * EACH, with_keys=True) as loader:
            (batch,) = loader
    assert batch["array"].shape == (3 * EACH, WINDOW, 3)
    assert batch["start"].shape == (3 * EACH, 1)
    for key, start, window in zip(
        batch["__key__"], batch["start"][:, 0].tolist(), batch["array"], strict=True
    ):
        assert window.numpy().tolist() == ARRAY[start : start + WINDOW].tolist()
        name, _, unit = key.partition("/")[2].partition("#")
        assert name == f"{urls[key.partition('/')[0]]}[{start}:{start + WINDOW}]"
        assert 0 <= int(unit) < EACH
    assert len(set(batch["start"][:, 0].tolist())) > EACH


def test_images_in_folders_of_classes_become_one_tensor_with_labels(tmp_path: Path) -> None:
    colours = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}
    for name, colour in colours.items():
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(4):
            Image.new("RGB", (20 + i, 30), colour).save(tmp_path / f"photos/{name}/{i}.png")
    source: Any = cs.open_source(tmp_path / "photos", resize=12, crop=8)
    assert source.label_names == ("blue", "green", "red")
    with cs.stream(
        source, cache=tmp_path / "cache", size_limit="20MB", batch_size=12, min_samples=12, num_workers=1,
        with_keys=True,
    ) as loader:  # fmt: skip
        batch = next(iter(loader))
    assert (batch["image"].dtype, batch["image"].shape) == (torch.uint8, (12, 3, 8, 8))
    for key, image, label in zip(batch["__key__"], batch["image"], batch["label"].tolist(), strict=True):
        name = source.label_names[label]
        assert key.startswith(f"{name}/")
        assert torch.equal(
            image, torch.tensor(colours[name], dtype=torch.uint8)[:, None, None].expand(3, 8, 8)
        )


def test_a_function_is_drawn_from_without_end_and_its_draws_can_be_repeated(tmp_path: Path) -> None:
    signal = np.arange(1000, dtype=np.float32)

    def draw(rng: np.random.Generator) -> dict[str, Any] | None:
        start = int(rng.integers(0, 900))
        return {"signal": signal[start : start + 50], "start": start} if start % 2 else None

    assert cs.open_source(draw).num_units is None
    keys: list[dict[str, int]] = []
    for name in ("one", "two"):
        with cs.stream(
            draw, cache=tmp_path / name, size_limit="20MB", batch_size=40, min_samples=40, num_workers=1,
            with_keys=True,
        ) as loader:  # fmt: skip
            batch = next(iter(loader))
        starts = batch["start"].tolist()
        assert all(start % 2 for start in starts)  # None: no sample
        assert torch.equal(batch["signal"], torch.tensor(starts)[:, None] + torch.arange(50.0))
        keys.append(dict(zip(batch["__key__"], starts, strict=True)))
    both = keys[0].keys() & keys[1].keys()
    assert both
    assert {key: keys[0][key] for key in both} == {key: keys[1][key] for key in both}


def test_a_dataset_of_tuples_gives_batches_of_tuples(tmp_path: Path) -> None:
    dataset = TensorDataset(torch.randn(30, 8), torch.arange(30))
    with (
        cs.Cache(tmp_path / "cache", "20MB", min_free=0) as cache,
        cs.start_worker(cache, dataset, num_workers=1) as worker,
    ):
        assert worker.wait(timeout_s=120)
        with cs.EpochLoader(cache, 30) as loader:
            ((features, index),) = loader
    assert sorted(index.tolist()) == list(range(30))
    assert torch.equal(features, dataset.tensors[0][index])


def test_a_source_of_your_own_may_fail_by_the_sample_or_for_a_while(tmp_path: Path) -> None:
    with (
        cs.Cache(tmp_path / "cache", "20MB", min_free=0) as cache,
        cs.start_worker(cache, Own(tmp_path), num_workers=1) as worker,
    ):
        assert worker.wait(timeout_s=120)
        with cs.EpochLoader(cache, 20, drop_last=False) as loader:
            found = sorted(n for batch in loader for n in batch["n"].tolist())
        (failure,) = cache.status().failures
    assert found == [i for i in range(EACH) if i not in (6, 7)]
    assert (tmp_path / "tried").exists()
    assert "the rest of unit 1 is broken" in failure.reason


def test_what_has_the_three_members_is_a_source_and_stays_what_it_is() -> None:
    source = Own()
    assert isinstance(source, cs.Source)
    assert cs.open_source(source) is source
    with pytest.raises(cs.ConfigError, match=r"no options beside a Source: resize"):
        cs.open_source(source, resize=8)


def test_nested_values_of_a_dataset_become_fields(tmp_path: Path) -> None:
    item = {"meta": {"author": "ann", "size": [1, 2]}, "tags": ["a"], "boxes": [[1.5, 2.0]], "ok": True}
    image = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4))
    (unit,) = read(cs.open_source([item | {"mask": image}]))
    assert unit[0] == "0"
    with (
        cs.Cache(tmp_path / "cache", "20MB", min_free=0) as cache,
        cs.start_worker(cache, [item | {"mask": image}], num_workers=1) as worker,
    ):
        assert worker.wait(timeout_s=120)
        with cache.snapshot() as dataset:
            cached = dataset[0]
    assert {name: plain(value) for name, value in cached.items()} == {
        "meta.author": "ann",
        "meta.size": ("<i8", (2,), [1, 2]),
        "tags": '["a"]',
        "boxes": ("<f8", (1, 2), [[1.5, 2.0]]),
        "ok": ("|b1", (), True),
        "mask": ("|u1", (3, 4), np.asarray(image).tolist()),
    }
