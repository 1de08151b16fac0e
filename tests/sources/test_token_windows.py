"""Documents packed into windows of tokens: every token once, in order, and a clear word on what cannot be packed."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cachestream as cs
from cachestream import SampleError
from cachestream.sources.mix import MixSource
from cachestream.sources.token_windows import apply_packing, packed_windows

LENGTHS = st.lists(st.integers(0, 40), max_size=120)
RNG = np.random.default_rng(0)


@dataclass
class Documents:
    """Units of samples, the last of which may be followed by an error."""

    units: list[list[Any]]
    error: SampleError | None = None
    fingerprint: str = "documents"

    @property
    def num_units(self) -> int:
        return len(self.units)

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
        for number, sample in enumerate(self.units[unit]):
            yield f"{unit}#{number}", sample
        if self.error is not None:
            raise self.error


def numbered(lengths: list[int]) -> list[npt.NDArray[np.int32]]:
    """Documents of `lengths` whose tokens are all different."""
    ends = np.cumsum([0, *lengths])
    return [np.arange(start, stop, dtype=np.int32) for start, stop in itertools.pairwise(ends)]


def windows_of(documents: list[Any], **options: Any) -> list[tuple[str, Any]]:
    """The windows of one unit with `documents` in the field "tokens"."""
    source, transform = apply_packing(
        Documents([[{"tokens": document} for document in documents]]), cs.pack_tokens(**options)
    )
    assert transform is None
    return list(source.read(0, RNG))


def complaint(samples: list[Any], **options: Any) -> str:
    source, _ = apply_packing(Documents([samples]), cs.pack_tokens(1, **{"pad": 0, **options}))
    with pytest.raises(SampleError) as raised:
        list(source.read(0, RNG))
    assert raised.value.lost == len(samples)
    return str(raised.value)


@given(LENGTHS, st.integers(1, 20))
def test_split_documents_are_cut_at_the_ends_of_windows_and_nowhere_else(
    lengths: list[int], block_size: int
) -> None:
    windows = windows_of(numbered(lengths), block_size=block_size, pad=9)
    total, size = sum(lengths), block_size + 1
    tokens = np.concatenate([window["tokens"] for _, window in windows] or [np.empty(0, np.int32)])
    assert len(windows) == -(-total // size)
    assert tokens[:total].tolist() == list(range(total))
    assert (tokens[total:] == 9).all()


@given(LENGTHS, st.integers(1, 20))
def test_documents_that_fit_a_window_lie_whole_in_one(lengths: list[int], block_size: int) -> None:
    documents, size = numbered(lengths), block_size + 1
    windows = windows_of(documents, block_size=block_size, split=False, pad=0)
    found: Counter[tuple[int, ...]] = Counter()
    for _, window in windows:
        ids, tokens = window["document_ids"], window["tokens"]
        found.update(tuple(tokens[ids == i].tolist()) for i in range(ids.max() + 1))
    pieces = [document[at : at + size] for document in documents for at in range(0, len(document), size)]
    assert found == Counter(tuple(piece.tolist()) for piece in pieces)


@given(LENGTHS, st.integers(1, 20), st.booleans())
def test_ids_and_positions_belong_to_the_tokens(lengths: list[int], block_size: int, split: bool) -> None:
    windows = windows_of(numbered(lengths), block_size=block_size, split=split, pad=0)
    assert len({key for key, _ in windows}) == len(windows)
    first_of = np.repeat(np.cumsum([0, *lengths])[:-1], lengths)
    for key, window in windows:
        assert {(name, array.dtype, array.shape) for name, array in window.items()} == {
            (name, np.dtype(np.int32), (block_size + 1,)) for name in ("tokens", "document_ids", "positions")
        }
        ids, positions, tokens = window["document_ids"], window["positions"], window["tokens"]
        assert (positions[ids == -1] == 0).all()
        assert (np.diff(ids[ids >= 0]) >= 0).all()
        for i in range(ids.max() + 1):
            piece = tokens[ids == i]
            assert len({first_of[token] for token in piece}) == 1  # of one document
            assert positions[ids == i].tolist() == (piece - piece[0]).tolist() == list(range(len(piece)))
        document = int(key.partition("/")[0].partition("#")[2])
        assert tokens[0] in numbered(lengths)[document]


def test_best_fit_wastes_less_than_a_window_for_each_document() -> None:
    lengths = RNG.integers(1, 100, 2000).tolist()
    windows = windows_of(numbered(lengths), block_size=99, split=False, pad=0)
    assert len(windows) < 1.06 * sum(lengths) / 100  # what whole documents allow; one for each would be 2.0


def test_no_more_than_64_windows_are_open() -> None:
    came = 0

    def documents() -> Iterator[tuple[str, npt.NDArray[np.int32]]]:
        nonlocal came
        for came in range(1000):
            yield str(came), np.zeros(6, np.int32)

    next(packed_windows(documents(), 10, split=False))
    assert came == 64


def test_what_is_left_over_is_carried_to_the_next_document_and_dropped_at_the_end_of_the_unit() -> None:
    documents = [{"tokens": np.arange(5)}, {"tokens": np.arange(5)}, {"tokens": np.arange(5)}]
    source, _ = apply_packing(Documents([documents, documents]), cs.pack_tokens(3))
    first, second, third, rest = source.read(0, RNG)
    assert [first[0], second[0], third[0], rest[0]] == ["0#0/0", "0#0/1", "0#1/2", "0#2/3"]
    assert second[1]["tokens"].tolist() == [4, 0, 1, 2]
    assert second[1]["document_ids"].tolist() == [0, 1, 1, 1]
    assert second[1]["positions"].tolist() == [0, 0, 1, 2]
    assert rest[1] is None
    assert next(source.read(1, RNG))[1]["tokens"].tolist() == [0, 1, 2, 3]  # nothing comes from another unit


def test_eos_ends_each_document() -> None:
    ((_, window),) = windows_of([[1, 2], [], [3]], block_size=6, eos=7, pad=0)
    assert window["tokens"].tolist() == [1, 2, 7, 3, 7, 0, 0]
    assert window["document_ids"].tolist() == [0, 0, 0, 1, 1, -1, -1]


def test_a_unit_that_fills_no_window_is_skipped_with_the_way_out() -> None:
    with pytest.raises(SampleError, match="unit 0: fewer tokens than one window of 9: give pad=") as raised:
        windows_of([[1, 2, 3], [1, 2, 3, 4]], block_size=8)
    assert raised.value.lost == 1


def test_problems_of_the_source_come_after_all_windows() -> None:
    error = SampleError("file.jsonl: 2 problems, the first: line at byte 7: not JSON")
    error.lost = 2
    source, _ = apply_packing(Documents([[{"tokens": [1, 2, 3]}, {"x": 1}]], error), cs.pack_tokens(1, pad=0))
    windows = source.read(0, RNG)
    assert [next(windows)[1]["tokens"].tolist() for _ in range(2)] == [[1, 2], [3, 0]]
    with pytest.raises(SampleError, match="3 problems, the first: has no field 'tokens'") as raised:
        next(windows)
    assert raised.value.lost == 3


def test_a_document_that_cannot_be_used_says_why() -> None:
    assert "has no field 'tokens' to pack, but 'text', 'id': give pack_tokens(field=)" in complaint(
        [{"text": "a", "id": 1}]
    )
    assert "has no field 'tokens' to pack, but tuple" in complaint([(1, 2)])
    assert "field 'tokens' is str: with tokenizer= pack text" in complaint([{"tokens": "a b"}])
    assert "field 'tokens' is float64 [2]: tokens are integers [n]" in complaint([{"tokens": [1.5, 2.0]}])
    assert "field 'tokens' is int64 [1, 2]: tokens are integers [n]" in complaint([{"tokens": [[1, 2]]}])
    assert "int64 [1]: tokens are integers [n] from 0 to 2**31 - 1" in complaint([{"tokens": [2**31]}])
    assert "int64 [1]: tokens are integers [n] from 0 to 2**31 - 1" in complaint([{"tokens": [-1]}])
    assert "field 'tokens' raised ValueError" in complaint([{"tokens": [[1], [2, 3]]}])
    assert "field 'tokens' is list: with tokenizer= pack text" in complaint([{"tokens": [1]}], tokenizer=len)
    assert "field 'tokens' raised ZeroDivisionError" in complaint(
        [{"tokens": "a"}], tokenizer=lambda _: 1 // 0
    )
    assert "field 'tokens' is int64 []" in complaint([{"tokens": "abc"}], tokenizer=len)


def test_a_tokenizer_makes_the_tokens(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    known = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 3, "b": 4, "?": 0}, unk_token="?"))
    known.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    known.save(str(tmp_path / "tokenizer.json"))
    samples = Documents([[{"text": "a b c"}, {"text": "b"}]])
    for tokenizer in (known, tmp_path / "tokenizer.json", lambda text: known.encode(text).ids):
        source, _ = apply_packing(samples, cs.pack_tokens(3, "text", tokenizer=tokenizer))
        ((_, window),) = (
            pickle.loads(pickle.dumps(source)).read(0, RNG) if tokenizer is known else source.read(0, RNG)
        )
        assert window["tokens"].tolist() == [3, 4, 0, 4]


def test_other_packings_are_other_data() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = [
        tokenizers.Tokenizer(tokenizers.models.WordLevel({word: 0, "?": 1}, unk_token="?")) for word in "ab"
    ]
    packings: list[dict[str, Any]] = [
        {},
        {"block_size": 9},
        {"field": "x"},
        {"eos": 0},
        {"pad": 0},
        {"pad": 0, "split": False},
        {"tokenizer": lambda text: list(text.encode())},
        {"tokenizer": lambda text: [len(text)]},
        *({"tokenizer": one} for one in words),
    ]
    source = Documents([[]])
    found = [apply_packing(source, cs.pack_tokens(**one))[0].fingerprint for one in packings]
    again = [apply_packing(source, cs.pack_tokens(**one))[0].fingerprint for one in packings]
    assert found == again
    assert len({source.fingerprint, *found}) == len(packings) + 1


def test_what_the_source_can_do_besides_is_kept() -> None:
    mixed = MixSource([Documents([[]] * 3), Documents([[]] * 3)], [1, 1])
    packed: Any = apply_packing(mixed, cs.pack_tokens())[0]
    assert [packed.remote_of(unit) for unit in range(4)] == [mixed.remote_of(unit) for unit in range(4)]
    assert packed.listing_digest == mixed.listing_digest
    assert packed.num_units == mixed.num_units
