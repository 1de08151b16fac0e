"""Several hosts on one machine: network namespaces on a bridge, each with a name of its own, links that can be cut.

They share the disk and the kernel, so a directory that two of them use is a disk that two hosts share.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import pytest

__all__ = ["Host", "Hosts", "needs_hosts", "run_hosts"]

# Of RFC 2544, for measuring networks: no real network routes them.
_NETWORK: Final = "198.{}.{}"
_OURS: Final = re.compile(r"csn(\d+)[a-z]")
_COMMAND_TIMEOUT_S: Final = 120.0
_END_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Host:
    """One host: `link` is its network interface inside, `outside` the end of it on the bridge.

    `names` is the file that it has as /etc/hosts: the hosts know one another by name.
    """

    name: str
    address: str
    outside: str
    names: str
    link: str = "net0"

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start `command` on the host, in a session of its own."""
        become = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
        named = ["unshare", "--uts", "--mount", "sh", "-c", become, self.name, self.names, *command]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, *named],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            **options,
        )

    def cut(self) -> None:
        """Take the host off the network: nothing is refused, all is lost."""
        _ip("link", "set", self.outside, "down")

    def restore(self) -> None:
        """Bring it back."""
        _ip("link", "set", self.outside, "up")

    def pids(self) -> list[int]:
        """The processes on it."""
        return [int(pid) for pid in _ip("netns", "pids", self.name).split()]


@dataclass(frozen=True, slots=True)
class Hosts:
    """Hosts on one network; this process reaches it, and is reached there, at `address`."""

    all: tuple[Host, ...]
    address: str

    def __getitem__(self, index: int) -> Host:
        return self.all[index]


@contextlib.contextmanager
def run_hosts(count: int) -> Iterator[Hosts]:
    """`count` hosts, which are removed at the end of the block with all that runs on them."""
    mine = f"csn{os.getpid()}"
    network = _NETWORK.format(18 + os.getpid() // 256 % 2, os.getpid() % 256)
    _remove_left_over()
    names = tempfile.NamedTemporaryFile("w", prefix="hosts-", encoding="ascii")  # noqa: SIM115 - closed below
    try:
        _ip("link", "add", f"{mine}z", "type", "bridge")
        _ip("address", "add", f"{network}.254/24", "dev", f"{mine}z")
        _ip("link", "set", f"{mine}z", "up")
        named = {f"{mine}{chr(97 + i)}": f"{network}.{i + 1}" for i in range(count)}
        hosts = tuple(_add_host(Host(*pair, f"{pair[0]}o", names.name), f"{mine}z") for pair in named.items())
        names.write("127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in hosts))
        names.flush()
        yield Hosts(hosts, f"{network}.254")
    finally:
        _remove(mine)
        names.close()


@cache
def why_no_hosts() -> str:
    """Why this machine cannot have hosts, or ""."""
    missing = [tool for tool in ("ip", "unshare", "mount") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} missing: install iproute2 and util-linux"
    try:
        with run_hosts(1) as hosts, hosts[0].popen(["true"], stderr=subprocess.PIPE, text=True) as process:
            said = process.communicate(timeout=_COMMAND_TIMEOUT_S)[1]
            return str(said) if process.returncode else ""
    except RuntimeError as error:
        return str(error)


def needs_hosts() -> None:
    """Skip the test where network namespaces are not permitted."""
    if why := why_no_hosts():
        pytest.skip(f"no network namespaces here: {why}")


def _add_host(host: Host, bridge: str) -> Host:
    _ip("netns", "add", host.name)
    _ip("link", "add", host.outside, "type", "veth", "peer", "name", host.link, "netns", host.name)
    _ip("link", "set", host.outside, "master", bridge, "up")
    _ip("-n", host.name, "link", "set", "lo", "up")
    _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.link)
    _ip("-n", host.name, "link", "set", host.link, "up")
    return host


def _remove(prefix: str) -> None:
    """Remove the hosts and the bridge whose names begin so, and end what runs on them."""
    names = [line.split()[0] for line in _ip("netns", "list").splitlines()]
    for name in (name for name in names if re.fullmatch(f"{prefix}[a-y]", name)):
        _end_all(name)
        _ip("netns", "delete", name)  # and with it the link, at some time
        _ip("link", "delete", f"{name}o", check=False)
    _ip("link", "delete", f"{prefix}z", check=False)


def _end_all(name: str) -> None:
    deadline = time.monotonic() + _END_S
    while pids := _ip("netns", "pids", name).split():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {', '.join(pids)} on {name} do not end")
        time.sleep(0.01)


def _remove_left_over() -> None:
    """Remove the hosts that killed processes left: their names hold the process ids."""
    found = {match[1] for match in map(_OURS.match, _ip("netns", "list").splitlines()) if match}
    for pid in found:
        if not os.path.exists(f"/proc/{pid}"):
            _remove(f"csn{pid}")


def _ip(*arguments: str, check: bool = True) -> str:
    """The output of `ip`; raises RuntimeError with what it says when it fails."""
    done = subprocess.run(
        ["ip", *arguments], capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False
    )
    if check and done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
