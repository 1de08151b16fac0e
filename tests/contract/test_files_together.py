"""Files that belong together are one sample: by their names, by parallel folders, or by a table that names them."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import cachestream as cs
from tests.contract.servers import Answer, answer_with, serve
from tests.support.s3 import S3Server


def images(folder: Path, names: Sequence[str], *, add: int = 0, mode: str = "RGB") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        image = Image.new(mode, (6, 4), number + add if mode == "P" else (number + add, 0, 0))
        if mode == "P":
            image.putpalette(list(range(48)))
        image.save(folder / name)


def read(source: Any) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the samples by their keys, and what is said of lost ones."""
    source.complete()
    found, lost = dict[str, dict[str, Any]](), list[str]()
    for unit in range(source.num_units):
        try:
            found.update(source.read(unit, np.random.default_rng(0)))
        except cs.SampleError as error:
            lost.append(str(error))
    return found, lost


NAMES = [f"{i}.png" for i in range(4)]


def pairs(folder: Path, *, folders: tuple[str, str] = ("", "")) -> None:
    images(folder / folders[0], NAMES)
    (folder / folders[1]).mkdir(exist_ok=True)
    for i in range(4):
        (folder / folders[1] / f"{i}.txt").write_text(f"caption {i}")


def test_a_text_an_array_and_an_object_of_the_same_name_are_fields_of_an_image(
    tmp_path: Path, said: list[str]
) -> None:
    pairs(tmp_path)
    for i in range(4):
        np.save(tmp_path / f"{i}.npy", np.full(3, i))
        (tmp_path / f"{i}.json").write_text(json.dumps({"width": 6, "boxes": [[i, 0]]}))
    (tmp_path / "README.md").write_text("about it")
    found, lost = read(cs.open_source(tmp_path))
    assert not lost
    assert list(found) == NAMES
    for i, sample in enumerate(found.values()):
        assert sorted(sample) == ["array", "boxes", "image", "text", "width"]
        assert sample["image"][0].max() == i
        assert sample["array"].tolist() == [i] * 3
        assert (sample["text"], sample["width"], sample["boxes"].tolist()) == (f"caption {i}", 6, [[i, 0]])
    assert "0.png and " in said[0]
    assert "0.txt as 'text'" in said[0]
    assert "give extensions='*'" in said[0]
    assert "1 of 5 files, of other kinds (such as README.md), left out" in said[1]
    assert len(said) == 2


@pytest.mark.parametrize("options", [{}, {"extensions": (".png", ".txt")}], ids=["all", "named"])
@pytest.mark.parametrize("folders", [("", ""), ("images", "captions")])
def test_a_caption_beside_an_image_comes_with_it(
    tmp_path: Path, options: dict[str, Any], folders: tuple[str, str]
) -> None:
    pairs(tmp_path, folders=folders)
    found, lost = read(cs.open_source(tmp_path, **options))
    assert not lost
    assert [sorted(sample) for sample in found.values()] == [["image", "text"]] * 4


def test_what_belongs_together_is_named_alike_in_all_processes(tmp_path: Path) -> None:
    images(tmp_path, NAMES)
    images(tmp_path, [f"{i}{end}.png" for i in range(4) for end in ("_mask", "_depth", "_gt", "-seg")])
    ask = f"import cachestream as cs; print(cs.open_source({str(tmp_path)!r}).fingerprint)"
    told = {
        subprocess.run(
            [sys.executable, "-c", ask],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1


def test_objects_in_a_list_beside_an_image_are_its_json_text(tmp_path: Path) -> None:
    images(tmp_path, NAMES)
    for i in range(4):
        (tmp_path / f"{i}.json").write_text(json.dumps([{"box": [i, 1]}, {"box": [9]}]))
    found, _ = read(cs.open_source(tmp_path))
    assert json.loads(found["3.png"]["json"]) == [{"box": [3, 1]}, {"box": [9]}]


@pytest.mark.parametrize(
    "layout", [("images", "masks"), ("JPEGImages", "SegmentationClass"), ("rgb", "depth")]
)
def test_masks_in_a_parallel_folder_are_a_field_and_no_labels(
    tmp_path: Path, layout: tuple[str, str], said: list[str]
) -> None:
    for split in ("train", "val"):
        images(tmp_path / split / layout[0], NAMES)
        images(tmp_path / split / layout[1], NAMES, add=9)
    source: Any = cs.open_source(tmp_path, resize=(2, 2))
    field = {"masks": "mask", "SegmentationClass": "segmentationclass", "depth": "depth"}[layout[1]]
    found, lost = read(source)
    assert not lost
    assert list(found) == [f"{split}/{layout[0]}/{name}" for split in ("train", "val") for name in NAMES]
    assert [(one["image"][0].max(), one[field][0].max()) for one in found.values()] == [
        (i, i + 9) for i in range(4)
    ] * 2
    assert {one[field].shape for one in found.values()} == {(3, 2, 2)}
    assert source.label_names == ()
    assert len(said) == 1


def test_folders_of_classes_below_are_labels(tmp_path: Path) -> None:
    for label in ("cat", "dog"):
        images(tmp_path / "images" / label, NAMES)
        images(tmp_path / "masks" / label, NAMES)
    source: Any = cs.open_source(tmp_path)
    found, _ = read(source)
    assert source.label_names == ("cat", "dog")
    assert [(sorted(one), one["label"]) for one in found.values()] == [
        (["image", "label", "mask"], label) for label in (0, 1) for _ in NAMES
    ]


def test_masks_named_after_their_images_keep_their_values_if_asked(tmp_path: Path, said: list[str]) -> None:
    images(tmp_path, NAMES)
    images(tmp_path, [f"{i}_mask.png" for i in range(4)], add=3, mode="P")
    lossy, _ = read(cs.open_source(tmp_path))
    assert {one["mask"].shape for one in lossy.values()} == {(3, 4, 6)}
    assert "0_mask.png has a palette" in said[1]
    assert "give decoders={'mask': 'index'}" in said[1]
    kept, _ = read(cs.open_source(tmp_path, decoders={"mask": "index"}))
    assert [one["mask"].max() for one in kept.values()] == [3, 4, 5, 6]
    assert list(kept) == NAMES
    with pytest.raises(
        cs.ConfigError, match=r"decoders= names the field 'masks': files have the fields .*, mask"
    ):
        cs.open_source(tmp_path, decoders={"masks": "index"})


def test_a_text_that_is_missing_costs_its_image_or_has_a_default(tmp_path: Path) -> None:
    pairs(tmp_path)
    (tmp_path / "2.txt").unlink()
    found, lost = read(cs.open_source(tmp_path))
    assert list(found) == ["0.png", "1.png", "3.png"]
    assert len(lost) == 1
    assert "2.txt: not found" in lost[0]
    found, lost = read(cs.open_source(tmp_path, fields={"text": "none"}))
    assert not lost
    assert [one["text"] for one in found.values()] == ["caption 0", "caption 1", "none", "caption 3"]
    (tmp_path / "1.txt").write_bytes(b"\xff")
    _, lost = read(cs.open_source(tmp_path, fields={"text": "none"}))
    assert len(lost) == 1
    assert "1.txt: not a usable .txt file" in lost[0]


@pytest.mark.parametrize(("status", "found"), [(200, "there"), (404, "none"), (403, "none")])
def test_a_text_from_a_server_that_tells_no_length_is_no_default(
    tmp_path: Path, status: int, found: str
) -> None:
    images(tmp_path, NAMES)
    page = "".join(f'<a href="{i}{ending}">{i}</a>' for i in range(4) for ending in (".png", ".txt"))

    def decide(path: str, wanted: str | None) -> Answer:
        if path.endswith(".png"):
            return answer_with((tmp_path / path[-5:]).read_bytes(), wanted)
        if path.endswith(".txt"):
            return Answer(status, b"5\r\nthere\r\n0\r\n\r\n", {"Transfer-Encoding": "chunked"})
        return Answer(200, page.encode(), {"Content-Type": "text/html"})

    with serve(decide) as url:
        samples, lost = read(cs.open_source(f"{url}/", fields={"text": "none"}))
    assert not lost
    assert [one["text"] for one in samples.values()] == [found] * 4


def test_files_of_which_few_have_a_text_and_those_in_lists_stay_alone(
    tmp_path: Path, said: list[str]
) -> None:
    pairs(tmp_path)
    listed, _ = read(cs.open_source([tmp_path / "0.png", tmp_path / "0.txt"]))
    assert [sorted(one) for one in listed.values()] == [["image"], ["text"]]
    every, _ = read(cs.open_source(tmp_path, extensions="*"))
    assert sorted(sorted(one) for one in every.values()) == [["image"]] * 4 + [["text"]] * 4
    alone, _ = read(cs.open_source(f"{tmp_path}/*.png"))
    assert [sorted(one) for one in alone.values()] == [["image"]] * 4
    assert not said
    for i in range(1, 4):
        (tmp_path / f"{i}.txt").unlink()
    few, _ = read(cs.open_source(tmp_path))
    assert [sorted(one) for one in few.values()] == [["image"]] * 4
    assert "1 of 5 files, of other kinds (such as 0.txt), left out" in said[0]


def test_an_image_elsewhere_costs_no_other_one_and_has_no_mask(tmp_path: Path) -> None:
    images(tmp_path / "images", NAMES)
    images(tmp_path / "masks", NAMES, add=9)
    images(tmp_path / "extra", ["9.png"])
    source: Any = cs.open_source(tmp_path)
    found, lost = read(source)
    assert list(found) == [f"images/{name}" for name in NAMES]
    assert {tuple(sorted(one)) for one in found.values()} == {("image", "mask")}
    assert source.label_names == ()
    assert len(lost) == 1
    assert "extra/9.png: has no 'mask', as it does not lie where the others do" in lost[0]
    found, lost = read(cs.open_source(tmp_path, fields={"mask": 0}))
    assert not lost
    assert found["extra/9.png"]["mask"] == 0


def test_a_folder_is_replaced_where_it_differs(tmp_path: Path) -> None:
    for name, add in (("images", 0), ("masks", 9)):
        images(tmp_path / "images" / name, NAMES, add=add)
    found, lost = read(cs.open_source(tmp_path))
    assert not lost
    assert [(one["image"][0].max(), one["mask"][0].max()) for one in found.values()] == [
        (i, i + 9) for i in range(4)
    ]


def test_folders_of_masks_above_the_images_too_cost_no_image(tmp_path: Path) -> None:
    images(tmp_path / "masks" / "images", NAMES)
    images(tmp_path / "masks" / "masks", NAMES, add=9)
    found, lost = read(cs.open_source(f"{tmp_path}/**/*.png"))
    assert (len(found), lost) == (8, [])


def test_classes_whose_images_have_equal_names_keep_their_labels(tmp_path: Path) -> None:
    for label in ("frames", "images", "photos"):
        images(tmp_path / label, NAMES)
    source: Any = cs.open_source(tmp_path)
    found, lost = read(source)
    assert not lost
    assert source.label_names == ("frames", "images", "photos")
    assert [one["label"] for one in found.values()] == [0] * 4 + [1] * 4 + [2] * 4
    for label in ("frames", "images"):
        for name in NAMES:
            (tmp_path / label / name).with_suffix(".txt").write_text(label)
    found, lost = read(cs.open_source(tmp_path))
    assert [(one["label"], one["text"]) for one in found.values()] == [(0, "frames")] * 4 + [
        (1, "images")
    ] * 4, "the text lies beside its image"
    assert len(lost) == 4


def test_two_files_of_one_name_decide_nothing_beside_many_images(tmp_path: Path, said: list[str]) -> None:
    images(tmp_path / "cat", [f"{i}.png" for i in range(30)])
    np.save(tmp_path / "labels.npy", np.arange(30))
    (tmp_path / "labels.txt").write_text("cat")
    found, lost = read(cs.open_source(tmp_path))
    assert not lost
    assert [(sorted(one), one["label"]) for one in found.values()] == [(["image", "label"], 0)] * 30
    assert "2 of 32 files, of other kinds" in said[0]


def test_samples_of_files_together_reach_the_batches(tmp_path: Path) -> None:
    pairs(tmp_path / "data")
    with cs.Cache(tmp_path / "cache", size_limit="50MB", min_free=0) as cache:
        with cs.start_worker(cache, cs.open_source(tmp_path / "data"), num_workers=1) as worker:
            worker.wait(timeout_s=60)
        with cs.EpochLoader(cache, batch_size=4) as loader:
            (batch,) = loader
    assert sorted(batch["text"]) == [f"caption {i}" for i in range(4)]
    assert [f"caption {image[0].max()}" for image in batch["image"]] == batch["text"]


# --- tables that name files


def metadata(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        if path.suffix == ".jsonl":
            file.writelines(json.dumps(row) + "\n" for row in rows)
        else:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


@pytest.mark.parametrize("ending", [".jsonl", ".csv"])
def test_a_table_gives_each_file_all_of_its_columns(tmp_path: Path, ending: str, said: list[str]) -> None:
    for split in ("train", "val"):
        images(tmp_path / split / "deep", NAMES)
        rows = [
            {"file_name": f"deep/{i}.png", "caption": f"{split} {i}", "score": i / 2, "label": 7}
            for i in range(3)
        ]
        metadata(tmp_path / split / f"metadata{ending}", rows)
    found, lost = read(cs.open_source(tmp_path))
    assert [(key, one["caption"], one["score"], one["label"]) for key, one in found.items()] == [
        (f"{split}/deep/{i}.png", f"{split} {i}", i / 2, 7) for split in ("train", "val") for i in range(3)
    ]
    assert sorted(found["val/deep/0.png"]) == ["caption", "image", "label", "score"]
    assert len(lost) == 2
    assert f"metadata{ending} does not name it" in lost[0]
    assert len(said) == 1
    assert f"train/metadata{ending}" in said[0]
    alone, lost = read(cs.open_source(tmp_path, extensions=".png"))
    assert (len(alone), lost) == (8, [])


def test_a_table_that_names_no_files_is_left_out_as_before(tmp_path: Path, said: list[str]) -> None:
    images(tmp_path, NAMES)
    metadata(tmp_path / "metadata.jsonl", [{"about": "it"}])
    found, lost = read(cs.open_source(tmp_path))
    assert (len(found), lost) == (4, [])
    (tmp_path / "metadata.csv").write_text("a,a\n1,2\n")
    found, lost = read(cs.open_source(tmp_path))
    assert (len(found), lost) == (4, [])
    assert "left out" in said[0]


def test_a_table_is_taken_if_it_names_half_of_the_files(tmp_path: Path, said: list[str]) -> None:
    images(tmp_path, NAMES)
    metadata(tmp_path / "metadata.csv", [{"path": f"/elsewhere/{i}", "author": "a"} for i in range(9)])
    found, lost = read(cs.open_source(tmp_path))
    assert (len(found), lost) == (4, [])
    assert "1 of 5 files, of other kinds (such as metadata.csv), left out" in said[0]
    metadata(tmp_path / "metadata.csv", [{"path": name, "author": "a"} for name in ("x", "0.png")])
    assert not read(cs.open_source(tmp_path))[1]
    metadata(tmp_path / "metadata.csv", [{"path": name, "author": "a"} for name in ("x", *NAMES[:2])])
    found, lost = read(cs.open_source(tmp_path))
    assert ([one["author"] for one in found.values()], len(lost)) == (["a", "a"], 2)


# --- a listing that goes on


@pytest.mark.parametrize("extra", [(), ("9.png",)], ids=["pairs", "one-elsewhere"])
def test_folders_of_pairs_are_no_labels_while_a_listing_goes_on(
    tmp_path: Path, extra: tuple[str, ...]
) -> None:
    names = [f"{i:02d}.png" for i in range(20)]
    images(tmp_path / "images", names)
    images(tmp_path / "masks", names, add=50)
    images(tmp_path / "extra", extra)
    source: Any = cs.open_source(tmp_path, first_names=10)
    assert source.is_listing
    assert source.label_names == ()
    first = dict(source.read(len(extra), np.random.default_rng(0)))
    assert [sorted(one) for one in first.values()] == [["image", "mask"]]
    found, lost = read(source)
    assert list(found) == [f"images/{name}" for name in names]
    assert len(lost) == len(extra)


def test_a_table_may_be_longer_than_the_largest_object(s3_server: S3Server) -> None:
    bucket, names = s3_server.bucket("together-long"), [f"{i:02d}.png" for i in range(20)]
    images(bucket / "images", names)
    metadata(bucket / "metadata.jsonl", [{"file_name": f"images/{name}", "text": "t" * 90} for name in names])
    source: Any = cs.open_source(
        f"s3://{bucket.name}/",
        storage_options=s3_server.storage_options,
        first_names=10,
        max_object_size="1kB",
    )
    assert source.is_listing
    found, lost = read(source)
    assert not lost
    assert {one["text"] for one in found.values()} == {"t" * 90}


@pytest.mark.parametrize("other", ["Annotations", "masks"])
def test_a_listing_that_goes_on_finds_what_belongs_together(s3_server: S3Server, other: str) -> None:
    bucket = s3_server.bucket(f"together-{other.lower()}")
    names = [f"{i:02d}.png" for i in range(12)]
    images(bucket / "images", names)
    images(bucket / other, names, add=50)
    for name in names:
        (bucket / "images" / name).with_suffix(".txt").write_text(name)
    rows = [{"file_name": f"images/{name}", "n": i} for i, name in enumerate(names)]
    metadata(bucket / "metadata.jsonl", rows)
    source: Any = cs.open_source(
        f"s3://{bucket.name}/", storage_options=s3_server.storage_options, first_names=8
    )
    found, lost = read(source)
    assert not lost
    field = {"Annotations": "annotation", "masks": "mask"}[other]
    assert [(one["n"], one["text"], one[field][0].max() - 50) for one in found.values()] == [
        (i, name, i) for i, name in enumerate(names)
    ]
    assert list(found) == [f"images/{name}" for name in names]
    assert {len(one) for one in found.values()} == {4}
