"""Starts the demo's ranks under torchrun, hears what the first one reports, and ends them."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from cachestream.demo.messages import Event, Failed, Settings, decode
from cachestream.errors import EpochError

if TYPE_CHECKING:
    from typing_extensions import Self


_SILENCE_S: Final = 120.0
_END_S: Final = 15.0
_READ_BYTES: Final = 1 << 16


class TorchrunJob:
    """The ranks of a job, as a context manager that ends them.

    They get a session of their own, so that Ctrl-C comes here alone and they end in order. Should this process be
    killed, the first rank's next report fails, and torchrun ends the others. What they print goes to `log`; torchrun has the folder `scratch` to itself.
    """

    def __init__(self, settings: Settings, log: Path, scratch: Path) -> None:
        self._log = log
        self._buffer = b""
        self._failures: list[str] = []
        self._last_heard_s = time.monotonic()
        with open(log, "wb") as errors:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                    *("--nproc-per-node", str(settings.ranks), "--log-dir", str(scratch)),
                    *("-m", "cachestream.demo.train", settings.to_json()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )

    def events(self, timeout_s: float) -> list[Event] | None:
        """What was reported within `timeout_s`; None when the ranks have ended, all well.

        Raises EpochError with their reasons when they failed, or have been silent for two minutes.
        """
        stdout = self._stdout
        if not select.select([stdout], [], [], timeout_s)[0]:
            if time.monotonic() - self._last_heard_s > _SILENCE_S:
                raise EpochError(f"the ranks have been silent for {_SILENCE_S:.0f} s; see {self._log}")
            return []
        data = os.read(stdout.fileno(), _READ_BYTES)
        self._last_heard_s = time.monotonic()
        if not data:
            code = self._process.wait(_END_S)
            if code:
                reasons = "; ".join(self._failures) or f"exit code {code}"
                raise EpochError(f"the demo's ranks failed: {reasons}; see {self._log}")
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        found = [decode(line.decode(errors="replace")) for line in lines]
        self._failures += [str(event) for event in found if isinstance(event, Failed)]
        return [event for event in found if event is not None and not isinstance(event, Failed)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the ranks if they have not ended, and wait until they have."""
        self._process.terminate()  # torchrun passes it on; nothing happens if it has ended
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its ranks end at their next report, or when they miss each other
            self._process.wait(_END_S)
        self._stdout.close()

    @property
    def _stdout(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout
