"""The names that URLs, folders, wildcards and ranges stand for, and the lists that keep them."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cachestream as cs
from cachestream.errors import ConfigError, SourceError
from cachestream.formats.files import FileSource
from cachestream.listing.file_list import FileList
from cachestream.listing.find import find_files
from cachestream.listing.names import Names
from cachestream.listing.patterns import expand_braces, local_path
from cachestream.transport.remote import Remote
from tests.sources.reading import keys
from tests.support.caches import add_shard, numbered


def make(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())


def test_files_that_are_named_are_kept_whatever_their_ending(tmp_path: Path) -> None:
    make(tmp_path, "a.tar", "b.shard", "folder/c.tar", "folder/d.txt")
    found = FileList([f"{tmp_path}/a.tar", f"{tmp_path}/b.shard"], owner="it", preferred=(".tar",))
    assert list(found.names) == ["a.tar", "b.shard"]
    found = FileList([f"{tmp_path}/b.shard", f"{tmp_path}/folder"], owner="it", preferred=(".tar",))
    assert list(found.names) == ["folder/c.tar"], "beside a folder the endings choose"


def test_several_chained_urls_are_refused_and_one_may_have_a_wildcard(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name in ("img1.txt", "img2.txt", "imgx.txt"):
            archive.writestr(name, name)
    chained = [f"zip://img{n}.txt::file://{tmp_path}/a.zip" for n in (1, 2)]
    for several in (chained, f"zip://img{{1,2}}.txt::file://{tmp_path}/a.zip"):
        with pytest.raises(ConfigError, match="chained URLs share no filesystem"):
            FileSource(several)
    assert FileSource(f"zip://img[0-9].txt::file://{tmp_path}/a.zip").num_units == 2


@pytest.mark.parametrize("pattern", ["{0..99999999999}", "{0..9999}{0..9999}", "{1..5..0}"])
def test_a_range_that_would_fill_the_memory_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigError):
        expand_braces(pattern)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), max_size=30))
def test_names_are_kept_exactly_also_over_pickle(texts: list[str]) -> None:
    names = pickle.loads(pickle.dumps(Names(texts)))
    assert list(names) == texts
    assert len(names) == len(texts)
    assert names.digest == Names(texts).digest


def test_two_lists_with_the_same_letters_have_different_digests() -> None:
    assert Names(["ab", "c"]).digest != Names(["a", "bc"]).digest
    assert Names([]).digest != Names([""]).digest


def test_a_cache_among_the_files_is_none_of_them(tmp_path: Path) -> None:
    make(tmp_path, "a.txt", "b/c.txt")
    add_shard(cs.Cache(tmp_path / "b" / "cache", size_limit="10MB"), numbered(0, 3))
    assert keys(FileSource(tmp_path)) == ["a.txt", "b/c.txt"]
    assert keys(FileSource(tmp_path, first_names=1)) == ["a.txt", "b/c.txt"]


def test_extensions_keep_only_such_files(tmp_path: Path) -> None:
    make(tmp_path, "a.JPG", "b.png", "c.txt")
    assert keys(FileSource(tmp_path, extensions=["jpg", ".png"])) == ["a.JPG", "b.png"]
    with pytest.raises(SourceError, match=r"none of 3 files ends in \.gif"):
        FileSource(tmp_path, extensions=".gif")


def test_wildcards_ranges_and_lists_name_files_below_their_common_root(tmp_path: Path) -> None:
    make(tmp_path, *(f"{part}/{number:03d}.bin" for part in ("train", "val") for number in range(5)))
    assert keys(FileSource(tmp_path / "train" / "00[12].bin")) == ["001.bin", "002.bin"]
    assert keys(FileSource(f"{tmp_path}/*/000.bin")) == ["train/000.bin", "val/000.bin"]
    assert keys(FileSource(f"{tmp_path}/train/{{003..004}}.bin")) == ["003.bin", "004.bin"]
    assert len(keys(FileSource(f"{tmp_path}/**/*.bin"))) == 10
    listed: list[str | Path] = [f"{tmp_path}/val", tmp_path / "train" / "001.bin", f"{tmp_path}/val/000.bin"]
    assert keys(FileSource(listed)) == ["train/001.bin", *(f"val/{number:03d}.bin" for number in range(5))]


def test_a_relative_path_and_a_file_url_name_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "data/a.bin")
    monkeypatch.chdir(tmp_path)
    assert keys(FileSource("data")) == keys(FileSource(f"file://{tmp_path}/data")) == ["a.bin"]
    assert FileSource("data").fingerprint == FileSource(tmp_path / "data").fingerprint


def test_a_name_with_wildcard_signs_is_taken_literally_if_it_exists(tmp_path: Path) -> None:
    make(tmp_path, "a[1]/x.bin", "b{1,2}.bin")
    assert keys(FileSource(tmp_path / "a[1]")) == ["x.bin"]
    assert keys(FileSource(tmp_path / "b{1,2}.bin")) == ["b{1,2}.bin"]


def test_a_list_of_local_files_is_what_each_of_them_names_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "a/1.bin", "a/.hidden", "a/b{1,2}.bin", "a/c[1].bin", "ä/2", "d/3.bin", "d/deep/4.bin")
    os.symlink("1.bin", tmp_path / "a" / "link.bin")
    os.mkfifo(tmp_path / "a" / "pipe")
    monkeypatch.chdir(tmp_path / "a")
    paths = ["1.bin", ".hidden", "./1.bin/", f"{tmp_path}/a/../ä/2", f"file://{tmp_path}//a/b{{1,2}}.bin"]
    paths += [f"{tmp_path}/a/{name}" for name in ("c[1].bin", "link.bin", "pipe", "1.bin")] + [
        "../d",
        "b{1,2}.bin",
    ]
    remote = Remote(paths[0])
    alone = [find_files(remote, [path]) for path in paths]
    assert [found for _, found in alone] == [
        [os.path.abspath(path.removeprefix("file://"))] for path in paths[:9]
    ] + [
        [f"{tmp_path}/d/3.bin", f"{tmp_path}/d/deep/4.bin"],
        [f"{tmp_path}/a/b{{1,2}}.bin"],
    ]
    assert find_files(remote, paths) == (
        f"{tmp_path}/",
        sorted({path for _, found in alone for path in found}),
    )
    assert find_files(remote, paths[:3]) == (
        f"{tmp_path}/a/",
        [f"{tmp_path}/a/.hidden", f"{tmp_path}/a/1.bin"],
    )
    with pytest.raises(SourceError, match=r"gone\.bin: no such file"):
        find_files(remote, [*paths, "gone.bin"])


@given(st.text(st.sampled_from("/.~a"), max_size=8), st.sampled_from(["", "file://", "local://"]))
def test_a_local_path_is_absolute_and_normal(path: str, scheme: str) -> None:
    assert local_path(scheme + path) == os.path.abspath(os.path.expanduser(path))


@pytest.mark.e2e
def test_links_that_form_a_circle_are_followed_once(tmp_path: Path) -> None:
    make(tmp_path, "a/x.bin")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    assert keys(FileSource(tmp_path)) == ["a/x.bin"]
    assert keys(FileSource(f"{tmp_path}/**/*.bin")) == ["a/x.bin"]


def test_a_name_that_is_not_utf8_is_read_and_has_a_printable_key(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/caf\xe9.bin"
    try:
        with open(path, "wb") as file:
            file.write(b"1")
    except OSError:
        pytest.skip("this filesystem takes UTF-8 names only")
    source = FileSource(tmp_path)
    ((key, sample),) = source.read(0, None)  # type: ignore[arg-type]
    assert key == "caf\ufffd.bin"
    assert sample == {"data": b"1"}


def test_nothing_found_is_an_error_that_names_the_place(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for url in ("empty", "*.jpg"):
        with pytest.raises(SourceError, match=r"no files found; check"):
            FileSource(tmp_path / url)
    for url in ("missing", "missing.jpg", "x{0..1}.bin"):
        with pytest.raises(SourceError, match="no such file or folder"):
            FileSource(tmp_path / url)


def test_every_pattern_of_a_list_must_find_files_and_not_every_one_that_its_braces_stand_for(
    tmp_path: Path,
) -> None:
    make(tmp_path, "train/a.bin")
    with pytest.raises(SourceError, match=r"typo/\*\.bin: no files found"):
        FileSource([f"{tmp_path}/train/*.bin", f"{tmp_path}/typo/*.bin"])
    assert keys(FileSource(f"{tmp_path}/{{train,val}}/*.bin")) == ["train/a.bin"]


@pytest.mark.parametrize("first_names", ["auto", None])
def test_on_any_remote_a_name_with_wildcard_signs_is_taken_literally_if_it_exists(first_names: Any) -> None:
    memory = fsspec.filesystem("memory")
    for name in ("[x].txt", "x.txt", "a[1]/b.txt", "a1/b.txt"):
        memory.pipe(f"/signs/{name}", name.encode())
    listed = ["memory://signs/[x].txt", "memory://signs/x.txt"]
    assert keys(FileSource(listed, first_names=first_names)) == ["[x].txt", "x.txt"]
    assert keys(FileSource(listed[0], first_names=first_names)) == ["[x].txt"]
    inner = FileSource("memory://signs/a[1]/b.txt", first_names=first_names)
    assert next(inner.read(0, np.random.default_rng(0)))[1] == {"text": "a[1]/b.txt"}


def test_an_unreadable_folder_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "open/a.bin", "closed/b.bin")
    scandir = os.scandir

    def guarded(path: str) -> Any:  # as root, permissions hold nobody back
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    with pytest.raises(SourceError, match=r"access denied.*closed"):
        FileSource(tmp_path)


def test_a_wildcard_leaves_out_folders_that_may_not_be_read_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, "open/a.bin", "closed/b.bin", "closed-too/c.bin")
    scandir = os.scandir

    def guarded(path: str) -> Any:
        if "closed" in str(path):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    assert [keys(FileSource(f"{tmp_path}/{one}")) for one in ("*/*.bin", "**/*.bin")] == [["open/a.bin"]] * 2
    assert len(caplog.messages) == 1
    assert f"{tmp_path}/: folders that may not be read are left out, such as closed" in caplog.text
    with pytest.raises(SourceError, match=r"access denied.*closed"):
        FileSource(f"{tmp_path}/closed/*.bin")


@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_a_wildcard_with_a_slash_at_its_end_stands_for_what_is_in_the_folders(
    scheme: str, tmp_path: Path
) -> None:
    for name in ("a1/x.txt", "a2/b/y.txt", "b1/z.txt", "a.txt"):
        with fsspec.open(f"{scheme}{tmp_path}/{name}", "w", auto_mkdir=True) as file:
            file.write(name)
    assert keys(FileSource(f"{scheme}{tmp_path}/a*/")) == ["a1/x.txt", "a2/b/y.txt"]
    assert keys(FileSource(f"{scheme}{tmp_path}/*/", recursive=False)) == ["a1/x.txt", "b1/z.txt"]


def test_brackets_with_nothing_in_them_stand_for_themselves(tmp_path: Path) -> None:
    make(tmp_path, "[]1.bin", "[!]2.bin", "]3.bin", "!4.bin")
    for pattern, expected in (("[]*", ["[]1.bin"]), ("[!]*", ["[!]2.bin"]), ("[]!]*", ["!4.bin", "]3.bin"])):
        assert keys(FileSource(f"{tmp_path}/{pattern}")) == expected
    assert keys(FileSource(f"{tmp_path}/[!]!]*")) == ["[!]2.bin", "[]1.bin"]


def test_urls_of_different_schemes_do_not_go_together(tmp_path: Path) -> None:
    make(tmp_path, "a.bin")
    with pytest.raises(ConfigError, match="same scheme"):
        FileSource([str(tmp_path / "a.bin"), "s3://bucket/b.bin"])


def test_an_unknown_scheme_and_a_missing_driver_say_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"unknown scheme 'foo://'.*s3://"):
        FileSource("foo://bucket/x")
    with pytest.raises(ConfigError, match="pip install gcsfs"):
        FileSource("gs://bucket/x")


@pytest.mark.parametrize("urls", [[], "", [""], [1], 5, None])
def test_what_is_no_url_is_refused(urls: Any) -> None:
    with pytest.raises(ConfigError, match="path or URL"):
        FileSource(urls)


def test_what_is_no_ending_is_refused(tmp_path: Path) -> None:
    bad: Any
    for bad in (5, [], [""], [None]):
        with pytest.raises(ConfigError, match="give endings such as"):
            FileSource(tmp_path, extensions=bad)


def test_the_digest_changes_with_the_listing_and_the_fingerprint_does_not(tmp_path: Path) -> None:
    make(tmp_path, "a.bin", "b.bin")
    before = FileSource(tmp_path)
    make(tmp_path, "c.bin")
    after = FileSource(tmp_path)
    assert before.fingerprint == after.fingerprint
    assert before.listing_digest != after.listing_digest
