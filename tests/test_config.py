"""Sizes as people write them, and keywords as users of other libraries type them."""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import cachestream as cs
from cachestream.config import (
    PEER_ANSWERS,
    PEER_KEYWORDS,
    check_count,
    collection_paused,
    format_duration,
    format_number,
    format_size,
    keywords_of,
    parse_size,
    reject_unknown,
    with_generator,
)
from cachestream.errors import ConfigError
from cachestream.sources.open import SOURCE_OPTIONS


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("1", 1),
        ("17b", 17),
        ("200GB", 200 * 10**9),
        ("200 gb", 200 * 10**9),
        ("64MiB", 64 * 2**20),
        ("  1.5k ", 1500),
        (".5KiB", 512),
        ("2.TB", 2 * 10**12),
        ("1PiB", 2**50),
        ("40MB/s", 40 * 10**6),
        (12.9, 12),
        (7, 7),
        (np.int64(7), 7),
        (np.float32(8.5), 8),
    ],
)
def test_a_size_is_bytes_with_decimal_or_binary_units(text: float | str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "value",
    [
        *(
            "",
            "GB",
            "-1",
            "-1GB",
            "1,5GB",
            "1 2",
            "five",
            "1GBB",
            "0x10",
            "1e9",
            "²GB",
            "1GB/m",
            "99999999999TB",
        ),
        *(-1, -0.5, 2**63, 1e30, math.nan, math.inf, True, None, b"1", [1]),
    ],
)
def test_what_is_not_a_size_is_refused_with_the_argument_and_the_value(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(value, "size_limit")  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"size_limit={value!r}: ")


@given(st.integers(0, 2**62))
def test_a_whole_number_survives_as_text_to_the_byte(size_bytes: int) -> None:
    """Also above 2⁵³, where floats would round."""
    assert parse_size(str(size_bytes)) == parse_size(size_bytes) == size_bytes


@given(st.integers(0, 10**17))
@example(999_999)
@example(999_499)
@example(999_999_999_999)
def test_what_is_shown_can_be_typed_again_and_is_right_to_three_digits(size_bytes: int) -> None:
    again = parse_size(format_size(size_bytes))
    assert abs(again - size_bytes) <= 0.005 * size_bytes + (0.5 if size_bytes < 1000 else 0)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (812_345, "812 kB"),
        (999_999, "1 MB"),
        (1.5e9, "1.5 GB"),
        (3e15, "3 PB"),
        (1e18, "1,000 PB"),
    ],
)
def test_sizes_are_shown_with_the_unit_that_keeps_them_short(size_bytes: float, text: str) -> None:
    assert format_size(size_bytes) == text


def test_a_keyword_of_a_peer_library_is_answered_with_ours() -> None:
    with pytest.raises(ConfigError, match=r"no argument 'max_cache_size'; here it is called 'size_limit'"):
        reject_unknown("stream", {"max_cache_size": 1}, ["cache", "size_limit"])


def test_a_typing_error_is_answered_with_the_nearest_keyword() -> None:
    with pytest.raises(ConfigError, match=r"no argument 'num_worker'; do you mean 'num_workers'\?"):
        reject_unknown("start_worker", {"num_worker": 1}, ["num_workers", "order"])


def test_an_unknown_keyword_with_no_likeness_is_answered_with_all_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no argument 'zzz'; it takes batch_size, cache"):
        reject_unknown("stream", {"zzz": 1}, ["cache", "batch_size"])


def test_a_peer_keyword_is_not_answered_with_one_the_function_lacks() -> None:
    assert PEER_KEYWORDS["urls"] == "source"
    with pytest.raises(ConfigError) as caught:
        reject_unknown("EpochLoader", {"urls": 1}, ["batch_size"])
    assert "source" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("replication", "any torch sampler as sampler="),
        ("resampled", "nothing is needed: there is always a next epoch"),
        ("predownload", "nothing is needed"),
        ("subsample", "epoch_size=, or a sampler="),
        ("collate_fn", "batch_transform="),
        ("handler", r"cache.status\(\).failures"),
        ("generator", "give seed="),
        ("download_retry", "tried again for as long as it takes"),
        ("num_canonical_nodes", "another number of ranks"),
    ],
)
def test_a_keyword_of_a_peer_that_has_no_name_here_is_answered_with_what_to_do(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"stream\(\) has no argument '{name}': .*{says}"):
        cs.stream("a", "b", batch_size=1, **{name: None})  # type: ignore[arg-type]


def test_a_keyword_of_a_peer_has_either_a_name_here_or_an_answer() -> None:
    assert not PEER_ANSWERS.keys() & PEER_KEYWORDS.keys()
    ours = {*keywords_of(cs.stream), *SOURCE_OPTIONS, *keywords_of(cs.start_worker)}
    ours |= keywords_of(cs.EpochLoader.__init__)
    assert {*PEER_KEYWORDS.values()} <= ours | {"cache", "size_limit", "source"}
    assert not PEER_ANSWERS.keys() & ours


def test_no_unknown_keyword_is_no_error() -> None:
    reject_unknown("stream", {}, ["cache"])


@pytest.mark.parametrize("three", [3, np.int64(3), np.uint8(3), torch.tensor(3)])
def test_a_whole_number_may_be_pythons_numpys_or_torchs(three: Any) -> None:
    assert type(check_count("n", three)) is int
    assert check_count("n", three, 3, 3) == 3


@pytest.mark.parametrize("value", [True, 3.0, np.float64(3), "3", None, 0, 9, np.bool_(True)])
def test_what_is_no_whole_number_or_outside_of_the_bounds_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"n=.*: give a whole number, 1 or more, 8 at most"):
        check_count("n", value, 1, 8)


class Flip(torch.nn.Module):
    """A transform of torch's kind."""

    def forward(self, value: str, generator: str | None = None) -> tuple[str, str | None]:
        return value, generator


class Plain(torch.nn.Module):
    """A transform as torchvision's v2 has them."""

    def forward(self, *values: str) -> tuple[str, ...]:
        return values


class Called:
    """A transform with a state."""

    def __call__(self, value: str, draws: str) -> tuple[str, str]:
        return value, draws


def keyword(value: str, scale: float = 1.0, *, rng: str | None = None) -> tuple[str, str | None]:
    return value, rng


def two(value: str, draws: str) -> tuple[str, str]:
    return value, draws


@pytest.mark.parametrize(
    ("function", "gets"),
    [
        (lambda value: (value,), ("value",)),
        (lambda value, draws: (value, draws), ("value", "draws")),
        (lambda value, scale=2: (value, scale), ("value", 2)),
        (lambda value, generator=None: (value, generator), ("value", "draws")),
        (lambda value, rng="own": (value, rng), ("value", "own")),
        (lambda *values: values, ("value",)),
        (keyword, ("value", "draws")),
        (two, ("value", "draws")),
        (functools.partial(two, draws="own"), ("value", "own")),
        (functools.partial(keyword, rng="own"), ("value", "own")),
        (functools.partial(two, "first"), ("first", "value")),
        (Called(), ("value", "draws")),
        (Called().__call__, ("value", "draws")),
        (Flip(), ("value", "draws")),
        (Plain(), ("value",)),
        (torch.nn.Identity(), "value"),
        (str.upper, "VALUE"),
        (dict.fromkeys, dict.fromkeys("value")),
    ],
)
def test_a_function_gets_a_generator_where_its_signature_asks_for_one(
    function: Callable[..., object], gets: object
) -> None:
    made: list[None] = []

    def make() -> str:
        made.append(None)
        return "draws"

    assert with_generator(function)("value", make) == gets
    assert len(made) == ("draws" in gets if isinstance(gets, tuple) else 0)  # and it is not made for others


@pytest.mark.parametrize("enabled", [True, False])
def test_a_pause_of_the_garbage_collector_leaves_it_as_it_was(enabled: bool) -> None:
    was_enabled = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with collection_paused():
            with collection_paused():
                pass
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "never"),
        (0.0, "0 s"),
        (0.00001, "0.00001 s"),
        (0.523, "0.52 s"),
        (59.2, "59 s"),
        (60, "1 min"),
        (3600, "1 h"),
        (3 * 3600 + 300, "3 h 5 min"),
        (2 * 86_400 + 4 * 3600 + 59, "2 d 4 h"),
    ],
)
def test_a_duration_takes_at_most_two_units(seconds: float | None, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (0.00001, "0.00001"),
        (0.000012345, "0.0000123"),
        (0.5234, "0.523"),
        (0.9996, "1"),
        (31.24, "31.2"),
        (999.4, "999"),
        (999.6, "1,000"),
        (4123.4, "4,120"),
        (-4123.4, "-4,120"),
        (1e18, "1,000,000,000,000,000,000"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_a_number_has_three_digits_and_no_exponent(number: float, text: str) -> None:
    assert format_number(number) == text


@given(st.floats(1e-12, 1e20) | st.floats(-1e20, -1e-12), st.integers(1, 6))
@example(999.6, 3)
@example(1e-5, 3)
def test_a_number_that_is_shown_is_right_to_its_digits(number: float, digits: int) -> None:
    text = format_number(number, digits)
    assert "e" not in text
    assert float(text.replace(",", "")) == float(f"{number:.{digits}g}")
