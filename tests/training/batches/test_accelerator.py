"""Delivery to a device of any kind: on a simulated one batches arrive whole, in one stream and in several."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import cachestream as cs
from cachestream.training.batches import transfer
from cachestream.training.batches.memory import PinnedMemory
from cachestream.training.batches.transfer import BatchTransform, accelerator, make_transfer
from tests.support.forked import run_forked
from tests.support.simulated_device import SimulatedStream, recorded, register, use_streams

SIZES = (500, 20_000)  # small batches are sent a few at a time
pytestmark = pytest.mark.usefixtures("forked")


def run(main: Callable[[], object], *arguments: object) -> None:
    done = run_forked(main, arguments, timeout_s=120)
    assert done.returncode == 0, done.stderr


def plus_one(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "y": batch["x"] + 1}


def deliver(path: str, transform: Callable[[Any], Any] | None) -> int:
    """Deliver three epochs. Look at the values of the first at once, and at the others' when all were gathered."""
    held, count = [], 0

    def check(batch: dict[str, Any]) -> None:
        number, x = batch["number"].cpu(), batch["x"].cpu()
        assert torch.equal(x, number.float().unsqueeze(1).expand_as(x))
        if transform is not None:
            assert torch.equal(batch["y"].cpu(), x + 1)

    with cs.Cache(path) as cache, cs.EpochLoader(cache, 4, device="sim", batch_transform=transform) as loader:
        for epoch in range(3):
            for batch in loader:
                assert batch["x"].device == torch.device("sim", 0)
                count += len(batch)
                if epoch == 0:
                    check(batch)
                else:
                    held.append(batch)
    for batch in held:
        check(batch)
    return count


def one_stream() -> None:
    register()
    deliver(sys.argv[1], None)
    deliver(sys.argv[1], plus_one)
    assert recorded == []  # all is in order


def several_streams() -> None:
    register()
    stream = use_streams()
    count = deliver(sys.argv[1], None) + deliver(sys.argv[1], plus_one)
    assert recorded == [stream] * count  # each tensor is known to be used on the consumer's stream
    assert isinstance(stream, SimulatedStream)
    assert torch.accelerator.current_stream() is stream


@pytest.mark.e2e
@pytest.mark.parametrize("main", [one_stream, several_streams])
@pytest.mark.parametrize("size", SIZES)
def test_batches_arrive_whole_however_late_the_device_works(
    main: Callable[[], None], size: int, cache_of: Any
) -> None:
    cache = cache_of([{"x": torch.full((size,), float(i)), "number": i} for i in range(64)], [32, 32])
    run(main, cache.path)


def bounded() -> None:
    register()
    limits = []

    class Told(PinnedMemory):
        def __init__(self, limit_bytes: int | None) -> None:
            limits.append(limit_bytes)
            super().__init__(0)  # the simulated device pins nothing

    with (
        patch.multiple(transfer, PinnedMemory=Told, _can_pin=lambda _: True),
        cs.Cache(sys.argv[1]) as cache,
        cs.EpochLoader(cache, 4, device="sim", pinned_limit="64KB") as loader,
    ):
        assert sum(len(batch["number"]) for batch in loader) == 64
    assert limits == [64_000]


@pytest.mark.e2e
def test_the_pinned_memory_of_a_loader_is_bounded_as_it_says(cache_of: Any) -> None:
    run(bounded, cache_of([{"x": torch.zeros(500), "number": i} for i in range(64)], [32, 32]).path)


def refusals() -> None:
    register()
    assert accelerator() == "sim"
    assert make_transfer("sim", 2).device == torch.device("sim", 0)
    for device, says in (
        ("sim:1", "device='sim:1': there is no such device, 1 of kind 'sim' is here"),
        ("cuda", "device='cuda': torch 2"),
        (
            "xpu:0",
            f"device='xpu:0': torch {torch.__version__} finds the accelerator 'sim' here; use device='sim'",
        ),
        ("meta", "device='meta': torch"),
    ):
        with pytest.raises(cs.ConfigError) as caught:
            make_transfer(device, 2)
        assert str(caught.value).startswith(says)


@pytest.mark.e2e
def test_a_device_that_is_not_here_is_refused_with_the_one_that_is() -> None:
    run(refusals)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without accelerator")
@pytest.mark.parametrize("device", ["cuda", "xpu", "mps", "meta"])
def test_a_machine_without_accelerator_says_so(device: str) -> None:
    with pytest.raises(cs.ConfigError) as caught:
        make_transfer(device, 2)
    assert (
        str(caught.value)
        == f"device={device!r}: torch {torch.__version__} finds no accelerator here; use device=None"
    )


def measured() -> None:
    from cachestream.tools.bench import bench
    from cachestream.tools.machine import check_machine

    register()
    with cs.Cache(sys.argv[1]) as cache:
        report = bench(cache, 4, seconds=0.05)
    assert report.moved is not None
    assert report.moved.num_samples >= 64
    found = {check.name: check.found for check in check_machine(sys.argv[2]).checks}
    assert found["device"] == "sim"


@pytest.mark.e2e
def test_the_tools_measure_the_accelerator_that_is_here(cache_of: Any, tmp_path: Path) -> None:
    cache = cache_of([{"x": torch.full((500,), float(i))} for i in range(64)], [32, 32])
    run(measured, cache.path, tmp_path)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("transform", [None, lambda batch: {**batch, "y": batch["x"] + 1}])
@pytest.mark.parametrize("size", [500, 50_000, 300_000])  # small batches are sent a few at a time
def test_batches_on_a_gpu_keep_their_values_when_held_changed_and_used_on_other_streams(
    cache_of: Any, size: int, transform: BatchTransform | None
) -> None:
    cache = cache_of([{"x": torch.full((size,), float(i)), "number": i} for i in range(64)], [32, 32])
    other = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    held = []
    with cs.EpochLoader(cache, 4, device="cuda", batch_transform=transform) as loader:
        for _ in range(3):
            for batch in loader:
                assert batch["x"].is_cuda
                with torch.cuda.stream(other):
                    other.wait_stream(torch.cuda.current_stream())
                    for tensor in batch.values():
                        tensor.record_stream(other)
                    held.append((batch["number"].clone(), *batch["x"].aminmax(dim=1)))
                    if transform is not None:
                        assert torch.equal(batch["y"], batch["x"] + 1)
                torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]
                batch["x"].fill_(-1)
    torch.cuda.synchronize()
    for number, least, most in held:
        assert torch.equal(least, number.float())
        assert torch.equal(most, number.float())
