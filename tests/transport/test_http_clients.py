"""Drivers that use httpx or requests: outages are transient errors, refusals say what to do."""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from cachestream.errors import SourceError, SourceUnavailableError
from cachestream.formats.files import FileSource
from cachestream.transport import metering
from cachestream.transport.remote_errors import map_errors

hub: Any = pytest.importorskip("huggingface_hub.errors")
requests: Any = pytest.importorskip("requests")
URL = "hf://datasets/some/set/a.bin"


@contextlib.contextmanager
def answering(status: int | None) -> Iterator[dict[str, Any]]:
    """Return the options for a hub that answers every request with `status`, or hangs up if it is None."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if status is not None:
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

        do_HEAD = do_POST = do_GET  # noqa: N815  the names that http.server looks for

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield {"endpoint": f"http://127.0.0.1:{server.server_port}", "token": False}
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize("status", [None, 429, 500, 503])
def test_a_hub_that_does_not_serve_at_present_is_unavailable_and_asks_for_less_where_it_throttles(
    status: int | None,
) -> None:
    slowed: list[bool] = []
    metering.install(None, None, lambda: slowed.append(True))
    try:
        with answering(status) as options, pytest.raises(SourceUnavailableError, match="some/set"):
            FileSource(URL, storage_options=options)
    finally:
        metering.install(None)
    assert bool(slowed) == (status in (429, 503))


@pytest.mark.usefixtures("short_waits")
def test_a_hub_that_cannot_be_reached_is_unavailable() -> None:
    with answering(503) as options:
        pass
    with pytest.raises(SourceUnavailableError, match="some/set"):
        FileSource(URL, storage_options=options)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("status", "next_step"), [(401, "credentials"), (403, "denied"), (404, "check the path")]
)
def test_what_a_hub_refuses_is_said_and_not_asked_for_again(status: int, next_step: str) -> None:
    with answering(status) as options, pytest.raises(SourceError, match=next_step) as caught:
        FileSource(URL, storage_options=options)
    assert type(caught.value) is SourceError


def test_a_certificate_that_does_not_hold_will_not_hold_later() -> None:
    connect_error = next(base for base in hub.HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
    client: Any = pytest.importorskip(connect_error.__module__.partition(".")[0])
    with pytest.raises(SourceError) as caught, map_errors(URL):
        raise client.ConnectError("verify failed") from ssl.SSLCertVerificationError("self-signed")
    assert type(caught.value) is SourceError


@pytest.mark.parametrize("name", ["ReadTimeout", "ChunkedEncodingError", "ConnectionError"])
def test_a_response_that_breaks_off_in_requests_is_unavailable(name: str) -> None:
    with pytest.raises(SourceUnavailableError), map_errors("github://a:b@/c"):
        raise getattr(requests.exceptions, name)("cut")
