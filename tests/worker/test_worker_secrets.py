"""The secrets of a URL (its user-info and its query) and of a driver's options are in memory alone.

The tests search every byte of the cache, every message, every chain of exceptions, every command line and environment.
"""

from __future__ import annotations

import json
import pickle
import traceback
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import cachestream as cs
from cachestream import Cache
from cachestream.cli.main import main
from cachestream.errors import SourceError, WorkerError
from cachestream.transport.remote_errors import map_errors, public_name
from tests.support.forked import run_forked
from tests.support.proxy import FaultyProxy
from tests.support.s3 import S3Server
from tests.support.unruly import UnrulyServer
from tests.worker.support import DEADLINE_S, Processes, failures_of, fill, only_once, wait_until

CANARY: Final = "CANARY"
SIGNED: Final = f"X-Amz-Signature={CANARY}0123&X-Amz-Credential=key%2F{CANARY}&X-Amz-Expires=600"
BAD: Final = ("missing", "broken", "endless", "bomb")


def signed(unruly_server: UnrulyServer, kinds: tuple[str, ...]) -> list[str]:
    """URLs that hold a secret in their query and in their user-info."""
    host = f"http://user:{CANARY}pass@127.0.0.1:{unruly_server.port}"
    names = [f"good/{number}.bin" for number in range(40)] + [f"{kind}/a.bin" for kind in kinds]
    return [f"{host}/{name}?{SIGNED}&n={number}" for number, name in enumerate(names)]


def assert_none_below(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            assert CANARY.encode() not in path.read_bytes(), f"{path} holds a secret"


def chain_of(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    todo = [error]
    while todo:
        one = todo.pop()
        if one is not None and one not in found:
            found.append(one)
            todo += [one.__context__, one.__cause__]
    return found


def assert_tells_nothing(error: BaseException) -> None:
    for one in chain_of(error):
        assert CANARY not in repr(one)
        assert CANARY.encode() not in pickle.dumps(one)
    assert CANARY not in "".join(traceback.format_exception(error))


@pytest.mark.e2e
def test_a_worker_over_signed_urls_leaves_no_secret_in_any_file_message_or_command_line(
    tmp_path: Path, unruly_server: UnrulyServer, processes: Processes, forked: None
) -> None:
    folder = tmp_path / "cache"
    with Cache(folder, size_limit="30MB", min_free=0) as cache:
        source = cs.open_source(signed(unruly_server, ("missing", "endless", "bomb", "broken")))
        with cs.start_worker(cache, source, num_workers=1, hang_timeout_s=1.0) as worker:
            wait_until(lambda: cache.num_samples == 40, "what is good is cached")
            wait_until(lambda: cache.status().remote_message, "what is broken is named")
            assert_none_below(folder)
            assert CANARY not in json.dumps(cache.status(), default=repr)
            for pid in processes.pids():
                assert CANARY.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
                assert CANARY.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
            assert worker.wait(DEADLINE_S)
        assert failures_of(cache) == {"sample": 4}
        assert all("?" not in key and "@" not in key for key in only_once(cache))
        assert CANARY not in json.dumps(cache.status(), default=repr)
        assert (folder / "worker" / "listing.json").exists()
    assert_none_below(folder)
    told = run_forked(main, ["status", folder, "--json"], timeout_s=DEADLINE_S)
    assert told.returncode == 0
    assert CANARY not in told.stdout + told.stderr


@pytest.mark.e2e
def test_urls_that_are_signed_anew_are_known_again_and_read_by_their_new_signatures(
    tmp_path: Path, unruly_server: UnrulyServer
) -> None:
    with Cache(tmp_path / "cache", size_limit="30MB", min_free=0) as cache:
        urls = signed(unruly_server, ("missing",))
        fill(cache, cs.open_source(urls))
        unruly_server.asked.clear()
        again = [url.replace("0123", "4567") for url in urls]
        with cs.start_worker(cache, cs.open_source(again), num_workers=1) as worker:
            wait_until(lambda: unruly_server.asked, "what failed is read again")
            assert worker.wait(DEADLINE_S)
        assert len(only_once(cache)) == 40
    assert {target.partition("?")[0] for target in unruly_server.asked} == {"/missing/a.bin"}
    assert all(f"{CANARY}4567" in target for target in unruly_server.asked)


@pytest.mark.e2e
@pytest.mark.parametrize("kind", BAD)
def test_no_error_of_a_source_holds_a_secret_anywhere_in_its_chain(
    unruly_server: UnrulyServer, kind: str
) -> None:
    url = f"http://user:{CANARY}pass@127.0.0.1:{unruly_server.port}/{kind}/a.bin?{SIGNED}"
    readers: list[tuple[str, dict[str, Any]]] = [(url, {"max_object_size": "10MB"})]
    if kind in ("missing", "broken"):
        readers += [
            (url.replace(".bin", ".tar"), {}),
            (url.replace(".bin", ".npy"), {"window": (4, 4)}),
            (url.replace(".bin", ".parquet"), {}),
            (url.replace(".bin", ".h5"), {"window": (4, 4), "dataset": "x"}),
        ]
    for what, options in readers:
        with pytest.raises(SourceError) as caught:
            list(cs.open_source([what], **options).read(0, np.random.default_rng(0)))
        assert_tells_nothing(caught.value)


def test_what_is_raised_in_place_of_a_drivers_error_has_that_nowhere_in_its_chain() -> None:
    def fail(inside: bool) -> None:
        try:
            raise OSError(f"http://host/a?sig={CANARY}")
        except OSError as known:
            if inside:
                raise cs.SampleError("of ours") from known
            raise

    for inside in (False, True):
        with pytest.raises(SourceError) as caught, map_errors("there"):
            fail(inside)
        assert (caught.value.__context__, caught.value.__cause__) == (None, None)
        assert_tells_nothing(caught.value)


@pytest.mark.parametrize(
    ("name", "public"),
    [
        ("a/b.jpg", "a/b.jpg"),
        (f"a.jpg?{SIGNED}", "a.jpg"),
        (f"a.jpg?Expires=1&Signature={CANARY}&Key-Pair-Id=x", "a.jpg"),
        (f"a.jpg?sv=2024&se=2026&sr=b&sp=r&sig={CANARY}", "a.jpg"),
        (f"https://user:{CANARY}@host/a.jpg?access_token={CANARY}", "https://host/a.jpg"),
    ],
)
def test_names_are_stored_without_what_tells_who_may_read(name: str, public: str) -> None:
    assert public_name(name) == public


def test_queries_that_name_objects_tell_these_apart_without_being_shown() -> None:
    one, other = public_name("get?id=1"), public_name("get?id=2")
    assert one != other
    assert one == public_name(f"get?id=1&X-Amz-Signature={CANARY}")
    assert one.startswith("get?")
    assert "id" not in one


def put_objects(bucket: Path, count: int) -> None:
    for number in range(count):
        (bucket / f"{number:05d}.bin").write_bytes(bytes(1000))


@pytest.mark.e2e
def test_no_secret_is_written_anywhere_whatever_goes_wrong(
    cache: Cache,
    s3_server: S3Server,
    s3_proxy: FaultyProxy,
    s3_bucket: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    put_objects(s3_bucket, 30)
    options = s3_server.options_through(s3_proxy.port)
    source = cs.open_source(f"s3://{s3_bucket.name}", storage_options=options)
    (s3_bucket / "00003.bin").unlink()
    s3_proxy.latency_s = 0.01
    with cs.start_worker(cache, source, num_workers=1) as worker:
        for fault in ("answer_busy", "reset", "truncate"):
            getattr(s3_proxy, fault)(5)
        assert worker.wait(DEADLINE_S)
        shown = f"{worker} {worker.status()} {cache.status()}"
    assert failures_of(cache) == {"sample": 1}
    assert Path(cache.path, "worker", "log.txt").exists()
    assert_none_below(Path(cache.path))
    assert CANARY not in shown + "".join(capfd.readouterr())


@pytest.mark.e2e
def test_credentials_that_end_are_told_once_without_a_storm_or_a_secret(
    cache: Cache,
    s3_server: S3Server,
    s3_proxy: FaultyProxy,
    s3_bucket: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    put_objects(s3_bucket, 200)
    source = cs.FileSource(f"s3://{s3_bucket.name}", storage_options=s3_server.options_through(s3_proxy.port))
    source._files.remote._options["secret"] = "CANARYEXPIRED"
    s3_proxy.requests = 0
    worker = cs.start_worker(cache, source, num_workers=1)
    with pytest.raises(WorkerError, match="no valid credentials") as caught:
        worker.wait(DEADLINE_S)
    worker.stop(DEADLINE_S)
    assert s3_proxy.requests <= 100  # of 200 units, each would be one
    assert_none_below(Path(cache.path))
    assert CANARY not in str(caught.value) + "".join(capfd.readouterr())
