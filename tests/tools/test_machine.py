"""What `cachestream diagnose` says of the machine: advice where something is amiss."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachestream.tools import machine
from cachestream.tools.machine import check_machine


@pytest.mark.parametrize(
    ("kind", "advice"), [("nfs4", "refused"), ("tmpfs", "memory"), ("ext4", ""), ("", "")]
)
def test_a_network_filesystem_and_one_in_memory_are_warned_of(
    kind: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "filesystem_of", lambda _: kind)
    (check,) = (one for one in check_machine(str(tmp_path)).checks if one.name == "filesystem")
    assert check.found == (kind or "unknown")
    assert advice in check.advice
    assert bool(advice) == bool(check.advice)


def test_a_small_and_slow_disk_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_bytes", lambda _: 1 << 28)
    monkeypatch.setattr(machine, "synced_bytes_per_s", lambda _: 20e6)
    report = check_machine(str(tmp_path))
    assert not report.ok
    warned = {check.name: check.advice for check in report.checks if check.advice}
    assert "free some space" in warned["space"]
    assert "a faster disk" in warned["disk"]
    assert "warning  disk         writes 20 MB/s, synced" in str(report)
    assert max(map(len, str(report).splitlines())) <= 80
