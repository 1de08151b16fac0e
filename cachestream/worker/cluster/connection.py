"""The options of a filling with Ray, and the connection to a Ray cluster.

Ray is imported by the functions that need it: without these options a process never loads it.
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from cachestream.errors import ConfigError, SourceUnavailableError

NAMESPACE: Final = "cachestream"
ENGINES: Final = ("local", "ray")
MOST_ACTORS: Final = 4096
_CONNECT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """The options for a Ray cluster that takes part in a filling; `start_worker` documents them.

    `address`: the cluster's, as `ray.init` takes it. `num_actors`: actors that read units, with the options
    `actor_options`; 0 if local processes read them. `group`: the caches that share one filling; "" for none.
    `required`: nothing is read while the group does not answer. `decoders`: the endings that plug-ins decode
    where the worker was started.
    """

    address: str
    num_actors: int = 0
    actor_options: Mapping[str, Any] = field(default_factory=dict)
    group: str = ""
    required: bool = False
    decoders: tuple[str, ...] = ()


def describe(options: ClusterOptions | None) -> str:
    """The options on which all processes that use one cache must agree."""
    text = f"engine={ENGINES[options is not None and options.num_actors > 0]!r}"
    if options is None or not options.group:
        return text
    required = ", share_required=True" if options.required else ""
    return f"{text}, share={options.group!r}{required}"


def import_ray() -> Any:
    """The module `ray`; raises ConfigError if it is not installed."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            f"engine='ray' and share= need Ray ({error}): pip install 'cachestream[ray]'"
        ) from error


def check_actor_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for options that Ray does not take for an actor."""
    try:
        import_ray().remote(type("AnyActor", (), {})).options(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"ray_options={dict(options)!r}: {error}") from error


def current_address() -> str:
    """The address of the cluster of this process, or "auto": that of this machine, or RAY_ADDRESS."""
    ray = import_ray()
    return str(ray.get_runtime_context().gcs_address) if ray.is_initialized() else "auto"


def connect(address: str) -> Any:
    """Connect this process to the cluster at `address`, and return the module `ray`.

    Raises SourceUnavailableError if no cluster answers.
    """
    ray = import_ray()
    with _translated_errors(address):
        ray.init(
            address=_check_answers(address),
            namespace=NAMESPACE,
            ignore_reinit_error=True,
            log_to_driver=False,
            logging_level="ERROR",
        )
    return ray


def check_cluster(address: str) -> None:
    """Raise SourceUnavailableError if nothing answers at the `address` of a cluster."""
    with _translated_errors(address):
        _check_answers(address)


def _check_answers(address: str) -> str:
    """The address of the cluster that `address` means; raises OSError if nothing listens there."""
    if address == "auto":
        services = importlib.import_module("ray._private.services")
        if (found := services.canonicalize_bootstrap_address(address)) is None:
            raise ConnectionError("this machine has none, and RAY_ADDRESS names none")
        address = str(found)
    check_port(address)
    return address


@contextmanager
def _translated_errors(address: str) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        raise SourceUnavailableError(
            f"no Ray cluster answers at {address!r} ({error}); start one with 'ray start --head', or call "
            "ray.init() before start_worker"
        ) from error


def check_port(address: str) -> None:
    """Raise OSError if nothing listens at the `address` of a cluster.

    Ray itself would wait for minutes, and then end the process.
    """
    host, _, port = address.rpartition(":")
    if port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
