"""A web server whose files fail as their paths say; to WebHDFS clients it is a name node that holds the same files."""

from __future__ import annotations

import contextlib
import itertools
import json
import select
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

__all__ = ["FILE_BYTES", "UnrulyServer", "full_backlog", "run_unruly_server"]

FILE_BYTES: Final = 1 << 20  # of all files but those below good/, endless/ and bomb/
HALF: Final = 1000  # bytes of a body that stalls
DRIP_S: Final = 0.05
PATIENCE_S: Final = 120.0
_ZEROS: Final = bytes(1 << 20)


@dataclass
class UnrulyServer:
    """A running server. The first part of a path tells how the file is served: "good", "silent" (no answer), "stalled" (in the
    middle of the body), "dripping" (a byte at a time), "endless" (chunks without end), "bomb" (4 GB of zeros, packed as gzip on
    the way), "missing", "broken" (500).

    `asked` are the targets of all requests.
    """

    port: int
    asked: list[str] = field(default_factory=list)
    closed: threading.Event = field(default_factory=threading.Event)
    hung_up: threading.Event = field(default_factory=threading.Event)

    def hang_up(self) -> None:
        """End the answers that are under way, and go on with new ones."""
        self.hung_up.set()
        self.hung_up = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def run_unruly_server() -> Iterator[UnrulyServer]:
    """Serve until the end of the block."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        server = UnrulyServer(listener.getsockname()[1])
        thread = threading.Thread(target=_accept, args=(listener, server), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.closed.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10.0)


@contextlib.contextmanager
def full_backlog() -> Iterator[int]:
    """A port at which connections are never made: what would accept them has no room for more."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                one.connect(listener.getsockname())
        yield listener.getsockname()[1]


def _accept(listener: socket.socket, server: UnrulyServer) -> None:
    while not server.closed.is_set():
        try:
            client, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_serve, args=(client, server), daemon=True).start()


def _serve(client: socket.socket, server: UnrulyServer) -> None:
    with client, contextlib.suppress(OSError, ValueError), client.makefile("rb") as lines:
        while line := lines.readline():
            method, target, _ = line.decode().split(" ", 2)
            while lines.readline() not in (b"\r\n", b""):
                pass
            server.asked.append(target)
            _answer(client, server, method, urlsplit(target))


def _answer(client: socket.socket, server: UnrulyServer, method: str, url: SplitResult) -> None:
    path = unquote(url.path).lstrip("/")
    kind = path.removeprefix("webhdfs/v1/").partition("/")[0]
    length = len(path) if kind == "good" else FILE_BYTES
    if kind == "silent":
        _wait(client, PATIENCE_S)
    elif kind in ("missing", "broken"):
        _send(client, b"", status="404 Not Found" if kind == "missing" else "500 Internal Server Error")
    elif "op=GETFILESTATUS" in url.query:
        _send(client, json.dumps({"FileStatus": {"type": "FILE", "length": length}}).encode())
    elif method == "HEAD":
        _send(client, b"", length=length)
    else:
        _send_file(client, server, kind, path)


def _send_file(client: socket.socket, server: UnrulyServer, kind: str, path: str) -> None:
    if kind in ("stalled", "dripping"):
        _send(client, _ZEROS[:HALF], length=FILE_BYTES)
        until_s, hung_up = time.monotonic() + PATIENCE_S, server.hung_up
        while time.monotonic() < until_s and not hung_up.is_set() and not _wait(client, DRIP_S):
            if kind == "dripping":
                client.sendall(b"x")
        raise ConnectionError("the client has gone, or been kept waiting for long enough")
    if kind == "endless":
        _send_head(client, "Transfer-Encoding: chunked")
        while not server.closed.is_set():
            client.sendall(b"%x\r\n%b\r\n" % (len(_ZEROS), _ZEROS))
    elif kind == "bomb":
        _send_head(client, "Content-Encoding: gzip", "Connection: close")
        packer = zlib.compressobj(9, wbits=31)
        for _ in itertools.repeat(None, 4096):
            client.sendall(packer.compress(_ZEROS))
        client.sendall(packer.flush())
        client.shutdown(socket.SHUT_RDWR)
    else:
        _send(client, path.encode())


def _wait(client: socket.socket, timeout_s: float) -> bool:
    """Wait until the client has gone; False at the deadline."""
    return bool(select.select([client], [], [], timeout_s)[0])


def _send_head(client: socket.socket, *lines: str, status: str = "200 OK") -> None:
    client.sendall("\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode())


def _send(client: socket.socket, body: bytes, length: int | None = None, status: str = "200 OK") -> None:
    _send_head(client, f"Content-Length: {len(body) if length is None else length}", status=status)
    client.sendall(body)
