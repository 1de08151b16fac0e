"""Files of raw tokens: nanoGPT's, llm.c's and Megatron-LM's, in windows, by ranges."""

from __future__ import annotations

import logging
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cachestream as cs
from tests.support.s3 import S3Server

TOKENS = np.random.default_rng(0).integers(0, 50_000, 10_000)


def windows(what: Any, **options: Any) -> np.ndarray[Any, Any]:
    source: Any = cs.open_source(what, window=100, windows="grid", **options)
    found = [
        sample["array"]
        for unit in range(source.num_units)
        for _, sample in source.read(unit, np.random.default_rng(0))
    ]
    assert {one.dtype.kind for one in found} <= {"u", "i"}
    return np.concatenate(found)


def index(code: int) -> bytes:
    """The beginning of Megatron-LM's index, up to the sizes of the documents."""
    return b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, 0, 0)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_tokens_without_a_header_are_told_by_their_look_which_is_said_once(
    tmp_path: Path, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    TOKENS.astype(dtype).tofile(tmp_path / "train.bin")
    with caplog.at_level(logging.WARNING, "cachestream"):
        assert np.array_equal(windows(tmp_path / "train.bin"), TOKENS)
        assert np.array_equal(windows(str(tmp_path / "*.bin")), TOKENS)
    (message,) = [record.getMessage() for record in caplog.records]
    assert f"read as {dtype}" in message
    assert "give dtype=" in message


@pytest.mark.parametrize("dtype", ["uint16", np.int32, "int64"])
def test_a_type_that_is_given_is_taken_at_its_word(
    tmp_path: Path, dtype: Any, caplog: pytest.LogCaptureFixture
) -> None:
    TOKENS.astype(dtype).tofile(tmp_path / "train.bin")
    with caplog.at_level(logging.WARNING, "cachestream"):
        assert np.array_equal(windows(tmp_path / "train.bin", dtype=dtype), TOKENS)
    assert not caplog.records


@pytest.mark.parametrize(("code", "dtype"), [(4, "int32"), (5, "int64"), (8, "uint16")])
def test_the_index_of_megatron_tells_the_type(tmp_path: Path, code: int, dtype: str) -> None:
    TOKENS.astype(dtype).tofile(tmp_path / "text_document.bin")
    (tmp_path / "text_document.idx").write_bytes(index(code))
    assert np.array_equal(windows(tmp_path / "text_document.bin"), TOKENS)
    (tmp_path / "text_document.idx").write_bytes(b"another")
    with pytest.raises(cs.SourceError, match=r"index \.idx is not one of Megatron-LM: give dtype="):
        windows(tmp_path / "text_document.bin")


@pytest.mark.parametrize(("magic", "dtype"), [(20240520, "uint16"), (20240801, "uint32")])
def test_the_header_of_llm_c_is_no_token(tmp_path: Path, magic: int, dtype: str) -> None:
    header = np.zeros(256, np.int32)
    header[:3] = magic, 1, len(TOKENS)
    (tmp_path / "train.bin").write_bytes(header.tobytes() + TOKENS.astype(dtype).tobytes())
    assert np.array_equal(windows(tmp_path / "train.bin"), TOKENS)


def test_a_window_of_a_huge_file_fetches_its_range_alone(s3_server: S3Server) -> None:
    bucket = s3_server.bucket("tokens")
    with (bucket / "train.bin").open("wb") as file:  # most of it is one hole
        file.write(TOKENS.astype("uint16").tobytes())
        file.truncate(32 << 20)
    (bucket / "train.idx").write_bytes(index(8))
    source: Any = cs.open_source(
        f"s3://{bucket.name}/train.bin",
        window=1000,
        windows="grid",
        storage_options=s3_server.storage_options,
    )
    ((key, sample),) = source.read(3, np.random.default_rng(0))
    assert key == "train.bin[3000:4000]"
    assert np.array_equal(sample["array"], TOKENS[3000:4000])
    assert source.num_units == -(-(16 << 20) // 1000)


def test_what_makes_no_tokens_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(os.urandom(1001))
    with pytest.raises(cs.SourceError, match=r"1,001 bytes are no tokens of uint16: give dtype="):
        windows(tmp_path / "a.bin")
    with pytest.raises(cs.ConfigError, match="dtype='words': give the type of the tokens"):
        windows(tmp_path / "a.bin", dtype="words")
    np.save(tmp_path / "a.npy", TOKENS)
    with pytest.raises(cs.ConfigError, match=r"dtype= is for files of tokens"):
        windows(tmp_path / "a.npy", dtype="uint16")
