"""TarSource against the webdataset library, on whole tars and in visits."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import re
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from webdataset.tariterators import base_plus_ext

from cachestream.errors import ConfigError, SampleError, SourceError
from cachestream.formats.tar import TarSource
from cachestream.formats.tar_archive import TarReader, split_name
from cachestream.transport import metering
from cachestream.transport.remote import Remote
from cachestream.transport.remote_object import open_stream
from tests.sources.tars import RNG, make, numbered, read_all, read_unit, tar_bytes

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


def write_with_webdataset(folder: Path, tars: int = 2, samples: int = 12) -> None:
    rng = np.random.default_rng(0)
    for number in range(tars):
        with webdataset.TarWriter(str(folder / f"train-{number:06d}.tar")) as writer:
            for sample in range(samples):
                writer.write(
                    {
                        "__key__": f"part/{number}-{sample:04d}",
                        "jpg": rng.integers(0, 256, (20 + sample, 30, 3), np.uint8),
                        "seg.png": rng.integers(0, 256, (8, 9, 3), np.uint8),
                        "cls": sample,
                        "json": {"caption": "a cät", "box": [1, 2, 3, 4]},
                        "npy": rng.random((2, sample + 1)),
                        "txt": f"text {sample}",
                        "bin": bytes([sample]) * 7,
                        "npz": {"x": np.arange(sample), "y": np.ones((2, 2))},
                    }
                )


def as_webdataset_reads(urls: list[str]) -> dict[str, dict[str, Any]]:
    dataset = webdataset.WebDataset(urls, shardshuffle=False).decode("rgb8")
    return {f"{Path(sample['__url__']).name}#{sample['__key__']}": sample for sample in dataset}


# --- beside webdataset ---------------------------------------------------------------------------


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore")  # webdataset's own
@pytest.mark.parametrize("samples_per_visit", [None, 5])
def test_what_webdataset_writes_is_read_as_webdataset_reads_it(
    tmp_path: Path, samples_per_visit: int | None
) -> None:
    write_with_webdataset(tmp_path)
    theirs = as_webdataset_reads(sorted(map(str, tmp_path.iterdir())))
    ours = read_all(
        TarSource(f"{tmp_path}/train-{{000000..000001}}.tar", samples_per_visit=samples_per_visit)
    )
    assert sorted(ours) == sorted(theirs)  # visits go from tar to tar
    for key, sample in ours.items():
        their = theirs[key]
        assert {name.partition(".x")[0].partition(".y")[0] for name in sample} == {
            name for name in their if not name.startswith("__")
        }
        for name in ("jpg", "seg.png"):
            assert np.array_equal(sample[name], their[name].transpose(2, 0, 1))
        assert (sample["cls"], sample["txt"], sample["bin"]) == (their["cls"], their["txt"], their["bin"])
        assert json.loads(sample["json"]) == their["json"]
        for name, array in {
            "npy": their["npy"],
            "npz.x": their["npz"]["x"],
            "npz.y": their["npz"]["y"],
        }.items():
            assert np.array_equal(sample[name], array)
            assert sample[name].dtype == array.dtype


@pytest.mark.e2e
@given(st.from_regex(re.compile(r"[a-c./_#-]{1,12}"), fullmatch=True))
def test_names_are_split_as_webdataset_splits_them_but_for_hidden_files(name: str) -> None:
    theirs = base_plus_ext(name)
    ours = split_name(name)
    hidden = name.rpartition("/")[2].startswith(".")
    if hidden or not theirs[1] or re.match(r"__[^/]*__($|/)", name):
        assert ours is None
    else:
        assert ours == (None if theirs[0] is None else theirs)


def test_names_that_are_no_samples_are_left_out_and_do_not_part_a_sample(tmp_path: Path) -> None:
    names = ["a.txt", "README", ".hidden.txt", "d/._a.txt", "__meta__/x.txt", "a.TXT2", "b.txt"]
    make(tmp_path / "1.tar", [(name, b"x") for name in names])
    assert {key: sorted(sample) for key, sample in read_all(TarSource(tmp_path)).items()} == {
        "1.tar#a": ["txt", "txt2"],
        "1.tar#b": ["txt"],
    }


# --- fields ------------------------------------------------------------------------------------


def test_each_extension_has_its_decoder(tmp_path: Path) -> None:
    files = [
        ("a.cls", b" 7\n"), ("a.id", b"-3"), ("a.json", b"[[1, 2], [3, 4]]"), ("a.meta.json", b'{"x": 1}'),
        ("a.txt", "ä".encode()), ("a.md", b"# t"), ("a.wav", b"RIFF"), ("a.pth", b"\x80"), ("a.b.c.bin", b""),
    ]  # fmt: skip
    make(tmp_path / "1.tar", files)
    (sample,) = read_all(TarSource(tmp_path)).values()
    assert sample["json"].tolist() == [[1, 2], [3, 4]]
    assert {name: value for name, value in sample.items() if name != "json"} == {
        "cls": 7, "id": -3, "meta.json": '{"x": 1}', "txt": "ä", "md": "# t", "wav": b"RIFF", "pth": b"\x80",
        "b.c.bin": b"",
    }  # fmt: skip


def shorten(data: bytes) -> str:
    return data.decode()[:2]


class Exploding:
    def __reduce__(self) -> Any:
        return pytest.fail, ("unpickled",)


def test_nothing_is_unpickled_unless_the_user_gives_a_decoder_that_does(tmp_path: Path) -> None:
    for name, value in (("good", [1, 2]), ("evil", Exploding())):
        data = pickle.dumps(value)
        make(
            tmp_path / f"{name}.tar",
            [(f"a.{extension}", data) for extension in ("pkl", "pickle", "pyd", "pth")],
        )
    evil = read_all(TarSource(tmp_path / "evil.tar"))["evil.tar#a"]
    assert all(type(value) is bytes for value in evil.values())
    good = read_all(TarSource(tmp_path / "good.tar", decoders={"pkl": pickle.loads}))["good.tar#a"]
    assert good["pkl"] == [1, 2]
    assert type(good["pickle"]) is bytes


def test_decoders_of_the_user_come_first_the_longest_extension_before_all(tmp_path: Path) -> None:
    make(tmp_path / "1.tar", [("a.txt", b"hello"), ("a.en.txt", b"world"), ("a.cls", b"x")])
    source = TarSource(tmp_path, decoders={".TXT": shorten, "en.txt": bytes, "cls": len})
    assert read_all(source) == {"1.tar#a": {"txt": "he", "en.txt": b"world", "cls": 1}}
    assert source.fingerprint != TarSource(tmp_path).fingerprint
    for wrong in ({"": bytes}, {"txt": "utf-8"}):
        with pytest.raises(ConfigError, match="give functions of bytes by extension"):
            TarSource(tmp_path, decoders=wrong)


def test_members_that_gzip_has_packed_are_read_as_webdataset_reads_them(tmp_path: Path) -> None:
    value, array = io.BytesIO(), np.arange(6.0).reshape(2, 3)
    np.save(value, array)
    members = [
        ("1.json.gz", gzip.compress(b"[1, 2]")),
        ("1.npy.gz", gzip.compress(value.getvalue())),
        ("1.txt.gz", gzip.compress(b"one") + gzip.compress(b" two")),
        ("1.own.gz", gzip.compress(b"mine")),
        ("1.gz", gzip.compress(b"bytes")),
    ]
    files = {name.removeprefix("1."): data for name, data in members}
    decoded = webdataset.autodecode.Decoder([])(files)
    assert (decoded["json.gz"], decoded["txt.gz"], decoded["gz"]) == ([1, 2], "one two", b"bytes")
    members.append(("2.txt.gz", gzip.compress(b"torn" * 1000)[:-10]))
    (tmp_path / "a.tar").write_bytes(tar_bytes(members))
    samples, reason = read_unit(TarSource(tmp_path / "a.tar", decoders={"own": shorten}))
    sample = dict(samples["a.tar#1"])
    assert len(samples) == 1
    assert sample.pop("json.gz").tolist() == [1, 2]
    assert np.array_equal(sample.pop("npy.gz"), array)
    assert sample == {"txt.gz": "one two", "own.gz": shorten(b"mine"), "gz": b"bytes"}
    assert "a.tar#2.txt.gz: not a usable .gz file" in reason
    kept = TarSource(tmp_path / "a.tar", decoders={"gz": bytes})
    assert read_unit(kept)[0]["a.tar#1"]["txt.gz"][:2] == b"\x1f\x8b", "a decoder of one's own comes first"


def test_a_sample_that_cannot_be_decoded_is_told_at_the_end_and_costs_no_other(tmp_path: Path) -> None:
    files = numbered(6)
    files[4:4] = [("x.cls", b"seven")]
    files[9:9] = [("y.jpg", b"no image"), ("y.cls", b"1")]
    make(tmp_path / "1.tar", files)
    found, problem = read_unit(TarSource(tmp_path))
    assert len(found) == 6
    assert problem == (
        f"{tmp_path}/1.tar: 2 problems, the first: {tmp_path}/1.tar#x.cls: not a usable integer: "
        "ValueError: invalid literal for int() with base 10: b'seven'"
    )


def test_a_decoder_that_raises_names_the_file(tmp_path: Path) -> None:
    make(tmp_path / "1.tar", [("a.x", b"")])
    found, problem = read_unit(TarSource(tmp_path, decoders={"x": json.loads}))
    assert found == {}
    assert re.search(r"1\.tar#a\.x: its decoder raised JSONDecodeError", problem)


# --- packed ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ending", "pack"),
    [
        (".tar.gz", gzip.compress), (".tgz", gzip.compress), (".tar.bz2", bz2.compress), (".tar.xz", lzma.compress),
        (".tar.zst", zstandard.compress), (".tar", gzip.compress), (".tar", zstandard.compress),
        (".tar.gz", lambda data: gzip.compress(data[:3000]) + gzip.compress(data[3000:]) + bytes(100)),
    ],
)  # fmt: skip
def test_packed_tars_are_unpacked_by_what_they_are(
    tmp_path: Path, ending: str, pack: Callable[[bytes], bytes]
) -> None:
    files = numbered(40, 5000)
    (tmp_path / f"a{ending}").write_bytes(pack(tar_bytes(files)))
    found = read_all(TarSource(tmp_path))
    plain = read_all(TarSource(make(tmp_path / "plain.tar", files)))
    assert [*found.values()] == [*plain.values()]
    assert next(iter(found)) == f"a{ending}#00000"


def test_a_tar_whose_first_file_is_named_like_a_packed_one_is_read(tmp_path: Path) -> None:
    make(tmp_path / "1.tar", [("BZh91AY.txt", b"x")])
    assert read_all(TarSource(tmp_path)) == {"1.tar#BZh91AY": {"txt": "x"}}


def test_zstd_without_its_package_is_refused_with_the_packages_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.tar.zst").write_bytes(zstandard.compress(tar_bytes(numbered(1))))
    monkeypatch.setattr("cachestream.sources.decode.compression._has_zstandard", lambda: False)
    with pytest.raises(ConfigError, match="pip install zstandard"):
        TarSource(tmp_path)


# --- one pass, bounded memory ------------------------------------------------------------------


@pytest.mark.e2e
def test_a_large_tar_is_read_in_little_memory_each_byte_once(tmp_path: Path, fetched: list[int]) -> None:
    make(tmp_path / "1.tar", numbered(600, 100_000))
    source = TarSource(tmp_path)
    tracemalloc.start()
    try:
        count = sum(1 for _ in source.read(0, RNG))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 600
    assert peak_bytes < 8 << 20
    assert sum(fetched) == (tmp_path / "1.tar").stat().st_size
    assert max(fetched) <= 1 << 20


def test_what_is_left_out_of_a_local_tar_is_not_read(tmp_path: Path, fetched: list[int]) -> None:
    make(tmp_path / "1.tar", [("a.bin", bytes(40 << 20)), ("b.txt", b"x")])
    found, problem = read_unit(TarSource(tmp_path, storage_options={"max_object_size": 1 << 20}))
    assert found == {"1.tar#b": {"txt": "x"}}
    assert "1.tar#a: more than 1.05 MB in one object; raise max_object_size=" in problem
    assert sum(fetched) < 4 << 20


@pytest.mark.e2e
@given(
    st.lists(st.tuples(st.text("ab/é", min_size=1, max_size=200), st.integers(0, 3000)), max_size=8),
    st.sampled_from(FORMATS),
)
def test_members_are_those_that_the_standard_library_finds(
    tmp_path_factory: pytest.TempPathFactory, members: list[tuple[str, int]], form: int
) -> None:
    files = [(f"{number}{name}", bytes(size)) for number, (name, size) in enumerate(members)]
    path = tmp_path_factory.mktemp("tar") / "1.tar"
    try:
        make(path, files, form)
    except ValueError:  # too long for this format
        return
    with tarfile.open(path) as archive:
        theirs = [(member.name.rstrip("/"), member.size) for member in archive]
    ours = []
    with open_stream(Remote(str(path)), str(path), "tar") as stream:
        reader = TarReader(stream)
        while (member := reader.next()) is not None:
            ours.append((member.name.rstrip("/"), len(reader.data())))
    assert ours == theirs


# --- visits ------------------------------------------------------------------------------------


@pytest.mark.e2e
@given(
    st.lists(st.integers(0, 4000), min_size=1, max_size=60),
    st.integers(1, 12),
    st.sampled_from(FORMATS),
    st.sampled_from([3, 90, 130]),
)
def test_visits_together_give_every_sample_once_wherever_the_cuts_fall(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], per_visit: int, form: int, name_chars: int
) -> None:
    files = [
        (
            f"{'d/' * (form != tarfile.USTAR_FORMAT) * (name_chars // 2)}{number // 3:03d}.{extension}{number % 3}",
            bytes(size),
        )
        for number, size in enumerate(sizes)
        for extension in ("x", "y")
    ]
    folder = tmp_path_factory.mktemp("tar")
    make(folder / "1.tar", files, form)
    source = TarSource(folder, samples_per_visit=per_visit)
    whole = read_all(TarSource(folder))
    assert read_all(source) == whole
    assert list(read_all(source)) == list(whole)


@pytest.mark.e2e
def test_a_visit_reads_its_share_and_little_more(tmp_path: Path) -> None:
    make(tmp_path / "1.tar", numbered(2000, 10_000))
    source = TarSource(tmp_path, samples_per_visit=100)
    assert 18 <= source.num_units <= 22
    assert repr(source) == f"<TarSource {tmp_path}, 1 files, {source.num_units} units>"
    for unit in range(source.num_units):
        seen: list[int] = []
        metering.install(seen.append)
        try:
            found, _ = read_unit(source, unit)
        finally:
            metering.install(None)
        assert 80 <= len(found) <= 120
        assert sum(seen) < 4 << 20


def test_visits_are_planned_alike_whenever_a_source_is_made(tmp_path: Path) -> None:
    make(tmp_path / "1.tar", numbered(200))
    make(tmp_path / "2.tar", numbered(50))
    first, second = (TarSource(tmp_path, samples_per_visit=20) for _ in range(2))
    assert (first.fingerprint, first.num_units) == (second.fingerprint, second.num_units)
    assert first.fingerprint != TarSource(tmp_path).fingerprint
    assert len(read_all(first)) == 250


def test_packed_and_old_tars_and_tars_in_tars_cannot_be_read_in_visits(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(tar_bytes(numbered(50))))
    with pytest.raises(ConfigError, match="can only be read from its begin; give samples_per_visit=0"):
        TarSource(tmp_path, samples_per_visit=10)
    (tmp_path / "a.tar.gz").rename(tmp_path / "a.tar")
    with pytest.raises(ConfigError, match="can only be read from its begin"):
        TarSource(tmp_path, samples_per_visit=10)
    inner = tar_bytes(numbered(300))
    later = [(f"later/{name}", data) for name, data in numbered(50)]
    make(tmp_path / "a.tar", [*numbered(50), ("big.tar", inner), *later])
    source = TarSource(tmp_path, samples_per_visit=10)
    problems = [read_unit(source, unit)[1] for unit in range(source.num_units)]
    assert any("it holds a tar itself" in problem for problem in problems)


@pytest.mark.parametrize("wrong", [-1, -3])
def test_a_visit_of_fewer_than_no_samples_is_refused(tmp_path: Path, wrong: int) -> None:
    make(tmp_path / "1.tar", numbered(2))
    with pytest.raises(ConfigError, match="samples_per_visit"):
        TarSource(tmp_path, samples_per_visit=wrong)


def test_visits_to_a_tar_without_samples_are_refused_at_once(tmp_path: Path) -> None:
    make(tmp_path / "1.tar", [])
    with pytest.raises(SampleError, match="holds no samples"):
        TarSource(tmp_path, samples_per_visit=10)


# --- listing -----------------------------------------------------------------------------------


def test_in_folders_only_tars_are_taken_and_a_url_is_taken_whatever_its_name(tmp_path: Path) -> None:
    make(tmp_path / "1.tar", numbered(1))
    make(tmp_path / "data", numbered(2))
    (tmp_path / "1.idx").write_text("x")
    assert TarSource(tmp_path).num_units == 1
    assert len(read_all(TarSource(tmp_path / "data"))) == 2
    with pytest.raises(SourceError, match="no such file"):
        TarSource(tmp_path / "3.tar")


def test_a_tar_that_vanished_is_a_sample_error(tmp_path: Path) -> None:
    source = TarSource(make(tmp_path / "1.tar", numbered(1)))
    (tmp_path / "1.tar").unlink()
    assert re.search(r"1\.tar: not found", read_unit(source)[1])
