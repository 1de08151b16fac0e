"""Sources, orders and options that make no sense are refused by name, before a process is started."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import BatchSampler, SequentialSampler

import cachestream as cs
from cachestream import Cache
from cachestream.errors import ConfigError
from tests.worker.sources import Numbers
from tests.worker.support import (
    fill,
)

BATCHES = BatchSampler(SequentialSampler(range(20)), 4, drop_last=False)


def unusual(num_units: object, fingerprint: object = "data") -> Numbers:
    """Numbers that say this about themselves."""

    class Unusual(Numbers):
        pass

    Unusual.num_units, Unusual.fingerprint = num_units, fingerprint  # type: ignore[assignment,method-assign]
    return Unusual()


@pytest.mark.parametrize(
    ("num_units", "fingerprint", "words"),
    [
        (0, "data", "num_units=0: must be a whole number, 1 or more"),
        (-1, "data", "Unusual: num_units=-1"),
        (4.0, "data", r"num_units=4\.0"),
        ("x", "data", "num_units='x'"),
        (True, "data", "num_units=True"),
        (4, "", "Unusual: fingerprint='': must be a str"),
        (4, 7, "fingerprint=7"),
    ],
)
def test_a_source_whose_numbers_make_no_sense_is_named(
    cache: Cache, num_units: object, fingerprint: object, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        cs.start_worker(cache, unusual(num_units, fingerprint))
    assert not cache.has_worker()


@pytest.mark.e2e
def test_a_number_of_units_may_be_numpys(cache: Cache) -> None:
    fill(cache, unusual(np.prod([2, 2])))
    assert cache.num_samples == 4
    assert cs.CallableSource(lambda _: 1, np.int64(3)).num_units == 3  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"num_units=2\.5"):
        cs.CallableSource(lambda _: 1, 2.5)  # type: ignore[arg-type]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("order", "words"),
    [
        (["a"] * 20, "weights must be numbers, one for each of the 20 units"),
        (np.ones((20, 5)), "weights must be numbers"),
        (
            BATCHES,
            r"the sampler gave \[0, 1, 2, 3\]; it must give unit numbers, one by one and not in batches",
        ),
    ],
    ids=["text", "table", "batches"],
)
def test_an_order_that_says_nothing_of_units_is_refused_by_name(
    cache: Cache, order: Any, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=words):
        cs.start_worker(cache, Numbers(20), order=order)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.e2e
def test_a_cache_is_not_filled_from_a_mix_with_itself(cache: Cache) -> None:
    fill(cache, Numbers(5))
    with pytest.raises(ConfigError, match="a cache cannot be filled from itself"):
        cs.start_worker(cache, cs.mix({cs.CacheSource(cache.path): 1, Numbers(5, name="more"): 1}))


@pytest.mark.e2e
def test_a_folder_that_would_change_the_labels_of_what_is_cached_is_refused(
    cache: Cache, tmp_path: Path
) -> None:
    def add(name: str) -> None:
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "images" / name / "1.png")

    add("b")
    add("c")
    fill(cache, tmp_path / "images")
    add("d")  # comes after the others, whose labels stay
    fill(cache, tmp_path / "images")
    add("a")
    with pytest.raises(ConfigError, match=r"had 3 label names. Now it has 4, .*cachestream clear"):
        cs.start_worker(cache, tmp_path / "images", num_workers=1)
    cache.clear()
    fill(cache, tmp_path / "images")
    assert cache.num_samples == 4


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"transform": threading.Lock().__enter__}, "the transform cannot be sent"),
        ({"order": iter(range(20))}, None),
        ({"order": (unit for unit in range(20))}, "the order cannot be sent"),
        ({"order": "random"}, "choose 'shuffle' or 'sequential'"),
        ({"order": 5}, "order=5"),
        ({"order": [1.0]}, "1 weights for 20 units"),
        ({"transform": 5}, "must be a function"),
        ({"num_workers": 0}, "num_workers=0"),
        ({"num_workers": 1.5}, "num_workers=1.5"),
        ({"concurrency": 65}, "1 or more, 64 at most"),
        ({"hang_timeout_s": 0}, "hang_timeout_s=0: give seconds"),
        ({"hang_timeout_s": True}, "hang_timeout_s=True: give seconds"),
        ({"when_full": "explode"}, "choose one of evict, wait, stop"),
        ({"shard_size": "1GB"}, "raise size_limit or lower shard_size"),
        ({"shard_size": 0}, "shard_size=0: must be above 0"),
        ({"holdout": 1.5}, "holdout=1.5"),
        ({"bandwidth_limit": 0}, "bandwidth_limit"),
        ({"workers": 4}, "num_workers"),
        ({"engine": "ray", "ray_options": {"num_cpu": 2}}, "ray_options=.*num_cpu"),
        ({"engine": "ray", "ray_options": {"num_cpus": "2"}}, "ray_options=.*'num_cpus' must be"),
        (
            {"resize": 8},
            r"resize= belongs to the source: start_worker\(cache, cs.open_source\(…, resize=…\)\)",
        ),
        ({"storage_options": {}}, "storage_options= belongs to the source"),
    ],
    ids=lambda value: re.sub(" at 0x[0-9a-f]+", "", str(value)),
)
def test_what_cannot_work_is_refused_at_once_and_by_name(
    cache: Cache, options: dict[str, object], words: str | None
) -> None:
    if words is None:
        cs.start_worker(cache, Numbers(20), num_workers=1, **options).stop()  # type: ignore[arg-type]
        return
    with pytest.raises(ConfigError, match=words):
        cs.start_worker(cache, Numbers(20), **options)  # type: ignore[arg-type]
    assert not cache.has_worker()


def test_a_source_that_does_not_pickle_is_named(cache: Cache) -> None:
    class Holding(Numbers):
        def __reduce__(self) -> tuple[object, ...]:
            raise TypeError("cannot pickle 'socket' object")

    with pytest.raises(ConfigError, match=r"the source cannot be sent .* 'socket'"):
        cs.start_worker(cache, Holding(5))
