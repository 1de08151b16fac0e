"""Decoding of images to uint8 `[3, H, W]` RGB, upright, with resizing and cropping.

The data are untrusted: only the listed formats are opened, and images that would be too large are refused
before they are decoded. Malformed data raise Pillow's errors, which `values.decode_with` maps.
"""

from __future__ import annotations

import importlib
import io
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image

from cachestream import tracing
from cachestream.config import whole_number
from cachestream.errors import ConfigError
from cachestream.transport import object_limit

JPEG_FORMATS: Final = ("JPEG", "MPO")
# Each scan of a progressive JPEG updates all pixels, and may be a few bytes long: without a limit, a small
# file can take minutes (libjpeg-turbo, "Two Issues with the JPEG Standard").
MAX_SCANS: Final = 100
_START_OF_SCAN: Final = b"\xff\xda"
IMAGE_FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "MPO", "JPEG2000", "AVIF")
# A JPEG is decoded at 1/2, 1/4 or 1/8 of its size if the result is at least this many times the target size,
# so that the resize filter still determines every pixel. (Pillow's default for thumbnails.)
REDUCING_GAP: Final = 2
_RAW_MODES: Final = ("1", "L", "LA", "P", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "I", "I;16")
# The exceptions of Pillow's and numpy's parsers for malformed input, as found by their fuzzers.
MALFORMED: Final = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    EOFError,
    AttributeError,
    NotImplementedError,
    RuntimeError,
    MemoryError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    Warning,  # Pillow's, if the user turns warnings into errors
)
_ORIENTATION_TAG: Final = 0x0112
_PNG_MAGIC: Final = b"\x89PNG\r\n\x1a\n"
_PNG_TEXTS: Final = (b"tEXt", b"zTXt", b"iTXt", b"iCCP")
_PNG_ORIENTATIONS: Final = (b"Raw profile type exif", b"XML:com.adobe.xmp")  # texts that tell what is up
_TRANSPOSE: Final[dict[int, Image.Transpose]] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

Pixels = npt.NDArray[np.uint8]
Size = int | tuple[int, int]
Buffer = bytes | bytearray | memoryview


@lru_cache(maxsize=1)
def _simplejpeg() -> Any:
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None


def check_scans(image: Image.Image, data: Buffer) -> None:
    """Raise ValueError for a progressive JPEG with more scans than any encoder writes."""
    if image.info.get("progressive"):
        count = bytes(data).count(_START_OF_SCAN)
        if count > MAX_SCANS:
            raise ValueError(f"a JPEG of {count} scans, {MAX_SCANS} at most")


def decode_by_simplejpeg(data: Buffer, image: Image.Image, scale: int) -> Pixels | None:
    """Decode a JPEG to uint8 `[H, W, 3]` RGB at 1/`scale` of its size; None if Pillow has to decode it.

    Pillow decodes if simplejpeg is missing, other colours than RGB and grey, and damaged images: so the same
    files are refused, for the same reasons, with and without simplejpeg.
    """
    simplejpeg = _simplejpeg()
    if simplejpeg is None or image.mode not in ("RGB", "L"):
        return None
    height, width = -(-image.height // scale), -(-image.width // scale)
    least = {} if scale == 1 else {"min_height": height, "min_width": width}
    try:
        found: Pixels = simplejpeg.decode_jpeg(data, "RGB", **least)
    except ValueError:
        return None
    return found if found.shape == (height, width, 3) else None


def _check_size(name: str, size: Any) -> Size | None:
    """Return `size` as an int or a tuple of two. Raises ConfigError unless it is None or above 0."""
    if size is None:
        return None
    is_pair = isinstance(size, list | tuple)
    numbers = [whole_number(one) or 0 for one in (size if is_pair else (size,))]
    if len(numbers) != 1 + is_pair or min(numbers) < 1:
        raise ConfigError(f"{name}={size!r}: give a number of pixels above 0, or (height, width)")
    return (numbers[0], numbers[1]) if is_pair else numbers[0]


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """The size of decoded images, as in torchvision's `Resize` and `CenterCrop`.

    resize: `(height, width)`, or the length of the shorter side, with the other side in proportion (rounded
    down). Bilinear with antialiasing, equal to torchvision's result for PIL images to within rounding. None:
    the size of the file.

    crop: `(height, width)`, or the side of a square, from the middle; a smaller image is padded with black
    on all sides. None: no crop.

    Raises ConfigError for invalid sizes. Also a transform: called on a sample, it resizes and crops each
    field that is an image, uint8 `[3, H, W]`.
    """

    resize: Size | None = None
    crop: Size | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "resize", _check_size("resize", self.resize))
        object.__setattr__(self, "crop", _check_size("crop", self.crop))

    @property
    def identity(self) -> tuple[str, ...]:
        """The options as parts of a fingerprint; empty if images keep their size."""
        named = (("resize", self.resize), ("crop", self.crop))
        return tuple(f"{name}={value}" for name, value in named if value is not None)

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height after the resize of an image of `width` and `height`."""
        if self.resize is None:
            return width, height
        if isinstance(self.resize, tuple):
            return self.resize[1], self.resize[0]
        long = int(self.resize * max(width, height) / min(width, height))
        return (self.resize, long) if width <= height else (long, self.resize)

    def crop_box(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Return the box of the crop in an image: left, top, right, bottom."""
        if self.crop is None:
            return 0, 0, width, height
        wanted = self.crop if isinstance(self.crop, tuple) else (self.crop, self.crop)
        tall, wide = min(wanted[0], height), min(wanted[1], width)
        left, top = round((width - wide) / 2), round((height - tall) / 2)
        return left, top, left + wide, top + tall

    def cropped(self, pixels: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the crop of `pixels`, `[C, H, W]`; a view if no padding is needed."""
        if self.crop is None:
            return pixels
        wanted = self.crop if isinstance(self.crop, tuple) else (self.crop, self.crop)
        left, top, right, bottom = self.crop_box(pixels.shape[2], pixels.shape[1])
        pixels = pixels[:, top:bottom, left:right]
        missing = [want - have for want, have in zip(wanted, pixels.shape[1:], strict=True)]
        if any(missing):
            pixels = np.pad(pixels, [(0, 0), *((one // 2, (one + 1) // 2) for one in missing)])
        return pixels

    def apply(self, pixels: Pixels) -> Pixels:
        """Return `pixels`, uint8 `[3, H, W]`, resized and cropped; contiguous."""
        _, height, width = pixels.shape
        size = self.resized(width, height)
        if size != (width, height):
            _check_pixels(*size)
            image = Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0)))
            pixels = _planes(image.resize(size, Image.Resampling.BILINEAR))
        return np.ascontiguousarray(self.cropped(pixels))

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {name: self.apply(value) if _is_image(value) else value for name, value in sample.items()}


UNCHANGED: Final = ImageOptions()


def decode_image(data: Buffer, options: ImageOptions = UNCHANGED) -> Pixels:
    """Decode the first frame to uint8 `[3, H, W]` RGB, contiguous, turned upright by its EXIF orientation."""
    try:
        return _decode(data, options)
    except ValueError:
        # Pillow refuses a PNG for texts and profiles of more than 1 MiB, in a limit of the whole process.
        plain = _without_texts(data)
        if plain is None:
            raise
    return _decode(plain, options)


def _without_texts(data: Buffer) -> bytes | None:
    """Return a PNG without its texts and its colour profile, but for EXIF and XMP; None if it has none."""
    view, at, kept = memoryview(data), len(_PNG_MAGIC), [_PNG_MAGIC]
    if bytes(view[:at]) != _PNG_MAGIC:
        return None
    while at < len(view):
        stop = at + 12 + int.from_bytes(view[at : at + 4], "big")
        kind, beginning = bytes(view[at + 4 : at + 8]), bytes(view[at + 8 : at + 32])
        if kind not in _PNG_TEXTS or beginning.startswith(_PNG_ORIENTATIONS):
            kept.append(bytes(view[at:stop]))
        at = stop
    plain = b"".join(kept)
    return plain if len(plain) < len(view) else None


def _decode(data: Buffer, options: ImageOptions) -> Pixels:
    with tracing.span("decode"), Image.open(io.BytesIO(data), formats=_formats()) as image:
        _check_pixels(image.width, image.height)
        if image.format == "TIFF":
            image.load()  # Pillow turns a TIFF upright here; the size before that depends on its version
        orientation = 1 if image.format == "TIFF" else _orientation(image)
        width, height = image.size
        upright = (width, height) if orientation < 5 else (height, width)
        size = options.resized(*upright)
        _check_pixels(*size)
        size = size if orientation < 5 else size[::-1]  # as the image is stored
        if image.format not in JPEG_FORMATS:
            return _finish(_to_rgb(image), (width, height), size, orientation, options)
        check_scans(image, data)
        scale = 1 if size == (width, height) else _jpeg_scale((width, height), size)
        found = decode_by_simplejpeg(data, image, scale)
        if found is not None and scale == 1 and size == (width, height) and orientation == 1:
            return np.ascontiguousarray(options.cropped(found.transpose(2, 0, 1)))
        if found is None:
            image.draft(None, (width // scale, height // scale))
        rgb = _to_rgb(image) if found is None else Image.fromarray(found)
        return _finish(rgb, (width / scale, height / scale), size, orientation, options)


def decode_index(data: Buffer, options: ImageOptions = UNCHANGED) -> npt.NDArray[Any]:
    """Decode the first frame to its values as they are stored, `[H, W]`, or `[C, H, W]` of several channels.

    The numbers of a palette's colours are uint8, depth of 16 bits is uint16, of more bits int32 or float32,
    and two levels are 0 and 1. Turned upright; resized by the nearest value, so that no new ones come;
    cropped.
    """
    with tracing.span("decode"), Image.open(io.BytesIO(data), formats=_formats()) as image:
        _check_pixels(image.width, image.height)
        image.load()
        orientation = 1 if image.format == "TIFF" else _orientation(image)
        upright = image if orientation == 1 else image.transpose(_TRANSPOSE[orientation])
        size = options.resized(*upright.size)
        _check_pixels(*size)
        if size != upright.size:
            upright = upright.resize(size, Image.Resampling.NEAREST)
        values = np.asarray(upright)
    values = values.astype(np.uint8) if values.dtype == np.bool_ else values
    planes = values.transpose(2, 0, 1) if values.ndim == 3 else values[np.newaxis]
    planes = options.cropped(planes)
    native = planes.astype(planes.dtype.newbyteorder("="))
    return np.ascontiguousarray(native if values.ndim == 3 else native[0])


def stack_images(images: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return several images as one array, `[N, 3, H, W]`; `[0, 3, 0, 0]` for none.

    Raises ValueError unless all have one size.
    """
    if not images:
        return np.empty((0, 3, 0, 0), np.uint8)
    if len({image.shape for image in images}) > 1:
        raise ValueError(
            "images of several sizes, which make no array: give all one size (resize= and crop=, where the "
            "source has them)"
        )
    return np.stack(images)


def loss_of(head: Buffer) -> str:
    """Return the part of an image's values that RGB of 8 bits lacks, by the file's `head`; "" if none is
    known.
    """
    try:
        with Image.open(io.BytesIO(head), formats=_formats()) as image:
            mode = image.mode
    except MALFORMED:
        return ""
    if mode.startswith("I"):
        return "has 16 bits or more a pixel, of which the upper 8 of 16 are kept"
    return (
        "has a palette: its colours are kept, and the numbers of the colours are not" if mode == "P" else ""
    )


def decode_raw_image(mode: str, size: tuple[int, int], data: Buffer, options: ImageOptions) -> Pixels:
    """Convert the output of Pillow's `tobytes()` as `decode_image` does; `size` is width and height."""
    if mode not in _RAW_MODES:
        raise ValueError(f"pixels of the mode {mode[:20]!r}")
    _check_pixels(*size)
    target = options.resized(*size)
    _check_pixels(*target)
    return _finish(_to_rgb(Image.frombytes(mode, size, data)), size, target, 1, options)


# --- steps -------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _formats() -> list[str]:
    Image.init()
    return [name for name in IMAGE_FORMATS if name in Image.OPEN]


def _is_image(value: Any) -> bool:
    return (
        isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3 and value.shape[0] == 3
    )


def _check_pixels(width: int, height: int) -> None:
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and width * height > limit:  # Pillow only warns
        raise Image.DecompressionBombError(f"{width} x {height} pixels, {limit} at most")
    object_limit.check(3 * width * height)


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, from 1 (upright) to 8; 1 if it is missing or malformed."""
    try:
        found = int(image.getexif().get(_ORIENTATION_TAG, 1))
    except MALFORMED:  # the pixels may still be intact
        return 1
    return found if found in _TRANSPOSE else 1


def _jpeg_scale(have: tuple[int, int], want: tuple[int, int]) -> int:
    """Return the scale, 1, 2, 4 or 8, by which a JPEG of size `have` is reduced in decoding for `want`."""
    most = min(one // (REDUCING_GAP * other) for one, other in zip(have, want, strict=True))
    return next((scale for scale in (8, 4, 2) if scale <= most), 1)


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert `image` to mode RGB. Transparency is dropped; 16-bit channels keep their upper 8 bits."""
    if image.mode == "RGB":
        return image
    if image.mode == "F":
        raise ValueError("floating-point pixels have no form as 8 bits a channel")
    if image.mode.startswith("I"):  # Pillow's own conversion would clip at 255
        values = np.asarray(image)
        image = Image.fromarray((np.clip(values, 0, 0xFFFF) >> 8).astype(np.uint8))
    if image.mode in ("P", "PA") and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def _planes(rgb: Image.Image) -> Pixels:
    pixels = np.empty((3, rgb.height, rgb.width), np.uint8)
    for channel, band in enumerate(rgb.split()):
        pixels[channel] = np.asarray(band)
    return pixels


def _finish(
    rgb: Image.Image,
    extent: tuple[float, float],
    size: tuple[int, int],
    orientation: int,
    options: ImageOptions,
) -> Pixels:
    """Resize to `size`, turn upright and crop `rgb`, whose top left part of size `extent` is the image."""
    if size != (rgb.width, rgb.height):
        # Only the crop is computed: the same pixels to within rounding, in half the time.
        left, top, right, bottom = options.crop_box(*size) if orientation == 1 else (0, 0, *size)
        # A JPEG of odd length at 1/2 ends in the middle of its last pixel, at `extent`.
        across, down = extent[0] / size[0], extent[1] / size[1]
        box = (left * across, top * down, min(right * across, rgb.width), min(bottom * down, rgb.height))
        rgb = rgb.resize((right - left, bottom - top), Image.Resampling.BILINEAR, box)
    if orientation != 1:
        rgb = rgb.transpose(_TRANSPOSE[orientation])
    return np.ascontiguousarray(options.cropped(_planes(rgb)))
