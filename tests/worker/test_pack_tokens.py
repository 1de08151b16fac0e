"""Workers that pack tokens: each window exactly once, whatever dies in between, and no two packings in one cache."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cachestream as cs
from cachestream import Cache, ConfigError, WorkerError
from cachestream.sources.token_windows import apply_packing
from cachestream.storage.shard import MappedShard
from tests.worker.sources import Documents
from tests.worker.support import fill, only_once, sampling_pids, wait_until

DEADLINE_S = 60.0
PACKING = cs.pack_tokens(29, "x", eos=256)


def expected(source: Any, packing: Any = PACKING) -> dict[str, list[int]]:
    """The tokens of all windows that `source` gives, by key."""
    packed, _ = apply_packing(source, packing)
    rng = np.random.default_rng(0)
    windows = [window for unit in range(packed.num_units or 0) for window in packed.read(unit, rng)]
    return {key: sample["tokens"].tolist() for key, sample in windows if sample is not None}


def cached(cache: Cache) -> dict[str, list[int]]:
    only_once(cache)
    shards = list(map(MappedShard, glob(f"{cache.directory.shards}/*.safetensors")))
    return {
        key: tokens.tolist()
        for shard in shards
        for key, tokens in zip(shard.keys(), shard.array("tokens"), strict=True)
    }


def write_texts(path: Path, count: int) -> Path:
    lines = [json.dumps({"text": f"{number} is a number. " * (number % 7)}) for number in range(count)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.mark.e2e
def test_kills_within_units_cost_no_window_and_bring_none_twice(cache: Cache) -> None:
    source, killed = Documents(units=60, samples=9, pause_s=0.1), 0
    wanted = expected(Documents(units=60, samples=9))
    with cs.start_worker(
        cache, source, num_workers=2, transform=PACKING, shard_size="2KB", concurrency=1
    ) as worker:
        for share in (0.1, 0.3, 0.5, 0.7):
            wait_until(lambda share=share: cache.num_samples > share * len(wanted), "more is cached")  # type: ignore[misc]
            with suppress(ProcessLookupError):  # a restarted one is not on the board yet
                os.kill(sampling_pids(cache)[0], signal.SIGKILL)
                killed += 1
        worker.wait(timeout_s=2 * DEADLINE_S)
    assert killed
    assert cached(cache) == wanted


@pytest.mark.e2e
def test_what_is_left_over_is_counted(cache: Cache) -> None:
    source = Documents(units=30, samples=2)
    with cs.start_worker(cache, source, num_workers=1, transform=PACKING) as worker:
        worker.wait(timeout_s=DEADLINE_S)
        totals = worker.status().worker.totals  # type: ignore[union-attr]
    lengths = [sum(len(source.sample(unit, i)[1]["x"]) + 1 for i in range(2)) for unit in range(30)]
    assert totals.samples == cache.num_samples == sum(length // 30 for length in lengths)
    assert totals.dropped == sum(length % 30 > 0 for length in lengths)
    assert totals.failures == 0


@pytest.mark.e2e
def test_a_worker_goes_on_where_the_one_before_was_stopped_and_in_no_other_packing(cache: Cache) -> None:
    wanted = expected(Documents(units=60, samples=9))
    source = Documents(units=60, samples=9, pause_s=0.06)
    with cs.start_worker(cache, source, num_workers=1, transform=PACKING, shard_size="2KB"):
        cache.wait(len(wanted) // 3, timeout_s=DEADLINE_S)
    assert cache.num_samples < len(wanted)
    fill(cache, source, transform=PACKING, shard_size="2KB")
    assert cached(cache) == wanted
    with (
        pytest.raises(ConfigError, match=r"packed:29:.*packed:19:.* use another directory"),
        cs.start_worker(cache, source, num_workers=1, transform=cs.pack_tokens(19, "x", eos=256)) as worker,
    ):
        worker.wait(timeout_s=DEADLINE_S)


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt"])
def test_text_is_packed_from_files_of_each_kind(cache: Cache, tmp_path: Path, kind: str) -> None:
    texts = [f"{number} is a number. " * (number % 7) for number in range(60)]
    if kind == "jsonl":
        write_texts(tmp_path / "a.jsonl", 60)
    elif kind == "parquet":
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=30)
    else:
        (tmp_path / "a.txt").write_text("".join(texts), encoding="utf-8")
    packing = cs.pack_tokens(15, "text", tokenizer=lambda text: list(text.encode()), pad=0)
    source = cs.open_source(str(tmp_path / f"*.{kind}"))
    fill(cache, source, transform=packing)
    found = cached(cache)
    assert found == expected(source, packing)
    assert sorted(b"".join(map(bytes, found.values())).replace(b"\0", b"")) == sorted("".join(texts).encode())


@pytest.mark.e2e
def test_a_listing_that_goes_on_is_packed_to_its_end(cache: Cache, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    for number in range(120):
        (folder / str(number // 10)).mkdir(parents=True, exist_ok=True)
        (folder / str(number // 10) / f"{number:03}.txt").write_text("abc" * (number + 1), encoding="utf-8")
    packing = cs.pack_tokens(15, "text", tokenizer=lambda text: list(text.encode()), pad=0)
    source: Any = cs.open_source(str(folder), first_names=10)
    assert source.is_listing
    fill(cache, source, transform=packing)
    assert cached(cache) == expected(cs.open_source(str(folder), first_names=None), packing)


@pytest.mark.e2e
def test_held_out_samples_and_windows_do_not_go_together(cache: Cache) -> None:
    with pytest.raises(ConfigError, match=r"pack_tokens\(\) has no holdout=: .* two caches"):
        cs.start_worker(cache, Documents(), transform=PACKING, holdout=0.1)
    with cs.start_worker(cache, Documents(units=3), num_workers=1, transform=PACKING) as worker:
        assert worker.wait(timeout_s=DEADLINE_S), "the refused start stored no share"
        cs.EpochLoader(cache, 2, split="train", holdout=0.1, min_samples=1).close()
    with pytest.raises(ConfigError, match=r"holds out 0\.1 of its samples; 'cachestream clear' forgets it"):
        cs.start_worker(cache, Documents(units=3), transform=PACKING)


@pytest.mark.e2e
def test_a_wrong_field_is_told_with_the_fields_there_are(cache: Cache, tmp_path: Path) -> None:
    source = write_texts(tmp_path / "a.jsonl", 300)
    fill(cache, str(source), transform=cs.pack_tokens(15))
    (failure,) = cache.status().failures
    assert failure.count == 300
    assert "has no field 'tokens' to pack, but 'text': give pack_tokens(field=)" in failure.reason


@pytest.mark.e2e
def test_a_worker_of_which_no_document_can_be_used_ends_with_the_reason(cache: Cache) -> None:
    with (
        pytest.raises(WorkerError, match=r"has no field 'tokens' to pack, but 'x': give pack_tokens\(field="),
        cs.start_worker(
            cache, Documents(units=400, samples=3), num_workers=1, transform=cs.pack_tokens(15)
        ) as worker,
    ):
        worker.wait(timeout_s=DEADLINE_S)
