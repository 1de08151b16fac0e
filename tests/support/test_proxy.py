"""The proxy that fails on command leaves nothing open when it ends."""

from __future__ import annotations

import gc
import socket
import warnings

import pytest

from tests.support.proxy import run_proxy
from tests.support.s3 import S3Server


def storm(port: int) -> None:
    """Connect clients while the proxy ends."""
    with run_proxy(port) as proxy:
        arrived = [socket.create_connection(("127.0.0.1", proxy.port)) for _ in range(20)]
    for client in arrived:
        client.close()


@pytest.mark.e2e
def test_a_proxy_that_ends_while_clients_arrive_closes_all_connections(s3_server: S3Server) -> None:
    unclosed: list[str] = []
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("always")
        patch.setattr(warnings, "showwarning", lambda message, *_args, **_more: unclosed.append(str(message)))
        for _ in range(20):
            storm(s3_server.port)
        gc.collect()
    assert not unclosed
