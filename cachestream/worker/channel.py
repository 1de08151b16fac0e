"""Messages between the supervisor and its processes, over one socket pair for each process.

A message is a pickle after its length. The supervisor's end, a `Channel`, never blocks: what a process does
not take yet waits in memory. A process has a `SupervisorLink`, through which any of its threads asks and
tells; one thread of its own receives.
"""

from __future__ import annotations

import itertools
import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any, Final

from cachestream.errors import WorkerError

_LENGTH: Final = struct.Struct("<Q")
_PIECE_BYTES: Final = 1 << 18

# A message: its kind, the number of the question that wants an answer (0: none), and its arguments.
Message = tuple[str, int, tuple[Any, ...]]


def _framed(message: Any) -> bytes:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


class _Frames:
    """Whole messages out of the pieces of a stream."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, piece: bytes) -> list[Any]:
        """The messages that `piece` completes."""
        self._data += piece
        found, start = [], 0
        while len(self._data) - start >= _LENGTH.size:
            (nbytes,) = _LENGTH.unpack_from(self._data, start)
            stop = start + _LENGTH.size + nbytes
            if len(self._data) < stop:
                break
            found.append(pickle.loads(memoryview(self._data)[start + _LENGTH.size : stop]))  # noqa: S301  by our own process
            start = stop
        if start:
            del self._data[:start]
        return found


class Channel:
    """The supervisor's end of the messages of one process."""

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._frames = end, _Frames()
        self._waiting = bytearray()
        end.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def is_blocked(self) -> bool:
        """True if messages wait for the process to take earlier ones."""
        return bool(self._waiting)

    def tell(self, kind: str, *arguments: Any) -> None:
        """Send a message; one to a process that has ended is lost."""
        self._waiting += _framed((kind, 0, arguments))
        self.flush()

    def answer(self, number: int, value: Any) -> None:
        """Answer the question `number`; the process raises `value` if it is an exception."""
        self._waiting += _framed(("answer", number, (value,)))
        self.flush()

    def flush(self) -> None:
        """Send as much of what waits as the process takes now."""
        try:
            while self._waiting:
                del self._waiting[: self._socket.send(memoryview(self._waiting)[:_PIECE_BYTES].tobytes())]
        except BlockingIOError:
            pass
        except OSError:  # the process has ended
            self._waiting.clear()

    def receive(self) -> list[Message] | None:
        """The messages that have arrived; None when there will be no more."""
        try:
            piece = self._socket.recv(_PIECE_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            return None
        return self._frames.add(piece) if piece else None

    def close(self) -> None:
        self._socket.close()


class SupervisorGoneError(WorkerError):
    """The supervisor has ended, or no longer answers: so does this process."""


class SupervisorLink:
    """The supervisor, as one of its processes sees it.

    `on_message(kind, *arguments)` is called for each message that is no answer, and `on_end()` when the
    supervisor is gone, by a thread of this object. Thread-safe.
    """

    def __init__(
        self, end: socket.socket, on_message: Callable[..., None], on_end: Callable[[], None]
    ) -> None:
        self._socket, self._on_message, self._on_end = end, on_message, on_end
        self._sending, self._lock = threading.Lock(), threading.Lock()
        self._numbers = itertools.count(1)
        self._questions: dict[int, futures.Future[Any]] = {}
        self._is_gone = False
        threading.Thread(target=self._listen, name="supervisor", daemon=True).start()

    def tell(self, kind: str, *arguments: Any) -> None:
        """Send a message that needs no answer."""
        self._send((kind, 0, arguments))

    def ask(
        self,
        kind: str,
        *arguments: Any,
        beat: Callable[[], bool] | None = None,
        every_s: float = 0.25,
        timeout_s: float | None = None,
    ) -> Any:
        """Send a question, and return its answer, or raise it if it is an exception.

        While it waits, `beat()` is called again and again; the wait ends with None once that returns False.
        Raises SupervisorGoneError if the supervisor ends, or at the deadline.
        """
        answer: futures.Future[Any] = futures.Future()
        with self._lock:
            number = next(self._numbers)
            self._questions[number] = answer
            if self._is_gone:
                raise SupervisorGoneError("the supervisor of this process has ended")
        try:
            self._send((kind, number, arguments))
            deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
            while not futures.wait([answer], timeout=every_s).done:
                if beat is not None and not beat():
                    return None
                if deadline_s is not None and time.monotonic() > deadline_s:
                    raise SupervisorGoneError(
                        f"the supervisor did not answer {kind!r} within {timeout_s:g} s"
                    )
        finally:
            with self._lock:
                self._questions.pop(number, None)
        return answer.result()

    def _send(self, message: Message) -> None:
        try:
            with self._sending:
                self._socket.sendall(_framed(message))
        except OSError as error:
            raise SupervisorGoneError("the supervisor of this process has ended") from error

    def _listen(self) -> None:
        frames, pid = _Frames(), os.getpid()
        while True:
            try:
                piece = self._socket.recv(_PIECE_BYTES)
            except OSError:
                piece = b""
            if not piece or os.getpid() != pid:
                break
            for kind, number, arguments in frames.add(piece):
                if kind == "answer":
                    self._answer(number, arguments[0])
                else:
                    self._on_message(kind, *arguments)
        with self._lock:
            self._is_gone = True
            questions = list(self._questions.values())
        for question in questions:
            question.set_exception(SupervisorGoneError("the supervisor of this process has ended"))
        self._on_end()

    def _answer(self, number: int, value: Any) -> None:
        with self._lock:
            question = self._questions.pop(number, None)
        if question is None:
            return  # it was given up
        if isinstance(value, BaseException):
            question.set_exception(value)
        else:
            question.set_result(value)
