"""A headless Chromium, driven by its DevTools protocol: it opens a page, and takes pictures of it."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.later import Later

if TYPE_CHECKING:
    import aiohttp
else:
    aiohttp = Later("aiohttp")

__all__ = ["Look", "take_pictures"]

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
)


@dataclass(frozen=True)
class Look:
    """How wide a picture is, of which colour scheme, and where it is saved, as a PNG."""

    picture: Path
    width: int
    dark: bool


async def _visit(address: str, url: str, ready: str, look: Look) -> None:
    numbers = itertools.count(1)
    async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=0) as socket:

        async def command(method: str, **params: Any) -> Any:
            number = next(numbers)
            await socket.send_json({"id": number, "method": method, "params": params})
            while (answer := json.loads((await socket.receive()).data)).get("id") != number:
                pass
            return answer["result"]

        size = {"width": look.width, "height": 900, "deviceScaleFactor": 1, "mobile": look.width < 500}
        await command("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if look.dark else "light"}
        await command("Emulation.setEmulatedMedia", features=[scheme])
        await command("Page.navigate", url=url)
        while not (await command("Runtime.evaluate", expression=ready))["result"].get("value"):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        taken = await command("Page.captureScreenshot", format="png")
        look.picture.write_bytes(base64.b64decode(taken["data"]))


async def _open_page(folder: Path, url: str, ready: str, looks: Sequence[Look]) -> None:
    port_file = folder / "DevToolsActivePort"
    while not port_file.exists() or len(port_file.read_text().split()) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    port = port_file.read_text().split()[0]
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}/json/list") as answer,
    ):
        (address,) = [tab["webSocketDebuggerUrl"] for tab in await answer.json() if tab["type"] == "page"]
    for look in looks:
        await _visit(address, url, ready, look)


def take_pictures(url: str, looks: Sequence[Look], *, ready: str, timeout_s: float) -> None:
    """Open the page at `url` for each of `looks`, and save it once the JavaScript expression `ready` is true."""
    folder = looks[0].picture.with_suffix(".profile")
    command = ["chromium", *_FLAGS, f"--user-data-dir={folder}", "--remote-debugging-port=0", "about:blank"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as chromium:
        try:
            asyncio.run(asyncio.wait_for(_open_page(folder, url, ready, looks), timeout_s))
        finally:
            chromium.terminate()
