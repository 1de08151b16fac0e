"""A web server whose answers a test decides, one by one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__ = ["Answer", "answer_with", "ranged", "serve"]


@dataclass(frozen=True, slots=True)
class Answer:
    """A status, headers and a body; Content-Length is that of the body unless the headers have one, or
    Transfer-Encoding.
    """

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


def ranged(data: bytes, wanted: str | None) -> tuple[int, int]:
    """Return the first and the last byte that the header Range asks for."""
    if wanted is None:
        return 0, len(data) - 1
    first, _, last = wanted.removeprefix("bytes=").partition("-")
    if not first:
        return max(0, len(data) - int(last)), len(data) - 1
    return int(first), min(int(last or len(data)), len(data) - 1)


def answer_with(data: bytes, wanted: str | None, etag: str = '"a"') -> Answer:
    """Return the right answer to a request for `wanted` of `data`."""
    first, last = ranged(data, wanted)
    told = {"Content-Range": f"bytes {first}-{last}/{len(data)}"} if wanted else {}
    return Answer(206 if wanted else 200, data[first : last + 1], {"ETag": etag, **told})


@contextlib.contextmanager
def serve(decide: Callable[[str, str | None], Answer]) -> Iterator[str]:
    """Serve what `decide(path, header Range)` returns; return the server's URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer = decide(self.path, self.headers.get("Range"))
            self.send_response(answer.status)
            told = {} if "Transfer-Encoding" in answer.headers else {"Content-Length": str(len(answer.body))}
            for name, value in (told | dict(answer.headers)).items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(OSError):  # the reader has closed the connection
                self.wfile.write(answer.body)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """Print nothing: the reader has closed the connection."""

    with Quiet(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
