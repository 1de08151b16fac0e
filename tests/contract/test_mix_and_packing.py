"""`mix`, `pack_tokens` and `CacheSource`: sources and samples made of others."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

import cachestream as cs
from tests.contract.conftest import NUM_SAMPLES, numbered, shown
from tests.contract.formats import read

BLOCK: Final = 7


def rows(name: str, count: int) -> list[dict[str, Any]]:
    return [{"name": name, "i": i} for i in range(count)]


# --- mix -----------------------------------------------------------------------------------------


def test_a_mix_has_its_sources_in_proportion_among_any_number_of_first_units() -> None:
    mixed = cs.mix({"day": (rows("day", 90), 3), "night": (rows("night", 10), 1)})
    assert mixed.num_units == 120
    found = read(mixed)
    for first in range(4, 121):
        nights = sum(sample["name"] == "night" for _, sample in found[:first])
        assert abs(nights - first / 4) < 2
    assert len({key for key, _ in found}) == 120
    assert Counter(sample["i"] for _, sample in found if sample["name"] == "night") == dict.fromkeys(
        range(10), 3
    )
    assert Counter(sample["i"] for _, sample in found if sample["name"] == "day") == dict.fromkeys(
        range(90), 1
    )


def test_keys_of_a_mix_begin_with_the_name_or_number_and_the_round() -> None:
    def keys(mixed: cs.Source) -> list[str]:
        return sorted(key for key, _ in read(mixed))

    night, day = rows("n", 2), rows("d", 4)
    assert keys(cs.mix([(night, 1), (day, 1)])) == [
        "0.1/0",
        "0/0",
        "0/1",
        "1/0",
        "1/1",
        "1/2",
        "1/3",
    ]
    named = cs.mix({"n": (night, 2.0), "d": (day, 4)})
    assert keys(named) == ["d/0", "d/1", "d/2", "d/3", "n/0", "n/1"]


def test_a_mix_opens_what_it_is_given_with_its_options(tmp_path: Path) -> None:
    for folder in "ab":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "1.txt").write_bytes(b"\xe9")
    mixed = cs.mix({f"{tmp_path}/a": 1, f"{tmp_path}/b": 1}, encoding="latin-1")
    assert sorted(read(mixed)) == [("0/1.txt", {"text": "é"}), ("1/1.txt", {"text": "é"})]
    with pytest.raises(cs.ConfigError, match="'encodings'; do you mean 'encoding'"):
        cs.mix({f"{tmp_path}/a": 1}, encodings="latin-1")


def test_a_mix_with_an_endless_source_is_endless_and_repeats_the_others() -> None:
    mixed = cs.mix([(lambda rng: {"i": int(rng.integers(100))}, 1), (rows("d", 3), 1)])
    assert mixed.num_units is None
    rounds = [key for unit in range(24) for key, _ in read(mixed, unit) if key.startswith("1")]
    assert len(rounds) == len(set(rounds)) == 12
    assert Counter(key.partition("/")[0] for key in rounds) == {"1": 3, "1.1": 3, "1.2": 3, "1.3": 3}


def test_the_fingerprint_of_a_mix_names_its_sources_weights_and_names() -> None:
    day, night = rows("d", 4), rows("n", 3)
    mixes = [
        cs.mix([(day, 1), (night, 1)]),
        cs.mix([(day, 2), (night, 1)]),
        cs.mix([(night, 1), (day, 1)]),
        cs.mix({"d": (day, 1), "n": (night, 1)}),
    ]
    assert len({mixed.fingerprint for mixed in mixes}) == len(mixes)
    assert cs.mix([(day, 2), (night, 2)]).fingerprint == mixes[0].fingerprint


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ([], "at least one"),
        ({}, "at least one"),
        ([("d", 2, 1)], "pairs"),
        ([(rows("d", 2), 0)], "the weight 0 must be a number above 0"),
        ([(rows("d", 2), -1)], "the weight -1 must be"),
        ([(rows("d", 2), float("nan"))], "the weight nan must be"),
        ([(rows("d", 2), True)], "the weight True must be"),
        ({"a b": (rows("d", 2), 1)}, "names are a letter and up to 31"),
        ({"1": (rows("d", 2), 1)}, "names are a letter and up to 31"),
        ([(7, 1)], r"open_source\(\) cannot read int"),
    ],
    ids=shown,
)
def test_a_mix_that_cannot_work_is_refused(sources: Any, words: str) -> None:
    with pytest.raises(cs.ConfigError, match=words):
        cs.mix(sources)


# --- pack_tokens -----------------------------------------------------------------------------------


def code(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def packed(path: Path, source: Any, packing: Any) -> tuple[dict[str, dict[str, list[int]]], Any]:
    """Return the windows by key, and the status after the pass."""
    with (
        cs.Cache(path, "20MB", min_free=0) as cache,
        cs.start_worker(cache, source, num_workers=1, transform=packing) as worker,
    ):
        assert worker.wait(timeout_s=120)
        status = cache.status()
        with cs.EpochLoader(cache, 1, shuffle=False, with_keys=True) as loader:
            batches = list(loader)
    names = ("tokens", "document_ids", "positions")
    assert {batch[name].dtype for batch in batches for name in names} == {torch.int32}
    return {
        batch["__key__"][0]: {name: batch[name][0].tolist() for name in names} for batch in batches
    }, status


@pytest.mark.e2e
def test_documents_are_cut_into_windows_without_a_token_lost_or_double(tmp_path: Path) -> None:
    documents = ["abcdefghij", "k", "", "lmnopqrstuvwxyz", "AB"]
    lines = "".join(json.dumps({"words": text}) + "\n" for text in documents)
    (tmp_path / "a.jsonl").write_text(lines)
    packing = cs.pack_tokens(BLOCK, "words", tokenizer=code, eos=0)
    found, status = packed(tmp_path / "cache", tmp_path / "a.jsonl", packing)
    flat, ids, positions = list[int](), list[int](), list[int]()
    for number, text in enumerate(documents):
        tokens = [*code(text), 0] if text else []  # an empty document has no end
        flat, ids = flat + tokens, ids + [number] * len(tokens)
        positions += range(len(tokens))
    size, starts = BLOCK + 1, np.cumsum([0, *(len(json.dumps({"words": text})) + 1 for text in documents)])
    expected = {}
    for number in range(len(flat) // size):
        cut = slice(number * size, (number + 1) * size)
        mine = ids[cut]
        fresh = [sorted(set(mine)).index(one) for one in mine]
        # of a document that goes on from the window before, positions count from its rest
        at = [
            position - (positions[cut][0] if one == mine[0] else 0)
            for one, position in zip(mine, positions[cut], strict=True)
        ]
        key = f"a.jsonl#{starts[mine[0]]}/{number}"
        expected[key] = {"tokens": flat[cut], "document_ids": fresh, "positions": at}
    assert found == expected
    assert status.worker.totals.dropped == (1 if len(flat) % size else 0)


def test_whole_documents_are_packed_with_padding(tmp_path: Path) -> None:
    lengths = [3, 6, 5, 2, 20, 8, 1]
    documents = [np.arange(length) + 100 * i for i, length in enumerate(lengths)]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"tokens": one.tolist()}) + "\n" for one in documents)
    )
    found, _ = packed(tmp_path / "cache", tmp_path / "a.jsonl", cs.pack_tokens(BLOCK, split=False, pad=9999))
    seen = list[int]()
    for window in found.values():
        tokens, ids, positions = (np.array(window[name]) for name in ("tokens", "document_ids", "positions"))
        assert len(tokens) == BLOCK + 1
        padding = ids == -1
        assert (tokens[padding] == 9999).all()
        assert (positions[padding] == 0).all()
        for one in range(ids.max() + 1):
            assert positions[ids == one].tolist() == list(range((ids == one).sum()))
            piece = tokens[ids == one]
            whole = documents[piece[0] // 100]
            assert len(piece) == len(whole) or len(whole) > BLOCK + 1  # only longer ones are cut
            seen += piece.tolist()
    assert sorted(seen) == sorted(np.concatenate(documents).tolist())
    assert len(found) == 6  # 3+5, 6+2, 8, 8, 4+1 and 8


def test_a_document_without_tokens_of_the_right_kind_is_counted_and_the_others_come(tmp_path: Path) -> None:
    good = [{"tokens": [1, 2, 3, 4]}] * 4
    bad = [{"text": "x"}, {"tokens": "x"}, {"tokens": [0.5]}, {"tokens": [[1], [2]]}, {"tokens": [-1]}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*good, *bad]))
    found, status = packed(tmp_path / "cache", tmp_path / "a.jsonl", cs.pack_tokens(BLOCK))
    assert [window["tokens"] for window in found.values()] == [[1, 2, 3, 4, 1, 2, 3, 4]] * 2
    assert status.skipped == len(bad)
    (failure,) = status.failures  # of a unit, with the first of its reasons
    assert "5 problems, the first: has no field 'tokens' to pack, but 'text'" in failure.reason


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block_size": 0}, "block_size"),
        ({"block_size": 8, "split": False}, r"split=False leaves room.*give pad="),
        ({"block_size": 8, "eos": -1}, "eos"),
        ({"block_size": 8, "pad": 2**31}, "pad"),
        ({"block_size": 8, "tokenizer": "gone.json"}, "no usable tokenizer.json"),
        ({"block_size": 8, "tokenizer": 3}, "tokenizer=3"),
    ],
    ids=shown,
)
def test_a_packing_that_cannot_work_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(cs.ConfigError, match=words):
        cs.pack_tokens(**options)


def test_a_packing_of_samples_alone_or_beside_a_hold_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(cs.ConfigError, match="packs whole units"):
        cs.pack_tokens(8)({"tokens": np.arange(9)})
    with (
        cs.Cache(tmp_path / "cache", "20MB", min_free=0) as cache,
        pytest.raises(cs.ConfigError, match="holdout"),
    ):
        cs.start_worker(cache, [{"tokens": [1]}], transform=cs.pack_tokens(8), holdout=0.5)


# --- CacheSource ---------------------------------------------------------------------------------


def test_the_cache_of_another_gives_its_samples_with_their_keys(filled: Path, tmp_path: Path) -> None:
    source = cs.open_source(filled)
    assert type(source) is cs.CacheSource
    found = dict(read(source))
    assert sorted(map(int, found)) == list(range(NUM_SAMPLES))
    for key, sample in found.items():
        expected = numbered(1, int(key))[0]
        assert (sample["number"], sample["x"].dtype) == (expected["number"], np.float32)
        assert np.array_equal(sample["x"], expected["x"])
    shutil.copytree(filled, tmp_path / "copy", ignore=shutil.ignore_patterns("*sqlite*"))
    assert source.num_units == len([*(filled / "shards").iterdir()])
    assert dict(read(cs.CacheSource(tmp_path / "copy"))).keys() == found.keys()  # without a catalogue


def test_a_shard_that_is_gone_or_damaged_costs_its_samples_alone(new_path: Callable[[], Path]) -> None:
    path = new_path()
    source = cs.CacheSource(path)
    shards: Sequence[Path] = sorted((path / "shards").iterdir())
    whole = len(read(source, 2))
    shards[0].unlink()
    data = bytearray(shards[1].read_bytes())
    data[-9] ^= 1
    shards[1].write_bytes(data)
    for unit in (0, 1):
        with pytest.raises(cs.SampleError, match=shards[unit].name):
            read(source, unit)
    assert len(read(source, 2)) == whole


def test_what_is_no_cache_is_refused(new_path: Callable[[], Path], tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/a.txt").write_text("no shard")
    cs.Cache(tmp_path / "empty", "10MB", min_free=0).close()
    with pytest.raises(cs.SourceError, match=r"photos: no cache is found there .*cache\.json and shards/"):
        cs.CacheSource(tmp_path / "photos")
    with pytest.raises(cs.SourceError, match=r"empty: the cache is still empty; wait until"):
        cs.CacheSource(tmp_path / "empty")
    for wrong in ("", None, 3, ["a", "b"]):
        with pytest.raises(cs.ConfigError, match="CacheSource takes the path or URL of one cache, not"):
            cs.CacheSource(wrong)  # type: ignore[arg-type]
    path = new_path()
    with pytest.raises(cs.ConfigError, match="'resize'"):
        cs.open_source(path, resize=8)
    with cs.Cache(path) as cache, pytest.raises(cs.ConfigError, match="cannot be filled from itself"):
        cs.start_worker(cache, cs.CacheSource(path))
