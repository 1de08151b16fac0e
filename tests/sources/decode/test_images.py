"""Images: the two JPEG decoders, resize and crop, unusual modes, and malicious files."""

from __future__ import annotations

import io
import re
import struct
import sys
import tarfile
import tracemalloc
import warnings
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from cachestream.errors import ConfigError, SampleError
from cachestream.formats.files import FileSource
from cachestream.sources.decode import images
from cachestream.sources.decode.images import ImageOptions, decode_image
from cachestream.sources.decode.values import decode_fields
from cachestream.sources.open import open_source

Pixels = npt.NDArray[np.uint8]
PLACE: Final = re.compile(r" at 0x[0-9a-f]+")


@cache
def photograph(width: int, height: int) -> Image.Image:
    """Return smooth and coloured pixels, like those of a photograph."""
    noise = np.random.default_rng(width * height).integers(0, 256, (9, 12, 3), np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, format_: str = "JPEG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format_, **options)
    return stream.getvalue()


@cache
def png_of(width: int, height: int) -> bytes:
    return encoded(photograph(width, height), "PNG")


def by_pillow(data: bytes) -> Pixels:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB")).transpose(2, 0, 1)


def difference(one: Pixels, other: Pixels) -> int:
    assert one.shape == other.shape
    return int(np.abs(one.astype(int) - other).max())


@pytest.fixture
def no_simplejpeg(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make simplejpeg look as if it were not installed."""
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    images._simplejpeg.cache_clear()
    yield
    images._simplejpeg.cache_clear()


@pytest.fixture(params=["with simplejpeg", "without"])
def either(request: pytest.FixtureRequest) -> None:
    if request.param == "without":
        request.getfixturevalue("no_simplejpeg")
    else:
        pytest.importorskip("simplejpeg")


# --- the two decoders --------------------------------------------------------------------------

JPEGS: Final[tuple[dict[str, Any], ...]] = (
    {"quality": 90},
    {"quality": 50, "subsampling": 0},
    {"quality": 95, "subsampling": 1},
    {"quality": 80, "progressive": True},
    {"quality": 80, "restart_marker_blocks": 4},
)


@pytest.mark.parametrize("options", JPEGS, ids=str)
@pytest.mark.parametrize("size", [(64, 48), (33, 17), (1, 1), (129, 200)], ids=str)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_simplejpeg_is_used_where_it_is_installed_and_gives_pillows_pixels(
    options: dict[str, Any], size: tuple[int, int], mode: str
) -> None:
    pytest.importorskip("simplejpeg")
    data = encoded(photograph(*size).convert(mode), **options)
    with Image.open(io.BytesIO(data)) as image:
        assert images.decode_by_simplejpeg(data, image, 1) is not None
    found = decode_image(memoryview(bytearray(data)))
    assert found.flags.c_contiguous
    assert found.flags.writeable
    assert difference(found, by_pillow(data)) <= 2  # 0 where both have the same libjpeg-turbo


@pytest.mark.parametrize("options", JPEGS, ids=str)
@pytest.mark.parametrize("size", [(640, 480), (333, 517), (517, 333)], ids=str)
def test_both_decoders_give_the_same_reduced_images(
    options: dict[str, Any], size: tuple[int, int], request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("simplejpeg")
    data = encoded(photograph(*size), **options)
    turbo = decode_image(data, ImageOptions(resize=40))
    request.getfixturevalue("no_simplejpeg")
    assert difference(turbo, decode_image(data, ImageOptions(resize=40))) <= 2


@pytest.mark.parametrize("keep", [0.02, 0.3, 0.9, 0.999])
def test_both_decoders_refuse_truncated_files_for_the_same_reason(
    keep: float, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("simplejpeg")
    data = encoded(photograph(200, 100))
    reasons = []
    for fixture in (None, "no_simplejpeg"):
        if fixture:
            request.getfixturevalue(fixture)
        with pytest.raises(SampleError) as caught:
            decode_fields(data[: int(len(data) * keep)], ".jpg", "a.jpg")
        reasons.append(str(caught.value))
    assert reasons[0] == reasons[1]


def test_what_pillow_forgives_is_forgiven_with_simplejpeg_too() -> None:
    data = bytearray(encoded(photograph(200, 100)))
    data[-200] ^= 0x55
    assert np.array_equal(decode_image(bytes(data)), by_pillow(bytes(data)))


# --- resize and crop ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "resize", "expected"),
    [  # width and height, and the size that torchvision's Resize gives
        ((640, 480), 256, (341, 256)),
        ((480, 640), 256, (256, 341)),
        ((500, 375), 224, (298, 224)),
        ((333, 333), 64, (64, 64)),
        ((100, 50), 200, (400, 200)),
        ((640, 480), (100, 300), (300, 100)),
        ((640, 480), [100, 300], (300, 100)),
    ],
)
def test_resize_takes_the_shorter_side_or_height_and_width_and_rounds_as_torchvision_does(
    either: None, size: tuple[int, int], resize: Any, expected: tuple[int, int]
) -> None:
    source = photograph(*size)
    found = decode_image(png_of(*size), ImageOptions(resize=resize))
    exact = np.asarray(source.resize(expected, Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    assert np.array_equal(found, exact)
    assert found.flags.c_contiguous


@pytest.mark.parametrize(
    ("crop", "rows", "columns"),
    [
        (8, slice(6, 14), slice(11, 19)),
        ((10, 30), slice(5, 15), slice(0, 30)),
        ((5, 7), slice(8, 13), slice(12, 19)),  # halves are rounded to even, as in torchvision
        ((20, 30), slice(0, 20), slice(0, 30)),
    ],
)
def test_crop_takes_the_middle(crop: Any, rows: slice, columns: slice) -> None:
    source = photograph(30, 20)
    found = decode_image(encoded(source, "PNG"), ImageOptions(crop=crop))
    assert np.array_equal(found, np.asarray(source).transpose(2, 0, 1)[:, rows, columns])
    assert found.flags.c_contiguous


@pytest.mark.parametrize("size", [(640, 480), (333, 517), (100, 99)], ids=str)
@pytest.mark.parametrize("resize", [40, 57, (60, 70), 150])
@pytest.mark.parametrize("crop", [33, (20, 64), 500])
def test_a_crop_of_a_resized_image_is_what_the_whole_one_has_there(
    size: tuple[int, int], resize: Any, crop: Any
) -> None:
    data = png_of(*size)
    whole = decode_image(data, ImageOptions(resize=resize))
    found = decode_image(data, ImageOptions(resize=resize, crop=crop))
    assert difference(found, ImageOptions(crop=crop).cropped(whole)) <= 2


def test_an_image_smaller_than_the_crop_is_padded_with_black_on_all_sides() -> None:
    source = photograph(6, 3)
    found = decode_image(encoded(source, "PNG"), ImageOptions(crop=(8, 6)))
    assert found.shape == (3, 8, 6)
    assert np.array_equal(found[:, 2:5], np.asarray(source).transpose(2, 0, 1))
    assert not found[:, :2].any()
    assert not found[:, 5:].any()


@pytest.mark.parametrize("size", [(640, 480), (1000, 600), (801, 1203), (2400, 90)], ids=str)
def test_a_large_jpeg_is_unpacked_at_a_part_of_its_size_and_looks_the_same(
    either: None, size: tuple[int, int]
) -> None:
    data = encoded(photograph(*size), quality=95)
    options = ImageOptions(resize=64, crop=56)
    found = decode_image(data, options)
    with Image.open(io.BytesIO(data)) as image:
        exact = options.cropped(
            np.asarray(image.resize(options.resized(*size), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
        )
    assert found.shape == (3, 56, 56)
    assert np.abs(found.astype(int) - exact).mean() < 1.0


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_photograph_is_resized_and_cropped_upright(either: None, orientation: int) -> None:
    upright = photograph(320, 200)
    undo = {2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_90"}
    undo |= {7: "TRANSVERSE", 8: "ROTATE_270"}
    stored = upright.transpose(getattr(Image.Transpose, undo[orientation])) if orientation > 1 else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = ImageOptions(resize=50, crop=(40, 60))
    found = decode_image(encoded(stored, quality=98, exif=exif), options)
    expected = decode_image(png_of(320, 200), options)
    assert found.shape == (3, 40, 60)
    assert np.abs(found.astype(int) - expected).mean() < 2


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    "options", [{}, {"resize": 50}, {"resize": (30, 70)}, {"crop": 60}, {"resize": 50, "crop": (40, 60)}]
)
@pytest.mark.parametrize("compression", [None, "tiff_lzw"])
def test_a_turned_tiff_is_upright_resized_and_cropped_as_one_that_was_stored_upright(
    orientation: int, options: dict[str, Any], compression: str | None
) -> None:
    size = (96, 64)
    upright = np.asarray(photograph(*size))
    turned = np.rot90(upright, {3: 2, 4: 2, 5: 1, 6: 1, 7: -1, 8: -1}.get(orientation, 0))
    stored = turned[:, ::-1] if orientation in (2, 4) else turned[::-1] if orientation in (5, 7) else turned
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(stored), "TIFF", exif=exif, compression=compression)
    found = decode_image(data, ImageOptions(**options))
    expected = decode_image(png_of(*size), ImageOptions(**options))
    assert difference(found, expected) <= 1


@given(
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    resize=st.none() | st.integers(1, 50) | st.tuples(st.integers(1, 50), st.integers(1, 50)),
    crop=st.integers(1, 50) | st.tuples(st.integers(1, 50), st.integers(1, 50)),
)
def test_with_a_crop_all_images_have_one_shape(size: tuple[int, int], resize: Any, crop: Any) -> None:
    found = decode_image(encoded(photograph(*size)), ImageOptions(resize=resize, crop=crop))
    assert found.shape == (3, *(crop if isinstance(crop, tuple) else (crop, crop)))


def test_image_options_are_also_a_transform_of_samples() -> None:
    pixels = np.asarray(photograph(64, 48)).transpose(2, 0, 1)
    sample = {"image": pixels, "label": 3, "mask": np.zeros((48, 64), np.uint8), "name": "a"}
    options = ImageOptions(resize=24, crop=20)
    found = options(sample)
    assert difference(found["image"], decode_image(encoded(photograph(64, 48), "PNG"), options)) <= 2
    assert {name: found[name] is sample[name] for name in sample} == {
        "image": False,
        "label": True,
        "mask": True,
        "name": True,
    }


@pytest.mark.parametrize("size", [0, -3, 2.5, "256", (1, 2, 3), (0, 4), (4,), True])
@pytest.mark.parametrize("name", ["resize", "crop"])
def test_a_size_that_is_none_is_refused_at_once(name: str, size: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.*pixels above 0"):
        ImageOptions(**{name: size})


# --- exotic modes ------------------------------------------------------------------------------


def test_an_inverted_cmyk_jpeg_as_adobe_writes_them_becomes_rgb(either: None) -> None:
    source = photograph(60, 40)
    data = encoded(source.convert("CMYK"), quality=95)
    assert b"Adobe" in data
    found = decode_image(data, ImageOptions(resize=(40, 60)))
    assert np.abs(found.astype(int) - np.asarray(source).transpose(2, 0, 1)).mean() < 12


@pytest.mark.parametrize("byteorder", ["<", ">"])
def test_16_bit_grey_tiffs_of_either_byte_order_keep_their_upper_8_bits(byteorder: str) -> None:
    grey = np.linspace(0, 65535, 64).astype(np.uint16).reshape(4, 16)
    head = b"II*\0" if byteorder == "<" else b"MM\0*"
    tags = [(256, 3, 16), (257, 3, 4), (258, 3, 16), (259, 3, 1), (262, 3, 1), (273, 4, 200), (278, 3, 4), (279, 4, 128)]  # fmt: skip
    entries = b"".join(
        struct.pack(f"{byteorder}HHI", tag, kind, 1)
        + (struct.pack(f"{byteorder}HH", value, 0) if kind == 3 else struct.pack(f"{byteorder}I", value))
        for tag, kind, value in tags
    )
    data = head + struct.pack(f"{byteorder}IH", 8, len(tags)) + entries + bytes(4)
    data = data.ljust(200, b"\0") + grey.astype(f"{byteorder}u2").tobytes()
    assert np.array_equal(decode_image(data), np.broadcast_to(grey >> 8, (3, 4, 16)))


def test_16_bit_colour_keeps_its_upper_8_bits() -> None:
    colour = np.random.default_rng(0).integers(0, 1 << 16, (5, 7, 3), np.uint16)

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in colour)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 7, 5, 16, 2, 0, 0, 0))
    data += chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    assert np.array_equal(decode_image(data), (colour >> 8).astype(np.uint8).transpose(2, 0, 1))


def test_floating_point_pixels_are_refused_instead_of_being_clipped_to_black() -> None:
    data = encoded(Image.fromarray(np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)), "TIFF")
    with pytest.raises(SampleError, match="floating-point pixels have no form as 8 bits"):
        decode_fields(data, ".tif", "depth.tif")


@pytest.mark.parametrize("format_", ["PNG", "GIF", "WEBP"])
def test_of_an_animation_the_first_frame_is_taken(format_: str) -> None:
    frames = [Image.new("RGB", (8, 6), colour) for colour in ("white", "black", "red")]
    data = encoded(frames[0], format_, save_all=True, append_images=frames[1:], lossless=True)
    assert decode_image(data).min() == 255


def test_transparency_is_dropped_and_what_lies_below_it_stays() -> None:
    pixels = np.zeros((4, 4, 4), np.uint8)
    pixels[..., 0], pixels[..., 3] = 200, 10
    assert decode_image(encoded(Image.fromarray(pixels), "PNG"))[0].min() == 200


# --- files made to harm ------------------------------------------------------------------------


def test_files_that_fail_alike_give_one_reason_without_places_in_memory() -> None:
    reasons = set()
    for number in range(3):
        with pytest.raises(SampleError) as caught:
            decode_fields(b"no image" + bytes(number), ".jpg", "a.jpg")
        reasons.add(str(caught.value))
    assert len(reasons) == 1
    assert not PLACE.search(reasons.pop())


def test_an_image_that_a_resize_would_blow_up_is_refused() -> None:
    data = encoded(Image.new("RGB", (20_000, 1)), "PNG")
    with pytest.raises(SampleError, match=r"DecompressionBombError: 22528000000 x|5120000 x 256 pixels"):
        decode_fields(data, ".png", "thin.png", ImageOptions(resize=256))
    with pytest.raises(Image.DecompressionBombError):
        ImageOptions(resize=256).apply(np.zeros((3, 20_000, 1), np.uint8))


def test_a_jpeg_of_thousands_of_scans_is_refused_before_it_is_unpacked() -> None:
    data = encoded(photograph(64, 64), progressive=True)
    last = data.rindex(b"\xff\xda")
    scan = data[last:-2]
    bomb = data[:-2] + scan * 2000 + data[-2:]
    with pytest.raises(SampleError, match=r"a JPEG of 20\d\d scans"):
        decode_fields(bomb, ".jpg", "scans.jpg")
    assert decode_image(data).shape == (3, 64, 64)


@pytest.mark.e2e
def test_a_small_file_of_a_large_image_is_refused_before_it_takes_memory(tmp_path: Path) -> None:
    data = encoded(Image.new("L", (12_000, 12_000)), "PNG")
    (tmp_path / "bomb.png").write_bytes(data)
    assert len(data) < 200_000
    source = FileSource(tmp_path)
    tracemalloc.start()
    with pytest.raises(SampleError, match=r"bomb\.png.*144000000|12000 x 12000 pixels"):
        next(source.read(0, np.random.default_rng(0)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 << 20


@pytest.mark.e2e
@given(st.data())
def test_a_damaged_image_is_a_sample_error_or_an_image_of_the_asked_shape(data: st.DataObject) -> None:
    format_ = data.draw(st.sampled_from(["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "JPEG2000"]))
    content = bytearray(encoded(photograph(24, 16), format_))
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, about metadata
        try:
            fields = decode_fields(bytes(content), ".jpg", "x.jpg", ImageOptions(crop=8))
            assert isinstance(fields, dict)
            found = fields["image"].shape
        except SampleError as error:
            found = PLACE.search(str(error))
    assert found in (None, (3, 8, 8))


# --- in every source ---------------------------------------------------------------------------


def write_files(folder: Path, images: list[bytes]) -> dict[str, Any]:
    for number, data in enumerate(images):
        (folder / f"{number}.jpg").write_bytes(data)
    return {"what": folder, "field": "image"}


def write_tar(folder: Path, images: list[bytes]) -> dict[str, Any]:
    with tarfile.open(folder / "a.tar", "w") as archive:
        for number, data in enumerate(images):
            member = tarfile.TarInfo(f"{number}.jpg")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return {"what": folder / "a.tar", "field": "jpg"}


def write_parquet(folder: Path, images: list[bytes]) -> dict[str, Any]:
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"picture": {"bytes": data, "path": None}} for data in images]
    parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(rows), folder / "a.parquet")
    return {"what": folder / "a.parquet", "field": "picture"}


def write_tfrecord(folder: Path, images: list[bytes]) -> dict[str, Any]:
    pytest.importorskip("google_crc32c")
    writer = pytest.importorskip("tfrecord").TFRecordWriter(str(folder / "a.tfrecord"))
    for data in images:
        writer.write({"picture": (data, "byte")})
    writer.close()
    return {"what": folder / "a.tfrecord", "field": "picture"}


@pytest.mark.parametrize("write", [write_files, write_tar, write_parquet, write_tfrecord])
def test_every_source_of_images_resizes_and_crops_them_and_says_so_in_its_fingerprint(
    write: Any, tmp_path: Path
) -> None:
    images = [encoded(photograph(*size)) for size in ((64, 48), (50, 90))]
    made = write(tmp_path, images)
    source = open_source(made["what"], resize=32, crop=24)
    found = [
        sample[made["field"]]
        for unit in range(source.num_units or 0)
        for _, sample in source.read(unit, np.random.default_rng(0))
    ]
    expected = [decode_image(data, ImageOptions(resize=32, crop=24)) for data in images]
    assert np.array_equal(np.stack(found), np.stack(expected))
    assert source.fingerprint == f"{open_source(made['what']).fingerprint}|resize=32|crop=24"
    with pytest.raises(ConfigError, match="crop=0"):
        open_source(made["what"], crop=0)
