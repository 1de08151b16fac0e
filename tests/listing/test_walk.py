"""Listings folder by folder on real remotes: the same files, from the first ones on, as a listing at once."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest

from cachestream.errors import SourceError, SourceUnavailableError
from cachestream.formats.files import FileSource
from cachestream.listing import pages as pages_module
from cachestream.listing.names import Page
from cachestream.listing.pages import FIRST_OF_DISKS, FIRST_OF_OTHERS, GoneError, Walk
from cachestream.sources.base import as_incremental
from cachestream.transport.remote import Remote
from tests.sources.reading import keys, read, read_all
from tests.support.ftp import PASSWORD, FTPServer, run_ftp_server
from tests.support.s3 import run_s3_server

NAMES = [
    *(f"a/{number:03d}.jpg" for number in range(12)),
    *(f"a-b/{number:03d}.JPG" for number in range(12)),
    *(f"a/x/{number:03d}.txt" for number in range(3)),
    "README.md",
    "a/.hidden.jpg",
    ".cache/1.jpg",
    "b/.tmp/2.jpg",
    "c/größe ü.jpg",
    "c/deep/er/1.jpg",
    "z.jpg",
]
WAYS: list[tuple[str, dict[str, Any]]] = [
    ("", {}),
    ("/", {"extensions": ".jpg"}),
    ("/a", {}),
    ("/a", {"recursive": False}),
    ("/*.jpg", {}),
    ("/*/*.jpg", {}),
    ("/a*/0[01]*", {}),
    ("/a**/0[01]*", {}),
    ("/**/*.jpg", {}),
    ("/c/**", {}),
    ("/?/**/1.*", {}),
    ("/README.md", {}),
]


def put(folder: Path, names: list[str]) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FTPServer]:
    root = tmp_path_factory.mktemp("ftp")
    put(root / "tree", NAMES)
    with run_ftp_server(root) as started:
        yield started


@pytest.fixture
def memory() -> Iterator[Any]:
    filesystem = fsspec.filesystem("memory")
    yield filesystem
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]


def same(url: str, *numbers: int, **options: Any) -> None:
    """A listing by folders is the one at once, whichever of the `numbers` of first names are listed at once."""
    options = {"extensions": "*", **options}
    whole = FileSource(url, first_names=None, **options)
    for first_names in numbers:
        check_walk(url, first_names, whole, options)


def check_walk(url: str, first_names: int, whole: FileSource, options: dict[str, Any]) -> None:
    walked = FileSource(url, first_names=first_names, **options)
    first = list(walked.first_names)
    assert first == list(whole.first_names)[: len(first)]
    copy = pickle.loads(pickle.dumps(walked))
    assert copy.is_listing == walked.is_listing
    assert keys(copy) == keys(walked) == keys(whole)
    assert set(walked.label_names) >= set(whole.label_names)
    assert walked.listing_digest == whole.listing_digest
    assert walked.fingerprint == whole.fingerprint
    assert not walked.is_listing


@pytest.mark.parametrize(("where", "options"), WAYS)
def test_a_listing_by_folders_is_the_one_at_once(memory: Any, where: str, options: dict[str, Any]) -> None:
    memory.pipe({f"/tree/{name}": b"x" for name in NAMES})
    same(f"memory://tree{where}", 1, 5, 1000, **options)


@pytest.mark.parametrize(
    ("first_names", "names"),
    [(1, ("about", "ant", "bee", "extra")), (5, ("ant", "bee", "extra")), (None, ("ant", "bee"))],
)
def test_folders_to_come_have_a_label_whatever_they_hold_and_those_that_are_listed_if_they_hold_images(
    memory: Any, first_names: int | None, names: tuple[str, ...]
) -> None:
    images = [f"{folder}/{number}.jpg" for folder in ("ant", "bee") for number in range(9)]
    memory.pipe({f"/stray/{name}": b"x" for name in ["README.md", "about/1.json", *images, "extra/1.json"]})
    assert FileSource("memory://stray", first_names=first_names).label_names == names


@pytest.mark.parametrize(("where", "options"), WAYS[1::3])
def test_an_ftp_server_is_listed_by_folders_as_it_is_at_once(
    server: FTPServer, where: str, options: dict[str, Any]
) -> None:
    same(f"ftp://127.0.0.1/tree{where}", 5, storage_options=server.options, **options)


@pytest.mark.e2e
def test_of_a_server_only_the_folders_of_the_first_names_are_asked_for_and_later_those_of_the_rest(
    server: FTPServer,
) -> None:
    put(server.root / "many", [f"{folder:02d}/{number}.jpg" for folder in range(60) for number in range(4)])
    server.asked.clear()
    source = FileSource("ftp://127.0.0.1/many", storage_options=server.options, first_names=8, label=None)
    assert as_incremental(source) is source
    assert len(source.first_names) == 8
    assert server.asked == ["/many", "/many/00", "/many/01"]
    labelled = FileSource("ftp://127.0.0.1/many", storage_options=server.options, first_names=8)
    assert labelled.label_names == tuple(f"{folder:02d}" for folder in range(60))
    assert len(server.asked) < 4 + 4 + 1 + 20, "and some of the others, for the names of the folders"
    server.asked.clear()
    rest = [name for page in source.more_names("57/3.jpg") for name in page.names]
    assert rest == [f"{folder}/{number}.jpg" for folder in (58, 59) for number in range(4)]
    assert server.asked == ["/many", "/many/57", "/many/58", "/many/59"], (
        "that of the last name may have more"
    )
    assert PASSWORD not in repr(source)


@pytest.mark.e2e
@pytest.mark.usefixtures("short_waits")
def test_a_connection_that_ends_in_mid_listing_is_no_end_of_the_listing(server: FTPServer) -> None:
    put(server.root / "cut", [f"{folder:02d}/1.bin" for folder in range(9)])
    source = FileSource("ftp://127.0.0.1/cut", storage_options=server.options, first_names=2, label=None)
    server.hang_up_after = 4
    found = list(source.first_names)
    found += [name for page in source.more_names(found[-1]) for name in page.names]
    assert found == [f"{folder:02d}/1.bin" for folder in range(9)]


@pytest.mark.e2e
def test_an_asynchronous_driver_is_asked_for_the_folders_that_follow_meanwhile() -> None:
    """On S3, whose own way is another one: it is the asynchronous driver at hand."""
    with run_s3_server(fresh=False) as s3:
        put(s3.bucket("tree"), NAMES)
        walk = Walk(Remote("s3://tree", s3.storage_options), "tree/")
        expected = keys(
            FileSource("s3://tree", storage_options=s3.storage_options, first_names=None, extensions="*")
        )
        for last in ("", "a-b/003.JPG", expected[-2]):
            rest = [name for name in expected if name > last]
            assert [name for page in walk.after(last) for name in page.names] == rest
        pages = walk.after("")
        assert next(pages).names == ["README.md"]
        pages.close()  # type: ignore[attr-defined]
        assert sorted(replace(walk, pattern="a*/**/*.jpg").folders_in("")) == ["a-b/", "a/"]
        assert walk.folders_in("c/") == ["c/deep/"]


def test_pages_tell_the_last_one_whatever_comes_after_it(memory: Any) -> None:
    memory.pipe({f"/t/{name}": b"x" for name in ("a/1", "a/b/2", "a/c", "z/.hidden/3")})
    walk = Walk(Remote("memory://t"), "/t/")
    rest = [Page(["a/c"], False), Page([], True)]  # "z" might hold some
    assert list(walk.after("")) == [Page(["a/1"], False), Page(["a/b/2"], False), *rest]
    assert list(walk.after("a/b/2")) == rest
    assert list(walk.after("a/c")) == [Page([], True)]
    assert list(Walk(Remote("memory://t"), "/t/a/").after("b/2")) == [Page(["c"], True)]


def test_what_all_has_gone_from_is_not_taken_for_a_listing_that_has_ended(tmp_path: Path) -> None:
    root = tmp_path / "mount"
    put(root, ["a/1.bin", "b/2.bin", "c/3.bin"])
    source = FileSource(root, first_names=1)
    pages = source.more_names("a/1.bin")
    root.rename(tmp_path / "elsewhere")
    root.mkdir()  # what is left of a mount point
    with pytest.raises(GoneError, match="is it mounted"):
        next(pages)
    pages = FileSource(tmp_path / "elsewhere", first_names=1).more_names("")
    assert next(pages).names == ["a/1.bin"]
    (tmp_path / "elsewhere").rename(tmp_path / "again")
    with pytest.raises(GoneError):
        list(pages)


def test_an_unreadable_folder_ends_the_listing_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, ["a/1.bin", "closed/2.bin"])
    source = FileSource(tmp_path, first_names=1, label=None)
    scandir = pages_module.os.scandir  # type: ignore[attr-defined]

    def guarded(path: str) -> Any:  # as root, permissions hold nobody back
        if path.endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr("os.scandir", guarded)
    with pytest.raises(SourceError, match=r"access denied.*closed"):
        list(source.more_names("a/1.bin"))


def test_a_disk_of_this_machine_is_listed_at_once_up_to_more_names_than_a_mount_of_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, ["a/1.bin", "b/2.bin"])
    opened = Walk(Remote(str(tmp_path)), f"{tmp_path}/")
    for kind, first in (("ext4", FIRST_OF_DISKS), ("nfs4", FIRST_OF_OTHERS), ("fuse.sshfs", FIRST_OF_OTHERS)):
        monkeypatch.setattr(pages_module, "filesystem_of", lambda _, kind=kind: kind)
        assert opened.num_first_names() == first


def test_one_file_without_an_ending_has_its_name_for_a_key(memory: Any) -> None:
    memory.pipe("/x/LICENSE", b"free")
    assert [key for key, _ in read_all(FileSource("memory://x/LICENSE"))] == ["LICENSE"]


def test_a_reader_whose_connection_was_cut_opens_another_one(server: FTPServer) -> None:
    put(server.root / "read", ["a/1.txt", "b/2.txt"])
    source = FileSource("ftp://127.0.0.1/read", storage_options=server.options, label=None)
    assert read(source, 0) == [("a/1.txt", {"text": "a/1.txt"})]
    server.hang_up_after = 0
    with pytest.raises(SourceUnavailableError, match="does not answer"):
        read(source, 1)
    assert read(source, 1) == [("b/2.txt", {"text": "b/2.txt"})]
