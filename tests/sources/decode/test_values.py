"""Decoding of files by extension to the fields of a sample, and refused files."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from cachestream.errors import SampleError
from cachestream.sources.decode.values import decode_fields, decode_value
from cachestream.transport import object_limit


def decoded(data: bytes | memoryview, extension: str, path: str, *options: Any) -> dict[str, Any]:
    """The fields of a file that is one sample."""
    found = decode_fields(data, extension, path, *options)
    assert isinstance(found, dict)
    return found


def encoded(image: Image.Image, format_: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format_, **options)
    return stream.getvalue()


def saved(array: np.ndarray[Any, Any]) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


@pytest.fixture
def gradient() -> np.ndarray[Any, Any]:
    """Return uint8 [20, 30, 3], different in every corner."""
    rows, columns = np.mgrid[0:20, 0:30]
    return np.stack([rows * 12, columns * 8, (rows + columns) * 5], axis=-1).astype(np.uint8)


# --- images ------------------------------------------------------------------------------------


@pytest.mark.parametrize("format_", ["PNG", "BMP", "TIFF", "PPM"])
def test_a_lossless_image_comes_as_uint8_channels_first_with_its_exact_pixels(
    gradient: npt.NDArray[np.uint8], format_: str
) -> None:
    image = decoded(encoded(Image.fromarray(gradient), format_), f".{format_.lower()}", "x")["image"]
    assert image.dtype == np.uint8
    assert image.shape == (3, 20, 30)
    assert image.flags.c_contiguous
    assert image.flags.writeable
    assert np.array_equal(image, gradient.transpose(2, 0, 1))


@pytest.mark.parametrize("format_", ["JPEG", "WEBP", "GIF"])
def test_a_lossy_image_comes_close_to_its_pixels(gradient: npt.NDArray[np.uint8], format_: str) -> None:
    options = {} if format_ == "GIF" else {"quality": 95}
    image = decoded(encoded(Image.fromarray(gradient), format_, **options), ".jpg", "x")["image"]
    assert image.shape == (3, 20, 30)
    assert np.abs(image.astype(int) - gradient.transpose(2, 0, 1)).mean() < 12


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA"])
def test_every_mode_that_png_knows_becomes_rgb(gradient: npt.NDArray[np.uint8], mode: str) -> None:
    source = Image.fromarray(gradient).convert(mode)
    image = decoded(encoded(source), ".png", "x")["image"]
    expected = np.asarray(source.convert("RGBA").convert("RGB")).transpose(2, 0, 1)
    assert np.array_equal(image, expected)


def test_a_palette_with_transparency_becomes_rgb_without_a_warning(gradient: npt.NDArray[np.uint8]) -> None:
    source = Image.fromarray(gradient).quantize(16)
    data = encoded(source, transparency=bytes(range(0, 160, 10)))
    image = decoded(data, ".png", "x")["image"]
    assert np.array_equal(image, np.asarray(source.convert("RGB")).transpose(2, 0, 1))


def test_a_cmyk_jpeg_becomes_rgb(gradient: npt.NDArray[np.uint8]) -> None:
    data = encoded(Image.fromarray(gradient).convert("CMYK"), "JPEG", quality=95)
    image = decoded(data, ".jpg", "x")["image"]
    assert np.abs(image.astype(int) - gradient.transpose(2, 0, 1)).mean() < 12


def test_16_bit_greys_keep_their_upper_8_bits_instead_of_being_clipped() -> None:
    grey = np.linspace(0, 65535, 256 * 4).astype(np.uint16).reshape(4, 256)
    image = decoded(encoded(Image.fromarray(grey)), ".png", "x")["image"]
    assert np.array_equal(image, np.broadcast_to(grey >> 8, (3, 4, 256)))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photograph_is_turned_upright_as_its_exif_data_say(orientation: int) -> None:
    upright = np.zeros((16, 32, 3), np.uint8)
    upright[:8, :16] = 255  # a white quarter at the top left
    undo = {2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_90"}
    undo |= {7: "TRANSVERSE", 8: "ROTATE_270"}
    stored = Image.fromarray(upright)
    if orientation in undo:
        stored = stored.transpose(getattr(Image.Transpose, undo[orientation]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = decoded(encoded(stored, "JPEG", exif=exif, quality=100), ".jpeg", "x")["image"]
    assert image.shape == (3, 16, 32)
    assert image[:, :7, :15].min() > 200
    assert image[:, 9:, :].max() < 50


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_broken_exif_data_do_not_spoil_the_pixels(gradient: npt.NDArray[np.uint8]) -> None:
    data = encoded(Image.fromarray(gradient), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff" + b"\xff" * 20)
    assert decoded(data, ".jpg", "x")["image"].shape == (3, 20, 30)


@pytest.mark.parametrize("keep", [0.0, 0.05, 0.5, 0.9])
@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP", "GIF", "TIFF"])
def test_a_truncated_image_is_a_sample_error_that_names_the_path(
    gradient: npt.NDArray[np.uint8], format_: str, keep: float
) -> None:
    data = encoded(Image.fromarray(np.tile(gradient, (5, 5, 1))), format_)
    with pytest.raises(SampleError, match=r"dir/a\.jpg"):
        decoded(data[: int(len(data) * keep)], ".jpg", "dir/a.jpg")


def test_a_decompression_bomb_is_refused_before_it_is_unpacked(
    monkeypatch: pytest.MonkeyPatch, gradient: npt.NDArray[np.uint8]
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20 * 30 - 1)
    with pytest.raises(SampleError, match=r"bomb\.png.*pixels"):
        decoded(encoded(Image.fromarray(gradient)), ".png", "bomb.png")


def test_a_format_outside_the_allow_list_is_refused_though_pillow_could_open_it(
    gradient: npt.NDArray[np.uint8],
) -> None:
    data = encoded(Image.fromarray(gradient), "EPS")
    with pytest.raises(SampleError, match="cannot identify"):
        decoded(data, ".jpg", "x.jpg")


def test_a_png_that_is_called_jpg_is_read_as_what_it_is(gradient: npt.NDArray[np.uint8]) -> None:
    image = decoded(encoded(Image.fromarray(gradient)), ".jpg", "x")["image"]
    assert np.array_equal(image, gradient.transpose(2, 0, 1))


# --- arrays ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "uint8", "bool", "complex64", ">f4", "<i2"])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5), (2, 0, 4)])
def test_an_npy_file_comes_back_equal_native_and_contiguous(dtype: str, shape: tuple[int, ...]) -> None:
    array = (np.random.default_rng(0).random(shape) * 100).astype(dtype)
    found = decoded(saved(array), ".npy", "x")["array"]
    assert np.array_equal(found, array)
    assert found.shape == shape
    assert found.dtype == array.dtype.newbyteorder("=")
    assert found.dtype.isnative
    assert found.flags.c_contiguous
    assert found.flags.writeable


def test_an_array_in_fortran_order_comes_back_in_c_order() -> None:
    array = np.asfortranarray(np.arange(12.0).reshape(3, 4))
    found = decoded(saved(array), ".npy", "x")["array"]
    assert np.array_equal(found, array)
    assert found.flags.c_contiguous


def test_an_npy_file_in_a_writable_buffer_is_not_copied() -> None:
    data = bytearray(saved(np.arange(1000.0)))
    found = decoded(memoryview(data), ".npy", "x")["array"]
    assert np.shares_memory(found, np.frombuffer(data, np.uint8))


def test_an_array_that_needs_pickle_is_refused() -> None:
    stream = io.BytesIO()
    np.save(stream, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(SampleError, match="pickle"):
        decoded(stream.getvalue(), ".npy", "x.npy")


@pytest.mark.e2e
@given(st.data())
def test_a_damaged_npy_file_is_a_sample_error_or_an_array_of_the_declared_size(data: st.DataObject) -> None:
    content = bytearray(saved(np.arange(24, dtype=np.int32).reshape(4, 6)))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    del content[data.draw(st.integers(0, len(content))) :]
    try:
        found = decoded(bytes(content), ".npy", "x.npy")["array"]
    except SampleError:
        return
    assert found.nbytes <= len(content)


def test_the_arrays_of_an_npz_file_are_fields_of_their_own() -> None:
    stream = io.BytesIO()
    np.savez_compressed(stream, image=np.ones((3, 4), np.float32), name=np.array("cat"), id=np.int64(7))
    fields = decoded(stream.getvalue(), ".npz", "x")
    assert sorted(fields) == ["id", "image", "name"]
    assert fields["image"].shape == (3, 4)
    assert fields["name"] == "cat"
    assert fields["id"] == 7


def test_an_npz_file_that_declares_too_much_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_limit, "_cache_bytes", 1000)
    stream = io.BytesIO()
    np.savez_compressed(stream, zeros=np.zeros(10_000))
    with pytest.raises(SampleError, match=r"more than 1 kB in one object"):
        decoded(stream.getvalue(), ".npz", "x.npz")


def test_a_damaged_npz_member_is_found_by_its_checksum() -> None:
    stream = io.BytesIO()
    np.savez(stream, a=np.arange(100))
    content = bytearray(stream.getvalue())
    content[400] ^= 1
    with pytest.raises(SampleError, match="CRC"):
        decoded(bytes(content), ".npz", "x.npz")


def test_an_npz_member_that_is_no_array_is_a_sample_error() -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("a.npy", b"not an array at all")
    with pytest.raises(SampleError, match="npy"):
        decoded(stream.getvalue(), ".npz", "x.npz")


# --- JSON, text, bytes -------------------------------------------------------------------------


def test_the_items_of_a_json_object_are_fields_of_plain_values_arrays_or_json_text() -> None:
    content = {
        "id": 7,
        "weight": 0.5,
        "ok": True,
        "name": "Zoë",
        "box": [1, 2, 3, 4],
        "matrix": [[1, 2.5], [3, 4]],
        "flags": [True, False],
        "ragged": [[1], [2, 3]],
        "words": ["a", "b"],
        "nested": {"a": [1]},
        "nothing": None,
        "huge": [1 << 70],
        "mixed": [True, 2],
    }
    fields = decoded(json.dumps(content).encode(), ".json", "x")
    assert list(fields) == list(content)
    assert [fields[name] for name in ("id", "weight", "ok", "name")] == [7, 0.5, True, "Zoë"]
    assert fields["ok"] is True
    assert fields["nothing"] is None
    arrays = {name: (fields[name].dtype.name, fields[name].tolist()) for name in ("box", "matrix", "flags")}
    assert arrays == {
        "box": ("int64", [1, 2, 3, 4]),
        "matrix": ("float64", [[1.0, 2.5], [3.0, 4.0]]),
        "flags": ("bool", [True, False]),
    }
    for name in ("ragged", "words", "nested", "huge", "mixed"):
        assert isinstance(fields[name], str)
        assert json.loads(fields[name]) == content[name]


@pytest.mark.parametrize(
    ("content", "expected"), [("3", 3), ('"a"', "a"), ("null", None), ('["a"]', '["a"]')]
)
def test_json_that_is_no_object_is_one_field(content: Any, expected: Any) -> None:
    assert decoded(content.encode(), ".json", "x") == {"json": expected}


@pytest.mark.parametrize("content", [b"{", b"", b"{'a': 1}", b"\xff\xfe\x00", b"[" * 100_000])
def test_malformed_json_is_a_sample_error(content: Any) -> None:
    with pytest.raises(SampleError, match=r"x\.json"):
        decoded(content, ".json", "x.json")


@pytest.mark.parametrize("extension", [".txt", ".text", ".md", ".csv"])
def test_text_is_a_str_without_its_byte_order_mark(extension: str) -> None:
    assert decoded("\ufeffGrüße\n".encode(), extension, "x") == {"text": "Grüße\n"}


def test_text_that_is_not_utf8_is_a_sample_error() -> None:
    with pytest.raises(SampleError, match=r"x\.txt.*utf-8"):
        decoded(b"\xff\xff", ".txt", "x.txt")


@pytest.mark.parametrize("extension", [".bin", "", ".pth", ".unknown"])
def test_anything_else_is_bytes(extension: str) -> None:
    fields = decoded(memoryview(bytearray(b"\0\1\2")), extension, "x")
    assert fields == {"data": b"\0\1\2"}
    assert type(fields["data"]) is bytes


def test_a_single_value_can_be_decoded_for_archives() -> None:
    assert decode_value(saved(np.arange(3)), ".npy", "x").tolist() == [0, 1, 2]
    assert decode_value(struct.pack("<I", 7), ".cls2", "x") == b"\7\0\0\0"
