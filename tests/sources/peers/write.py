"""Write the data sets of this folder anew: `python -m tests.sources.peers.write`, from the repository's root.

The files are kept here because the libraries need older versions of packages than this project is tested
with. They were written by mosaicml-streaming 0.13.0 and litdata 0.2.76 (the packages are licensed under
Apache-2.0; the files hold nothing of them). In an environment of its own:

    pip install mosaicml-streaming==0.13.0
    pip install litdata==0.2.76 zstd pyarrow
"""

from __future__ import annotations

import importlib
import io
import shutil
import sys
from typing import Any

from PIL import Image

from tests.sources.peers.samples import (
    FOLDER,
    LITDATA_SAMPLES,
    MDS_COLUMNS,
    MDS_SAMPLES,
    litdata_sample,
    mds_sample,
    picture,
)


def jpeg(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "JPEG")
    return stream.getvalue()


def as_file(image: Image.Image) -> Any:
    """Return the image as opened from a JPEG file: LitData stores the bytes of such a file unchanged."""
    return Image.open(io.BytesIO(jpeg(image)))


def write_mds() -> None:
    streaming: Any = importlib.import_module("streaming")

    def write(name: str, columns: dict[str, str], samples: Any, **options: Any) -> None:
        folder = FOLDER / name
        shutil.rmtree(folder, ignore_errors=True)
        with streaming.MDSWriter(out=str(folder), columns=columns, **options) as writer:
            for sample in samples:
                writer.write(sample)

    samples = [mds_sample(number) for number in range(MDS_SAMPLES)]
    for sample in samples:
        sample["jpegs_too"] = [jpeg(image) for image in sample["jpegs_too"]]
        sample["a_decimal"] = importlib.import_module("decimal").Decimal(sample["a_decimal"])
    write("mds", MDS_COLUMNS, samples, size_limit="24kb", hashes=["sha1", "xxh3_64"])
    few = {"a_number": "int", "a_str": "str", "any_array": "ndarray"}
    samples = [{name: sample[name] for name in few} for sample in samples]
    for packer in ("zstd", "gz:9", "bz2", "br"):
        name = f"mds-{packer.partition(':')[0]}"
        write(name, few, samples, size_limit=700, compression=packer, hashes=["blake2b"])
    write("mds-pkl", {"a_number": "int", "a_pickle": "pkl"}, [{"a_number": 1, "a_pickle": {"x": 2}}])


def write_litdata() -> None:
    torch: Any = importlib.import_module("torch")
    writers: Any = importlib.import_module("litdata.streaming.writer")
    loaders: Any = importlib.import_module("litdata.streaming.item_loader")

    def write(name: str, samples: Any, chunk_size: int, **options: Any) -> None:
        folder = FOLDER / name
        shutil.rmtree(folder, ignore_errors=True)
        writer = writers.BinaryWriter(str(folder), chunk_size=chunk_size, **options)
        for number, sample in enumerate(samples):
            writer[number] = sample
        writer.done()
        writer.merge()

    samples = [litdata_sample(number) for number in range(LITDATA_SAMPLES)]
    for sample in samples:
        sample["a_jpeg"] = as_file(sample["a_jpeg"])
        sample["a_tensor"], sample["a_vector"] = map(
            torch.from_numpy, (sample["a_tensor"], sample["a_vector"])
        )
    write("litdata", samples, 3)
    few = [{name: sample[name] for name in ("a_tensor", "pair", "words")} for sample in samples]
    for level in ("chunk", "batch"):
        write(
            f"litdata-{level}", few, 4, compression="zstd", compression_level=level, compression_batch_size=2
        )
    rows = [{name: sample[name] for name in ("a_bytes", "a_str", "numbers", "box")} for sample in samples]
    write("litdata-rows", rows, 4)
    write("litdata-rows-zstd", rows, 4, compression="zstd")
    write("litdata-tuples", [(number, picture(number), f"{number}") for number in range(5)], 5)
    write("litdata-bare", [torch.full((2, 2), number) for number in range(3)], 3)
    write("litdata-pickle", [{"a": 1, "b": complex(1, 2)}], 1)
    tokens = [torch.arange(3 + number, dtype=torch.int32) for number in range(5)]
    write("litdata-tokens", tokens, 16, item_loader=loaders.TokensLoader(block_size=4))


def main() -> None:
    what = sys.argv[1:] or ["mds", "litdata"]
    if "mds" in what:
        write_mds()
    if "litdata" in what:
        write_litdata()


if __name__ == "__main__":
    main()
