"""No object takes all memory: one above the bound is skipped, counted, and never read to its end."""

from __future__ import annotations

import base64
import bz2
import gzip
import io
import lzma
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from PIL import Image

import cachestream as cs
from cachestream import Cache
from cachestream.errors import ConfigError, SampleError
from cachestream.sources.files import FileSource
from cachestream.sources.tar import TarSource
from cachestream.transport import object_limit
from tests.storage.steps import apart, serving
from tests.support.s3 import S3Server
from tests.support.unruly import UnrulyServer
from tests.worker.support import failures_of, only_once, sampling_pids, wait_until

LIMIT_BYTES: Final = 20_000_000
BOMB_BYTES: Final = 300_000_000
PIECE_BYTES: Final = 10_000_000
# Of bz2.compress(head() + bytes(BOMB_BYTES)), which takes three seconds.
BZIP2: Final = r"""
LRx4!F+o`-Q&|Kfp-KgQK;NL`5J2Q;5CH>1Ag@K=4hR4M2p|BI2`QyLBTR;xXk^emH9U|-RKjGz8ZZEW5dH-KRZ$=jKowL-e
L#u;q>>SZr7JiW4Cdt=-8zC7LjHDC<D~H1p_aJi<4o_2+R48`?GiF+V@eH5?bbv4(dbA4B$5&Q#RX)UO=LJHi+lxsIRFCy00
1C>0Kx$^847@wq$&bj#RX)UO=LJHi+lxsIRFCy001C>0Kx$^847@wq$&bj#RX)UO=LJHi+lxsIRFCy001C>0Kx$^847@wq$&
bj#RX)UO=LJHi+lxsIRFCy001C>0Kx$^847@wq$&bj#RX)UO=LJHi+lxsIRFCy001C>0Kx$^847@wq$&bj#RX)UO=OtmcT58
D@c@GW06+i$Ab<eFFea&{s1*gZC=~_b?ntK!5({AjFCY
"""
MOST_GROWTH: Final = 200_000_000  # several times the limit, and the libraries loaded meanwhile


@pytest.fixture(scope="module", autouse=True)
def small_process() -> Iterator[None]:
    """A process of little memory, from which those that read are forked."""
    with serving():
        yield


def read_elsewhere(what: str | list[str], **options: Any) -> tuple[str, int]:
    """Return the SampleError of reading the last unit, and the peak growth of the process that reads it."""
    return apart(partial(read_last, what, {"max_object_size": LIMIT_BYTES, **options}))


def read_last(what: str | list[str], options: dict[str, Any]) -> tuple[str, int]:
    source: Any = cs.open_source(what, **options)
    (before,) = _peak(os.getpid())
    error = ""
    try:
        for _ in source.read(source.num_units - 1, np.random.default_rng(0)):
            pass
    except SampleError as caught:
        error = str(caught)
    return error, _peak(os.getpid())[0] - before


def head() -> bytes:
    """The beginning of an .npy file of zeros."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": "|u1", "fortran_order": False, "shape": (BOMB_BYTES,)}
    )
    return file.getvalue()


def deflated(first: bytes, zeros: int) -> bytes:
    """`first` and so many zeros, packed piece by piece."""
    pieces = 40
    assert zeros % pieces == 0

    def part(piece: bytes, mode: int) -> bytes:
        packer = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS)
        return packer.compress(piece) + packer.flush(mode)

    piece = part(bytes(zeros // pieces), zlib.Z_FULL_FLUSH)
    return part(first, zlib.Z_FULL_FLUSH) + piece * pieces + part(b"", zlib.Z_FINISH)


def zip_of(
    path: Path, name: str, first: bytes, packed: bytes, compression: int = zipfile.ZIP_DEFLATED
) -> None:
    """A zip of one file, `first` and BOMB_BYTES zeros, of which `packed` is the compressed form."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, packed)
        entry = archive.getinfo(name)
        entry.compress_type, entry.file_size = compression, len(first) + BOMB_BYTES
        entry.CRC = zlib.crc32(first)
        for _ in range(BOMB_BYTES // PIECE_BYTES):
            entry.CRC = zlib.crc32(bytes(PIECE_BYTES), entry.CRC)


def npz(path: Path) -> None:
    zip_of(path, "x.npy", head(), deflated(head(), BOMB_BYTES))


def npz_of_bzip2(path: Path) -> None:
    packed = base64.b85decode(BZIP2.translate({ord("\n"): None}))
    assert bz2.BZ2Decompressor().decompress(packed, len(head())) == head()
    zip_of(path, "x.npy", head(), packed, zipfile.ZIP_BZIP2)


def tar(path: Path, compress: Callable[[bytes], bytes] | None = None) -> None:
    """A tar of one file of zeros, packed piece by piece, or sparse."""
    entry = tarfile.TarInfo("a.bin")
    entry.size = BOMB_BYTES
    if compress is None:
        sparse(path, entry.tobuf())
    else:
        packed = compress(bytes(PIECE_BYTES)) * (BOMB_BYTES // PIECE_BYTES + 1)
        path.write_bytes(compress(entry.tobuf()) + packed)


def zst(path: Path) -> None:
    tar(path, pytest.importorskip("zstandard").ZstdCompressor().compress)


def sparse(path: Path, head: bytes = b"") -> None:
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + BOMB_BYTES + PIECE_BYTES)


def png(path: Path) -> None:
    """A black picture of 9000 x 9000 pixels."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    nbytes = 9000 * (1 + 3 * 9000)
    body = b"\x78\x01" + deflated(b"", nbytes) + struct.pack(">HH", nbytes % 65521, 1)
    ends = chunk(b"IHDR", struct.pack(">IIBBBBB", 9000, 9000, 8, 2, 0, 0, 0)), chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + ends[0] + chunk(b"IDAT", body) + ends[1])
    with Image.open(path) as image:
        assert image.size == (9000, 9000)


FILES: Final[dict[str, tuple[str, Callable[[Path], None]]]] = {
    "npz": ("a.npz", npz),
    "npz of bzip2": ("a.npz", npz_of_bzip2),
    "tar": ("a.tar", tar),
    "tar.gz": ("a.tar.gz", lambda path: tar(path, gzip.compress)),
    "tar.bz2": ("a.tar.bz2", lambda path: tar(path, bz2.compress)),
    "tar.xz": ("a.tar.xz", lambda path: tar(path, lzma.compress)),
    "tar.zst": ("a.tar.zst", zst),
    "image": ("a.png", png),
    "data": ("a.bin", sparse),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_above_the_limit_is_refused_in_little_memory(tmp_path: Path, kind: str) -> None:
    name, make = FILES[kind]
    make(tmp_path / name)
    message, growth = read_elsewhere(str(tmp_path / name))
    if kind != "npz of bzip2":
        assert "more than 20 MB in one object; raise max_object_size= of the source" in message
    assert name in message
    assert growth < MOST_GROWTH


@pytest.mark.parametrize("kind", ["endless", "bomb"])
def test_a_body_on_the_web_that_grows_above_the_limit_is_read_no_further(
    unruly_server: UnrulyServer, kind: str
) -> None:
    message, growth = read_elsewhere([f"{unruly_server.url}/{kind}/a.bin"])
    assert f"{kind}/a.bin: more than 20 MB in one object" in message
    assert growth < MOST_GROWTH


def test_an_object_of_s3_above_the_limit_is_not_asked_for(s3_server: S3Server, s3_bucket: Path) -> None:
    (s3_bucket / "a.bin").write_bytes(
        bytes(LIMIT_BYTES + PIECE_BYTES)
    )  # the server reads it whole for its ETag
    message, _ = read_elsewhere(f"s3://{s3_bucket.name}", storage_options=s3_server.storage_options)
    assert "a.bin: more than 20 MB in one object" in message


def test_a_file_of_a_driver_that_is_not_asynchronous_is_limited(tmp_path: Path) -> None:
    zip_of(tmp_path / "all.zip", "a.bin", b"", deflated(b"", BOMB_BYTES))
    message, growth = read_elsewhere(f"zip://a.bin::file://{tmp_path}/all.zip")
    assert "more than 20 MB in one object" in message
    assert growth < MOST_GROWTH


def test_a_worker_skips_what_is_above_the_limit_of_its_cache_and_says_what_to_raise(
    tmp_path: Path, unruly_server: UnrulyServer
) -> None:
    good = [f"{unruly_server.url}/good/{number}.bin" for number in range(20)]
    source = cs.open_source([*good, f"{unruly_server.url}/endless/a.bin", f"{unruly_server.url}/bomb/a.bin"])
    with Cache(tmp_path / "cache", size_limit="30MB", min_free=0) as cache:
        with cs.start_worker(cache, source, num_workers=1):
            (pid,) = sampling_pids(cache)
            peaks: list[int] = []

            def has_ended() -> bool:
                peaks.extend(_peak(pid))
                return cache.fill_state() == "complete"

            wait_until(has_ended, "all was read")
        assert len(only_once(cache)) == 20
        assert failures_of(cache) == {"sample": 2}
        (row,) = cache.status().failures
        assert row.reason == "more than 30 MB in one object; raise the cache's size_limit to read it"
        assert max(peaks) < 2 * MOST_GROWTH


def _peak(pid: int) -> list[int]:
    """Return the peak memory of a process in a list, which is empty if the process has ended."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        return [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")]
    return []


def test_the_limit_is_an_option_of_all_sources_of_urls(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 1000, encoding="utf-8")
    source = cs.open_source(str(tmp_path), max_object_size="0.5kB")
    with pytest.raises(SampleError, match="more than 500 B in one object"):
        next(source.read(0, np.random.default_rng(0)))
    kept = FileSource(str(tmp_path), storage_options={"max_object_size": 1000})
    assert len(next(kept.read(0, np.random.default_rng(0)))[1]["text"]) == 1000
    with pytest.raises(ConfigError, match="max_object_size='much'"):
        cs.open_source(str(tmp_path), max_object_size="much")
    with pytest.raises(ConfigError, match="max_object_size"):
        cs.open_source([{"x": 1}], max_object_size="1GB")


def test_sources_that_are_read_in_turns_keep_their_own_limits(tmp_path: Path) -> None:
    (tmp_path / "0.txt").write_text("x" * 10, encoding="utf-8")
    (tmp_path / "1.txt").write_text("x" * 5000, encoding="utf-8")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in ("0.txt", "1.txt"):
            archive.add(tmp_path / name, name)
    small, large = (
        TarSource(str(tmp_path / "a.tar"), storage_options={"max_object_size": most}).read(
            0, np.random.default_rng(0)
        )
        for most in (1000, 10_000)
    )
    assert next(small)[0] == next(large)[0] == "a.tar#0"
    with pytest.raises(SampleError, match="more than 1 kB in one object"):
        next(small)
    assert next(large)[0] == "a.tar#1"
    assert object_limit.limit_bytes() == object_limit.DEFAULT_BYTES, "the reader's own limit is another one"
    large.close()  # type: ignore[attr-defined]
