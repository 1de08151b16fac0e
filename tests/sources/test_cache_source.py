"""CacheSource over caches that real workers have filled: the second cache holds what the first one does."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

import cachestream as cs
from cachestream.schema import STORAGE
from cachestream.sources.base import Rows
from cachestream.testing.checks import check_source
from tests.sources.reading import read
from tests.support.caches import add_shard, fill, numbered
from tests.support.ftp import run_sftp_server
from tests.support.same import same

RNG: Final = np.random.default_rng(0)
COUNT: Final = 40
_opened: Final[list[cs.Cache]] = []


@pytest.fixture(autouse=True)
def closed_caches() -> Iterator[None]:
    """Close the caches that a test has opened."""
    yield
    while _opened:
        _opened.pop().close()


def fixed(i: int) -> dict[str, Any]:
    """A field of every dtype, in one dimension and as a number, an empty one, and str and bytes."""
    sample: dict[str, Any] = {
        "text": f"é{i}" * (i % 3),
        "raw": bytes([i]) * (i % 5),
        "none": torch.zeros(0, 3),
    }
    for name in STORAGE:
        dtype = getattr(torch, name)
        values = [i % 2, 1] if name == "bool" else [i, 100 - i]
        sample[name] = torch.tensor(values).to(dtype)
        sample[f"{name}-number"] = torch.tensor(values[0]).to(dtype)
    return sample


def ragged(i: int) -> dict[str, Any]:
    """A field of every dtype whose shape varies, beside one of one shape, and str."""
    fields = {name: torch.full((2, i % 4), i % 2, dtype=getattr(torch, name)) for name in STORAGE}
    return {**fields, "text": f"text {i}", "label": i}


SAMPLES: Final[dict[str, Callable[[int], Any]]] = {
    "fixed": fixed,
    "ragged": ragged,
    "tuple": lambda i: (torch.full((3,), i, dtype=torch.bfloat16), f"text {i}", i, *range(8)),
    "bare": lambda i: np.full(i % 3, i, np.int16),
}


def filled(path: Path, source: Any, **options: Any) -> cs.Cache:
    """A cache that a worker has filled with all of `source`."""
    cache = cs.Cache(path, "100MB", min_free=0)
    _opened.append(cache)
    with cs.start_worker(cache, source, **{"num_workers": 1, **options}) as worker:
        assert worker.wait(timeout_s=120)
    return cache


def contents(cache: cs.Cache) -> dict[str, Any]:
    """The samples of a cache by their keys, each of which comes once."""
    with cache.snapshot(turnover=0) as dataset:
        keys = dataset.keys()
        assert len({*keys}) == len(keys)
        return dict(sorted(zip(keys, (dataset[i] for i in range(len(dataset))), strict=True)))


@pytest.fixture
def original(tmp_path: Path) -> cs.Cache:
    """A cache of four shards with five samples each."""
    _opened.append(cache := fill(tmp_path / "original", 4, 5))
    return cache


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["ragged", "tuple", "bare", pytest.param("fixed", marks=pytest.mark.slow)])
def test_a_cache_of_a_cache_of_a_cache_holds_the_same_samples_and_keys(tmp_path: Path, kind: str) -> None:
    first = cs.Cache(tmp_path / "0", "100MB", min_free=0)
    _opened.append(first)
    for start in range(0, COUNT, 10):
        add_shard(first, [(str(i), SAMPLES[kind](i)) for i in range(start, start + 10)])
    second = filled(tmp_path / "1", cs.CacheSource(first.path))
    third = filled(tmp_path / "2", cs.open_source(tmp_path / "1"))
    expected = contents(first)
    assert len(expected) == COUNT
    assert second.schema == third.schema == first.schema
    assert same(contents(second), expected)
    assert same(contents(third), expected)
    source = cs.CacheSource(first.path)
    found = [item for unit in range(source.num_units) for item in source.read_rows(unit, RNG)]
    assert {isinstance(item, Rows) for item in found} == {kind == "fixed"}, "others come one by one"
    if kind in ("fixed", "ragged"):  # in columns, and one by one
        check_source(lambda: cs.CacheSource(first.path))


@pytest.mark.e2e
def test_a_transform_gets_the_samples_as_arrays_that_it_may_change(tmp_path: Path) -> None:
    samples = [{"x": np.full(3, i, np.float32), "b": torch.tensor(i / 2).bfloat16()} for i in range(COUNT)]
    first = filled(tmp_path / "0", samples)

    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        sample["x"] += 1
        bits = torch.from_numpy(sample["b"]["bfloat16"][None]).view(torch.bfloat16)
        return {"x": sample["x"], "b": 2 * bits[0]}

    found = contents(filled(tmp_path / "1", cs.CacheSource(first.path), transform=transform))
    assert [float(found[str(i)]["b"]) for i in range(COUNT)] == list(range(COUNT))
    assert all((found[str(i)]["x"] == i + 1).all() for i in range(COUNT))
    assert found["0"]["b"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "content", [b"", b"short", bytes(64), b"\xff" * 64, b"\x08" + bytes(7) + b'{"a": 1}']
)
def test_a_file_that_is_no_shard_is_named(original: cs.Cache, content: bytes) -> None:
    path = min(Path(original.path, "shards").iterdir())
    path.write_bytes(content)
    with pytest.raises(cs.SampleError, match=rf"{path}: .*(truncated|passes the end|makes no sense)"):
        read(cs.CacheSource(original.path), 0)


@pytest.mark.e2e
def test_the_units_are_the_shards_at_the_opening_and_a_later_pass_brings_those_that_came(
    tmp_path: Path, original: cs.Cache
) -> None:
    source = cs.CacheSource(original.path)
    add_shard(original, numbered(20, 5))
    assert source.num_units == 4
    other = filled(tmp_path / "other", source)
    assert len(contents(other)) == 20
    later = cs.CacheSource(original.path)
    assert later.fingerprint == source.fingerprint
    assert same(contents(filled(tmp_path / "other", later)), contents(original)), "each sample once"


@pytest.mark.e2e
def test_nothing_is_locked_or_written_in_the_other_cache(tmp_path: Path, original: cs.Cache) -> None:
    shutil.copytree(Path(original.path, "shards"), tmp_path / "copy/shards")  # no catalogue, no cache.json

    def state() -> list[tuple[str, int]]:
        return sorted((str(path), path.stat().st_mtime_ns) for path in (tmp_path / "copy").rglob("*"))

    before = state()
    assert same(contents(filled(tmp_path / "other", cs.CacheSource(tmp_path / "copy"))), contents(original))
    assert state() == before


# --- S3 ----------------------------------------------------------------------------------------


# --- SFTP and web servers ----------------------------------------------------------------------


@pytest.mark.e2e
def test_a_cache_on_another_host_is_read_by_sftp(tmp_path: Path, original: cs.Cache) -> None:
    with run_sftp_server(tmp_path) as options:
        source = cs.CacheSource("sftp://127.0.0.1/original", storage_options=options)
        assert same(contents(filled(tmp_path / "other", source)), contents(original))
        assert isinstance(
            cs.open_source("sftp://127.0.0.1/original", storage_options=options), cs.CacheSource
        )
        check_source(source, secrets=[options["password"]])
        in_url = f"sftp://{options['username']}:{options['password']}@127.0.0.1:{options['port']}/original"
        assert [key for key, _ in read(cs.CacheSource(in_url), 0)] == [key for key, _ in read(source, 0)]
        with pytest.raises(cs.SourceError, match=r"/gone: no cache is found there"):
            cs.CacheSource("sftp://127.0.0.1/gone", storage_options=options)
        with pytest.raises(
            cs.SourceError, match=r"/original: .*access denied; check .*Authentication"
        ) as caught:
            cs.CacheSource(
                "sftp://127.0.0.1/original", storage_options={**options, "password": "CANARYWRONG"}
            )
        assert "CANARY" not in str(caught.value)
    with pytest.raises(cs.SourceUnavailableError, match=r"the remote does not answer at present"):
        cs.CacheSource("sftp://127.0.0.1/original", storage_options=options)


class Web(SimpleHTTPRequestHandler):
    """Files of a folder, and pages that list folders unless `lists` is false."""

    lists = True

    def list_directory(self, path: Any) -> Any:
        if self.lists:
            return super().list_directory(path)
        self.send_error(403)
        return None

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  http.server's name
        pass


@contextlib.contextmanager
def web_server(folder: Path, *, lists: bool) -> Iterator[str]:
    """Serve `folder`; yields its URL."""
    handler = type("Served", (Web,), {"lists": lists})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_web_server_that_lists_no_folders_is_told_from_an_empty_cache(
    tmp_path: Path, original: cs.Cache
) -> None:
    with (
        web_server(tmp_path, lists=False) as url,
        pytest.raises(cs.SourceError, match="is still empty, unless the web server lists no folders"),
    ):
        cs.CacheSource(f"{url}/original")


# --- what is no cache --------------------------------------------------------------------------
