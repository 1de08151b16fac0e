"""TarSource on damaged and malicious tars: good samples come, and all else is reported."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import random
import resource
import struct
import tarfile
import threading
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from cachestream.errors import SampleError, SourceError
from cachestream.formats.tar import TarSource
from cachestream.formats.tar_archive import BLOCK, _parse_pax
from cachestream.sources.decode import compression
from cachestream.transport import object_limit
from tests.sources.tars import add, make, numbered, read_all, read_unit, tar_bytes

FILES: Final = numbered(8, 700)
GOOD: Final = {f"1.tar#{n:05d}": {"cls": n, "bin": bytes([n]) * 700} for n in range(8)}


@pytest.fixture(autouse=True)
def nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that leaves files other than those it made itself."""
    inside = tmp_path / "inside"
    inside.mkdir()
    monkeypatch.chdir(inside)
    yield
    assert list(inside.iterdir()) == []


def read(tmp_path: Path, data: bytes, **options: Any) -> tuple[dict[str, Any], str]:
    (tmp_path / "1.tar").write_bytes(data)
    return read_unit(TarSource(tmp_path / "1.tar", **options))


def header(name: str, size: bytes | int, kind: bytes = b"0") -> bytes:
    """Return a header block with a valid checksum; `size` may be the 12 bytes of the field."""
    field = size if isinstance(size, bytes) else b"%011o\0" % size
    block = bytearray(BLOCK)
    block[:100] = name.encode().ljust(100, b"\0")
    block[124:136] = field
    block[148:156] = b" " * 8
    block[156:157] = kind
    block[257:265] = b"ustar\x0000"
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


# --- truncated and damaged ---------------------------------------------------------------------


@pytest.mark.e2e
def test_a_tar_cut_anywhere_gives_the_whole_samples_before_the_cut_and_says_so(tmp_path: Path) -> None:
    data = tar_bytes(FILES)
    sample_bytes = 3 * BLOCK + 2 * BLOCK  # two headers, one block and two
    end = 8 * sample_bytes
    first_file = 2 * BLOCK
    for cut in [*range(0, end + 2 * BLOCK, BLOCK // 2), 1, 511, 513, end - 1]:
        if cut == first_file:  # it cannot be told from a whole archive of one file
            continue
        found, problem = read(tmp_path, data[:cut])
        # A sample is known to be complete by the next one, or at the end by the extensions of the previous one.
        whole = 8 if cut >= end + BLOCK else max(0, -(-(cut - BLOCK + 1) // sample_bytes) - 1)
        unmarked = cut > 0 and cut % sample_bytes == 0
        assert found == dict(list(GOOD.items())[: cut // sample_bytes if unmarked else whole]), cut
        assert ("truncated: it ends after" in problem) == (cut < end + BLOCK and not unmarked), cut


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress, zstandard.compress])
def test_a_tar_without_the_mark_at_its_end_is_read_to_the_end(tmp_path: Path, pack: Any) -> None:
    """The standard library, GNU tar and webdataset do so, too; here a truncated file is no complete sample."""
    unmarked = tar_bytes(FILES)[: 8 * 5 * BLOCK]
    assert read(tmp_path, pack(unmarked)) == (GOOD, "")
    assert (
        read(tmp_path, pack(unmarked), **({} if pack is not bytes else {"samples_per_visit": 20}))[0] == GOOD
    )
    torn, problem = read(
        tmp_path, pack(unmarked[: -2 * BLOCK - BLOCK])
    )  # before the last file of the last sample
    assert (torn, "#00007: truncated" in problem) == (dict(list(GOOD.items())[:7]), True)
    extended = tar_bytes([*FILES, ("ä" * 200 + ".bin", b"")])[: 8 * 5 * BLOCK + 3 * BLOCK]
    assert "truncated: it ends after" in read(tmp_path, pack(extended))[1]
    if pack is not bytes:
        assert "truncated: it ends after" in read(tmp_path, pack(unmarked)[:-12])[1]


def quick_xz(data: bytes) -> bytes:
    return lzma.compress(data, preset=0)


@pytest.mark.e2e
@pytest.mark.parametrize("pack", [gzip.compress, quick_xz, zstandard.compress], ids=["gz", "xz", "zst"])
def test_a_packed_tar_cut_anywhere_gives_samples_from_its_begin(tmp_path: Path, pack: Any) -> None:
    rng = random.Random(0)
    files = [(f"{n:03d}.bin", rng.randbytes(20_000)) for n in range(20)]
    data = pack(tar_bytes(files))
    most = 0
    for cut in range(0, len(data), len(data) // 40):
        found, problem = read(tmp_path, data[:cut])
        assert problem or len(found) == 20  # only the end is missing
        assert list(found) == [f"1.tar#{n:03d}" for n in range(len(found))]
        assert all(
            sample["bin"] == content for sample, (_, content) in zip(found.values(), files, strict=False)
        )
        most = max(most, len(found))
    assert most > 10


@pytest.mark.e2e
@given(st.lists(st.tuples(st.integers(0), st.integers(0, 7)), min_size=1, max_size=4), st.booleans())
def test_flipped_bits_cost_samples_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]], in_visits: bool
) -> None:
    data = bytearray(tar_bytes(FILES))
    for place, bit in flips:
        data[place % len(data)] ^= 1 << bit
    path = tmp_path_factory.mktemp("tar") / "1.tar"
    path.write_bytes(data)
    try:
        source = TarSource(path, samples_per_visit=3 if in_visits else None)
    except (SampleError, SourceError):  # no sample can be read
        return
    found = {}
    for unit in range(source.num_units):
        found.update(read_unit(source, unit)[0])
    changed = [key for key, sample in found.items() if GOOD.get(key) != sample]
    assert len(changed) <= 2 * len(flips)


@pytest.mark.e2e
@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, zstandard.compress], ids=["gz", "xz", "zst"])
def test_flipped_bits_of_packed_tars_do_no_harm(tmp_path: Path, pack: Any) -> None:
    data, rng = pack(tar_bytes(FILES)), random.Random(1)
    for _ in range(150):
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        found, _ = read(tmp_path, bytes(flipped))
        assert len(found) <= 8


@given(st.binary(max_size=3000))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("tar") / "1.tar"
    path.write_bytes(data)
    found, problem = read_unit(TarSource(path))
    assert not found
    assert problem or data.startswith(bytes(BLOCK)) or data == b""


@pytest.mark.e2e
@given(st.data())
def test_headers_of_any_content_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """The checksum is valid, so that the parser gets to the data behind it."""
    blocks = b""
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from([bytes([n]) for n in b"01234567xgLKSXDVM\0\xff"]))
        size = data.draw(st.one_of(st.integers(0, 2000), st.binary(min_size=12, max_size=12)))
        blocks += header(data.draw(st.text("a./\n", max_size=20)), size, kind)
        blocks += data.draw(st.binary(max_size=600)).ljust(BLOCK, b"\0")[: 2 * BLOCK]
        blocks += bytes(-len(blocks) % BLOCK)
    path = tmp_path_factory.mktemp("tar") / "1.tar"
    path.write_bytes(blocks)
    read_unit(TarSource(path))


# --- names and kinds of members ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["/etc/x.txt", "../x.txt", "a/../../x.txt", "a\0b/../x.txt"])
def test_names_that_lead_out_of_the_archive_are_refused(tmp_path: Path, name: str) -> None:
    block = header("a.txt", 1) + b"1".ljust(BLOCK, b"\0")
    pax = f"path={name}\n".encode()
    record = b"%d " % (len(pax) + 3) + pax
    evil = (
        header("p", len(record), b"x")
        + record.ljust(BLOCK, b"\0")
        + header("p", 1)
        + b"2".ljust(BLOCK, b"\0")
    )
    found, problem = read(tmp_path, block + evil + header("b.txt", 0) + bytes(2 * BLOCK))
    assert found == {"1.tar#a": {"txt": "1"}, "1.tar#b": {"txt": ""}}
    assert "a name that leads out of the archive" in problem


def test_a_name_of_endless_length_is_refused_quickly(tmp_path: Path) -> None:
    name = "/".join(["a" * 60] * 15_000) + ".txt"
    data = tar_bytes([(name, b"1"), ("b.txt", b"2")])
    begun_s = time.process_time()
    found, problem = read(tmp_path, data)
    assert time.process_time() - begun_s < 5
    assert found == {"1.tar#b": {"txt": "2"}}
    assert "a name of 915,003 characters" in problem
    assert len(problem) < 1000


def test_sparse_files_are_refused_and_left_out(tmp_path: Path) -> None:
    old = bytearray(header("s.bin", 512, b"S"))
    old[482] = 1  # one more block of the sparse map
    old[148:156] = b" " * 8
    old[148:156] = b"%06o\0 " % sum(old)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        add(
            archive,
            "n.bin",
            b"x",
            pax_headers={"GNU.sparse.major": "1", "GNU.sparse.realsize": "99999999999"},
        )
        add(archive, "b.txt", b"1")
    found, problem = read(tmp_path, bytes(old) + bytes(BLOCK) + b"data".ljust(BLOCK) + buffer.getvalue())
    assert found == {"1.tar#b": {"txt": "1"}}
    assert "2 problems" in problem
    assert "1.tar#s: its .bin is a sparse file" in problem


def test_two_files_of_one_extension_make_no_sample(tmp_path: Path) -> None:
    found, problem = read(tmp_path, tar_bytes([("a.txt", b"1"), ("a.TXT", b"2"), ("b.txt", b"3")]))
    assert found == {"1.tar#b": {"txt": "3"}}
    assert "two files with the extension .txt" in problem


def test_names_that_are_no_utf_8_make_keys_that_are(tmp_path: Path) -> None:
    found, _ = read(tmp_path, header("x", 0).replace(b"x", b"\xff.txt", 1)[:BLOCK])
    assert found == {}  # the checksum is wrong: so it is a damaged header
    block = bytearray(header("abc.txt", 0))
    block[0] = 0xFF
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    assert read(tmp_path, bytes(block) + bytes(BLOCK)) == ({"1.tar#\ufffdbc": {"txt": ""}}, "")


# --- sizes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size",
    [b"77777777777\0", b"\x80" + b"\xff" * 11, b"\x80" + (1 << 62).to_bytes(11, "big"), b"\xff" * 12, b"nonsense\0\0\0\0"],
    ids=["8 GiB", "2^88", "2^62", "negative", "nonsense"],
)  # fmt: skip
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gz"])
def test_sizes_beyond_all_bounds_end_the_tar_in_little_memory(tmp_path: Path, size: bytes, pack: Any) -> None:
    data = pack(tar_bytes(FILES)[: 8 * 5 * BLOCK] + header("evil.bin", size) + bytes(BLOCK))
    tracemalloc.start()
    try:
        found, problem = read(tmp_path, data)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(found) in (7, 8)
    assert problem
    assert peak_bytes < 8 << 20


def test_an_extended_header_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    for kind in b"xgLKX":
        found, problem = read(tmp_path, header("evil", 5 << 20, bytes([kind])) + bytes(6 << 20))
        assert (found, "an extended header of 5,242,880 bytes" in problem) == ({}, True)


@pytest.mark.e2e
@pytest.mark.parametrize("pack", [gzip.compress, quick_xz, zstandard.compress], ids=["gz", "xz", "zst"])
def test_a_packed_bomb_is_given_up_at_the_bound_in_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: Any
) -> None:
    monkeypatch.setattr(object_limit, "_cache_bytes", 4 << 20)
    data = pack(tar_bytes([("a.txt", b"1"), ("b.bin", bytes(64 << 20)), ("c.txt", b"2")]))
    assert len(data) < 1 << 20
    tracemalloc.start()
    try:
        found, problem = read(tmp_path, data)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == {"1.tar#a": {"txt": "1"}}
    assert "#b, in a packed tar: more than 4.19 MB in one object; raise the cache's size_limit" in problem
    assert peak_bytes < 24 << 20


def test_an_xz_header_that_asks_for_gigabytes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "MEMORY_BYTES", 4 << 20)
    data = lzma.compress(tar_bytes(FILES), preset=9)  # a dictionary of 64 MiB
    found, problem = read(tmp_path, data)
    assert (found, "Memory usage limit" in problem) == ({}, True)


def test_an_image_bomb_in_a_tar_costs_one_sample(tmp_path: Path) -> None:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0))
    bomb += chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    found, problem = read(tmp_path, tar_bytes([("a.png", bomb), ("b.txt", b"1")]))
    assert found == {"1.tar#b": {"txt": "1"}}
    assert "DecompressionBomb" in problem


# --- resources ---------------------------------------------------------------------------------


def test_reads_that_are_given_up_close_the_file_at_once(tmp_path: Path) -> None:
    source = TarSource(make(tmp_path / "1.tar", FILES))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        for _ in range(100):
            samples = source.read(0, None)  # type: ignore[arg-type]
            next(samples)
            samples.close()  # type: ignore[attr-defined]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert read_all(source) == GOOD


def test_a_named_pipe_in_a_tars_place_does_not_block(tmp_path: Path) -> None:
    source = TarSource(make(tmp_path / "1.tar", FILES))
    os.unlink(tmp_path / "1.tar")
    os.mkfifo(tmp_path / "1.tar")
    done = threading.Timer(10, os._exit, [1])
    done.start()
    try:
        assert "not a regular file" in read_unit(source)[1]
    finally:
        done.cancel()
        done.join()


def test_records_of_a_pax_header_that_are_not_used_take_no_memory() -> None:
    given = [
        "path=a",
        "comment=b",
        "GNU.sparse.major=1",
        "GNU.sparse.minor=0",
        *(f"x{i}=c" for i in range(90)),
    ]
    data = b"".join(b"%d %s\n" % (len(one) + (4 if len(one) > 6 else 3), one.encode()) for one in given)
    assert _parse_pax(data).keys() == {"path", "GNU.sparse"}
