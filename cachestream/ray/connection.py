"""The connection to a Ray cluster. The functions import Ray, which need not be installed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Final

from cachestream.config import require
from cachestream.errors import ConfigError, SourceUnavailableError

NAMESPACE: Final = "cachestream"
_CONNECT_S: Final = 10.0
_FIND_S: Final = 60.0
_FIND: Final = "import ray; ray.init(address='auto', log_to_driver=False, logging_level='ERROR')"


def import_ray() -> Any:
    """The module `ray`; raises ConfigError if it is not installed."""
    return require("ray", "ray", "a worker with engine='ray' or share=")


def check_actor_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for options that Ray does not take for an actor."""
    try:
        import_ray().remote(type("AnyActor", (), {})).options(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"ray_options={dict(options)!r}: {error}") from error


def current_address() -> str:
    """The address of the cluster of this process, that in RAY_ADDRESS, or "auto": one on this machine."""
    ray = import_ray()
    if ray.is_initialized():
        return str(ray.get_runtime_context().gcs_address)
    return os.environ.get("RAY_ADDRESS") or "auto"


def connect(address: str) -> Any:
    """Connect this process to the cluster at `address`, and return the module `ray`.

    Raises SourceUnavailableError if no cluster answers.
    """
    ray = import_ray()
    try:
        check_port(address)
        ray.init(
            address=address,
            namespace=NAMESPACE,
            ignore_reinit_error=True,
            log_to_driver=False,
            logging_level="ERROR",
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise _no_answer(address, error) from error
    return ray


def check_cluster(address: str, *, is_required: bool) -> None:
    """Raise SourceUnavailableError if nothing answers at the `address` of a cluster.

    A cluster of this machine whose address is not known is looked for only if it `is_required`: Ray takes
    seconds for that, in a process of its own.
    """
    try:
        check_port(address)
        if address == "auto" and is_required:
            subprocess.run([sys.executable, "-c", _FIND], check=True, capture_output=True, timeout=_FIND_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise _no_answer(address, error) from error


def check_port(address: str) -> None:
    """Raise OSError if nothing listens at the `address` of a cluster.

    Ray itself would wait for minutes, and then end the process.
    """
    host, _, port = address.rpartition(":")
    if port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()


def _no_answer(address: str, error: Exception) -> SourceUnavailableError:
    return SourceUnavailableError(
        f"no Ray cluster answers at {address!r} ({error}); start one with 'ray start --head', or call "
        "ray.init() before start_worker"
    )
