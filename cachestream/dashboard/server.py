"""The server of the page and of the metrics: Bokeh's, which is tornado's, behind a token."""

from __future__ import annotations

import errno
import hmac
import secrets
import signal
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import quote

from bokeh.application import Application
from bokeh.application.handlers.function import FunctionHandler
from bokeh.document import Document
from bokeh.server.auth_provider import AuthProvider
from bokeh.server.server import Server
from tornado.ioloop import IOLoop
from tornado.web import RequestHandler

from cachestream.dashboard.page import build_page
from cachestream.dashboard.prometheus import CONTENT_TYPE, metrics_text
from cachestream.dashboard.readings import CacheWatch
from cachestream.errors import ConfigError

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_REFUSED: Final = "This page needs its token: open the URL that 'cachestream dashboard' has printed.\n"


class Dashboard:
    """A server of the page of the caches at `paths`, at `host` and `port` (0: any free one), until `stop`.

    `token`: what a browser must give in the URL (`?token=`), and Prometheus there or as a bearer token; None
    makes a new one, and "" asks for none. Raises ConfigError for a port in use, and for a host that is none.
    """

    def __init__(self, paths: Sequence[str], host: str, port: int, token: str | None = None) -> None:
        self._watches = list({watch.path: watch for watch in map(CacheWatch, paths)}.values())
        self.token = secrets.token_urlsafe(24) if token is None else token
        origins = ["*"] if host not in LOOPBACK else None
        application = Application(FunctionHandler(self._build))
        try:
            self._server = Server(
                {"/": application},
                address=host,
                port=port,
                allow_websocket_origin=origins,
                auth_provider=_TokenCheck(self.token),
                extra_patterns=[
                    ("/metrics", _MetricsHandler, {"watches": self._watches, "token": self.token})
                ],
                use_index=False,
                unused_session_lifetime_milliseconds=5_000,
            )
        except OSError as error:
            raise _unusable(error, host, port) from error
        self.port = self._server.port
        shown = f"[{host}]" if ":" in host else host  # an address of IPv6
        query = f"?token={quote(self.token, safe='')}" if self.token else ""
        self.url = f"http://{shown}:{self.port}/{query}"

    def _build(self, document: Document) -> None:
        build_page(document, self._watches)

    def run(self, on_ready: Callable[[], None]) -> None:
        """Serve until Ctrl-C, or SIGTERM."""
        loop = IOLoop.current()
        signal.signal(signal.SIGTERM, lambda *_: loop.add_callback_from_signal(loop.stop))
        self._server.start()
        on_ready()
        try:
            loop.start()
        finally:
            self.stop()

    def stop(self) -> None:
        """Close the server and the caches."""
        self._server.stop()
        self._server.unlisten()
        for watch in self._watches:
            watch.close()


def _unusable(error: OSError, host: str, port: int) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"--port {port} of {host} is in use: stop what runs there, or give another one (0: any free one)"
        )
    if error.errno == errno.EACCES:
        return ConfigError(f"--port {port}: this user may not listen there; give one above 1023")
    return ConfigError(f"--host {host}: no server can listen there: {error.strerror or error}")


def _matches(given: str | None, token: str) -> bool:
    return not token or (given is not None and hmac.compare_digest(given.encode(), token.encode()))


class _TokenCheck(AuthProvider):
    """The check of the token in the page's URL, which Bokeh passes on to the page's other requests."""

    def __init__(self, token: str) -> None:
        self._token = token
        super().__init__()

    @property
    def get_user(self) -> Any:
        return lambda handler: (
            "reader" if _matches(handler.get_argument("token", None), self._token) else None
        )

    @property
    def login_url(self) -> str:
        return "/refused"

    @property
    def login_handler(self) -> type[RequestHandler]:
        return _RefusedHandler


class _RefusedHandler(RequestHandler):
    """The answer to a browser without the token."""

    def get(self) -> None:
        self.set_status(403)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.write(_REFUSED)


class _MetricsHandler(RequestHandler):
    """The metrics, for Prometheus."""

    def initialize(self, watches: Sequence[CacheWatch], token: str) -> None:
        self._watches, self._token = watches, token

    def get(self) -> None:
        bearer = self.request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not _matches(self.get_argument("token", bearer), self._token):
            self.set_status(403)
            self.write(_REFUSED)
            return
        self.set_header("Content-Type", CONTENT_TYPE)
        self.write(metrics_text(watch.look() for watch in self._watches))
