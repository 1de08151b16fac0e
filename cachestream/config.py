"""Parsing and checks of arguments, optional libraries, and the names that similar libraries use."""

from __future__ import annotations

import difflib
import functools
import gc
import importlib
import inspect
import math
import numbers
import operator
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from decimal import Decimal
from types import ModuleType
from typing import Any, Final, ParamSpec, TypeGuard, TypeVar

from cachestream.errors import ConfigError


def require(module: str, extra: str, what: str) -> Any:
    """Import the optional `module`, which `what` needs and the extra `extra` installs.

    Raises ConfigError where it is missing.
    """
    try:
        found: ModuleType = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{what} needs {error.name or module}: pip install 'cachestream[{extra}]'"
        ) from error
    return found


# The advice for Python's "can't start new thread".
NO_THREADS: Final = (
    "raise 'ulimit -u', or the container's limit on processes (pids), or use fewer num_workers"
)

SHORTEST_S: Final = 0.001  # a deadline below this is a mistake

_GENERATORS: Final = ("generator", "rng")
Result = TypeVar("Result")
Parameters = ParamSpec("Parameters")
_MAX_BYTES: Final = 2**62  # the catalogue and the system use signed 64-bit integers
_PREFIXES: Final = " kmgtp"
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(?:([kmgtp])(i(?=b))?)?b?\s*", re.IGNORECASE)

# Names of options in similar libraries, and their names here.
PEER_KEYWORDS: Final[dict[str, str]] = {
    "cache_dir": "cache",
    "cache_limit": "size_limit",
    "cache_path": "cache",
    "cache_size": "size_limit",
    "input_dir": "source",
    "local": "cache",
    "max_cache_size": "size_limit",
    "num_samples": "epoch_size",
    "num_threads": "num_workers",
    "pin_memory": "device",
    "prefetch_factor": "prefetch",
    "remote": "source",
    "session_options": "storage_options",
    "shardshuffle": "shuffle",
    "shuffle_seed": "seed",
    "sync_period": "turnover",
    "urls": "source",
    "validate_hash": "check_hashes",
    "workers": "num_workers",
}

# Options of similar libraries without an equivalent here, and what to do instead.
PEER_ANSWERS: Final[dict[str, str]] = {
    "batch_sampler": "EpochLoader and stream take it as sampler=",
    "batching_method": "make a loader for each stream",
    "collate_fn": "batches are made without one; give batch_transform= for work on whole batches",
    "encryption": "sets that are encrypted cannot be read",
    "generator": "give seed=",
    "handler": "nothing is needed: what cannot be used is counted with its reason in cache.status().failures",
    "index_path": "the source is the folder that holds index.json, with format=",
    "keep_zip": "nothing is needed: compressed shards are never on the disk",
    "max_pre_download": "nothing is needed: filling does not depend on where training is",
    "nodesplitter": "nothing is needed: each node gets a share of the remote",
    "num_canonical_nodes": "nothing is needed: a state goes on with another number of ranks",
    "partition_algo": "nothing is needed: each node gets a share of the remote",
    "persistent_workers": "nothing is needed: the worker fills on from epoch to epoch",
    "predownload": "nothing is needed: filling does not depend on where training is",
    "resampled": "nothing is needed: there is always a next epoch",
    "streams": "give cs.mix({source: weight}) as the source",
    "subsample": "EpochLoader and stream take epoch_size=, or a sampler=",
    "worker_init_fn": "nothing is needed: no process makes batches, and transform= runs in the background",
    "workersplitter": "nothing is needed: the worker's processes divide the units among themselves",
    **dict.fromkeys(
        ("download_retry", "download_timeout"),
        "nothing is needed: what does not answer is tried again for as long as it takes",
    ),
    **dict.fromkeys(("item_loader", "serializers"), "nothing is needed; decoders= is for fields of your own"),
    **dict.fromkeys(
        ("num_replicas", "rank", "world_size"),
        "the ranks are found from torch.distributed, once it is initialised",
    ),
    **dict.fromkeys(
        ("replication", "sampling_granularity", "sampling_method"),
        "EpochLoader and stream take any torch sampler as sampler=, and start_worker an order= for the "
        "filling",
    ),
    **dict.fromkeys(
        ("shuffle_algo", "shuffle_block_size"),
        "nothing is needed: every epoch permutes all that is cached",
    ),
}


def parse_size(value: int | float | str, what: str = "size") -> int:
    """Bytes of `value`: a number of bytes, or text such as "200GB" (10⁹) or "64MiB" (2²⁰).

    A rate such as "40MB/s" is read as bytes a second. Raises ConfigError naming `what`.
    """
    if not (_is_number(value) or isinstance(value, str)):
        raise ConfigError(f"{what}={value!r}: give bytes as a number, or text such as '200GB'")
    if not isinstance(value, str):
        if not math.isfinite(value) or value < 0:
            raise ConfigError(f"{what}={value!r}: must be a finite number of bytes, 0 or more")
        size_bytes = int(value)
    else:
        match = _SIZE.fullmatch(value.strip().removesuffix("/s"))
        if match is None:
            raise ConfigError(f"{what}={value!r}: give bytes as a number, or text such as '200GB'")
        factor = (1024 if match[3] else 1000) ** _PREFIXES.index((match[2] or " ").lower())
        size_bytes = int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor
    if size_bytes > _MAX_BYTES:
        raise ConfigError(f"{what}={value!r}: more than any disk has; give at most 4000PB")
    return size_bytes


def parse_path(value: object, what: str) -> str:
    """The path `value` as text, a `~` in front as the user's home. Raises ConfigError naming `what`."""
    if not isinstance(value, str | bytes | os.PathLike) or "\0" in (path := os.fsdecode(value)):
        raise ConfigError(f"{what}={value!r}: give a path, such as '/scratch/train'")
    return os.path.expanduser(path)


def format_size(size_bytes: float) -> str:
    """`size_bytes` for a person: "0 B", "812 kB", "1.5 GB"."""
    for factor, unit in ((10**15, "PB"), (10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if abs(size_bytes) >= 0.9995 * factor:  # what would round up to 1000 has the next unit
            return f"{format_number(size_bytes / factor)} {unit}"
    return f"{int(size_bytes)} B"


def format_number(number: float, digits: int = 3) -> str:
    """`number` for a person, by so many significant `digits`: "0.00052", "31.2", "4,120", "inf"."""
    rounded = f"{number:.{digits}g}"
    return f"{Decimal(rounded):,f}" if math.isfinite(number) else rounded  # no "1e+03" or "1e-05"


def format_duration(seconds: float | None) -> str:
    """`seconds` for a person: "0.52 s", "12 s", "5 min", "1 h 39 min", "14 d"; "never" for None."""
    if seconds is None or not math.isfinite(seconds):
        return "never"
    if seconds < 10:
        return f"{format_number(seconds, 2)} s"
    for unit_s, unit, below_s, below in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min")):
        if seconds >= unit_s:
            whole, rest = divmod(int(seconds), unit_s)
            return f"{whole} {unit} {rest // below_s} {below}" if rest >= below_s else f"{whole} {unit}"
    return f"{int(seconds) // 60} min" if seconds >= 60 else f"{int(seconds)} s"


def keywords_of(function: Callable[..., object]) -> set[str]:
    """The names of the arguments that `function` takes by keyword only."""
    parameters = inspect.signature(function).parameters.values()
    return {one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY}


def with_generator(function: Callable[..., Result]) -> Callable[[Any, Callable[[], Any]], Result]:
    """Wrap a user's function, which may take a random generator, as one of (value, factory of generators).

    `function` gets a generator as its second positional parameter without a default, or as a parameter
    `generator` or `rng` that is None by default. Otherwise, and where it has no signature, it gets the value
    alone.
    """
    name = _generator_parameter(function)
    if name is None:
        return lambda value, _: function(value)
    if not name:
        return lambda value, make: function(value, make())
    return lambda value, make: function(value, **{name: make()})


def _generator_parameter(function: Callable[..., object]) -> str | None:
    """The name of the parameter for a generator, "" for the second positional one; None without one."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
        if parameters and parameters[0].kind is inspect.Parameter.VAR_POSITIONAL:
            # A torch.nn.Module passes all arguments on to its `forward`.
            parameters = list(inspect.signature(getattr(function, "forward", function)).parameters.values())
    except (TypeError, ValueError):
        return None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [one for one in parameters if one.kind in positional and one.default is one.empty]
    if len(needed) == 2:
        return ""
    # With another default it is the user's own generator, for example one bound by functools.partial.
    named = [one.name for one in parameters if one.name in _GENERATORS and one.default is None]
    return named[0] if len(needed) == 1 and named else None


def suggests_names(
    known: Collection[str] = (), hints: Mapping[str, str] | None = None, name: str = ""
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Decorate a function: for a keyword that it lacks, a ConfigError tells the right one.

    `known` are taken besides those of the signature. `hints` are for keywords that belong elsewhere. `name`
    is shown for a constructor. A type checker sees the function as it is.
    """

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        shown, parameters = name or function.__name__, inspect.signature(function).parameters.values()
        named = [one.name for one in parameters if one.kind is not one.VAR_KEYWORD and one.name != "self"]
        all_known = frozenset([*named, *known])

        @functools.wraps(function)
        def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            if not kwargs.keys() <= all_known:
                for keyword in kwargs.keys() & (hints or {}).keys():
                    raise ConfigError(f"{shown}() has no argument '{keyword}': {(hints or {})[keyword]}")
                reject_unknown(shown, kwargs, all_known)
            return function(*args, **kwargs)

        return checked

    return decorate


def reject_unknown(function: str, given: Mapping[str, object], known: Collection[str]) -> None:
    """Raise ConfigError for `given` keywords that are not `known`, with the equivalent where there is one."""
    for name in given:
        if name not in known:
            raise ConfigError(f"{function}() has no argument '{name}'{_advice(name, sorted(known))}")


def _advice(name: str, options: list[str]) -> str:
    if name in PEER_ANSWERS:
        return f": {PEER_ANSWERS[name]}"
    if PEER_KEYWORDS.get(name) in options:
        return f"; here it is called '{PEER_KEYWORDS[name]}'"
    near = difflib.get_close_matches(name, options, n=1)
    return f"; do you mean '{near[0]}'?" if near else f"; it takes {', '.join(options)}"


def check_mapping(name: str, value: object, such_as: str) -> None:
    """Raise ConfigError unless the argument `name` is None or a mapping; `such_as` is an example of one.

    The value is not shown: it may be a secret.
    """
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{name}= is a {type(value).__name__}: give a dict, such as {such_as}")


def whole_number(value: object) -> int | None:
    """`value` as a plain int if it is an integer of Python, numpy or torch, and no bool; None otherwise."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def check_count(name: str, value: object, least: float = 1, most: float = math.inf) -> int:
    """`value` as a plain int; raises ConfigError unless it is a whole number from `least` to `most`."""
    count = whole_number(value)
    if count is None or not least <= count <= most:
        lower = "" if math.isinf(least) else f", {least} or more"
        upper = "" if math.isinf(most) else f", {most} at most"
        raise ConfigError(f"{name}={value!r}: give a whole number{lower}{upper}")
    return count


def check_seconds(name: str, value: object, least: float = -math.inf, most: float = math.inf) -> None:
    """Raise ConfigError unless `value` is a number of seconds from `least` to `most`."""
    if not (_is_number(value) and least <= value <= most):
        lower = "" if math.isinf(least) else f", {least:g} or more"
        upper = "" if math.isinf(most) else f", {most:g} at most"
        raise ConfigError(f"{name}={value!r}: give seconds{lower}{upper}")


def check_share(name: str, value: object) -> None:
    """Raise ConfigError unless `value` is at least 0 and less than 1."""
    if not (_is_number(value) and 0 <= value < 1):
        raise ConfigError(f"{name}={value!r}: give a share from 0 up to, not with, 1")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause Python's garbage collector while modules are loaded, whose objects stay.

    A collection scans all objects of the process: 0.1 s where torch is loaded.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
