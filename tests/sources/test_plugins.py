"""Other packages add formats and decoders through entry points, and are named where they are wrong."""

from __future__ import annotations

import functools
import io
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import cachestream as cs
from cachestream.testing.checks import cached_keys
from tests.support.plugins import forget_plugins, lay_package, lay_site

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """A function that installs a package `name` with these entry points for this test."""
    site = lay_site(tmp_path / "site")
    monkeypatch.syspath_prepend(str(site))
    yield functools.partial(lay_package, site)
    forget_plugins()


PAIRS = {"pairs": "pairs_plugin:PairSource", ".pair": "pairs_plugin:PairSource"}


def test_a_format_is_found_by_name_by_ending_and_in_a_folder(install: Install, tmp_path: Path) -> None:
    install("pairs", sources=PAIRS)
    (tmp_path / "data").mkdir()
    for name in ("a.pair", "b.PAIR"):
        (tmp_path / "data" / name).write_bytes(b"1")
    for what, options in (
        ("anything", {"format": "pairs"}),
        ("s3://bucket/a.pair", {}),
        ([tmp_path / "data" / "a.pair"], {}),
        (tmp_path / "data", {}),
    ):
        source = cs.open_source(what, times=3, **options)
        assert type(source).__name__ == "PairSource"
        assert next(iter(source.read(1, np.random.default_rng())))[1]["x"].tolist() == [3, 3]


def test_built_in_formats_win(install: Install, tmp_path: Path) -> None:
    install("pairs", sources={"files": "nowhere:x", ".txt": "nowhere:x", ".npy": "nowhere:x"})
    (tmp_path / "a.txt").write_text("one")
    np.save(tmp_path / "b.npy", np.zeros(2))
    for source in (cs.open_source(tmp_path / "a.txt"), cs.open_source(tmp_path / "b.npy", format="files")):
        assert isinstance(source, cs.FileSource)


def test_an_option_that_the_source_has_not_is_refused(install: Install) -> None:
    install("pairs", sources=PAIRS)
    with pytest.raises(cs.ConfigError, match=r"'tiems'.*times"):
        cs.open_source("a.pair", tiems=3)


def test_a_function_may_take_any_options(install: Install) -> None:
    install("pairs", sources={".pair": "pairs_plugin:open_pairs"})
    source = cs.open_source("a.pair", times=3)
    assert next(iter(source.read(1, np.random.default_rng())))[1]["x"].tolist() == [3, 3]


def test_an_unknown_format_is_refused_with_the_names_of_all(install: Install) -> None:
    install("pairs", sources=PAIRS)
    with pytest.raises(cs.ConfigError, match=r"format='pears'.*'tar'.*'pairs'.*, or install the package"):
        cs.open_source("a", format="pears")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "nowhere:x",
            r"pairs 1\.2: its plug-in 'pairs' .*nowhere:x.* cannot be imported: ModuleNotFoundError",
        ),
        ("pairs_plugin:missing", r"pairs 1\.2: .*cannot be imported: AttributeError"),
        ("pairs_plugin:number", r"pairs 1\.2: .*is a int, which cannot be called"),
    ],
)
def test_a_broken_plug_in_is_named_with_its_package(install: Install, value: str, message: str) -> None:
    install("pairs", sources={"pairs": value})
    with pytest.raises(cs.ConfigError, match=message):
        cs.open_source("a", format="pairs")


def test_two_packages_with_one_name_are_refused(install: Install) -> None:
    install("pairs", sources=PAIRS)
    install("more-pairs", sources=PAIRS)
    with pytest.raises(cs.ConfigError, match=r"several packages .*more-pairs 1\.2.*uninstall all but one"):
        cs.open_source("a.pair")


@pytest.mark.e2e
def test_a_decoder_reads_files_and_members_of_tars_in_the_worker_s_processes(
    install: Install, tmp_path: Path
) -> None:
    install("pairs", decoders={".dbl": "pairs_plugin:decode", ".half": "pairs_plugin:halves"})
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.dbl").write_bytes(b"\x01\x02")
    with tarfile.open(tmp_path / "b.tar", "w") as archive:
        for name, data in (("s.dbl", b"\x03"), ("s.half", b"lr")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    ((_, sample),) = cs.open_source(tmp_path / "files").read(0, np.random.default_rng())
    assert sample["data"].tolist() == [2, 4]
    tar = cs.open_source(tmp_path / "b.tar")
    ((_, sample),) = tar.read(0, np.random.default_rng())
    assert sample["dbl"].tolist() == [6]
    assert (sample["half.left"], sample["half.right"]) == (b"l", b"r")
    with cs.Cache(tmp_path / "cache", "10MB", min_free=0) as cache:
        with cs.start_worker(cache, tar, num_workers=1) as worker:
            assert worker.wait(timeout_s=60)
        assert {"dbl", "half.left", "half.right"} <= cache.snapshot()[0].keys()
        assert len(list(cached_keys(cache))) == 1


def test_what_a_decoder_raises_is_a_problem_of_its_file(install: Install, tmp_path: Path) -> None:
    install("pairs", decoders={".dbl": "pairs_plugin:damaged"})
    (tmp_path / "a.dbl").write_bytes(b"1")
    with pytest.raises(cs.SampleError, match=r"a\.dbl: the plug-in for \.dbl raised ValueError: no header"):
        list(cs.open_source(tmp_path / "a.dbl").read(0, np.random.default_rng()))


def test_a_decoder_that_cannot_be_imported_stops_the_worker(install: Install, tmp_path: Path) -> None:
    install("pairs", decoders={".dbl": "nowhere:x"})
    (tmp_path / "a.dbl").write_bytes(b"1")
    with pytest.raises(cs.ConfigError, match=r"pairs 1\.2: .*'\.dbl'.* cannot be imported"):
        list(cs.open_source(tmp_path / "a.dbl").read(0, np.random.default_rng()))


@pytest.mark.e2e
def test_plug_ins_are_not_looked_for_where_built_in_formats_serve(tmp_path: Path) -> None:
    script = f"""
import numpy as np
def fail(**_): raise SystemExit("entry points were searched")
import cachestream as cs
import cachestream.sources.registry as plugins
plugins.entry_points = fail
from pathlib import Path
folder = Path({str(tmp_path)!r})
np.save(folder / "a.npy", np.zeros(2)); (folder / "b.txt").write_text("x")
for name in ("a.npy", "b.txt", "", "missing.tar"):
    try: list(cs.open_source(folder / name).read(0, np.random.default_rng()))
    except cs.SourceError: pass
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
