"""Sources and orders that make no sense are refused at once, by name, before any process is started for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch.utils.data import BatchSampler, SequentialSampler

import cachestream as cs
from cachestream import Cache
from cachestream.errors import ConfigError
from tests.worker.sources import Numbers
from tests.worker.support import DEADLINE_S

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


def test_a_number_of_units_may_be_numpys(cache: Cache) -> None:
    with cs.start_worker(cache, unusual(np.prod([2, 2])), num_workers=1) as worker:
        assert worker.wait(DEADLINE_S)
    assert cache.num_samples == 4
    assert cs.CallableSource(lambda _: 1, np.int64(3)).num_units == 3  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"num_units=2\.5"):
        cs.CallableSource(lambda _: 1, 2.5)  # type: ignore[arg-type]


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
