"""A faulty network before a real HTTP server: latency, limits, and faults on command."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

__all__ = ["FaultyProxy", "run_proxy"]

Fault = Literal["none", "busy", "hang", "reset", "truncate", "drop"]

PIECE_BYTES: Final = 64 << 10
START_TIMEOUT_S: Final = 60.0
TOGETHER_TIMEOUT_S: Final = 60.0
_LENGTH: Final = re.compile(rb"(?i)\r\ncontent-length:\s*(\d+)")
_CHUNKED: Final = re.compile(rb"(?i)\r\ntransfer-encoding:\s*chunked")
_IS_LIST: Final = re.compile(rb"GET [^ ]*[?&]list-type=2")
_BUSY_BODY: Final = (
    b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>SlowDown</Code>'
    b"<Message>Please reduce your request rate.</Message></Error>"
)
_BUSY: Final = (
    b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n" % len(_BUSY_BODY)
) + _BUSY_BODY


@dataclass(frozen=True, slots=True)
class _Plan:
    """The fault of the next `times` requests; `after_bytes` of the answer's body pass before it."""

    fault: Fault = "none"
    times: int = 0
    after_bytes: int = 0


class FaultyProxy:
    """An HTTP/1.1 proxy on `port` before `target_port`. Its methods may be called from any thread.

    `latency_s` is added to every request, half before it is passed on and half before the answer
    is. `bytes_per_s` limits the bodies of all answers together. `requests` counts requests that
    arrived, `connections` those that carried them; `in_flight_peak` how many waited for an answer at once.
    `busy_above`: while more than so many do, the rest are told 503 SlowDown, `refused` so far. `sent` is what
    was passed on of bodies, as (monotonic time, bytes). `lists` counts requests for a page of a listing;
    `lists_allowed`: so many more of them are passed on, the rest wait until it is raised (None: all are);
    `others_allowed`: the same for all other requests; `bytes_allowed`: the same for the bytes of bodies.
    `together`: requests wait until so many do at once, for a minute at most, but for the first `alone` of them.
    """

    def __init__(self, target_port: int, latency_s: float = 0.0, bytes_per_s: float | None = None) -> None:
        self.target_port = target_port
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self.requests = 0
        self.connections = 0
        self.in_flight_peak = 0
        self.busy_above: int | None = None
        self.refused = 0
        self.sent: list[tuple[float, int]] = []
        self.lists = 0
        self.lists_allowed: int | None = None
        self.others_allowed: int | None = None
        self.bytes_allowed: int | None = None
        self.together = self.alone = 0
        self._in_flight = 0
        self._paid_s = 0.0
        self._plan = _Plan()
        self._lock = threading.Lock()
        self._clients: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="faulty-proxy", daemon=True)
        self._thread.start()
        self.port = 0
        self.port = self._call(self._listen())

    # --- commands ------------------------------------------------------------------------------

    def answer_busy(self, times: int) -> None:
        """503 SlowDown to the next `times` requests."""
        self._set(_Plan("busy", times))

    def hang(self, times: int = 1 << 30) -> None:
        """No answer to the next `times` requests."""
        self._set(_Plan("hang", times))

    def reset(self, times: int = 1, after_bytes: int = 0) -> None:
        """Cut the next `times` answers off by a TCP reset."""
        self._set(_Plan("reset", times, after_bytes))

    def truncate(self, times: int = 1, after_bytes: int = 0) -> None:
        """Close the connection in the middle of the next `times` answers."""
        self._set(_Plan("truncate", times, after_bytes))

    def refuse(self) -> None:
        """Refuse connections, and end those that are open, until `heal`."""
        self._call(self._stop_listening())

    def heal(self) -> None:
        """Work again."""
        self._set(_Plan())
        self._call(self._listen())

    def close(self) -> None:
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_TIMEOUT_S)
        self._loop.close()

    def _set(self, plan: _Plan) -> None:
        with self._lock:
            self._plan = plan

    def _next_fault(self) -> _Plan:
        with self._lock:
            plan = self._plan
            if plan.times == 0:
                return _Plan()
            self._plan = _Plan(plan.fault, plan.times - 1, plan.after_bytes)
            return plan

    # --- the loop's thread ---------------------------------------------------------------------

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(START_TIMEOUT_S)

    async def _listen(self) -> int:
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port, limit=1 << 20)
        return int(self._server.sockets[0].getsockname()[1])

    async def _stop_listening(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            # asyncio drops what was accepted just before `close` without closing it: give that a turn first.
            self._loop.remove_reader(server.sockets[0].fileno())
            await asyncio.sleep(0)
            server.close()
        for writer in list(self._clients):
            writer.transport.abort()

    async def _end(self) -> None:
        """Until nothing is left: what was accepted a moment ago becomes a connection only now."""
        while self._server is not None or (asyncio.all_tasks() - {asyncio.current_task()}):
            await self._stop_listening()
            for task in self._tasks:
                task.cancel()
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # sockets are closed a turn after their connections

    def _accept(self, client_in: asyncio.StreamReader, client_out: asyncio.StreamWriter) -> None:
        # No coroutine: a task that is cancelled before its first step would never close its connection.
        self._clients.add(client_out)
        task = self._loop.create_task(self._serve(client_in, client_out))
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._forget(task, client_out))

    def _forget(self, task: asyncio.Task[None], client_out: asyncio.StreamWriter) -> None:
        self._tasks.discard(task)
        self._clients.discard(client_out)
        client_out.transport.abort()

    async def _serve(self, client_in: asyncio.StreamReader, client_out: asyncio.StreamWriter) -> None:
        self.connections += 1
        server_out: asyncio.StreamWriter | None = None
        try:
            server_in, server_out = await asyncio.open_connection(
                "127.0.0.1", self.target_port, limit=1 << 20
            )
            while await self._one_request(client_in, client_out, server_in, server_out):
                pass
        except (OSError, asyncio.IncompleteReadError):
            pass  # either side went away: so does the other
        except asyncio.CancelledError:
            pass  # the proxy is closed
        finally:
            if server_out is not None:
                server_out.transport.abort()

    async def _one_request(
        self,
        client_in: asyncio.StreamReader,
        client_out: asyncio.StreamWriter,
        server_in: asyncio.StreamReader,
        server_out: asyncio.StreamWriter,
    ) -> bool:
        """Pass one request and its answer on; False when the connection is to end."""
        head = await client_in.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(head)
        body = await client_in.readexactly(int(length[1])) if length else b""
        plan = self._next_fault()
        self.requests += 1
        self._in_flight += 1
        self.in_flight_peak = max(self.in_flight_peak, self._in_flight)
        try:
            is_list = _IS_LIST.match(head) is not None
            self.lists += is_list
            if not await self._may_pass("lists_allowed" if is_list else "others_allowed", client_in):
                return False
            await self._wait_for_others(self.requests)
            await asyncio.sleep(self.latency_s / 2)
            if plan.fault == "busy" or (self.busy_above is not None and self._in_flight > self.busy_above):
                self.refused += 1
                client_out.write(_BUSY)
                await client_out.drain()
                return True
            if plan.fault == "hang":
                await client_in.read(1)  # until the client gives up
                return False
            server_out.write(head + body)
            answer = await server_in.readuntil(b"\r\n\r\n")
            await asyncio.sleep(self.latency_s / 2)
            return await self._answer(answer, head.startswith(b"HEAD "), plan, server_in, client_out)
        finally:
            self._in_flight -= 1

    async def _may_pass(self, allowance: str, client_in: asyncio.StreamReader) -> bool:
        """Wait until such a request may go on; False when who asked has gone."""
        while getattr(self, allowance) == 0:
            await asyncio.sleep(0.01)
            if client_in.at_eof():
                return False
        if getattr(self, allowance) is not None:
            setattr(self, allowance, getattr(self, allowance) - 1)
        return True

    async def _may_send(self, nbytes: int, client_out: asyncio.StreamWriter) -> bool:
        """Wait until so many bytes may go on; False when who asked has gone."""
        while self.bytes_allowed is not None and self.bytes_allowed < nbytes:
            await asyncio.sleep(0.01)
            if client_out.transport.is_closing():
                return False
        if self.bytes_allowed is not None:
            self.bytes_allowed -= nbytes
        return True

    async def _wait_for_others(self, number: int) -> None:
        give_up_s = time.monotonic() + TOGETHER_TIMEOUT_S
        while number > self.alone and self.in_flight_peak < self.together:
            await asyncio.sleep(0.002)
            if time.monotonic() > give_up_s:
                return

    async def _answer(
        self,
        head: bytes,
        is_head: bool,
        plan: _Plan,
        server_in: asyncio.StreamReader,
        client_out: asyncio.StreamWriter,
    ) -> bool:
        client_out.write(head)
        left = None if plan.fault == "none" else plan.after_bytes
        async for piece in self._body(head, is_head, server_in):
            await self._pay(len(piece))
            if not await self._may_send(len(piece), client_out):
                return False
            self.sent.append((time.monotonic(), len(piece)))
            if left is not None:
                client_out.write(piece[:left])
                left -= min(left, len(piece))
                if left == 0:
                    break
            else:
                client_out.write(piece)
            await client_out.drain()
        if left is None:
            return True
        await client_out.drain()
        if plan.fault == "reset":
            linger = struct.pack("ii", 1, 0)  # close() sends a reset
            client_out.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            client_out.transport.abort()
        else:
            client_out.close()
            with contextlib.suppress(OSError):
                await client_out.wait_closed()
        return False

    async def _body(self, head: bytes, is_head: bool, server_in: asyncio.StreamReader) -> Any:
        """The pieces of an answer's body, as they are on the wire."""
        if is_head or head[9:12] in (b"204", b"304"):
            return
        if _CHUNKED.search(head):
            size = -1
            while size != 0:
                line = await server_in.readuntil(b"\r\n")
                size = int(line.split(b";")[0], 16)
                yield line + await server_in.readexactly(size + 2)
            return
        length = _LENGTH.search(head)
        left = int(length[1]) if length else 0
        while left:
            piece = await server_in.read(min(left, PIECE_BYTES))
            if not piece:
                raise ConnectionError("the server closed the connection")
            left -= len(piece)
            yield piece

    async def _pay(self, nbytes: int) -> None:
        if self.bytes_per_s is None:
            return
        now_s = time.monotonic()
        self._paid_s = max(self._paid_s, now_s - 0.05) + nbytes / self.bytes_per_s
        await asyncio.sleep(max(0.0, self._paid_s - now_s))


@contextlib.contextmanager
def run_proxy(
    target_port: int, latency_s: float = 0.0, bytes_per_s: float | None = None
) -> Iterator[FaultyProxy]:
    """A FaultyProxy that is closed at the end of the block."""
    proxy = FaultyProxy(target_port, latency_s, bytes_per_s)
    try:
        yield proxy
    finally:
        proxy.close()
