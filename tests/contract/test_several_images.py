"""Rows with several images: lists of files become one array of decoded images, and the text beside them is kept."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import cachestream as cs

FILE: Final = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
COUNTS: Final = (1, 3, 0, 2)


def pixels(number: int, size: int = 4) -> np.ndarray[Any, Any]:
    return np.full((3, size, size + 2), number, np.uint8)


def file(number: int, size: int = 4) -> bytes:
    sink = io.BytesIO()
    Image.fromarray(pixels(number, size).transpose(1, 2, 0)).save(sink, "PNG")
    return sink.getvalue()


def as_struct(data: bytes) -> dict[str, Any]:
    return {"bytes": data, "path": "a.png"}


def read(source: Any) -> tuple[list[dict[str, Any]], str]:
    """Return the samples, and what is said of lost ones."""
    found, said = list[dict[str, Any]](), ""
    for unit in range(source.num_units):
        try:
            found.extend(sample for _, sample in source.read(unit, np.random.default_rng(0)))
        except cs.SampleError as error:
            said += str(error)
    return found, said


def parquet(tmp_path: Path, **columns: Any) -> str:
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    return str(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("kind", "of"),
    [
        (pa.list_(FILE), as_struct),
        (pa.large_list(FILE), as_struct),
        (pa.list_(pa.binary()), bytes),
        (pa.list_(pa.large_binary()), bytes),
    ],
    ids=["structs", "large-structs", "binary", "large-binary"],
)
def test_a_list_of_files_is_an_array_of_decoded_images(
    tmp_path: Path, kind: Any, of: Callable[[bytes], Any]
) -> None:
    rows = [[of(file(10 * i + j)) for j in range(count)] for i, count in enumerate(COUNTS)]
    texts = [["a", None, "b"], ["c"], [], [None]]
    path = parquet(tmp_path, images=pa.array(rows, kind), texts=texts)
    samples, said = read(cs.open_source(path))
    assert not said
    for i, (count, sample) in enumerate(zip(COUNTS, samples, strict=True)):
        assert sample["images"].dtype == np.uint8
        assert sample["images"].tolist() == [pixels(10 * i + j).tolist() for j in range(count)]
        assert sample["images"].ndim == 4
        assert json.loads(sample["texts"]) == texts[i]


@pytest.mark.parametrize("options", [{}, {"decode_images": False}], ids=["all", "named"])
def test_a_list_of_masks_keeps_their_values_if_its_column_is_named(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    sink = io.BytesIO()
    mask = Image.new("P", (6, 4), 7)
    mask.putpalette(list(range(48)))
    mask.save(sink, "PNG")
    rows = [[as_struct(sink.getvalue())] * count for count in COUNTS]
    path = parquet(tmp_path, masks=pa.array(rows, pa.list_(FILE)))
    samples, said = read(cs.open_source(path, decoders={"masks": "index"}, **options))
    assert not said
    assert [(len(sample["masks"]), sample["masks"].ndim) for sample in samples] == [(n, 3) for n in COUNTS]
    assert samples[0]["masks"].tolist() == np.full((1, 4, 6), 7).tolist()


def test_the_places_of_texts_between_images_are_in_the_texts(tmp_path: Path) -> None:
    images = pa.array([[None, as_struct(file(7)), None], None], pa.list_(FILE))
    path = parquet(tmp_path, images=images, texts=[["a", None, "b"], ["c"]])
    samples, said = read(cs.open_source(path))
    assert [one["images"].tolist() for one in samples] == [[pixels(7).tolist()]]
    assert json.loads(samples[0]["texts"]) == ["a", None, "b"]
    assert "row 1: column 'images' is null" in said


def test_lists_of_structs_with_images_are_a_list_for_each_member(tmp_path: Path) -> None:
    kind = pa.list_(pa.struct([("image", FILE), ("text", pa.string()), ("at", pa.int64())]))
    rows = [[{"image": as_struct(file(j)), "text": f"t{j}", "at": j} for j in range(n)] for n in (2, 1)]
    path = parquet(tmp_path, page=pa.array([*rows, None], kind))
    samples, said = read(cs.open_source(path))
    assert [one["page.image"].shape for one in samples] == [(2, 3, 4, 6), (1, 3, 4, 6)]
    assert [json.loads(one["page.text"]) for one in samples] == [["t0", "t1"], ["t0"]]
    assert [one["page.at"].tolist() for one in samples] == [[0, 1], [0]]
    assert "row 2: column 'page" in said
    with pytest.raises(cs.ConfigError, match=r"several columns become the field 'page\.text'"):
        cs.open_source(parquet(tmp_path, **{"page": pa.array(rows, kind), "page.text": ["a", "b"]}))


def test_images_of_several_sizes_in_a_row_need_one_size(tmp_path: Path) -> None:
    rows = [[file(1), file(2, 6)], [file(3), file(4)]]
    path = parquet(tmp_path, images=pa.array(rows, pa.list_(pa.binary())))
    samples, said = read(cs.open_source(path))
    assert [one["images"].shape for one in samples] == [(2, 3, 4, 6)]
    assert "images of several sizes, which make no array: give all one size (resize= and crop=" in said
    samples, said = read(cs.open_source(path, resize=(5, 5)))
    assert not said
    assert [one["images"].shape for one in samples] == [(2, 3, 5, 5)] * 2


def test_lists_of_files_that_are_no_images_are_refused(tmp_path: Path) -> None:
    path = parquet(tmp_path, sounds=pa.array([[b"RIFF"], [b"RIFF"]], pa.list_(pa.binary())))
    samples, said = read(cs.open_source(path))
    assert not samples
    assert "column 'sounds': not a usable image" in said
    for options in ({"decode_images": False}, {"decoders": {"sounds": "raw"}}):
        with pytest.raises(cs.ConfigError, match="no form as a field: leave it out with columns="):
            cs.open_source(path, **options)


def test_lists_of_images_of_objects_are_the_same(tmp_path: Path) -> None:
    rows = [[as_struct(file(i)) for i in range(1 + n)] for n in range(2)]
    samples, _ = read(cs.open_source([{"images": row, "text": "a"} for row in rows]))
    assert [one["images"].shape for one in samples] == [(1, 3, 4, 6), (2, 3, 4, 6)]
    samples, _ = read(cs.open_source([{"images": [file(1), file(2)]}]))
    assert samples[0]["images"].tolist() == [pixels(1).tolist(), pixels(2).tolist()]
    _, said = read(cs.open_source([{"images": [file(1), file(2, 6)]}]))
    assert "images of several sizes" in said

    def stream(shard: int, shards: int) -> Any:
        yield {"images": [Image.open(io.BytesIO(file(5))), Image.open(io.BytesIO(file(6)))]}

    samples, _ = read(cs.IterableSource(stream))
    assert samples[0]["images"].tolist() == [pixels(5).tolist(), pixels(6).tolist()]
