"""The samples of the data sets in this folder; every call returns the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

__all__ = [
    "FOLDER",
    "LITDATA_SAMPLES",
    "MDS_COLUMNS",
    "MDS_SAMPLES",
    "edit_index",
    "litdata_sample",
    "mds_sample",
    "picture",
]

FOLDER: Final = Path(__file__).parent
MDS_SAMPLES: Final = 7
LITDATA_SAMPLES: Final = 7
MDS_COLUMNS: Final = {
    "a_bytes": "bytes",
    "a_decimal": "str_decimal",
    "a_float": "str_float",
    "a_half": "float16",
    "a_jpeg": "jpeg",
    "a_number": "int",
    "a_pil": "pil",
    "a_png": "png",
    "a_small": "uint8",
    "a_str": "str",
    "a_str_int": "str_int",
    "a_wide": "float64",
    "any_array": "ndarray",
    "fixed_array": "ndarray:float32:2,3",
    "float_array": "ndarray:float32",
    "json_list": "json",
    "json_object": "json",
    "jpegs": "list[jpeg]",
    "jpegs_too": "jpeg_array",
    "pils": "list[pil]",
    "pngs": "list[png]",
}


def picture(number: int, mode: str = "RGB", width: int = 8, height: int = 6) -> Image.Image:
    """Return a small smooth picture, a different one for each number."""
    rows, columns = np.mgrid[0:height, 0:width]
    pixels = np.stack([rows * 20 + number, columns * 15, (rows + columns) * 9 + 2 * number], -1)
    return Image.fromarray(pixels.astype(np.uint8)).convert(mode)


def mds_sample(number: int) -> dict[str, Any]:
    """Return a sample as it was given to MDSWriter, except that the writer gets the images of "jpegs_too"
    encoded.
    """
    return {
        "a_bytes": bytes(range(number)),
        "a_decimal": f"{number}.25",
        "a_float": number / 3,
        "a_half": number / 4,
        "a_jpeg": picture(number),
        "a_number": -number << 40,
        "a_pil": picture(number, "L" if number % 2 else "RGB"),
        "a_png": picture(number, "RGBA", 5 + number),
        "a_small": 200 + number,
        "a_str": f"Grüße {number}",
        "a_str_int": -(number**20),
        "a_wide": number / 7,
        "any_array": np.arange(12 + 4 * number, dtype=np.int16 if number % 2 else np.float64).reshape(
            2, -1, 2
        ),
        "fixed_array": np.full((2, 3), number, np.float32),
        "float_array": np.arange(300 if number == 3 else number + 1, dtype=np.float32),
        "json_list": [number, number + 1],
        "json_object": {"number": number, "words": ["a", "b"]},
        "jpegs": [picture(number), picture(number + 1)],
        "jpegs_too": [picture(number + 2)],
        "pils": [picture(number), picture(number + 5)],
        "pngs": [picture(number), picture(number + 7)],
    }


def litdata_sample(number: int) -> dict[str, Any]:
    """Return a sample as it was given to LitData, with arrays instead of tensors."""
    return {
        "nested": {"a_bool": bool(number % 2), "a_float": number / 3},
        "a_bytes": bytes(range(number)),
        "a_jpeg": picture(number),
        "a_number": -number << 40,
        "a_pil": picture(number, "L" if number % 2 else "RGB"),
        "a_str": f"Grüße {number}",
        "a_tensor": np.arange(6 * (number + 1), dtype=np.float16).reshape(2, 3, -1),
        "a_vector": np.arange(number + 2, dtype=np.int64),
        "an_array": np.arange(4 * (number + 1), dtype=np.uint16).reshape(2, -1),
        "an_array_of_one_axis": np.arange(number + 1, dtype=np.float32),
        "pair": (number, f"{number}"),
        "words": ["a", f"b{number}"],
        "numbers": [number, 2],
        "box": {"x": [number / 2], "name": "n"},
    }


def edit_index(folder: Path, change: Callable[[Any], Any]) -> Path:
    """Apply `change` to the index of `folder`, or write the index that `change` returns; return `folder`."""
    index = json.loads((folder / "index.json").read_text())
    changed = change(index)
    (folder / "index.json").write_text(json.dumps(index if changed is None else changed))
    return folder
