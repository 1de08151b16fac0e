"""Which batches stay in the processor's caches, by what the kernel says of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachestream.training.batches.batch_queue import LastLevel, fits_caches, last_level, usable_bytes

MIB = 1 << 20


def write_index(root: Path, number: int, level: int, size: str, mask: str) -> None:
    folder = root / f"index{number}"
    folder.mkdir()
    for name, text in (("level", str(level)), ("size", size), ("shared_cpu_map", mask)):
        (folder / name).write_text(text + "\n")


def test_the_last_level_is_the_one_nearest_to_the_memory(tmp_path: Path) -> None:
    write_index(tmp_path, 0, 1, "48K", "00000001")
    write_index(tmp_path, 3, 3, "32768K", "00000000,00ff00ff")
    write_index(tmp_path, 2, 2, "1024K", "00000001")
    assert last_level(tmp_path) == LastLevel(32 * MIB, 16)


@pytest.mark.parametrize(
    ("size", "mask"), [("", "1"), ("many", "1"), ("32768K", ""), ("32768K", "0"), ("0K", "1")]
)
def test_without_a_word_of_the_kernel_it_is_a_usual_one(tmp_path: Path, size: str, mask: str) -> None:
    usual = last_level(tmp_path / "none")
    assert usual.num_bytes >= MIB
    write_index(tmp_path, 0, 3, size, mask)
    assert last_level(tmp_path) == usual


def test_this_machine_has_a_last_level() -> None:
    level = last_level()
    assert level.num_bytes >= 64 << 10
    assert level.processors >= 1


@pytest.mark.parametrize(
    ("processors", "ranks", "share"),
    [
        (8, 1, 1.0),
        (8, 2, 0.5),
        (2, 2, 0.5),  # fewer processors are let to these processes than share the cache
        (64, 1, 1.0),  # a thread uses no more than one of eight
        (64, 8, 1.0),  # one for each
        (64, 16, 0.5),
    ],
)
def test_ranks_share_the_caches(processors: int, ranks: int, share: float) -> None:
    cache = LastLevel(32 * MIB, 8)
    alone = usable_bytes(cache, 8, 1)
    assert 16 * MIB < alone < 32 * MIB  # something else passes through it, too
    assert usable_bytes(cache, processors, ranks) == share * alone


def test_small_batches_fit_this_machine_s_caches_and_a_disk_of_them_does_not() -> None:
    assert fits_caches(1024, 1)
    assert not fits_caches(1 << 40, 1)
