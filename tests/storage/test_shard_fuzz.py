"""Opening a file with any content gives a sound shard or CorruptShardError, and takes little memory."""

from __future__ import annotations

import copy
import json
import os
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from cachestream.errors import CorruptShardError
from cachestream.shard_format import encode_header
from cachestream.storage.shard import MappedShard
from tests.storage.support import content
from tests.storage.test_shard import signed

CASES: Final = 6_000
MEASURED_CASES: Final = 300
SLOW_CASES: Final = 500_000
MOST_BYTES: Final = 32 * 2**20
NUMBERS: Final = (
    0,
    1,
    -1,
    3,
    2**31,
    2**63,
    2**64 - 1,
    10**30,
    -(10**30),
    1.5,
    float("inf"),
    float("nan"),
    True,
)
VALUES: Final[tuple[Any, ...]] = (
    None, *NUMBERS, "", "x", "9" * 5000, "F32", "I64", [], {}, [[]], {"": {}}, [0, 2**63], [-1, 1], {"dtype": "U8"},
)  # fmt: skip


def _sound() -> tuple[bytes, bytes]:
    shard = content(3)
    return encode_header(shard), b"".join(column.data.tobytes() for column in shard.columns)


HEAD, DATA = _sound()


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values in a JSON value."""
    found = [path] if path else []
    children = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, child in children:
        found += paths_of(child, (*path, key))
    return found


def mutate_json(rng: random.Random, header: dict[str, Any]) -> dict[str, Any]:
    """Replace, remove or add one to three values, in the header or in the JSON texts inside it."""
    texts = {key: json.loads(header["__metadata__"][key]) for key in ("schema", "fill", "xxh3")}
    for _ in range(rng.randint(1, 3)):
        whole = rng.choice([header, header, *texts.values()])
        where = paths_of(whole)
        if not where:
            continue
        *parents, last = rng.choice(where)
        target = whole
        try:
            for key in parents:
                target = target[key]
            if rng.random() < 0.3 and isinstance(target, dict):
                del target[last]
            elif rng.random() < 0.2 and isinstance(target, dict):
                target[rng.choice(["", "x", "n#offsets", "__key__", "__metadata__"])] = copy.deepcopy(
                    target[last]
                )
            else:
                target[last] = copy.deepcopy(rng.choice(VALUES))
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took it away
    if isinstance(header.get("__metadata__"), dict):
        for key, value in texts.items():
            header["__metadata__"].setdefault(key, "")
            if isinstance(header["__metadata__"][key], str) and header["__metadata__"][key]:
                header["__metadata__"][key] = json.dumps(value)
    return header


def any_bytes(rng: random.Random) -> bytes:
    """The file with bytes changed, cut out or doubled, or with a length or offset that is far off."""
    data = bytearray(HEAD + DATA)
    kind = rng.randrange(6)
    if kind == 0:
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif kind == 1:
        del data[rng.randrange(len(data)) :]
    elif kind == 2:
        data[:8] = struct.pack(
            "<Q", rng.choice([0, 1, 2**20, 100 * 2**20, 2**32, 2**63, 2**64 - 1, len(data)])
        )
    elif kind == 3:
        start = rng.randrange(len(data))
        data[start:start] = data[start : start + rng.randint(1, 200)]
    elif kind == 4:
        text = rng.choice([b"[" * 5000, b'{"a":' * 5000, b"\xff\xfe", b"null", b"{}", b"[]", b"1e999", b'""'])
        data[:] = struct.pack("<Q", len(text)) + text + b"\0" * rng.choice([0, 1, 100])
    else:
        data[:] = rng.randbytes(rng.randint(0, 300))
    return bytes(data)


def resigned(rng: random.Random) -> bytes:
    """A changed header with a valid checksum, for the checks that follow it."""
    header = mutate_json(rng, json.loads(HEAD[8:]))
    try:
        return signed(header) + DATA
    except (KeyError, TypeError, ValueError):
        return json.dumps(header).encode() + DATA


def fuzz(path: Path, seed: int, cases: int, make: Callable[[random.Random], bytes]) -> int:
    """The number of cases that opened. Fails on any error but CorruptShardError, naming the seed."""
    opened = longest = 0
    for case in range(cases):
        data = make(random.Random(seed + case))
        path.write_bytes(data)
        try:
            found = MappedShard(str(path))
            for name in found.columns:
                found.array(name)
            found.verify()
            opened += 1
        except CorruptShardError as error:
            longest = max(longest, len(str(error)))
        except Exception as error:  # noqa: BLE001  any other is what we look for
            pytest.fail(f"seed {seed + case}: {error!r}; the file is {data[:300]!r}…")
    assert longest < 2000
    return opened


@pytest.mark.e2e
@pytest.mark.parametrize("make", [any_bytes, resigned])
def test_ten_thousand_broken_headers_are_corrupt_shards(
    fast_path: Path, make: Callable[[random.Random], bytes]
) -> None:
    opened = fuzz(fast_path / "a", 1, CASES, make)
    assert opened < CASES / 2, "most of the cases change something"


@pytest.mark.e2e
@pytest.mark.parametrize("make", [any_bytes, resigned])
def test_broken_headers_take_little_memory(fast_path: Path, make: Callable[[random.Random], bytes]) -> None:
    tracemalloc.start()
    try:
        fuzz(fast_path / "a", 1, MEASURED_CASES, make)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MOST_BYTES


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("make", [any_bytes, resigned])
def test_a_million_broken_headers_are_corrupt_shards(
    fast_path: Path, make: Callable[[random.Random], bytes]
) -> None:
    fuzz(fast_path / "a", 1_000_000, SLOW_CASES, make)


@pytest.mark.parametrize("length", [2**40, 2**64 - 1, 101 * 2**20])
def test_a_header_length_that_is_far_off_takes_no_memory(fast_path: Path, length: int) -> None:
    path = fast_path / "a"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", length))
        os.truncate(file.fileno(), 2**34)  # sparse
    tracemalloc.start()
    try:
        with pytest.raises(CorruptShardError, match=r"its length|the header's length"):
            MappedShard(str(path))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20
