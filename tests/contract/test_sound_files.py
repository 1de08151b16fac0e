"""Sound files are read: what a decoder, a server or a name has against them is no reason to leave them out."""

import io
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

import cachestream as cs

PIXELS = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)


def read(source: Any, unit: int = 0) -> list[tuple[str, dict[str, Any]]]:
    return list(source.read(unit, np.random.default_rng(0)))


# --- images --------------------------------------------------------------------------------------


def _large_texts() -> Iterator[tuple[str, dict[str, Any]]]:
    for packed in (True, False):
        text = PngImagePlugin.PngInfo()
        for number in range(1 if packed else 70):
            text.add_text(f"parameters {number}", "a" * 2_000_000 if packed else "a" * 1_000_000, zip=packed)
        yield f"zip={packed}", {"pnginfo": text}
    yield "profile", {"icc_profile": bytes(2_000_000)}


@pytest.mark.parametrize(
    "texts", [texts for _, texts in _large_texts()], ids=[name for name, _ in _large_texts()]
)
def test_a_png_with_large_texts_or_a_large_profile_is_read(tmp_path: Path, texts: Any) -> None:
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    Image.fromarray(PIXELS).save(tmp_path / "a.png", exif=exif, **texts)
    ((_, sample),) = read(cs.open_source(str(tmp_path / "a.png")))
    assert np.array_equal(sample["image"], PIXELS[::-1, ::-1].transpose(2, 0, 1))


def test_a_broken_png_with_texts_is_refused(tmp_path: Path) -> None:
    text, file = PngImagePlugin.PngInfo(), io.BytesIO()
    text.add_text("a", "b")
    Image.fromarray(PIXELS).save(file, "PNG", pnginfo=text)
    (tmp_path / "a.png").write_bytes(file.getvalue()[:-3000])
    with pytest.raises(cs.SampleError, match=r"a\.png: not a usable \.png file"):
        read(cs.open_source(str(tmp_path / "a.png")))


@pytest.mark.parametrize(
    ("mode", "dtype", "words"), [("P", np.uint8, "has a palette"), ("I;16", np.uint16, "16 bits")]
)
def test_it_is_said_once_that_depth_and_masks_of_a_folder_lose_their_values(
    tmp_path: Path, mode: str, dtype: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(2):
        image = Image.frombytes(mode, (4, 4), np.arange(16, dtype=dtype).tobytes())
        if mode == "P":
            image.putpalette(list(range(48)))
        image.save(tmp_path / f"{number}.png")
    with caplog.at_level(logging.WARNING, "cachestream"):
        source = cs.open_source(str(tmp_path))
        for unit in range(2):
            read(source, unit)
    (message,) = [record.getMessage() for record in caplog.records]
    assert words in message
    assert "give decoders={'image': 'index'}" in message
    caplog.clear()
    kept = cs.open_source(str(tmp_path), decoders={"image": "index"})
    values = np.arange(16, dtype=dtype).reshape(4, 4)
    ((_, sample),) = read(kept, 0)
    assert sample["image"].dtype == dtype
    assert sample["image"].tolist() == values.tolist()
    assert not caplog.records


# --- JSON ----------------------------------------------------------------------------------------

RECORDS = [{"id": i, "text": f"t{i}"} for i in range(3)]


def test_a_json_file_with_an_array_of_objects_is_a_sample_for_each(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(RECORDS))
    source = cs.open_source(str(tmp_path / "a.json"))
    assert read(source) == [(f"a.json#{i}", record) for i, record in enumerate(RECORDS)]


def test_json_lines_in_a_json_file_are_refused_with_the_format_that_reads_them(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("\n".join(map(json.dumps, RECORDS)))
    with pytest.raises(cs.SampleError, match=r"JSON Lines are read by open_source\(…, format='lines'\)"):
        read(cs.open_source(str(tmp_path / "a.json")))
    assert [sample for _, sample in read(cs.open_source(str(tmp_path / "a.json"), format="lines"))] == RECORDS


# --- Zarr where absent objects are denied ---------------------------------------------------------

zarr: Any = pytest.importorskip("zarr")


class DenyingBucket(BaseHTTPRequestHandler):
    """A bucket of S3 whose keys may not be listed: it answers 403 for what is absent, and for `denied`."""

    folder: Path
    denied: set[str]
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        file = self.folder / path.removeprefix("/bucket/")
        found = "?list-type" not in self.path and file.is_file() and file.name not in self.denied
        data = (
            file.read_bytes() if found else b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
        )
        status, total, start, stop = 200 if found else 403, len(data), 0, 0
        if found and (asked := self.headers.get("Range")):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, stop = (
                (int(first), min(total, int(last or total) + 1))
                if first
                else (max(0, total - int(last)), total)
            )
            status, data = 206, data[start:stop]
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{total}")
        self.send_header("ETag", '"1"')
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def _threads_of_zarr(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let zarr start its threads, which it keeps, before tests look for threads that are left behind."""
    zarr.create_array(str(tmp_path_factory.mktemp("zarr") / "a.zarr"), shape=(2,), dtype="i4")[:] = 1


@pytest.fixture
def bucket(tmp_path: Path, _threads_of_zarr: None) -> Iterator[tuple[type[DenyingBucket], dict[str, Any]]]:
    handler = type("Bucket", (DenyingBucket,), {"folder": tmp_path, "denied": set()})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        yield handler, {"key": "k", "secret": "s", "endpoint_url": endpoint}
        server.shutdown()


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("dense", [True, pytest.param(False, marks=pytest.mark.e2e)])
def test_a_zarr_array_is_read_where_absent_objects_are_denied(
    bucket: Any, version: int, dense: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    array = zarr.create_array(
        str(tmp_path / "a.zarr"), shape=(20,), chunks=(5,), dtype="i4", zarr_format=version, fill_value=7
    )
    expected = np.arange(100, 120)
    array[:] = expected
    if not dense:
        array[5:10] = expected[5:10] = 7
        (tmp_path / ("a.zarr/1" if version == 2 else "a.zarr/c/1")).unlink(missing_ok=True)
    source = cs.open_source("s3://bucket/a.zarr", window=20, windows="grid", storage_options=bucket[1])
    ((_, sample),) = read(source)
    assert np.array_equal(sample["array"], expected)
    assert ("hold the fill value" in caplog.text) == (not dense)


def test_a_zarr_array_whose_metadata_are_denied_is_refused(bucket: Any, tmp_path: Path) -> None:
    zarr.create_array(str(tmp_path / "a.zarr"), shape=(20,), chunks=(5,), dtype="i4", zarr_format=2)
    bucket[0].denied.add(".zarray")
    with pytest.raises(cs.SourceError, match="access denied"):
        cs.open_source("s3://bucket/a.zarr", window=20, windows="grid", storage_options=bucket[1])


@pytest.mark.e2e
def test_a_window_of_a_zarr_array_is_lost_if_access_ends_while_it_is_read(
    bucket: Any, tmp_path: Path
) -> None:
    array = zarr.create_array(
        str(tmp_path / "a.zarr"), shape=(20,), chunks=(5,), dtype="i4", zarr_format=2, fill_value=7
    )
    array[:10] = np.arange(10)  # the others are absent
    source = cs.open_source("s3://bucket/a.zarr", window=20, windows="grid", storage_options=bucket[1])
    assert len(read(source)) == 1
    bucket[0].denied |= {".zarray", "1"}
    with pytest.raises(cs.SourceError, match="access denied"):
        read(source)
    bucket[0].denied.clear()
    assert np.array_equal(read(source)[0][1]["array"], [*range(10), *[7] * 10])
