"""Listings page by page, on a real S3 server: the same files as a listing at once gives."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachestream.errors import ConfigError, SampleError, SourceError
from cachestream.formats.files import FileSource
from cachestream.listing.names import Names
from cachestream.listing.pages import PAGE_NAMES, S3Listing
from cachestream.sources.base import as_incremental, is_source, units_of
from cachestream.sources.open import open_source
from cachestream.transport.remote import Remote
from tests.sources.reading import keys
from tests.support.proxy import FaultyProxy
from tests.support.s3 import S3Server, run_s3_server

NAMES = [
    *(f"a/{number:03d}.jpg" for number in range(40)),
    *(f"a-b/{number:03d}.JPG" for number in range(40)),
    *(f"a/x/{number:03d}.txt" for number in range(3)),
    "a/x/003.jpg",
    "README.md",
    "notes/1.txt",
    "a/.hidden.jpg",
    ".cache/1.jpg",
    "b/.tmp/2.jpg",
    "c/größe ü.jpg",
    "z.jpg",
]
# A folder deeper than the others.
DEEPER = [f"a/{number:04d}.jpg" for number in range(PAGE_NAMES)] + ["a/z/1.jpg", "a/z/2.txt", "b/1.jpg"]

SIGNS = ["[x].txt", "x.txt", "what?.txt", "whats.txt", "a[1]/b*.txt", "a1/bc.txt"]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with run_s3_server(fresh=False) as started:
        bucket = started.bucket("paged")
        started.bucket("empty")
        put(bucket, NAMES)
        put(started.bucket("deeper"), DEEPER)  # before it lists the buckets
        put(started.bucket("signs"), SIGNS)
        yield started


def put(bucket: Path, names: list[str]) -> None:
    for name in names:
        path = bucket / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


@pytest.mark.e2e
@pytest.mark.parametrize("first_names", [7, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("where", "options"),
    [
        ("s3://paged", {}),
        ("s3://paged/a", {}),
        ("s3://paged/a/", {"recursive": False}),
        ("s3://paged/*.jpg", {}),
        ("s3://paged/a*/0[12]*", {}),
        ("s3://paged/a**/0[12]*", {}),
        ("s3://paged/**jpg", {}),
        ("s3://paged/**/*.jpg", {}),
        ("s3://paged/a/**", {}),
        ("s3://paged", {"extensions": ".jpg"}),
    ],
)
def test_a_listing_by_pages_is_the_one_at_once(
    server: S3Server, where: str, options: dict[str, Any], first_names: int
) -> None:
    options = {"extensions": "*", **options}
    whole = FileSource(where, storage_options=server.storage_options, first_names=None, **options)
    paged = FileSource(where, storage_options=server.storage_options, first_names=first_names, **options)
    assert paged.fingerprint == whole.fingerprint
    first = list(paged.first_names)
    assert first == list(whole.first_names)[: len(first)]
    copy = pickle.loads(pickle.dumps(paged))
    assert copy.is_listing == paged.is_listing
    assert keys(copy) == keys(paged) == keys(whole)
    assert paged.listing_digest == whole.listing_digest
    assert set(paged.label_names) >= set(whole.label_names)
    assert not paged.is_listing


@pytest.mark.parametrize("pattern", ["**", "*.jpg", "**/*.jpg"])
def test_objects_that_stand_for_folders_are_no_files(monkeypatch: pytest.MonkeyPatch, pattern: str) -> None:
    """As S3's console makes them, and this server does not."""
    keys = [["a/", "a/1.jpg"], ["a/b/"], ["a/b/2.jpg"]]
    answers = [{"Contents": [{"Key": key} for key in page], "IsTruncated": page != keys[-1]} for page in keys]
    monkeypatch.setattr(S3Listing, "_answers", lambda *_: iter(answers))
    listing = S3Listing(Remote("s3://bucket/a"), "bucket/a/", pattern)
    found = ["1.jpg"] if pattern == "*.jpg" else ["1.jpg", "b/2.jpg"]
    pages = list(listing.after(""))
    assert [name for page in pages for name in page.names] == found
    assert [page.is_last for page in pages] == [False, False, True]
    assert listing.all() == found


@pytest.mark.e2e
@pytest.mark.parametrize("first_names", [7, None])
def test_an_object_whose_name_holds_wildcard_signs_is_meant_by_it_alone(
    server: S3Server, first_names: int | None
) -> None:
    options: Any = {"storage_options": server.storage_options, "first_names": first_names}
    assert keys(FileSource("s3://signs/[x].txt", **options)) == ["[x].txt"]
    assert keys(FileSource("s3://signs/what?.txt", **options)) == ["what?.txt"]
    assert keys(FileSource("s3://signs/a[1]/b*.txt", **options)) == ["b*.txt"]
    listed = [f"s3://signs/{name}" for name in ("x.txt", "[x].txt", "a[1]/b*.txt")]
    assert keys(FileSource(listed, **options)) == ["[x].txt", "a[1]/b*.txt", "x.txt"]
    assert keys(FileSource("s3://signs/[xy].txt", **options)) == ["x.txt"]


@pytest.mark.e2e
def test_every_url_of_a_list_must_find_files(server: S3Server) -> None:
    for typo in ("s3://paged/typo/*.jpg", "s3://paged/typo/"):
        with pytest.raises(SourceError, match=r"typo/.*: no files found"):
            FileSource(["s3://paged/a/*.jpg", typo], storage_options=server.storage_options)


@pytest.mark.e2e
def test_what_comes_after_the_first_names_is_left_to_be_listed(server: S3Server) -> None:
    options = server.storage_options
    visible = sum("/." not in f"/{name}" for name in NAMES)
    closed = FileSource("s3://paged", storage_options=options, first_names=visible)
    source = FileSource("s3://paged", storage_options=options, first_names=30, label=None)
    assert not closed.is_listing
    assert as_incremental(closed) is None
    assert as_incremental(source) is source
    assert is_source(source)
    assert source.num_units is None
    assert source.is_listing, "nothing of this has asked for the rest"
    assert f"{len(source.first_names)} files and more" in repr(source)
    rest = [name for page in source.more_names(source.first_names[-1]) for name in page.names]
    assert [*source.first_names, *rest] == [closed.key(unit) for unit in range(len(closed.first_names))]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("where", "names"),
    [
        # "x" lies deeper, "b" holds hidden files alone, and "notes" no image.
        ("s3://paged", ("a", "a-b", "b", "c", "notes")),
        ("s3://paged/**/*.jpg", ("a", "b", "c", "notes")),
        ("s3://paged/a*/*", ("a", "a-b")),
        ("s3://paged/a/*/*", ("x",)),
        ("s3://paged/a-b/", ()),
    ],
)
def test_labels_are_known_before_the_files_are_as_the_folders_beside_the_first_ones(
    server: S3Server, where: str, names: tuple[str, ...]
) -> None:
    source = FileSource(where, storage_options=server.storage_options, first_names=2)
    assert source.is_listing
    assert source.label_names == names


@pytest.mark.e2e
def test_the_first_batch_needs_one_page_and_one_request_for_the_labels(
    server: S3Server, s3_proxy: FaultyProxy
) -> None:
    s3_proxy.target_port = server.port
    s3_proxy.lists_allowed = 2
    source = open_source("s3://deeper", storage_options=server.options_through(s3_proxy.port))
    assert isinstance(source, FileSource)
    assert len(source.first_names) == PAGE_NAMES
    assert source.label_names == ("a", "b")
    assert as_incremental(source) is source
    assert s3_proxy.lists == 2


@pytest.mark.e2e
def test_images_in_a_deeper_folder_are_said_to_have_no_label(server: S3Server) -> None:
    source = FileSource("s3://deeper", storage_options=server.storage_options, first_names=100)
    assert source.label_names == ("a", "b")
    rest = [name for page in source.more_names(source.first_names[-1]) for name in page.names]
    worker = source.over(Names([*source.first_names, *rest]))
    unit = {worker.key(unit): unit for unit in range(len(worker.first_names))}
    with pytest.raises(SampleError, match=r"a/z/1\.jpg: has no label.*first_names=None"):
        next(worker.read(unit["a/z/1.jpg"], np.random.default_rng(0)))
    assert next(worker.read(unit["a/z/2.txt"], np.random.default_rng(0))) == ("a/z/2.txt", {"text": "x"})
    assert source.num_units is None
    assert units_of(source) == worker.num_units
    assert list(source.label_names) == ["a", "b", "z"], "all is listed here"


@pytest.mark.e2e
def test_what_is_wrong_is_said_at_once(server: S3Server) -> None:
    options = server.storage_options
    with pytest.raises(SourceError, match="no files found"):
        FileSource("s3://empty/", storage_options=options, first_names=5)
    with pytest.raises(SourceError, match=r"none of 88 files ends in \.png"):
        FileSource("s3://paged", storage_options=options, first_names=5, extensions="png")
    with pytest.raises(ConfigError, match="first_names=0"):
        FileSource("s3://paged", storage_options=options, first_names=0)
