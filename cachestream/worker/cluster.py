"""The options of a filling with a Ray cluster, and the one door to `cachestream.ray`.

That folder stands on top: without these options no process loads it, nor Ray.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from cachestream.worker.channel import Channel, Message
    from cachestream.worker.child_process import ChildProcess

ENGINES: Final = ("local", "ray")
MOST_ACTORS: Final = 4096


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


class Sharing(Protocol):
    """A filling that is shared with other caches, as the supervisor sees it.

    `message`: the reason of the state of the filling while the group does not answer; else empty.
    """

    process: ChildProcess
    message: str

    def begin(self, now_s: float) -> None: ...
    def tick(self, now_s: float, resumed_s: float) -> int | None: ...
    def handle(self, process: int, channel: Channel, message: Message) -> bool: ...


def ray_module(name: str) -> Any:
    """The module `cachestream.ray.<name>`."""
    return importlib.import_module(f"cachestream.ray.{name}")
