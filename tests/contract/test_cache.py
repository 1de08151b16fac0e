"""The public class `Cache`: a bounded directory on a local disk that many processes open, with settings that it keeps."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import pickle
import shutil
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from safetensors import safe_open

import cachestream as cs
from tests.contract.conftest import NUM_SAMPLES, SHARD_SIZE, bytes_on_disk, numbered, numbers_in

WORDS: Final = [
    {"word": "é" * n, "raw": bytes(n), "ragged": np.arange(n % 3), "pixels": np.full((2, 1 + n % 2), n, "u1")}
    for n in range(5)
]


def shards_of(path: str | Path) -> list[Path]:
    return sorted(Path(path, "shards").iterdir())


def rows_of(cache: cs.Cache) -> list[Any]:
    """The rows of all shards that no epoch uses, as an eviction function gets them; nothing is evicted."""
    rows: list[Any] = []
    before = cache.eviction

    def look(given: Sequence[Any]) -> Sequence[Any]:
        rows.extend(given)
        return ()

    cache.eviction = look
    assert cache.evict(to=0) == 0
    cache.eviction = before
    return rows


# --- the settings


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        (4_000_000, 4_000_000),
        ("4MB", 4_000_000),
        ("4 MiB", 4 << 20),
        ("0.005GB", 5_000_000),
        (3e6, 3_000_000),
    ],
)
def test_a_limit_is_bytes_or_text_and_is_kept_in_the_cache(given: Any, limit: int, tmp_path: Path) -> None:
    with cs.Cache(tmp_path / "c", given, min_free="2MB", eviction="fifo") as cache:
        assert (cache.size_limit, cache.min_free, cache.eviction) == (limit, 2_000_000, "fifo")
    with cs.Cache(tmp_path / "c") as again:
        assert (again.size_limit, again.min_free, again.eviction) == (limit, 2_000_000, "fifo")
        assert json.loads(Path(again.path, "cache.json").read_text())["size_limit"] == limit


def test_a_new_cache_takes_80_percent_of_the_free_disk_leaves_1_gb_and_evicts_the_least_recently_used(
    tmp_path: Path,
) -> None:
    def free() -> int:
        return os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize

    before = free()
    with cs.Cache(tmp_path / "c") as cache:
        low, high = sorted((before, free()))
        assert 0.79 * low <= cache.size_limit <= 0.81 * high
        assert (cache.min_free, cache.eviction) == (1_000_000_000, "lru")


def test_settings_that_are_changed_hold_for_all_who_have_the_cache_open(tmp_path: Path) -> None:
    with cs.Cache(tmp_path / "c", "2MB", min_free=0) as one, cs.Cache(tmp_path / "c") as other:
        one.size_limit, one.min_free, one.eviction = "3MB", "5MB", "least-fresh"
        assert (other.size_limit, other.min_free, other.eviction) == (3_000_000, 5_000_000, "least-fresh")
        other.eviction = first = lambda rows: rows  # a function is of this object alone
        assert (one.eviction, other.eviction) == ("least-fresh", first)
        with cs.Cache(tmp_path / "c", 2_500_000) as third:
            settings = third.size_limit, third.min_free, third.eviction
        assert settings == (2_500_000, 5_000_000, "least-fresh")
        assert one.size_limit == 2_500_000


WRONG_SETTINGS: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "no size": ({"size_limit": "much"}, "size_limit='much'"),
    "no unit": ({"size_limit": "5 apples"}, "size_limit='5 apples'"),
    "negative": ({"size_limit": -1}, "size_limit=-1"),
    "a bool": ({"size_limit": True}, "size_limit=True"),
    "not a number": ({"size_limit": float("nan")}, "size_limit=nan"),
    "too small": ({"size_limit": "10KB"}, r"size_limit='10KB' is too small .* at least 1 MB"),
    "no reserve": ({"min_free": "much"}, "min_free='much'"),
    "no policy": ({"eviction": "oldest"}, "eviction='oldest': choose one of lru, fifo, least-fresh"),
    "a peer's name": ({"cache_limit": "5GB"}, "cache_limit.*size_limit"),
    "a slip": ({"size_limt": "5GB"}, "size_limt.*size_limit"),
}


@pytest.mark.parametrize("wrong", WRONG_SETTINGS)
def test_settings_that_cannot_be_are_refused_by_name_and_leave_no_cache(wrong: str, tmp_path: Path) -> None:
    options, message = WRONG_SETTINGS[wrong]
    with pytest.raises(cs.ConfigError, match=message):
        cs.Cache(tmp_path / "c", **options)
    assert not (tmp_path / "c").exists()


def test_settings_that_cannot_be_set_leave_the_old_ones(cache: cs.Cache) -> None:
    before = (cache.size_limit, cache.min_free, cache.eviction)
    for name, value in (("size_limit", "10KB"), ("min_free", -1), ("eviction", "oldest")):
        with pytest.raises(cs.ConfigError, match=name):
            setattr(cache, name, value)
    assert (cache.size_limit, cache.min_free, cache.eviction) == before


# --- the place

WRONG_PLACES: Final[dict[str, tuple[Callable[[Path], Any], str]]] = {
    "nothing": (lambda _: "", "is no local directory"),
    "none": (lambda _: None, "give a path, such as '/scratch/train'"),
    "a URL": (lambda _: "s3://bucket/cache", "s3://… is no local directory; give the cache one on a disk"),
    "a file": (lambda path: path / "file", "is a file; give a directory"),
    "below a file": (lambda path: path / "file" / "c", "cannot be created .*; choose another directory"),
    "another's folder": (lambda path: path / "theirs", r"holds other files \(thesis.tex\); give the cache"),
    "an open folder": (lambda path: path / "open", "may be written by everybody; run 'chmod o-w'"),
    "a shared folder": (lambda path: path / "shared", "a shared temporary directory; .* inside it"),
    "too long": (lambda path: path / "/".join(["x" * 200] * 3), "is too long a path"),
}


@pytest.mark.parametrize("place", WRONG_PLACES)
def test_a_place_where_a_cache_cannot_be_is_refused_and_left_as_it_is(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, mode in (("theirs", 0o755), ("open", 0o777), ("shared", 0o1777)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    (tmp_path / "theirs" / "thesis.tex").write_text("years")
    before = sorted(tmp_path.rglob("*"))
    make, message = WRONG_PLACES[place]
    with pytest.raises(cs.ConfigError, match=message):
        cs.Cache(make(tmp_path))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_path_may_be_new_empty_relative_a_link_at_home_or_odd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty" / "lost+found").mkdir(parents=True)  # as on a disk of its own
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "link").symlink_to(tmp_path / "deep" / "new")
    for given, path in {
        "deep/new": "deep/new",
        "link": "deep/new",
        "empty": "empty",
        "~/c": "home/c",
        "ä ?#%25&mode=ro\udcff": "ä ?#%25&mode=ro\udcff",
    }.items():
        with cs.Cache(given, "2MB") as cache:
            assert cache.path == str(tmp_path / path)
            assert (cache.num_samples, cache.schema, cache.fill_state()) == (0, None, "none")
    assert "~" not in os.listdir()


def test_what_a_cache_makes_is_its_users_alone(cache: cs.Cache) -> None:
    with cache.snapshot():
        for path in (Path(cache.path), *Path(cache.path).rglob("*")):
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_cache_that_a_newer_cachestream_made_is_refused_and_left_alone(
    new_path: Callable[[], Path],
) -> None:
    path = new_path()
    with sqlite3.connect(path / "catalogue.sqlite") as catalogue:
        catalogue.execute("PRAGMA user_version = 9999")
        catalogue.execute("CREATE TABLE of_that_version (x)")  # the number alone might be a flipped bit
    catalogue.close()
    before = (path / "catalogue.sqlite").read_bytes()
    with pytest.raises(cs.CacheVersionError, match="upgrade cachestream or use another directory"):
        cs.Cache(path)
    assert (path / "catalogue.sqlite").read_bytes() == before
    assert sum(map(len, map(numbers_in, shards_of(path)))) == NUM_SAMPLES


# A filesystem cannot be mounted here: what the kernel tells of mounts is replaced.
SHIM: Final = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
static const char *real_name(const char *path) {
    int is_table = strncmp(path, "/proc/", 6) == 0 && (strstr(path, "/mountinfo") || strstr(path, "/mounts"));
    return is_table ? getenv("FORGED_MOUNTS") : path;
}
#define REPLACE(name) int name(const char *path, int flags, ...) { \
    va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
    return ((int (*)(const char *, int, ...))dlsym(RTLD_NEXT, #name))(real_name(path), flags, mode); }
REPLACE(open)
REPLACE(open64)
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_a_network_filesystem_is_refused_with_the_reason_and_a_local_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "shim.c").write_text(SHIM)
    library = str(tmp_path / "shim.so")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, str(tmp_path / "shim.c"), "-ldl"], check=True)
    kinds = ["nfs4", "cifs", "lustre", "fuse.sshfs", "xfs", "fuse.fuse-overlayfs"]
    lines = ["22 27 0:21 / / rw - ext4 /dev/vda rw"]
    lines += [
        f"{n} 22 0:{n} / {tmp_path}/{kind}\\040disk rw shared:1 - {kind} x rw"
        for n, kind in enumerate(kinds, 30)
    ]
    (tmp_path / "mounts").write_text("\n".join(lines) + "\n")
    script = (
        "import sys, cachestream as cs\n"
        "for path in sys.argv[1:]:\n"
        "    try: cs.Cache(path, '2MB').close(); print('opened')\n"
        "    except cs.ConfigError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *(str(tmp_path / f"{kind} disk" / "c") for kind in kinds)],
        env={**os.environ, "LD_PRELOAD": library, "FORGED_MOUNTS": str(tmp_path / "mounts")},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    said = done.stdout.splitlines()
    for kind, line in zip(kinds[:4], said, strict=False):
        assert f"network filesystem ({kind})" in line
        assert "choose a directory on a local disk" in line
    assert said[4:] == ["opened", "opened"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes somebody else")
def test_somebody_elses_directory_is_refused_and_a_cache_without_write_access_is_for_looking(
    fast_path: Path, filled: Path
) -> None:
    (fast_path / "theirs").mkdir()
    shutil.copytree(filled, fast_path / "cache")
    for path in (fast_path, *fast_path.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    script = (
        "import os, sys, cachestream as cs\n"
        "cs.Cache, cs.ConfigError, cs.CacheError\n"
        "os.setgroups([]); os.setegid(65534); os.seteuid(65534)\n"
        "theirs, cache = sys.argv[1:]\n"
        "try: cs.Cache(theirs)\n"
        "except cs.ConfigError as error: print(error)\n"
        "cache = cs.Cache(cache)\n"
        "print(cache.num_samples, cache.status().num_shards > 1, cache.verify().ok)\n"
        "for write in (cache.clear, lambda: cache.evict(to=0), lambda: cs.Cache(cache.path, '3MB')):\n"
        "    try: write()\n"
        "    except cs.CacheError as error: print(type(error).__name__, 'cannot be written' in str(error))\n"
        "print(cache.num_samples)\n"
    )
    os.chown(fast_path / "theirs", 1234, 1234)
    done = subprocess.run(
        [sys.executable, "-c", script, str(fast_path / "theirs"), str(fast_path / "cache")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = done.stdout.splitlines()
    assert "belongs to another user (uid 1234)" in said[0], done.stderr
    assert said[1] == f"{NUM_SAMPLES} True True"
    assert said[2:] == ["CacheError True"] * 3 + [str(NUM_SAMPLES)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a cache to somebody else")
def test_root_looks_at_a_users_cache_and_changes_nothing_in_it(
    new_path: Callable[[], Path], tmp_path: Path
) -> None:
    path, empty = new_path(), tmp_path / "empty"
    empty.mkdir()
    for one in (empty, path, *path.rglob("*")):
        os.chown(one, 1234, 1234)
    before = sorted((file, file.stat().st_uid, file.stat().st_size) for file in path.rglob("*"))
    with cs.Cache(path) as cache:
        assert (cache.num_samples, cache.status().num_samples, cache.verify().ok) == (
            NUM_SAMPLES,
            NUM_SAMPLES,
            True,
        )
        changes: list[Callable[[], object]] = [
            cache.snapshot,
            cache.clear,
            lambda: cache.evict(to=0),
            lambda: cs.Cache(path, "3MB"),
            lambda: cache.verify(repair=True),
            lambda: cs.start_worker(cache, numbered(NUM_SAMPLES), num_workers=1),
        ]
        for change in changes:
            with pytest.raises(
                cs.CacheError, match=r"belongs to another user \(uid 1234\).*run as this user"
            ):
                change()
    assert sorted((file, file.stat().st_uid, file.stat().st_size) for file in path.rglob("*")) == before
    with pytest.raises(cs.ConfigError, match=r"belongs to another user \(uid 1234\); choose a directory"):
        cs.Cache(empty)
    assert not os.listdir(empty)


# --- what is there


def test_what_a_cache_says_of_itself_is_what_is_on_the_disk(cache: cs.Cache) -> None:
    shards = shards_of(cache.path)
    assert {shard.suffix for shard in shards} == {".safetensors"}
    assert cache.num_shards == len(shards) > 10
    assert cache.num_samples == sum(map(len, map(numbers_in, shards))) == NUM_SAMPLES
    assert cache.size_bytes == bytes_on_disk(Path(cache.path))
    assert str(cache.schema) == "{number: int64[], x: float32[1024]}"
    assert repr(cache).startswith(f"<Cache {cache.path}: {NUM_SAMPLES} samples in {len(shards)} shards, ")
    assert (cache.fill_state(), cache.has_worker()) == ("complete", False)
    theirs = Path(cache.path, "theirs", "deep")
    theirs.mkdir(parents=True)
    (theirs / "file").write_bytes(bytes(100_000))
    (theirs / "link").symlink_to("/usr")
    assert cache.size_bytes == bytes_on_disk(Path(cache.path))


def test_anyone_can_open_a_shard_with_safetensors(tmp_path: Path) -> None:
    with cs.Cache(tmp_path / "c", "4MB", min_free=0) as cache:
        with cs.start_worker(cache, WORDS, num_workers=1, order="sequential") as worker:
            worker.wait(timeout_s=120)
        with safe_open(shards_of(cache.path)[0], "np") as file:
            columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dict
            about = file.metadata()
    assert (about["format"], about["num_samples"]) == ("cachestream", "5")
    assert json.loads(about["xxh3"]).keys() == columns.keys()
    for name in ("word", "raw"):
        offsets = columns[f"{name}#offsets"]
        values = [bytes(columns[name][a:b]) for a, b in itertools.pairwise(offsets)]
        texts: list[Any] = [sample[name] for sample in WORDS]
        assert values == [text.encode() if isinstance(text, str) else text for text in texts]
    for name in ("ragged", "pixels"):
        offsets, shapes = columns[f"{name}#offsets"], columns[f"{name}#shapes"]
        for n, sample in enumerate(WORDS):
            value = columns[name][offsets[n] : offsets[n + 1]].reshape(shapes[n])
            np.testing.assert_array_equal(value, sample[name])
    offsets = columns["__key__#offsets"]
    keys = [bytes(columns["__key__"][a:b]) for a, b in itertools.pairwise(offsets)]
    assert keys == [b"0", b"1", b"2", b"3", b"4"]


def test_waiting_ends_with_the_number_of_samples_or_says_what_is_missing(
    cache: cs.Cache, tmp_path: Path
) -> None:
    assert cache.wait(0) == cache.wait() == cache.wait(NUM_SAMPLES, timeout_s=1) == NUM_SAMPLES
    assert cache.wait(np.int64(7), np.float32(0)) == NUM_SAMPLES  # type: ignore[arg-type]
    for timeout_s in (None, 1000):
        with pytest.raises(cs.NotEnoughSamplesError, match=r"holds 300 samples, 301 are needed.*'complete'"):
            cache.wait(NUM_SAMPLES + 1, timeout_s)
    with cs.Cache(tmp_path / "empty", "2MB") as empty:
        with pytest.raises(TimeoutError, match=r"after 0.01 s it is 'none': start a worker"):
            empty.wait(1, timeout_s=0.01)
        assert empty.wait(0) == 0
    wrongs: list[tuple[str, dict[str, Any]]] = [
        ("min_samples", {"min_samples": "5"}),
        ("min_samples", {"min_samples": -1}),
        ("timeout_s", {"timeout_s": "soon"}),
    ]
    for name, options in wrongs:
        with pytest.raises(cs.ConfigError, match=f"^{name}="):
            cache.wait(**options)


def test_a_snapshot_is_a_dataset_of_all_or_of_the_least_used_shards(cache: cs.Cache) -> None:
    with cache.snapshot() as dataset:
        assert isinstance(dataset, cs.EpochDataset)
        assert sorted(dataset[:]["number"].tolist()) == list(range(NUM_SAMPLES))
    with cache.snapshot(100) as first, cache.snapshot(100) as second:
        seen = [set(one[:]["number"].tolist()) for one in (first, second)]
        assert not seen[0] & seen[1]
        assert all(100 <= len(one) < 100 + 16 for one in seen)
    for wrong, options in (("epoch_size", {"epoch_size": 0}), ("turnover", {"turnover": 1})):
        with pytest.raises(cs.ConfigError, match=f"^{wrong}="):
            cache.snapshot(**options)  # type: ignore[arg-type]


# --- eviction


@pytest.fixture(scope="module")
def used(filled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache whose shards differ in their uses and in the time of their last use, and not as in their age."""
    path = tmp_path_factory.mktemp("used") / "cache"
    shutil.copytree(filled, path)
    with cs.Cache(path) as cache:
        cache.snapshot(240).close()
        state: dict[str, Any] | None = None
        for _ in range(
            3
        ):  # the newest shards, again and again; and older ones, for the epochs that would follow
            with cs.EpochLoader(cache, 10, epoch_size=60) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                next(iter(loader))
                state = state or loader.state_dict()
    return path


POLICIES: Final[dict[str, Callable[[Any], Any]]] = {
    "lru": attrgetter("last_used"),
    "fifo": attrgetter("id"),
    "least-fresh": lambda row: -row.uses,
    "none": attrgetter("last_used"),  # filling does not evict, `evict` was asked for
}


def evicted_by(policy: Any, used: Path, tmp_path: Path) -> tuple[list[Any], list[Any]]:
    """The rows of a copy of `used` that go when a third of the bytes must, and those that stay."""
    shutil.copytree(used, tmp_path / "copy")
    with cs.Cache(tmp_path / "copy") as cache:
        before, size, to = rows_of(cache), cache.size_bytes, cache.size_bytes * 2 // 3
        cache.eviction = policy
        freed = cache.evict(to=to)
        left = {row.id for row in rows_of(cache)}
        gone = [row for row in before if row.id not in left]
        assert freed == sum(row.size_bytes for row in gone) == size - cache.size_bytes
        assert cache.size_bytes <= to < cache.size_bytes + 2 * max(row.size_bytes for row in gone)
        status = cache.status()
        assert (status.evicted_shards, status.evicted_samples) == (
            len(gone),
            sum(r.num_samples for r in gone),
        )
        assert status.evicted_unused_samples == 0
        assert len(shards_of(cache.path)) == len(left) == cache.num_shards
    return gone, [row for row in before if row.id in left]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_evicts_first_what_it_says_and_no_more_than_is_needed(
    policy: str, used: Path, tmp_path: Path
) -> None:
    value = POLICIES[policy]
    gone, left = evicted_by(policy, used, tmp_path)
    assert max(map(value, gone)) <= min(map(value, left))
    others = [other for name, other in POLICIES.items() if other is not value and name != "none"]
    if policy != "none":
        assert all(max(map(other, gone)) > min(map(other, left)) for other in others), (
            "these rows tell nothing"
        )


@pytest.mark.parametrize("answers", ["rows", "ids"])
def test_a_function_evicts_what_it_chooses_by_frozen_rows_in_its_order(
    answers: str, used: Path, tmp_path: Path
) -> None:
    def newest_first(rows: Any) -> Any:
        with pytest.raises(AttributeError):
            rows[0].uses = 0
        chosen = sorted(rows, key=attrgetter("id"), reverse=True)
        return chosen if answers == "rows" else [row.id for row in chosen]

    gone, left = evicted_by(newest_first, used, tmp_path)
    assert min(row.id for row in gone) > max(row.id for row in left)
    sizes = {int(shard.stem): shard.stat().st_blocks * 512 for shard in shards_of(used)}
    for row in (*gone, *left):
        assert row.num_samples == len(numbers_in(used / "shards" / f"{row.id:012d}.safetensors"))
        assert row.size_bytes >= sizes[row.id]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda _: [10**6], "unknown or repeated shards"),
        (lambda rows: [rows[0], rows[0]], "unknown or repeated shards"),
        (lambda _: None, "returned a NoneType.*return some of the rows it gets, or their ids"),
        (lambda _: 1 // 0, "the eviction function failed: ZeroDivisionError"),
    ],
)
def test_a_function_that_answers_wrongly_is_refused_and_nothing_goes(
    answer: Callable[[Any], Any], message: str, cache: cs.Cache
) -> None:
    cache.eviction = answer
    with pytest.raises(cs.ConfigError, match=message):
        cache.evict(to=0)
    assert cache.num_samples == NUM_SAMPLES


def test_the_weights_of_a_loader_decide_which_shards_go_under_least_weight(
    new_path: Callable[[], Path],
) -> None:
    with cs.Cache(new_path(), eviction="least-weight") as cache:
        heavy = {number for shard in shards_of(cache.path)[:5] for number in numbers_in(shard)}
        weights = {str(number): 9.0 if number in heavy else 1.0 for number in range(NUM_SAMPLES)}
        with cs.EpochLoader(cache, 50, weights=weights, drop_last=False) as loader:
            list(loader)
            list(loader)
        cache.evict(to=cache.size_bytes // 2)
        left = {number for shard in shards_of(cache.path) for number in numbers_in(shard)}
    assert heavy < left
    assert len(left) < NUM_SAMPLES


def test_a_full_cache_stops_under_none_and_is_turned_over_by_a_function_of_the_user(tmp_path: Path) -> None:
    def endless(rng: np.random.Generator) -> dict[str, Any]:
        return {"x": rng.random(4096, np.float32)}

    with cs.Cache(tmp_path / "c", "2MB", min_free=0, eviction="none") as cache:
        options: dict[str, Any] = {"num_workers": 1, "shard_size": "200KB"}
        with cs.start_worker(cache, endless, **options) as worker:
            worker.wait(timeout_s=120)
            assert (worker.status().fill_state, worker.status().evicted_shards) == ("full", 0)
        oldest = shards_of(cache.path)[0].name
        cache.eviction = lambda rows: sorted(rows, key=attrgetter("id"), reverse=True)
        assert cache.evict(to=cache.size_bytes // 2) > 0
        assert shards_of(cache.path)[0].name == oldest  # which every other policy had taken first
        before = cache.status().evicted_shards
        with cs.start_worker(cache, endless, **options), cs.EpochLoader(cache, 8, turnover=0.5) as loader:
            while cache.status().evicted_shards == before:
                assert list(loader)


def test_a_worker_ends_at_once_though_the_function_that_chooses_what_to_evict_blocks(tmp_path: Path) -> None:
    asked, trainer = tmp_path / "asked", os.getpid()

    def blocks(rows: Sequence[Any]) -> Sequence[Any]:
        if os.getpid() != trainer:
            asked.touch()
            time.sleep(600)
        return rows

    def endless(rng: np.random.Generator) -> dict[str, Any]:
        return {"x": rng.random(4096, np.float32)}

    with (
        cs.Cache(tmp_path / "c", "2MB", min_free=0, eviction=blocks) as cache,
        cs.start_worker(cache, endless, num_workers=1, shard_size="200KB") as worker,
    ):
        cache.wait(8, timeout_s=120)
        deadline_s = time.monotonic() + 120
        while not asked.exists() and time.monotonic() < deadline_s:
            cache.snapshot().close()  # samples that were used may go
            time.sleep(0.05)
        assert asked.exists()
        worker.stop()
        assert not cache.has_worker()


def test_evicting_without_a_size_means_the_limit(new_path: Callable[[], Path]) -> None:
    with cs.Cache(new_path()) as cache:
        assert cache.evict() == 0
        cache.size_limit = 1_000_000
        assert cache.size_bytes <= 1_000_000
        assert 0 < cache.num_samples < NUM_SAMPLES
        for wrong in ("much", -1):
            with pytest.raises(cs.ConfigError, match=r"^to="):
                cache.evict(to=wrong)


# --- clearing and verifying


def test_a_cleared_cache_keeps_its_settings_and_takes_another_source(cache: cs.Cache) -> None:
    cache.size_limit, cache.eviction = "5MB", "fifo"
    with cache.snapshot(20) as held:
        with pytest.raises(cs.CacheError, match=r"leased by epochs in use; close them"):
            cache.clear()
        assert len(held) == cache.num_samples  # all others are gone
    cache.clear()
    assert (cache.num_samples, cache.num_shards, cache.schema, cache.fill_state()) == (0, 0, None, "none")
    assert (cache.size_limit, cache.eviction, shards_of(cache.path)) == (5_000_000, "fifo", [])
    with cs.start_worker(cache, WORDS, num_workers=1) as worker:
        worker.wait(timeout_s=120)
        with pytest.raises(cs.CacheError, match=r"a worker is filling .*; stop it first"):
            cache.clear()
    assert cache.num_samples == len(WORDS)


def flip(shard: Path, place: float) -> None:
    content = bytearray(shard.read_bytes())
    content[int(place * (len(content) - 1))] ^= 16
    shard.write_bytes(content)


DAMAGES: Final[dict[str, Callable[[Path], object]]] = {
    "a bit of the header": lambda shard: flip(shard, 0.003),
    "a bit of the data": lambda shard: flip(shard, 0.5),
    "the last bit": lambda shard: flip(shard, 1.0),
    "the end": lambda shard: os.truncate(shard, shard.stat().st_size - 1),
    "all of it": lambda shard: os.truncate(shard, 0),
    "the file": os.remove,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_put_aside_and_fetched_again(damage: str, cache: cs.Cache) -> None:
    shard, stranger = shards_of(cache.path)[4], Path(cache.path, "shards", "000000009999.safetensors")
    lost = numbers_in(shard)
    calls: list[tuple[int, int]] = []
    assert cache.verify(on_progress=lambda done, total: calls.append((done, total))).ok
    assert calls[-1][1] == cache.num_shards
    DAMAGES[damage](shard)
    stranger.write_bytes(b"?" * 5000)
    report = cache.verify()
    assert not report
    assert (report.ok, report.repaired, report.num_shards) == (False, False, cache.num_shards)
    assert [str(shard) in line for line in report.corrupt] == [True] * (damage != "the file")
    assert report.missing == (() if damage != "the file" else (int(shard.stem),))
    assert report.orphans == (str(stranger),)
    assert "run 'cachestream verify CACHE --repair'" in str(report)
    assert cache.num_samples == NUM_SAMPLES, "nothing is repaired unasked"

    assert cache.verify(repair=True).repaired
    assert not stranger.exists()
    assert cache.verify().ok
    assert cache.num_samples == NUM_SAMPLES - len(lost)
    assert cache.status().quarantined == (damage != "the file")
    assert cache.size_bytes == bytes_on_disk(Path(cache.path))


def test_samples_that_were_put_aside_or_lost_are_fetched_again_each_once(cache: cs.Cache) -> None:
    shards = shards_of(cache.path)
    flip(shards[2], 0.5)
    shards[7].unlink()
    cache.verify(repair=True)
    with cs.start_worker(cache, numbered(NUM_SAMPLES), num_workers=1, shard_size=SHARD_SIZE) as worker:
        worker.wait(timeout_s=120)
    with cache.snapshot() as dataset:
        assert sorted(dataset[:]["number"].tolist()) == list(range(NUM_SAMPLES))


def test_a_lost_catalogue_is_made_again_from_the_shards_and_the_settings(cache: cs.Cache) -> None:
    cache.size_limit, cache.min_free, cache.eviction = "6MB", 12_345, "fifo"
    path, schema = cache.path, cache.schema
    cache.close()
    for file in Path(path).glob("catalogue.sqlite*"):
        file.unlink()
    with cs.Cache(path) as again:
        assert (again.size_limit, again.min_free, again.eviction) == (6_000_000, 12_345, "fifo")
        assert (again.num_samples, again.schema) == (NUM_SAMPLES, schema)
        assert again.verify().ok
        with cs.start_worker(again, numbered(NUM_SAMPLES), num_workers=1) as worker:
            worker.wait(timeout_s=120)
        assert again.num_samples == NUM_SAMPLES, "what is cached is not fetched again"


# --- one cache in many hands


def test_a_closed_cache_opens_again_when_it_is_used_and_travels_by_pickle(cache: cs.Cache) -> None:
    with cache:
        assert cache.num_samples == NUM_SAMPLES
    assert cache.num_samples == NUM_SAMPLES
    with pickle.loads(pickle.dumps(cache)) as copy:
        assert (copy.path, copy.num_samples, copy.size_limit) == (cache.path, NUM_SAMPLES, cache.size_limit)
        copy.evict(to=0)
    assert cache.num_samples == 0


def use_at_once(path: Path, first: Path, number: int, said: Connection) -> None:
    """Open the cache at `path` in this process and use it, and open the one at `first`, which is not there yet."""
    with cs.Cache(path, "4MB", min_free=0) as cache, cs.Cache(first, "2MB") as new:
        for _ in range(5):
            with cache.snapshot(100) as dataset:
                assert cache.evict() == 0
                assert len({int(dataset[i]["number"]) for i in range(0, 100, 9)}) == 12
        cache.size_limit = 3_000_000 + number
        said.send((new.status().cache_id, cache.num_samples))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # Python 3.12 warns where threads run
def test_many_processes_open_use_and_make_one_cache_at_once(
    new_path: Callable[[], Path], tmp_path: Path
) -> None:
    path, context = new_path(), multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(4)]
    users = [
        context.Process(target=use_at_once, args=(path, tmp_path / "first", number, writing))
        for number, (_, writing) in enumerate(pipes)
    ]
    for user in users:
        user.start()
    for user in users:
        user.join(120)
        assert user.exitcode == 0
        user.close()
    said = {reading.recv() for reading, _ in pipes}
    for pipe in (*itertools.chain(*pipes),):
        pipe.close()
    with cs.Cache(path) as cache, cs.Cache(tmp_path / "first") as first:
        assert said == {(first.status().cache_id, NUM_SAMPLES)}
        assert cache.size_limit in range(3_000_000, 3_000_004)
        assert json.loads((path / "cache.json").read_text())["size_limit"] == cache.size_limit
        status = cache.status()
        assert (status.snapshots, status.leases) == (20, 0)
        assert cache.verify().ok


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # Python 3.12 warns where threads run
def test_a_cache_is_usable_after_a_fork_and_the_end_of_a_child_takes_no_lease(cache: cs.Cache) -> None:
    context = multiprocessing.get_context("fork")
    reading, writing = context.Pipe(duplex=False)
    with cache.snapshot() as dataset:
        child = context.Process(target=lambda: writing.send((cache.num_samples, cache.status().leases)))
        child.start()
        child.join(120)
        assert reading.recv() == (NUM_SAMPLES, 1)
        assert cache.evict(to=0) == 0
        assert cache.status().leases == 1
        assert sorted(dataset[:]["number"].tolist()) == list(range(NUM_SAMPLES))
    for one in (reading, writing, child):
        one.close()
