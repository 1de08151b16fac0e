"""Recording: each epoch that is trained leaves a manifest in a folder, written beside the training."""

from __future__ import annotations

import os
import warnings
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final

from cachestream.errors import CacheStreamError, ConfigError
from cachestream.storage.contents import Contents
from cachestream.storage.leases import Lease, join_lease
from cachestream.training.epoch import Segment
from cachestream.training.manifest import Manifest, Stretch, load_manifest, manifest_name, save_manifest

__all__ = ["Recorder"]

_CLOSE_S: Final = 30.0


class Recorder:
    """Writes manifests into `folder`, made if need be, in a thread of its own. Used from the training thread.

    `settings` go into each manifest. What cannot be written, or not in time, is told in a warning: training goes on.
    """

    def __init__(self, folder: str, settings: dict[str, Any]) -> None:
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"record={folder!r} cannot be made ({error.strerror}); give a folder for manifests"
            ) from error
        self._folder = folder
        self._settings = settings
        self._contents = Contents()
        self._thread: ThreadPoolExecutor | None = None
        self._sent: list[Future[None]] = []
        self._pid = os.getpid()

    def enter(self, segment: Segment, leader: int, world_size: int) -> None:
        """The first batch of `segment` has come, on the rank that is the first of its cache: `leader`."""
        self._warn()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "cachestream-record")
        # A lease of its own: the epoch may be over before its shards' headers are read.
        lease = join_lease(segment.snapshot.lease)
        self._sent.append(self._thread.submit(self._write, segment, lease, leader, world_size))

    def flush(self) -> None:
        """Wait until all of it is written, while that takes no longer than `_CLOSE_S`: what a checkpoint goes on from
        should be recorded. A forked child waits for nothing: its parent writes.
        """
        if self._pid == os.getpid():
            self._warn_of_late(wait(self._sent, _CLOSE_S).not_done)

    def close(self) -> None:
        """Finish what is to be written. What takes longer is still written, beside whatever comes next."""
        thread, self._thread = self._thread, None
        late = wait(self._sent, _CLOSE_S).not_done
        if thread is not None:
            thread.shutdown(wait=not late)
        self._warn()
        self._warn_of_late(late)

    def _warn(self) -> None:
        done = [future for future in self._sent if future.done()]
        self._sent = [future for future in self._sent if not future.done()]
        for error in filter(None, (future.exception() for future in done)):
            warnings.warn(f"an epoch could not be recorded: {error}", stacklevel=5)

    def _warn_of_late(self, late: set[Future[None]]) -> None:
        if late:
            warnings.warn(
                f"{len(late)} of the manifests in {self._folder} are not written after {_CLOSE_S:g} s, and will be when "
                "the disk answers: do not replay from there before; record= a folder on a faster disk",
                stacklevel=4,
            )

    def _write(self, segment: Segment, lease: Lease, leader: int, world_size: int) -> None:
        request, plan, snapshot = segment.request, segment.plan, segment.snapshot
        try:
            contents = self._contents.read(snapshot.root, snapshot.shard_ids.tolist())
        finally:
            lease.release()
        path = os.path.join(self._folder, manifest_name(request.epoch, leader))
        settings = self._settings | {"world_size": world_size, "cache_id": snapshot.cache_id}
        manifest = Manifest(request.epoch, settings, (), ())
        if request.done:
            manifest = _known(path, manifest)
        stretch = Stretch(
            request.index,
            request.done,
            plan.num_batches,
            plan.position(plan.num_batches),
            plan.batch_size,
            plan.ranks,
            segment.record,
        )
        save_manifest(path, manifest.with_stretch(stretch, contents))


def _known(path: str, fresh: Manifest) -> Manifest:
    """What is recorded of an epoch that goes on, or `fresh` where nothing is."""
    try:
        return load_manifest(path)
    except CacheStreamError:
        return fresh
