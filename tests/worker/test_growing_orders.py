"""Passes and listings that grow, without processes: what was there stays as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cachestream.errors import SourceError
from cachestream.listing.names import Mark, Names, NamesWriter, StoredNames, read_mark
from cachestream.worker.order import Partition, PassPlan, UnitOrder

ENDS = (7, 8, 300, 1301)


def grown(kind: str, ends: tuple[int, ...], partition: Partition | None) -> list[PassPlan]:
    """A pass as it grows to `ends`."""
    plan = PassPlan(kind, 3, 2, 0, "", 0, partition, growing=True)
    plans = []
    for end in ends:
        plan = plan.grown(end, f"digest of {end}", is_complete=end == ends[-1])
        plans.append(plan)
    return plans


@pytest.mark.parametrize("kind", ["shuffle", "sequential"])
@pytest.mark.parametrize("partition", [None, Partition(0, 3), Partition(2, 3)], ids=str)
def test_a_pass_that_grows_holds_every_unit_once_and_changes_no_position_that_there_was(
    kind: str, partition: Partition | None
) -> None:
    before = np.array([], np.int64)
    for plan in grown(kind, ENDS, partition):
        order = UnitOrder(plan)
        units = order.units(np.arange(plan.length or 0))
        every = np.arange(plan.num_units or 0)
        mine = every if partition is None else every[partition.places(every) >= 0]
        assert sorted(units.tolist()) == mine.tolist()
        assert units[: len(before)].tolist() == before.tolist()
        assert order.positions(units).tolist() == list(range(len(units)))
        before = units


def test_each_segment_is_shuffled_and_units_that_are_not_listed_yet_have_no_position() -> None:
    short, long = (UnitOrder(plan) for plan in grown("shuffle", (500, 1000), None))
    units = long.units(np.arange(1000))
    assert units[:500].max() == 499
    assert units[:500].tolist() != list(range(500))
    assert units[500:].tolist() != list(range(500, 1000))
    assert (units[500:] - 500).tolist() != units[:500].tolist()
    assert short.positions(np.array([500, 999])).tolist() == [-1, -1]


@pytest.mark.parametrize("kind", ["shuffle", "sequential"])
@pytest.mark.parametrize("partition", [None, Partition(1, 3)], ids=str)
def test_units_that_a_pass_knows_nothing_of_have_no_position_in_it(
    kind: str, partition: Partition | None
) -> None:
    plan = PassPlan(kind, 3, 0, 90, "", None, partition)
    positions = UnitOrder(plan).positions(np.arange(-1, 120))
    assert positions[0] == -1
    assert (positions[91:] == -1).all()
    assert sorted(positions[positions >= 0].tolist()) == list(range(plan.share or 0))


def test_the_nodes_shares_of_a_growing_pass_are_disjoint_and_complete() -> None:
    found: list[int] = []
    for node in range(3):
        plan = grown("shuffle", ENDS, Partition(node, 3))[-1]
        found += UnitOrder(plan).units(np.arange(plan.length or 0)).tolist()
    assert sorted(found) == list(range(ENDS[-1]))


def test_plans_are_read_back_from_what_they_are_written_as_and_those_of_old_from_what_they_were() -> None:
    for plan in [*grown("shuffle", ENDS, None), *grown("sequential", ENDS, Partition(1, 3))]:
        assert PassPlan.from_json(plan.to_json()) == plan
    old = '["shuffle",0,1,90,"abc",90]'
    assert PassPlan.from_json(old) == PassPlan("shuffle", 0, 1, 90, "abc", 90)
    assert PassPlan.from_json(old).to_json() == old
    shared = '["curriculum",0,1,90,"",45,[1,2],"rule"]'
    assert PassPlan.from_json(shared).to_json() == shared


def test_a_pass_takes_up_what_is_an_eighth_more_or_the_end() -> None:
    plan = grown("shuffle", (800, 900), None)[0]
    assert not plan.takes_up(900, is_complete=False)
    assert plan.takes_up(901, is_complete=False)
    assert plan.takes_up(800, is_complete=True)
    ended = plan.grown(800, plan.listing, is_complete=True)
    assert (ended.segments, ended.length, ended.growing) == ((800,), 800, False)
    assert not ended.takes_up(2000, is_complete=True)


@pytest.mark.parametrize("module", ["supervisor", "sampler"])
def test_neither_the_supervisor_nor_a_sampling_process_loads_a_driver_that_the_source_does_not_bring(
    module: str,
) -> None:
    code = f"import sys, cachestream.worker.{module}; print({{'fsspec', 'torch'}} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=180
    )
    assert done.stdout.strip() == "set()"


# --- stored names


def stored(folder: Path, *pages: list[str], is_complete: bool = False) -> str:
    """The mark of a listing of `pages`."""
    path = str(folder / "listing.json")
    writer = NamesWriter(path, read_mark(path) or Mark("listing-0", "data"))
    for number, page in enumerate(pages):
        writer.add(page, is_complete=is_complete and number == len(pages) - 1)
    writer.close()
    return path


ODD = ["a", "b/é", os.fsdecode(b"b/\xff"), "", "c" * 5000]


def test_stored_names_are_those_that_were_added_and_have_the_digest_that_names_in_memory_have(
    tmp_path: Path,
) -> None:
    path = stored(tmp_path, ODD[:2])
    names = StoredNames(path)
    names.look()
    assert list(names) == ODD[:2]
    stored(tmp_path, ODD[2:], [], is_complete=True)
    assert len(names) == 2, "nothing changes under who reads"
    names.reach(5)
    assert list(names) == ODD
    assert names.digest == Names(ODD).digest
    assert names.digest_of(3) == Names(ODD[:3]).digest
    assert names.digest_of(6) is None
    mark = read_mark(path)
    assert mark is not None
    assert mark.is_complete
    with pytest.raises(SourceError, match="5 names are listed and 6 were"):
        names.reach(6)


@pytest.mark.parametrize("torn", [b"", b"half of a pa"])
def test_what_a_writer_that_died_left_behind_the_mark_is_cut_off_by_the_next_one(
    tmp_path: Path, torn: bytes
) -> None:
    stored(tmp_path, ODD[:3])
    for ending in ("names", "ends"):
        with open(tmp_path / f"listing-0.{ending}", "ab") as file:
            file.write(torn)
    (tmp_path / "listing.json.new").write_bytes(torn)
    path = stored(tmp_path, ODD[3:])
    names = StoredNames(path)
    names.look()
    assert list(names) == ODD


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "listing.json").unlink(),
        lambda folder: (folder / "listing.json").write_bytes(b"{"),
        lambda folder: (folder / "listing.json").write_text('{"stem": "listing-0", "colour": 1}'),
        lambda folder: (folder / "listing-0.names").unlink(),
        lambda folder: os.truncate(folder / "listing-0.ends", 8),
    ],
    ids=["no mark", "half a mark", "another mark", "no names", "short"],
)
def test_a_listing_that_is_not_whole_counts_as_none(tmp_path: Path, spoil: object) -> None:
    path = stored(tmp_path, ODD)
    assert callable(spoil)
    spoil(tmp_path)
    assert read_mark(path) is None
    assert StoredNames(path).look() is None
