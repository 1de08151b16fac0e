"""The data of the conformance suite: each format written by its own library, and the samples that must come.

MDS and LitData sets lie in `tests/sources/peers`, as their libraries wrote them.
"""

from __future__ import annotations

import bz2
import contextlib
import csv
import gzip
import html
import io
import json
import lzma
import shutil
import tarfile
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

import cachestream as cs
from tests.contract.servers import Answer, answer_with, serve
from tests.sources.peers.samples import FOLDER as PEERS
from tests.sources.peers.samples import LITDATA_SAMPLES, MDS_SAMPLES, litdata_sample, mds_sample, picture

__all__ = ["FORMATS", "ON_S3", "Format", "Samples", "plain", "read", "serve_folder"]

Samples = list[tuple[str, Any]]
CLOSING: Final = {"Connection": "close"}


@dataclass(frozen=True, slots=True)
class Format:
    """`write(folder)` returns the samples that `open(url of the folder, storage_options)` must give.

    `in_order`: unit after unit they come in that order.
    """

    write: Callable[[Path], Samples]
    open: Callable[[str, Mapping[str, Any] | None], cs.Source]
    in_order: bool = True


def opened(below: str = "", **options: Any) -> Callable[[str, Mapping[str, Any] | None], cs.Source]:
    """Open `below` in the folder by `open_source` with `options`."""
    return lambda url, storage: cs.open_source(f"{url}/{below}", storage_options=storage, **options)


def read(source: cs.Source, unit: int | None = None) -> Samples:
    """Return the samples of a unit, or of all."""
    units = range(source.num_units or 0) if unit is None else [unit]
    return [item for one in units for item in source.read(one, np.random.default_rng(one))]


def plain(value: Any) -> Any:
    """Return a value that is equal where type, dtype, shape and every value are."""
    if isinstance(value, Mapping):
        return {name: plain(value[name]) for name in sorted(value)}
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if isinstance(value, str | bytes):
        return value
    array = np.asarray(value)
    return array.dtype.str, array.shape, array.tolist()


@contextlib.contextmanager
def serve_folder(folder: Path) -> Iterator[str]:
    """Serve the files of `folder` by HTTP, with ranges, and pages that list the folders.

    A connection is closed after its answer: no thread that waits for the next request is left to a test.
    """

    def decide(path: str, wanted: str | None) -> Answer:
        found = folder / urllib.parse.unquote(path).lstrip("/")
        if found.is_dir():
            names = [f"{below.name}{'/' if below.is_dir() else ''}" for below in sorted(found.iterdir())]
            links = (f'<a href="{urllib.parse.quote(name)}">{html.escape(name)}</a>' for name in names)
            return Answer(200, "\n".join(links).encode(), {"Content-Type": "text/html", **CLOSING})
        if not found.is_file():
            return Answer(404, headers=CLOSING)
        answer = answer_with(found.read_bytes(), wanted)
        return Answer(answer.status, answer.body, {**answer.headers, **CLOSING})

    with serve(decide) as url:
        yield url


def file(path: Path, content: bytes | str) -> None:
    """Write a file, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def pixels(number: int, height: int = 5, width: int = 7) -> np.ndarray[Any, Any]:
    """Return an image, uint8 `[3, height, width]`, another one for each number."""
    return np.random.default_rng(number).integers(0, 256, (3, height, width), dtype=np.uint8)


def encoded(image: np.ndarray[Any, Any], kind: str = "PNG") -> bytes:
    sink = io.BytesIO()
    Image.fromarray(image.transpose(1, 2, 0)).save(sink, kind)
    return sink.getvalue()


# --- files -------------------------------------------------------------------------------------


def images(folder: Path) -> Samples:
    samples: Samples = []
    for label, name in enumerate(("cat", "dog")):
        for i in range(3):
            image = pixels(10 * label + i, 4 + i, 6)
            file(folder / name / f"{i}.png", encoded(image))
            samples.append((f"{name}/{i}.png", {"image": image, "label": label}))
    return samples


def images_with_masks(folder: Path) -> Samples:
    samples: Samples = []
    for i in range(4):
        file(folder / "images" / f"{i}.png", encoded(pixels(i)))
        file(folder / "masks" / f"{i}.png", encoded(pixels(9 + i)))
        file(folder / "images" / f"{i}.txt", f"no. {i}")
        file(folder / "metadata.csv", "file_name,n\n" + "".join(f"images/{j}.png,{j}\n" for j in range(4)))
        fields = {"image": pixels(i), "mask": pixels(9 + i), "text": f"no. {i}", "n": i}
        samples.append((f"images/{i}.png", fields))
    return samples


def photographs(folder: Path) -> Samples:
    samples: Samples = []
    for i, kind in enumerate(("jpeg", "webp", "bmp", "gif", "tiff")):
        data = encoded(pixels(i, 16, 24), kind.upper())
        file(folder / f"{i}.{kind}", data)
        rgb = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
        samples.append((f"{i}.{kind}", {"image": rgb.transpose(2, 0, 1)}))
    return samples


def arrays_in_files(folder: Path) -> Samples:
    samples: Samples = []
    for i, dtype in enumerate(("f2", "i8", "u1", "?")):
        array = np.arange(6 * (i + 1)).reshape(2, -1).astype(dtype)
        np.save(folder / f"{i}.npy", array, allow_pickle=False)
        samples.append((f"{i}.npy", {"array": array}))
    return samples


def archives_of_numpy(folder: Path) -> Samples:
    samples: Samples = []
    for i in range(3):
        fields: dict[str, Any] = {"x": np.full((2, i + 1), i, np.float32), "y": np.int16(i)}
        (np.savez if i % 2 else np.savez_compressed)(folder / f"{i}.npz", **fields)
        samples.append((f"{i}.npz", fields))
    return samples


def objects(folder: Path) -> Samples:
    samples: Samples = []
    for i in range(3):
        file(folder / f"{i}.json", json.dumps({"a": i, "b": [1.5, i], "c": {"d": f"é{i}", "e": [{"f": i}]}}))
        inner = json.dumps({"d": f"é{i}", "e": [{"f": i}]}, ensure_ascii=False)
        samples.append((f"{i}.json", {"a": i, "b": np.array([1.5, i]), "c": inner}))
    return samples


def arrays_of_objects(folder: Path) -> Samples:
    for i in range(2):
        file(folder / f"{i}.json", json.dumps([{"a": 10 * i + j} for j in range(3)]))
    return [(f"{i}.json#{j}", {"a": 10 * i + j}) for i in range(2) for j in range(3)]


def texts(folder: Path) -> Samples:
    for i in range(4):
        file(folder / f"part {i % 2}" / f"{i}%ü.txt", f"Grüße {i}\n" * i)
    return [(f"part {i % 2}/{i}%ü.txt", {"text": f"Grüße {i}\n" * i}) for i in (0, 2, 1, 3)]


def binaries(folder: Path) -> Samples:
    for i in range(12):
        file(folder / f"{i:03d}.bin", bytes(range(i)))
    return [(f"{i:03d}.bin", {"data": bytes(range(i))}) for i in range(12)]


# --- tars --------------------------------------------------------------------------------------


def tars(ending: str, pack: Callable[[bytes], bytes], samples_each: int = 5) -> Callable[[Path], Samples]:
    def write(folder: Path) -> Samples:
        samples: Samples = []
        for number in range(2):
            sink = io.BytesIO()
            with tarfile.open(fileobj=sink, mode="w") as archive:
                for i in range(samples_each):
                    name, image, array = f"in/{i:03d}", pixels(i), np.full((2, 3), i, np.float16)
                    stored, packed = io.BytesIO(), io.BytesIO()
                    np.save(stored, array)
                    np.savez(packed, a=array, b=array[0])
                    members = {
                        "cls": str(i).encode(),
                        "txt": f"é{i}".encode(),
                        "json": json.dumps({"i": i}).encode(),
                        "box.json": json.dumps([i, 2.5]).encode(),
                        "npy": stored.getvalue(),
                        "npz": packed.getvalue(),
                        "png": encoded(image),
                        "raw": bytes(i) * 700,
                        "pkl": b"\x80\x04.",
                    }
                    for extension, data in members.items():
                        member = tarfile.TarInfo(f"{name}.{extension}")
                        member.size = len(data)
                        archive.addfile(member, io.BytesIO(data))
                    sample = {
                        "cls": i,
                        "txt": f"é{i}",
                        "json": json.dumps({"i": i}),
                        "box.json": np.array([i, 2.5]),
                        "npy": array,
                        "npz.a": array,
                        "npz.b": array[0],
                        "png": image,
                        "raw": bytes(i) * 700,
                        "pkl": b"\x80\x04.",
                    }
                    samples.append((f"{number}.{ending}#{name}", sample))
            file(folder / f"{number}.{ending}", pack(sink.getvalue()))
        return samples

    return write


def zstd(data: bytes) -> bytes:
    import zstandard

    return zstandard.compress(data)


# --- windows of arrays ---------------------------------------------------------------------------


def windows(name: str, array: np.ndarray[Any, Any], window: tuple[int, int]) -> Samples:
    """Return all windows of a grid over the first two axes; the last ones are flush with the end."""
    first, second = (
        [*range(0, size - length, length), size - length]
        for size, length in zip(array.shape, window, strict=False)
    )
    return [
        (
            f"{name}[{i}:{i + window[0]},{j}:{j + window[1]}]",
            {"array": array[i : i + window[0], j : j + window[1]], "start": np.array([i, j])},
        )
        for i in first
        for j in second
    ]


GRID: Final = np.arange(50 * 40, dtype=np.int32).reshape(50, 40)


def npy(folder: Path) -> Samples:
    samples: Samples = []
    for index, name in enumerate(("a.npy", "b.npy")):
        array = np.arange(90 + 60 * index).reshape(-1, 3).astype(">f4")
        np.save(folder / name, array)
        for start in [*range(0, len(array) - 20, 20), len(array) - 20]:
            window = array[start : start + 20].astype("=f4")
            sample = {"array": window, "start": np.array([start]), "index": index}
            samples.append((f"{name}[{start}:{start + 20}]", sample))
    return samples


def tokens(folder: Path) -> Samples:
    found = np.arange(100, dtype="u2")
    file(folder / "train.bin", found.tobytes())
    return [
        (f"train.bin[{at}:{at + 25}]", {"array": found[at : at + 25], "start": np.array([at])})
        for at in range(0, 100, 25)
    ]


def hdf5(folder: Path) -> Samples:
    import h5py

    with h5py.File(folder / "a.h5", "w") as stored:
        stored.create_dataset("deep/x", data=GRID, chunks=(16, 16), compression="gzip", shuffle=True)
    return windows("a.h5::/deep/x", GRID, (20, 16))


def zarrs(version: Any) -> Callable[[Path], Samples]:
    def write(folder: Path) -> Samples:
        import zarr

        group = zarr.open_group(folder / "a.zarr", mode="w", zarr_format=version)
        group.create_array("x", shape=GRID.shape, chunks=(16, 16), dtype="i4")[:] = GRID
        return windows("a.zarr/x", GRID, (20, 16))

    return write


def pairs(folder: Path) -> Samples:
    import h5py

    image = pixels(3, 50, 40)
    np.save(folder / "image.npy", image)
    with h5py.File(folder / "mask.h5", "w") as stored:
        stored.create_dataset("m", data=image[0] > 99, chunks=(10, 10))
    found = windows("", image[0], (25, 20))
    return [
        (
            f"image.npy{key}",
            {
                "image": image[:, s[0] : s[0] + 25, s[1] : s[1] + 20],
                "mask": sample["array"] > 99,
                "start": s,
            },
        )
        for key, sample in found
        for s in [sample["start"]]
    ]


def open_pairs(url: str, storage: Mapping[str, Any] | None) -> cs.Source:
    return cs.open_source(
        {"image": f"{url}/image.npy", "mask": f"{url}/mask.h5::/m"},
        window={"image": (None, 25, 20), "mask": (25, 20)},
        windows="grid",
        storage_options=storage,
    )


# --- tables ------------------------------------------------------------------------------------


def table(first: int, count: int) -> tuple[Any, list[dict[str, Any]]]:
    """Return an Arrow table and its rows as samples."""
    import pyarrow as pa

    numbers = range(first, first + count)
    columns = {
        "i": pa.array(numbers, pa.int32()),
        "f": pa.array([i / 2 for i in numbers], pa.float32()),
        "ok": pa.array([i % 2 == 0 for i in numbers]),
        "s": pa.array([f"é{i}" for i in numbers]),
        "b": pa.array([bytes(i % 5) for i in numbers], pa.binary()),
        "list": pa.array([list(range(i % 4)) for i in numbers], pa.list_(pa.int16())),
        "fixed": pa.array([[i, -i] for i in numbers], pa.list_(pa.float64(), 2)),
        "box": pa.array([{"x": float(i), "tags": [f"t{i}"]} for i in numbers]),
        "day": pa.array(numbers, pa.date32()),
        "image": pa.array(
            [{"bytes": encoded(pixels(i)), "path": None} for i in numbers],
            pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
        ),
    }
    samples = [
        {
            "i": np.int32(i),
            "f": np.float32(i / 2),
            "ok": i % 2 == 0,
            "s": f"é{i}",
            "b": bytes(i % 5),
            "list": np.arange(i % 4, dtype=np.int16),
            "fixed": np.array([i, -i], np.float64),
            "box.x": float(i),
            "box.tags": json.dumps([f"t{i}"]),
            "day": i,
            "image": pixels(i),
        }
        for i in numbers
    ]
    return pa.table(columns), samples


def parquet(folder: Path) -> Samples:
    import pyarrow.parquet as pq

    samples: Samples = []
    for number in range(2):
        rows, expected = table(10 * number, 7)
        pq.write_table(rows, folder / f"{number}.parquet", row_group_size=3)
        samples += [(f"{number}.parquet#{i}", sample) for i, sample in enumerate(expected)]
    return samples


def folders_of_parquet(folder: Path) -> Samples:
    import pyarrow as pa
    import pyarrow.parquet as pq

    samples: Samples = []
    for label in ("cat", "dog"):
        for year in (2024, 2025):
            name = f"label={label}/year={year}/part-0.parquet"
            file(folder / name, b"")
            pq.write_table(pa.table({"i": pa.array([year, year + 1], pa.int64())}), folder / name)
            rows = ({"i": year + j, "label": label, "year": year} for j in range(2))
            samples += [(f"{name}#{j}", row) for j, row in enumerate(rows)]
    return samples


def arrow(as_file: bool) -> Callable[[Path], Samples]:
    def write(folder: Path) -> Samples:
        import pyarrow as pa

        samples: Samples = []
        for number in range(2):
            rows, expected = table(10 * number, 5)
            make = pa.ipc.new_file if as_file else pa.ipc.new_stream
            with make(folder / f"{number}.arrow", rows.schema) as writer:
                writer.write_table(rows, max_chunksize=2)
            samples += [(f"{number}.arrow#{i}", sample) for i, sample in enumerate(expected)]
        return samples

    return write


def saved_to_disk(folder: Path) -> Samples:
    import datasets

    rows = [{"i": i, "s": f"é{i}", "v": [float(i)] * (i + 1)} for i in range(6)]
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).save_to_disk(folder, num_shards=2)
    return [
        (f"data-{i // 3:05d}-of-00002.arrow#{i % 3}", {**row, "v": np.array(row["v"])})
        for i, row in enumerate(rows)
    ]


def json_lines(ending: str, pack: Callable[[bytes], bytes]) -> Callable[[Path], Samples]:
    def write(folder: Path) -> Samples:
        samples: Samples = []
        for number in range(2):
            data = b""
            for i in range(4):
                text = f"é{i}"
                row = {"i": i, "t": text, "v": [[i], [2]], "o": {"x": i / 4}, "tags": [{"a": None}]}
                sample = {"i": i, "t": text, "v": np.array([[i], [2]]), "o.x": i / 4, "tags": '[{"a": null}]'}
                samples.append((f"{number}.{ending}#{len(data)}", sample))
                data += json.dumps(row, ensure_ascii=bool(i % 2)).encode() + b"\n"
            file(folder / f"{number}.{ending}", pack(data))
        return samples

    return write


def rows_of_text(ending: str, delimiter: str) -> Callable[[Path], Samples]:
    def write(folder: Path) -> Samples:
        rows = [(i, i / 2, f'say "é{i}",\nor\t{delimiter}', f"0{i}") for i in range(5)]
        sink = io.StringIO()
        writer = csv.writer(sink, delimiter=delimiter)
        writer.writerows([("id", "score", "text", "zip"), *rows])
        packed = ending.endswith(".gz")
        file(
            folder / f"a.{ending}",
            gzip.compress(sink.getvalue().encode()) if packed else sink.getvalue(),
        )
        return [
            (f"a.{ending}#{i}", {"id": row[0], "score": row[1], "text": row[2], "zip": row[3]})
            for i, row in enumerate(rows)
        ]

    return write


def records(pack: Callable[[bytes], bytes]) -> Callable[[Path], Samples]:
    def write(folder: Path) -> Samples:
        from tfrecord import TFRecordWriter

        samples: Samples = []
        for number in range(2):
            path = folder / f"{number}.tfrecord"
            writer = TFRecordWriter(str(path))
            for i in range(4):
                samples.append(
                    (
                        f"{path.name}#{path.stat().st_size}",
                        {
                            "n": i,
                            "w": np.float32(i / 2),
                            "v": np.arange(i + 2),
                            "t": b"t%d" % i,
                            "p": pixels(i),
                        },
                    )
                )
                writer.write(
                    {
                        "n": (i, "int"),
                        "w": (i / 2, "float"),
                        "v": (list(range(i + 2)), "int"),
                        "t": (b"t%d" % i, "byte"),
                        "p": (encoded(pixels(i)), "byte"),
                    }
                )
                writer.file.flush()
            writer.close()
            path.write_bytes(pack(path.read_bytes()))
        return samples

    return write


# --- sets of other libraries -----------------------------------------------------------------------


MDS_COLUMNS: Final = (
    "a_bytes",
    "a_float",
    "a_number",
    "a_pil",
    "a_png",
    "a_small",
    "a_str",
    "any_array",
    "pils",
)
LITDATA_COLUMNS: Final = ("a_bytes", "a_number", "a_str", "a_tensor", "an_array", "a_pil", "pair.0", "words")

MDS_FEW: Final = ("a_number", "a_str", "any_array")
LITDATA_FEW: Final = ("a_tensor", "pair.0", "pair.1", "words")
LITDATA_ROWS: Final = ("a_bytes", "a_str", "numbers", "box.x", "box.name")


def rgb(image: Any) -> Any:
    return np.asarray(image.convert("RGB")).transpose(2, 0, 1)


def mds(name: str, columns: tuple[str, ...], first_shard: int) -> Callable[[Path], Samples]:
    """`first_shard`: samples in every shard but the last one."""

    def write(folder: Path) -> Samples:
        shutil.copytree(PEERS / name, folder, dirs_exist_ok=True)
        samples: Samples = []
        for i in range(MDS_SAMPLES):
            given = {field: mds_sample(i)[field] for field in columns}
            sample = {
                field: np.stack([*map(rgb, value)])
                if field == "pils"
                else rgb(value)
                if field in ("a_pil", "a_png")
                else np.uint8(value)
                if field == "a_small"
                else value
                for field, value in given.items()
            }
            samples.append((f"shard.{i // first_shard:05d}.mds#{i % first_shard}", sample))
        return samples

    return write


def litdata(name: str, columns: tuple[str, ...], each: int, ending: str = "bin") -> Callable[[Path], Samples]:
    """`each`: samples in a chunk."""

    def write(folder: Path) -> Samples:
        shutil.copytree(PEERS / name, folder, dirs_exist_ok=True)
        samples: Samples = []
        for i in range(LITDATA_SAMPLES):
            given = litdata_sample(i)
            every = {
                **given,
                "a_pil": rgb(given["a_pil"]),
                "pair.0": given["pair"][0],
                "pair.1": given["pair"][1],
                "words": json.dumps(given["words"]),
                "box.x": np.array(given["box"]["x"]),
                "box.name": given["box"]["name"],
                "numbers": np.array(given["numbers"]),
            }
            samples.append(
                (f"chunk-0-{i // each}.{ending}#{i % each}", {field: every[field] for field in columns})
            )
        return samples

    return write


def litdata_tuples(folder: Path) -> Samples:
    shutil.copytree(PEERS / "litdata-tuples", folder, dirs_exist_ok=True)
    return [(f"chunk-0-0.bin#{i}", (i, rgb(picture(i)), f"{i}")) for i in range(5)]


def litdata_tokens(folder: Path) -> Samples:
    shutil.copytree(PEERS / "litdata-tokens", folder, dirs_exist_ok=True)
    keys = (f"chunk-0-{i // 3}.bin#{i % 3}" for i in range(5))
    return [(key, np.arange(3 + i, dtype=np.int32)) for i, key in enumerate(keys)]


def cache(folder: Path) -> Samples:
    """Fill a cache, with fields of one shape and of several, texts, bytes and tuples."""
    samples = [
        {
            "x": np.full((2, 3), i, np.float16),
            "v": np.arange(i % 3),
            "s": f"é{i}",
            "b": bytes(i),
            "ok": i % 2 == 0,
        }
        for i in range(40)
    ]
    with (
        cs.Cache(folder, "4MB", min_free=0) as filled,
        cs.start_worker(filled, samples, num_workers=1, shard_size="4KB") as worker,
    ):
        worker.wait(timeout_s=120)
    return [(str(i), sample) for i, sample in enumerate(samples)]


# --- manifests ---------------------------------------------------------------------------------


def manifest(folder: Path) -> Samples:
    for mood in ("a", "b"):
        for i in range(3):
            file(folder / mood / f"{i}.txt", f"{mood}{i}")
    lines = [("b/2.txt", "wild"), ("a/0.txt", "calm"), ("b/0.txt", "wild"), ("a/1.txt", "odd")]
    text = "path,mood\n" + "".join(f"{path},{mood}\n" for path, mood in lines)
    file(folder / "list.csv", text)
    names = ("calm", "odd", "wild")
    return [(path, {"text": path[0] + path[2], "label": names.index(mood)}) for path, mood in lines]


def open_manifest(url: str, storage: Mapping[str, Any] | None) -> cs.Source:
    return cs.open_source(cs.Manifest(f"{url}/list.csv", label="mood"), storage_options=storage)


def manifest_of_tars(folder: Path) -> Samples:
    samples = tars("tar", bytes)(folder)
    file(folder / "tars.txt", "# the tars\n1.tar\n\n0.tar\n")
    return samples[5:] + samples[:5]


NONE: Final = bytes
FORMATS: Final[Mapping[str, Format]] = {
    "images": Format(images, opened()),
    "images-with-masks": Format(images_with_masks, opened()),
    "photographs": Format(photographs, opened(label=None)),
    "npy-files": Format(arrays_in_files, opened("{0..3}.npy")),
    "npz-files": Format(archives_of_numpy, opened()),
    "json-files": Format(objects, opened()),
    "json-arrays": Format(arrays_of_objects, opened()),
    "texts": Format(texts, opened()),
    "bytes": Format(binaries, opened("*.bin")),
    "tar": Format(tars("tar", NONE), opened("{0..1}.tar", samples_per_visit=0)),
    "tar-visits": Format(tars("tar", NONE, 40), opened(samples_per_visit=9), in_order=False),
    "tar-gz": Format(tars("tar.gz", gzip.compress), opened()),
    "tgz": Format(tars("tgz", gzip.compress), opened("*.tgz")),
    "tar-bz2": Format(tars("tar.bz2", bz2.compress), opened()),
    "tar-xz": Format(tars("tar.xz", lzma.compress), opened()),
    "tar-zst": Format(tars("tar.zst", zstd), opened()),
    "npy": Format(npy, opened("*.npy", window=20, windows="grid")),
    "tokens": Format(tokens, opened("train.bin", window=25, windows="grid", dtype="uint16")),
    "hdf5": Format(hdf5, opened("a.h5::/deep/x", window=(20, 16), windows="grid")),
    "zarr2": Format(zarrs(2), opened("a.zarr/x", window=(20, 16), windows="grid")),
    "zarr3": Format(zarrs(3), opened("a.zarr/x", window=(20, 16), windows="grid")),
    "arrays-by-name": Format(pairs, open_pairs),
    "parquet": Format(parquet, opened("*.parquet")),
    "parquet-folders": Format(folders_of_parquet, opened()),
    "arrow-stream": Format(arrow(False), opened()),
    "arrow-file": Format(arrow(True), opened("{0..1}.arrow")),
    "save-to-disk": Format(saved_to_disk, opened()),
    "jsonl": Format(json_lines("jsonl", NONE), opened()),
    "ndjson-gz": Format(json_lines("ndjson.gz", gzip.compress), opened()),
    "jsonl-bz2": Format(json_lines("jsonl.bz2", bz2.compress), opened()),
    "jsonl-xz": Format(json_lines("jsonl.xz", lzma.compress), opened()),
    "jsonl-zst": Format(json_lines("jsonl.zst", zstd), opened("*.jsonl.zst")),
    "csv": Format(rows_of_text("csv", ","), opened("a.csv")),
    "tsv": Format(rows_of_text("tsv", "\t"), opened()),
    "csv-gz": Format(rows_of_text("csv.gz", ","), opened()),
    "tfrecord": Format(records(NONE), opened("{0..1}.tfrecord")),
    "tfrecord-gz": Format(records(gzip.compress), opened()),
    "mds": Format(mds("mds", MDS_COLUMNS, 6), opened(format="mds", columns=MDS_COLUMNS)),
    "mds-visits": Format(
        mds("mds", MDS_COLUMNS, 6), opened(format="mds", columns=MDS_COLUMNS, samples_per_visit=2)
    ),
    "litdata": Format(
        litdata("litdata", LITDATA_COLUMNS, 3), opened(format="litdata", columns=LITDATA_COLUMNS)
    ),
    **{
        f"mds-{packing}": Format(mds(f"mds-{packing}", MDS_FEW, 3), opened(format="mds", check_hashes=True))
        for packing in ("zstd", "gz", "bz2")
    },
    "litdata-chunk": Format(litdata("litdata-chunk", LITDATA_FEW, 4, "zstd.bin"), opened(format="litdata")),
    "litdata-batch": Format(litdata("litdata-batch", LITDATA_FEW, 4), opened(format="litdata")),
    "litdata-rows": Format(litdata("litdata-rows", LITDATA_ROWS, 4), opened(format="litdata")),
    "litdata-tuples": Format(litdata_tuples, opened(format="litdata")),
    "litdata-tokens": Format(litdata_tokens, opened(format="litdata")),
    "cache": Format(cache, opened(format="cache"), in_order=False),
    "manifest": Format(manifest, open_manifest),
    "manifest-of-tars": Format(manifest_of_tars, opened("tars.txt", manifest=True, samples_per_visit=0)),
}
# Read from S3 too, where opening a source takes half a second: of formats that differ in their packing alone, one.
ON_S3: Final = frozenset(
    {
        *("images", "npy-files", "tar", "tar-visits", "npy", "hdf5", "zarr3", "arrays-by-name", "parquet"),
        *("save-to-disk", "jsonl", "csv", "tfrecord", "mds", "litdata", "cache", "manifest"),
    }
)
