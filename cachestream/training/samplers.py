"""The order of a user's sampler: a list of samples, the same on every rank, different every epoch.

Samplers that give each rank its share are evaluated on all ranks, which then interleave their lists.
"""

from __future__ import annotations

import copy
import itertools
import random
import reprlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from cachestream.errors import ConfigError, RankMismatchError
from cachestream.schema import IntArray
from cachestream.training.ranks import pack_numbers, unpack_numbers

if TYPE_CHECKING:
    from cachestream.training.ranks import Ranks

_ENDLESS: Final = 100  # a sampler that gives more than so many times the dataset is taken for endless
_ENDLESS_AT_LEAST: Final = 1_000_000
_SEEDED: Final = (
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    BatchSampler,
    DistributedSampler,
)
_NUMBERS: Final = (list, tuple, range, np.ndarray, torch.Tensor)

SamplerLike = Sampler[Any] | Iterable[int] | Callable[[Any], Iterable[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """The samples of a sampler: `indices` int64 `[n]`; of a batch sampler `bounds` int64 `[batches + 1]`.

    `shared`: the list is for all ranks together, which split it. Otherwise it is this rank's.
    """

    indices: IntArray
    bounds: IntArray | None
    shared: bool


def join_selections(mine: Selection, batch_size: int, ranks: Ranks, name: str) -> Selection:
    """Join the selections that the samplers of the group's ranks made, exchanged in round `name`, into one
    order, from which each rank gets its own.
    """
    share = {
        "drawn": pack_numbers(mine.indices),
        "bounds": None if mine.bounds is None else pack_numbers(mine.bounds),
    }
    answers = ranks.agree(name, share, in_group=True)
    answers = [answers[ranks.group.index(rank)] for rank in ranks.sharers]
    lists = [unpack_numbers(answer["drawn"]) for answer in answers]
    bounds = [unpack_numbers(answer["bounds"]) for answer in answers if answer["bounds"] is not None]
    if bounds and len(bounds) < len(lists):
        raise RankMismatchError(
            "some ranks' samplers give batches, others samples: give all the same sampler"
        )
    return interleave(lists, bounds or None, batch_size)


def check_sampler(sampler: object) -> None:
    """Raise ConfigError for an object that cannot be a sampler."""
    if not (callable(sampler) or isinstance(sampler, Sampler) or hasattr(sampler, "__iter__")):
        raise ConfigError(
            f"sampler={sampler!r}: give a torch sampler, a sampler class, or a function that gets "
            "the epoch's dataset and returns one"
        )
    if isinstance(sampler, Iterator) and iter(sampler) is sampler:
        raise ConfigError(
            f"sampler={sampler!r} is an iterator, which ends after one epoch; give what can be iterated "
            "again, such as a list or a torch sampler, or a function of the dataset that returns an iterator "
            "for each epoch"
        )


def may_draw_globally(sampler: SamplerLike) -> bool:
    """Return whether `sampler` may draw from the global generators: it is a function, or not one of
    torch's.
    """
    if isinstance(sampler, type):
        return sampler not in _SEEDED
    return any(type(part) not in _SEEDED and not isinstance(part, _NUMBERS) for part in _nested(sampler))


@contextmanager
def seeded_globally(key: int) -> Iterator[None]:
    """Seed the global generators of torch (the CPU's), numpy and Python from `key`; restore them at the
    end.
    """
    saved = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        torch.default_generator.manual_seed(key & (2**63 - 1))
        np.random.seed(key & (2**32 - 1))  # noqa: NPY002
        random.seed(key)
        yield
    finally:
        torch.set_rng_state(saved[0])
        np.random.set_state(saved[1])  # noqa: NPY002
        random.setstate(saved[2])


def evaluate(
    sampler: SamplerLike, dataset: Dataset[Any], epoch: int, key: int, most: int | None = None, ranks: int = 1
) -> Selection:
    """The samples that `sampler` draws from `dataset` in `epoch`: the first `most` (None: all), or as many
    whole batches as fit from a batch sampler. A sampler that gives this rank its share gives `most // ranks`.

    A sampler without a generator gets one seeded from `key`: the order is then the same on all ranks and
    after a resume, and torch's global generator, which the training thread uses, stays untouched. Raises
    ConfigError for values that are no indices of the dataset, and for a sampler that does not end.
    """
    made = sampler if isinstance(sampler, Sampler) or not callable(sampler) else sampler(dataset)
    if not hasattr(made, "__iter__"):
        raise ConfigError(
            f"the sampler {sampler!r} returned {made!r} for the epoch's dataset: let it return a torch "
            "sampler, or the numbers of samples"
        )
    fitted = _fitted(made, dataset, epoch)
    # A fitted DistributedSampler gives everything; a user's class of that kind gives this rank its share.
    shared = not any(
        hasattr(part, "num_replicas") and not isinstance(part, DistributedSampler) for part in _nested(fitted)
    )
    seeded = [part for part in _nested(fitted) if getattr(part, "generator", False) is None]
    for part in seeded:
        part.generator = torch.Generator().manual_seed(key & (2**63 - 1))
    try:
        drawn = _draw(fitted, len(dataset), most if shared or most is None else most // ranks)  # type: ignore[arg-type]
    finally:
        for part in seeded:
            part.generator = None
    return _selection(drawn, len(dataset), shared)  # type: ignore[arg-type]


def interleave(lists: list[IntArray], bounds: list[IntArray] | None, batch_size: int) -> Selection:
    """Interleave the ranks' lists by batches, so that ranks which split the result get their own lists.

    The result has as many batches as the shortest list; the last one takes as much from each list.
    """
    if bounds is not None:
        batches = [
            lists[rank][bounds[rank][i] : bounds[rank][i + 1]]
            for i in range(min(map(len, bounds)) - 1)
            for rank in range(len(lists))
        ]
        ends = np.cumsum([0, *map(len, batches)]).astype(np.int64)
        return Selection(np.concatenate([np.empty(0, np.int64), *batches]), ends, shared=True)
    least = min(map(len, lists))
    whole = least - least % batch_size
    heads = np.stack([indices[:whole].reshape(-1, batch_size) for indices in lists], axis=1)
    tails = [indices[whole:least] for indices in lists]
    return Selection(np.concatenate([heads.reshape(-1), *tails]), None, shared=True)


def _draw(sampler: Iterable[Any], size: int, most: int | None) -> list[Any]:
    """The values that `sampler` yields for a dataset of `size`, up to `most` samples."""
    given = iter(sampler)
    drawn = list(itertools.islice(given, 1))
    if not drawn or not _is_batch(drawn[0]):
        limit = _ENDLESS * size + _ENDLESS_AT_LEAST if most is None else most
        drawn += itertools.islice(given, max(0, limit - 1))
        if most is None and next(given, None) is not None:
            _refuse_endless(size)
        return [] if most == 0 else drawn
    count = 0
    batches: list[Any] = []
    for batch in itertools.chain(drawn, given):
        count += len(batch)
        if most is not None and count > most:
            return batches
        if most is None and count > _ENDLESS * size + _ENDLESS_AT_LEAST:
            _refuse_endless(size)
        batches.append(batch)
    if most is not None and count < most:
        raise ConfigError(
            f"the sampler's batches have {count} samples together, and epoch_size asks for {most}: let it "
            "give as many, or leave epoch_size out"
        )
    return batches


def _is_batch(drawn: Any) -> bool:
    return isinstance(drawn, list | tuple | np.ndarray | torch.Tensor) and np.ndim(drawn) == 1


def _refuse_endless(size: int) -> NoReturn:
    raise ConfigError(
        f"the sampler does not end: it gave more than {_ENDLESS} times the dataset's {size} samples; say "
        "with epoch_size= how many make an epoch"
    )


def _fitted(sampler: Any, dataset: Dataset[Any], epoch: int) -> Any:
    """Adapt `sampler`, which was made for a dataset of another length, to this epoch's dataset."""
    if isinstance(sampler, DistributedSampler):
        # The samples of all ranks, without padding: the plan splits them between the ranks.
        sampler = copy.copy(sampler)
        sampler.dataset, sampler.num_replicas, sampler.rank = dataset, 1, 0
        sampler.num_samples = sampler.total_size = len(dataset)  # type: ignore[arg-type]
    elif isinstance(sampler, WeightedRandomSampler) and len(sampler.weights) != len(dataset):  # type: ignore[arg-type]
        raise ConfigError(
            f"the WeightedRandomSampler has {len(sampler.weights)} weights for a dataset of {len(dataset)}: "  # type: ignore[arg-type]
            "the cache changes from epoch to epoch; give a function that gets the dataset and returns a "
            "sampler, or weights by key (weights=)"
        )
    elif hasattr(sampler, "data_source"):
        sampler = copy.copy(sampler)
        sampler.data_source = dataset
    elif hasattr(getattr(sampler, "sampler", None), "__iter__"):
        sampler = copy.copy(sampler)
        sampler.sampler = _fitted(sampler.sampler, dataset, epoch)
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    return sampler


def _nested(sampler: Any) -> Iterator[Any]:
    """Yield `sampler` and those inside it, as in a BatchSampler."""
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "sampler", None)


def _selection(drawn: list[Any], size: int, shared: bool) -> Selection:
    bounds: IntArray | None = None
    if drawn and _is_batch(drawn[0]):
        # An empty batch has no position in the order for a resume, and cannot be a common step of the ranks.
        batches = [batch for batch in map(_indices, drawn) if len(batch)]
        bounds = np.cumsum([0, *map(len, batches)]).astype(np.int64) if batches else None
        indices = np.concatenate([np.empty(0, np.int64), *batches])
    else:
        indices = _indices(drawn)
    outside = indices[(indices < 0) | (indices >= size)]
    if len(outside):
        raise ConfigError(
            f"the sampler asks for sample {outside[0]} of a dataset of {size}: the cache, and with it the "
            "dataset, changes from epoch to epoch; give a function that gets the dataset and returns a "
            "sampler"
        )
    return Selection(indices, bounds, shared)


def _indices(drawn: Any) -> IntArray:
    """Check sample numbers and return them as int64 `[n]`. A mask is an error, not samples 0 and 1."""
    try:
        given = np.array(drawn).reshape(-1)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"the sampler yields something else than sample numbers ({error})") from error
    if len(given) and given.dtype.kind not in "iu":
        raise ConfigError(
            f"the sampler yields {reprlib.repr(given[0])}: give the numbers of samples (of a mask: where it "
            "is true)"
        )
    return given.astype(np.int64, copy=False)
