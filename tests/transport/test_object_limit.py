"""No object takes all memory: one above the bound is skipped, counted, and never read to its end."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from PIL import Image

import cachestream as cs
from cachestream import Cache
from cachestream.errors import ConfigError, SampleError
from cachestream.formats.files import FileSource
from cachestream.formats.tar import TarSource, decode_gzip
from cachestream.transport import object_limit
from tests.support.s3 import S3Server
from tests.support.unruly import UnrulyServer
from tests.worker.support import DEADLINE_S, ROOT, failures_of, only_once, sampling_pids, wait_until

LIMIT_BYTES: Final = 20_000_000
BOMB_BYTES: Final = 300_000_000
PIECE_BYTES: Final = 10_000_000
MOST_GROWTH: Final = 200_000_000  # several times the limit, and the libraries loaded meanwhile
READ: Final = """
import json, sys
import numpy as np
import cachestream as cs

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

what, options = json.loads(sys.argv[1])
source = cs.open_source(what, **options)
before = peak()
try:
    for _ in source.read(source.num_units - 1, np.random.default_rng(0)):
        pass
    print(json.dumps(["", peak() - before]))
except cs.SampleError as error:
    print(json.dumps([str(error), peak() - before]))
"""


def read_elsewhere(what: str | list[str], **options: Any) -> tuple[str, int]:
    """Return the SampleError of reading the last unit, and the peak growth of the process that reads it."""
    options = {"max_object_size": LIMIT_BYTES, **options}
    done = subprocess.run(
        [sys.executable, "-c", READ, json.dumps([what, options])],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    message, growth = json.loads(done.stdout)
    return message, growth


def zeros_to(file: Any, nbytes: int) -> None:
    for _ in range(nbytes // 1_000_000):
        file.write(bytes(1_000_000))


def npz(path: Path, compression: int = zipfile.ZIP_DEFLATED) -> None:
    with (
        zipfile.ZipFile(path, "w", compression, compresslevel=1) as archive,
        archive.open("x.npy", "w", force_zip64=True) as file,
    ):
        np.lib.format.write_array_header_1_0(
            file, {"descr": "|u1", "fortran_order": False, "shape": (BOMB_BYTES,)}
        )
        zeros_to(file, BOMB_BYTES)


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
    Image.new("RGB", (9000, 9000)).save(path, compress_level=1)


FILES: Final[dict[str, tuple[str, Callable[[Path], None]]]] = {
    "npz": ("a.npz", npz),
    "npz of bzip2": ("a.npz", lambda path: npz(path, zipfile.ZIP_BZIP2)),
    "tar": ("a.tar", tar),
    "tar.gz": ("a.tar.gz", lambda path: tar(path, gzip.compress)),
    "tar.bz2": ("a.tar.bz2", lambda path: tar(path, bz2.compress)),
    "tar.xz": ("a.tar.xz", lambda path: tar(path, lzma.compress)),
    "tar.zst": ("a.tar.zst", zst),
    "image": ("a.png", png),
    "data": ("a.bin", sparse),
}


@pytest.mark.e2e
@pytest.mark.parametrize("kind", FILES)
def test_a_file_above_the_limit_is_refused_in_little_memory(tmp_path: Path, kind: str) -> None:
    name, make = FILES[kind]
    make(tmp_path / name)
    message, growth = read_elsewhere(str(tmp_path / name))
    if kind != "npz of bzip2":
        assert "more than 20 MB in one object; raise max_object_size= of the source" in message
    assert name in message
    assert growth < MOST_GROWTH


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["endless", "bomb"])
def test_a_body_on_the_web_that_grows_above_the_limit_is_read_no_further(
    unruly_server: UnrulyServer, kind: str
) -> None:
    message, growth = read_elsewhere([f"{unruly_server.url}/{kind}/a.bin"])
    assert f"{kind}/a.bin: more than 20 MB in one object" in message
    assert growth < MOST_GROWTH


@pytest.mark.e2e
def test_an_object_of_s3_above_the_limit_is_not_asked_for(s3_server: S3Server, s3_bucket: Path) -> None:
    (s3_bucket / "a.bin").write_bytes(bytes(2 * LIMIT_BYTES))  # the server reads it whole for its ETag
    message, _ = read_elsewhere(f"s3://{s3_bucket.name}", storage_options=s3_server.storage_options)
    assert "a.bin: more than 20 MB in one object" in message


@pytest.mark.e2e
def test_a_file_of_a_driver_that_is_not_asynchronous_is_limited(tmp_path: Path) -> None:
    with (
        zipfile.ZipFile(tmp_path / "all.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("a.bin", "w") as file,
    ):
        zeros_to(file, BOMB_BYTES)
    message, growth = read_elsewhere(f"zip://a.bin::file://{tmp_path}/all.zip")
    assert "more than 20 MB in one object" in message
    assert growth < MOST_GROWTH


@pytest.mark.e2e
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


def test_a_packed_member_takes_what_it_holds_and_not_what_the_bound_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(object_limit, "limit_bytes", lambda: 1 << 50)
    assert decode_gzip(gzip.compress(b"small")) == b"small"
