"""A shard reads back as it was written, also with the safetensors library, or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
import xxhash

from cachestream.errors import CacheError, CorruptShardError
from cachestream.schema import STORAGE
from cachestream.shard_format import ShardContent, encode_header
from cachestream.storage.shard import MappedShard, shard_path
from cachestream.worker.sampling.encode import to_record
from cachestream.worker.sampling.packer import Packer
from tests.storage.support import content, fork

DTYPES = [
    "bool", "uint8", "int8", "int16", "uint16", "float16", "bfloat16", "int32", "uint32", "float32", "int64",
    "uint64", "float64", "complex64", "complex128",
]  # fmt: skip


def packed(samples: list[Any], fill: Mapping[str, Any] | None = None) -> ShardContent:
    packer = Packer()
    for number, sample in enumerate(samples):
        packer.add(to_record(sample, f"k{number}"), None)
    return packer.content(fill or {})


def write(path: Path, shard: ShardContent) -> Path:
    path.write_bytes(encode_header(shard) + b"".join(column.data.tobytes() for column in shard.columns))
    return path


def some(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    kind = getattr(torch, dtype)
    if kind.is_floating_point or kind.is_complex:
        return torch.randn(shape, dtype=torch.complex128 if kind.is_complex else torch.float64).to(kind)
    return torch.randint(0, 2, shape).to(kind)


def as_torch(shard: MappedShard, name: str) -> torch.Tensor:
    """A column as its original tensor, for dtypes that are stored as others."""
    field = next(f for f in shard.schema.fields if f.name == name.partition("#")[0])
    array = shard.array(name).copy()
    if field.dtype == "complex128":
        return torch.from_numpy(array.view(np.complex128)[..., 0])
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if field.dtype == "bfloat16" else tensor


@pytest.mark.parametrize("shape", [(), (3,), (2, 1, 3), (0,)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fixed_shape_field_of_any_dtype_comes_back_and_safetensors_reads_the_same(
    tmp_path: Path, dtype: str, shape: tuple[int, ...]
) -> None:
    samples = [some(dtype, shape) for _ in range(4)]
    path = write(tmp_path / "a.safetensors", packed([{"x": sample} for sample in samples]))
    shard = MappedShard(str(path))
    shard.verify()
    assert shard.keys() == ["k0", "k1", "k2", "k3"]
    assert shard.schema.fields[0].dtype == dtype
    assert torch.equal(as_torch(shard, "x"), torch.stack(samples))
    assert not shard.array("x").flags.writeable
    others = safetensors.torch.load_file(path)
    stored = others["x"]
    if dtype == "complex128":
        assert torch.equal(stored, torch.view_as_real(torch.stack(samples)))
    else:
        assert torch.equal(stored, torch.stack(samples))
    shard.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_ragged_field_of_any_dtype_comes_back_value_by_value(tmp_path: Path, dtype: str) -> None:
    samples = [some(dtype, shape) for shape in ((2, 3), (0, 5), (1, 1), (4, 2))]
    shard = MappedShard(str(write(tmp_path / "a", packed([{"x": sample} for sample in samples]))))
    shard.verify()
    assert shard.schema.fields[0].shape is None
    flat, offsets, shapes = shard.array("x"), shard.array("x#offsets"), shard.array("x#shapes")
    for row, sample in enumerate(samples):
        value = torch.from_numpy(flat[offsets[row] : offsets[row + 1]].copy())
        if dtype == "bfloat16":
            value = value.view(torch.bfloat16)
        if dtype == "complex128":
            value = torch.view_as_complex(value.reshape(-1, 2))
        assert torch.equal(value.reshape(tuple(shapes[row])), sample)
    with safetensors.safe_open(path := str(tmp_path / "a"), "pt") as others:
        assert set(others.keys()) == {"x", "x#offsets", "x#shapes", "__key__", "__key__#offsets"}, path
    shard.close()


def test_text_bytes_tuples_and_bare_values_come_back(tmp_path: Path) -> None:
    words = ["", "naïve", "日本語", "a" * 1000, "lone \udc80"]
    samples = [(word, word.encode("utf-8", "surrogatepass")[::-1], i) for i, word in enumerate(words)]
    shard = MappedShard(str(write(tmp_path / "a", packed(samples))))
    shard.verify()
    assert shard.schema.container == "tuple"
    assert [f.kind for f in shard.schema.fields] == ["str", "bytes", "tensor"]
    for name, column in (("0", 0), ("1", 1)):
        flat, offsets = shard.array(name).tobytes(), shard.array(f"{name}#offsets")
        values = [flat[offsets[i] : offsets[i + 1]] for i in range(len(words))]
        expected = [s[column] for s in samples]
        assert values == [v.encode("utf-8", "surrogatepass") if isinstance(v, str) else v for v in expected]
    assert shard.array("2").tolist() == list(range(len(words)))
    shard.close()
    bare = MappedShard(str(write(tmp_path / "b", packed([1.5, 2.5]))))
    assert bare.schema.container == "bare"
    assert bare.array("0").tolist() == [1.5, 2.5]
    bare.close()


def test_columns_begin_at_multiples_of_their_width_so_that_views_are_aligned(tmp_path: Path) -> None:
    sample = {"a": np.int8(1), "b": np.float64(2), "c": np.int16(3), "d": "odd", "e": np.complex64(1)}
    shard = MappedShard(str(write(tmp_path / "a", packed([sample] * 3))))
    for name, column in shard.columns.items():
        assert column.offset % column.dtype.itemsize == 0, name
        assert shard.array(name).flags.aligned
    shard.close()


def test_what_the_worker_wrote_about_the_filling_comes_back(tmp_path: Path) -> None:
    fill = {
        "source": "s3://bucket/*",
        "plan": '{"a":"\\"header_xxh3\\":"}',
        "length": None,
        "spans": [[0, 0, 1, 0]],
    }
    shard = MappedShard(str(write(tmp_path / "a", packed([{"x": 1}], fill))))
    assert shard.fill == fill
    shard.close()


def test_arrays_outlive_the_shard_they_came_from(tmp_path: Path) -> None:
    shard = MappedShard(str(write(tmp_path / "a", content(7))))
    numbers = shard.array("n")
    shard.close()
    shard.close()
    os.unlink(tmp_path / "a")
    del shard
    assert numbers.tolist() == [7, 8, 9]


@pytest.mark.e2e
def test_every_single_flipped_bit_is_detected(tmp_path: Path) -> None:
    """Exhaustive for header, padding and data: CorruptShardError on opening or by verify, and no other error."""
    path = write(
        tmp_path / "a",
        packed([{"x": np.arange(3, dtype=np.uint8), "s": "é"}, {"x": np.zeros(3, np.uint8), "s": ""}]),
    )
    whole = path.read_bytes()
    undetected, named = [], 0
    with open(path, "r+b", buffering=0) as file:
        for place in range(len(whole)):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([whole[place] ^ 1 << bit]), place)
                try:
                    shard = MappedShard(str(path))
                    shard.verify()
                    undetected.append((place, bit))
                except CorruptShardError as error:
                    named += str(path) in str(error)
            os.pwrite(file.fileno(), whole[place : place + 1], place)
    assert not undetected
    assert named == 8 * len(whole)
    MappedShard(str(path)).verify()


@pytest.mark.e2e
def test_a_shard_cut_short_or_grown_by_any_number_of_bytes_is_detected(tmp_path: Path) -> None:
    path = write(tmp_path / "a", packed([{"x": 1}]))
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CorruptShardError):
            MappedShard(str(path)).verify()
    path.write_bytes(whole + b"\0")
    with pytest.raises(CorruptShardError):
        MappedShard(str(path))


def test_a_shard_cut_short_after_it_was_mapped_is_an_error_and_not_a_dead_process(tmp_path: Path) -> None:
    path = write(tmp_path / "a", content(0, size_bytes=64_000))
    shard = MappedShard(str(path))
    os.truncate(path, 4096)
    with pytest.raises(CorruptShardError, match="cannot be read"):
        shard.verify()


@pytest.mark.parametrize("what", ["missing", "folder", "link", "fifo", "no folder"])
def test_what_is_no_shard_file_is_corrupt(tmp_path: Path, what: str) -> None:
    path = tmp_path / "000000000001.safetensors"
    if what == "folder":
        path.mkdir()
    elif what == "link":
        path.symlink_to(write(tmp_path / "a", content(0)))
    elif what == "fifo":
        os.mkfifo(path)
    elif what == "no folder":
        path = tmp_path / "a" / "b"
        (tmp_path / "a").touch()
    with pytest.raises(CorruptShardError, match=r"verify CACHE --repair"):
        MappedShard(str(path))


@pytest.mark.e2e
def test_more_shards_than_open_files_can_be_mapped(tmp_path: Path) -> None:
    path = str(write(tmp_path / "a", content(0)))

    def map_many(_: object) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        shards = [MappedShard(path) for _ in range(500)]
        assert all(shard.keys() == ["k0", "k1", "k2"] for shard in shards)

    assert fork(map_many).wait() == 0


def test_too_many_open_files_are_not_taken_for_a_corrupt_shard(tmp_path: Path) -> None:
    path = str(write(tmp_path / "a", content(0)))

    def use_up(_: object) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        files: list[int] = []
        with contextlib.suppress(OSError):  # "Too many open files"
            while True:
                files.append(os.open(path, os.O_RDONLY))
        with pytest.raises(CacheError, match="raise the limit of open files") as caught:
            MappedShard(path)
        assert not isinstance(caught.value, CorruptShardError)
        for fd in files:
            os.close(fd)
        MappedShard(path)

    assert fork(use_up).wait() == 0


def signed(header: dict[str, Any]) -> bytes:
    """A header with a valid checksum, so that the other checks find the error."""
    header["__metadata__"]["header_xxh3"] = "0" * 16
    text = json.dumps(header, separators=(",", ":")).encode()
    signature = xxhash.xxh3_64_hexdigest(text)
    text = text.replace(b'"header_xxh3":"0000000000000000"', f'"header_xxh3":"{signature}"'.encode(), 1)
    return struct.pack("<Q", len(text)) + text


def test_a_dtype_that_is_not_the_schemas_is_refused(tmp_path: Path) -> None:
    """It would be read as the schema says, past the end of the column."""
    path = write(tmp_path / "a", packed([{"x": np.zeros(8, np.uint8)}]))
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    schema = header["__metadata__"]["schema"]
    header["__metadata__"]["schema"] = schema.replace('"uint8"', '"float64"')
    path.write_bytes(signed(header) + whole[8 + length :])
    with pytest.raises(CorruptShardError, match=r"column 'x' is uint8 \(1, 8\) instead of float64"):
        MappedShard(str(path))
    header["__metadata__"]["schema"] = schema
    header["__metadata__"]["version"] = "2"
    path.write_bytes(signed(header) + whole[8 + length :])
    with pytest.raises(CorruptShardError, match="format version 2 is not 1"):
        MappedShard(str(path))


@pytest.mark.parametrize("forged", ["0", "1", "3", "-1", str(2**62), "9" * 5000, "1e3", ""])
def test_a_number_of_samples_that_is_not_the_columns_is_refused(tmp_path: Path, forged: str) -> None:
    """Rows would be read past the end of every column."""
    path = write(tmp_path / "a", packed([{"x": np.zeros(8, np.uint8)}, {"x": np.ones(8, np.uint8)}]))
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    assert header["__metadata__"]["num_samples"] == "2"
    header["__metadata__"]["num_samples"] = forged
    path.write_bytes(signed(header) + whole[8 + length :])
    with pytest.raises(CorruptShardError):
        MappedShard(str(path))


def test_shards_lie_where_their_number_says() -> None:
    assert shard_path("/c", 42) == "/c/shards/000000000042.safetensors"
    assert STORAGE["complex128"] == ("F64", np.dtype("<f8"))
