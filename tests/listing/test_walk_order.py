"""Trees of files in the order of their paths: pure, on trees made up by Hypothesis, and on local folders."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestream.formats.files import FileSource
from cachestream.listing.pages import MOST_FOLLOWING, Folder, LocalFolders, Walk, in_order
from cachestream.transport.remote import Remote
from tests.sources.reading import keys

NAME = st.text(st.sampled_from("a-./0é\udcff\U0001f600".replace("/", "")), min_size=1, max_size=3)
PATHS = st.sets(st.lists(NAME, min_size=1, max_size=4).map("/".join), max_size=25)


class Tree:
    """Files by their paths, where a file and a folder may have one name, as in object stores."""

    def __init__(self, paths: set[str]) -> None:
        self.paths = paths
        self.asked: list[str] = []
        self.told: list[list[str]] = []

    def __call__(self, folder: str, following: Sequence[str]) -> Folder:
        self.asked.append(folder)
        self.told.append(list(following))
        below = [path[len(folder) :] for path in self.paths if path.startswith(folder)]
        inner = {path.partition("/")[0] for path in below if "/" in path}
        return Folder([path for path in below if "/" not in path], list(inner))


@given(PATHS)
def test_all_paths_come_in_the_order_of_sorted_ones(paths: set[str]) -> None:
    runs = list(in_order(Tree(paths)))
    assert [path for run, _ in runs for path in run] == sorted(paths)
    assert all(run for run, _ in runs)
    assert [is_last for _, is_last in runs] == [False] * (len(runs) - 1) + [True] * bool(runs)


@pytest.mark.e2e
@given(PATHS, st.lists(NAME, min_size=1, max_size=4).map("/".join))
def test_what_comes_after_a_path_comes_alone_and_no_folder_before_it_is_asked_for(
    paths: set[str], anywhere: str
) -> None:
    for last in [*paths, anywhere]:
        tree = Tree(paths)
        assert [path for run, _ in in_order(tree, last) for path in run] == sorted(
            path for path in paths if path > last
        )
        for folder in tree.asked:
            assert folder > last or last.startswith(folder), "all of it lies before"


@pytest.mark.e2e
@given(PATHS)
def test_the_folders_that_are_said_to_follow_are_asked_for_next_but_for_those_inside_of_them(
    paths: set[str],
) -> None:
    tree = Tree(paths)
    for _ in in_order(tree):
        pass
    for position, (folder, told) in enumerate(zip(tree.asked, tree.told, strict=True)):
        assert len(told) <= MOST_FOLLOWING
        outside = [one for one in tree.asked[position + 1 :] if not folder or not one.startswith(folder)]
        known = [one for one in outside if one in told]
        assert known == told


def make(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def test_a_local_tree_by_folders_is_the_one_at_once(tmp_path: Path) -> None:
    make(tmp_path, "b/2.jpg", "b/1.jpg", "b.txt", "b-/x.jpg", "a/deep/er/z.bin", "a/.hid/x", ".top/x", "c/.x")
    make(tmp_path, os.fsdecode(b"a/\xff\xfe.bin"), "a/größe/ü.npy", "ab/0.jpg")
    (tmp_path / "empty").mkdir()
    whole = FileSource(tmp_path, first_names=None, extensions="*")
    for first_names in (1, 3, 6, 9, "auto"):
        source = FileSource(tmp_path, first_names=first_names, extensions="*")
        assert source.is_listing == (isinstance(first_names, int) and first_names < 9)
        first = list(source.first_names)
        assert first == list(whole.first_names)[: len(first)]
        assert set(source.label_names) >= set(whole.label_names)
        assert keys(source) == keys(whole)
        assert source.listing_digest == whole.listing_digest
        assert source.fingerprint == whole.fingerprint


def test_links_lead_to_each_folder_by_one_path_whatever_they_lead_to(tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    make(root, "a/1.bin", "a/deep/2.bin", ".store/v1/3.bin")
    make(other, "4.bin", "inner/5.bin")
    (root / "0-alias").symlink_to(root / "a")  # "a" comes by itself
    (root / "a/deep/up").symlink_to(root)
    (root / "current").symlink_to(root / ".store/v1")
    (root / ".store/v1/again").symlink_to(root / ".store/v1")
    (root / "linked").symlink_to(other)
    (other / "inner/back").symlink_to(other)
    (other / "inner/to-root").symlink_to(root)
    (other / "above").symlink_to(tmp_path)
    (root / "dangling").symlink_to(tmp_path / "nowhere")
    (root / "file-link.bin").symlink_to(root / "a/1.bin")
    found = [
        "a/1.bin",
        "a/deep/2.bin",
        "current/3.bin",
        "file-link.bin",
        "linked/4.bin",
        "linked/inner/5.bin",
    ]
    assert keys(FileSource(root, first_names=None)) == found
    for last in ["", *found]:
        pages = Walk(Remote(str(root)), f"{root}/").after(last)
        assert [name for page in pages for name in page.names] == [path for path in found if path > last]


def test_a_wildcard_follows_links_that_stay_in_the_tree_but_in_no_circle(tmp_path: Path) -> None:
    make(tmp_path, "set/v2/1.bin")
    (tmp_path / "set/latest").symlink_to(tmp_path / "set/v2")
    (tmp_path / "set/up").symlink_to(tmp_path)
    assert keys(FileSource(f"{tmp_path}/*/latest/*.bin")) == ["set/latest/1.bin"]
    assert keys(FileSource(f"{tmp_path}/**/*.bin")) == ["set/latest/1.bin", "set/v2/1.bin"]


def test_two_links_that_lead_to_each_other_are_no_circle_without_end(tmp_path: Path) -> None:
    make(tmp_path, "root/1.bin", "x/2.bin", "y/3.bin")
    (tmp_path / "root/to-x").symlink_to(tmp_path / "x")
    (tmp_path / "x/to-y").symlink_to(tmp_path / "y")
    (tmp_path / "y/to-x").symlink_to(tmp_path / "x")
    assert keys(FileSource(tmp_path / "root")) == ["1.bin", "to-x/2.bin", "to-x/to-y/3.bin"]


@pytest.mark.parametrize(
    "target", ["nowhere", "1.bin/", "odd.bin"], ids=["missing", "through a file", "itself"]
)
def test_a_link_that_leads_nowhere_is_left_out_and_nothing_else_is(tmp_path: Path, target: str) -> None:
    make(tmp_path, "a/1.bin", "a/b/2.bin", "c/3.bin")
    os.symlink(target, tmp_path / "a" / "odd.bin")
    for first_names in (1, None):
        assert keys(FileSource(tmp_path, first_names=first_names)) == ["a/1.bin", "a/b/2.bin", "c/3.bin"]


def test_a_folder_tells_what_it_holds_or_that_it_is_gone(tmp_path: Path) -> None:
    make(tmp_path, "f/1.bin", "f/inner/2.bin")
    folders = LocalFolders(f"{tmp_path}/")
    assert folders("f/") == Folder(["1.bin"], ["inner"])
    assert not folders("gone/").is_there


def test_a_folder_that_is_gone_when_its_turn_comes_is_left_out(tmp_path: Path) -> None:
    make(tmp_path, "a/1.bin", "b/2.bin", "c/3.bin")
    runs = in_order(LocalFolders(f"{tmp_path}/"))
    assert next(runs) == (["a/1.bin"], False)
    (tmp_path / "b/2.bin").unlink()
    (tmp_path / "b").rmdir()
    assert list(runs) == [(["c/3.bin"], True)]


@pytest.mark.parametrize("first_names", [0, -1, "all", 2.5])
def test_a_number_of_first_names_that_is_none_is_refused(tmp_path: Path, first_names: object) -> None:
    make(tmp_path, "a.bin")
    with pytest.raises(ValueError, match="first_names"):
        FileSource(tmp_path, first_names=first_names)  # type: ignore[arg-type]
