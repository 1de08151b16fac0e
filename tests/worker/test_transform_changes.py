"""A transform that has changed is told from one that has not, and what is cached of the one before is not silent."""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest

import cachestream as cs
from cachestream import Cache
from cachestream.worker.job import transform_fingerprint
from tests.worker.sources import Numbers
from tests.worker.support import run_python

DEADLINE_S = 60.0
CODE = """
def first(sample):
    "Words do not matter to the bytecode, and their place does not."
    return sample if sample["n"] in {"a", "b", "c", 1, 2} else None
"""


def compiled(code: str) -> Any:
    names: dict[str, Any] = {}
    exec(code, names)
    return names["first"]


def test_the_same_code_is_alike_elsewhere_and_in_another_process() -> None:
    here = transform_fingerprint(compiled(CODE))
    assert transform_fingerprint(compiled("\n\n" + CODE)) == here
    assert transform_fingerprint(functools.partial(compiled(CODE))) == here
    script = f"from cachestream.worker.job import transform_fingerprint\n{CODE}\nprint(transform_fingerprint(first), end='')"
    for seed in ("1", "2"):
        assert run_python(script, PYTHONHASHSEED=seed) == here


@pytest.mark.parametrize("change", [('"c"', '"d"'), ("1, 2", "1, 3"), ("in {", "not in {"), ('"n"', '"m"')])
def test_other_code_is_not(change: tuple[str, str]) -> None:
    assert transform_fingerprint(compiled(CODE.replace(*change))) != transform_fingerprint(compiled(CODE))
    assert transform_fingerprint(None) != transform_fingerprint(compiled(CODE))


def test_what_has_no_code_to_see_is_not_judged() -> None:
    assert transform_fingerprint(dict) == ""


@pytest.mark.e2e
def test_a_changed_transform_is_warned_of_once_where_it_attaches_or_samples_of_the_other_are_cached(
    cache: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    def keep(sample: Any) -> Any:
        return sample

    def adds(sample: Any) -> Any:
        return {**sample, "more": 1}

    def warnings() -> list[str]:
        found = [record.getMessage() for record in caplog.records if "transform" in record.getMessage()]
        caplog.clear()
        return found

    def fill(transform: Any) -> list[str]:
        with cs.start_worker(cache, Numbers(8), num_workers=1, transform=transform) as worker:
            assert worker.wait(DEADLINE_S)
        return warnings()

    caplog.set_level(logging.WARNING, "cachestream")
    with cs.start_worker(cache, Numbers(8), num_workers=1, transform=keep) as worker:
        assert worker.wait(DEADLINE_S)
        assert warnings() == []
        with cs.start_worker(cache, Numbers(8), transform=adds):
            (warning,) = warnings()
            assert "which the running worker goes on with" in warning
    assert fill(keep) == [], "the one in use stays known"
    (warning,) = fill(adds)
    assert "the transform has changed" in warning
    assert "'cachestream clear'" in warning
    assert fill(adds) == []
    cache.clear()
    assert fill(None) == []
