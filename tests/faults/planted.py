"""Sixty faults to plant in a copy of the package, each of them one broken promise, and the test that finds it.

A fault is known by what breaks for a user: that stays true when the code is written anew. Its place and its
change (see `operators`) say where today's code keeps the promise, whatever the module. Who moves that code
gives the fault its new place; who cannot has perhaps moved the promise out of it.

`make test` holds that each fault can be planted in one place, `make soak` that each is found. `python -m
tests.faults` plants them and prints by which test each is found.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.faults.operators import (
    Change,
    File,
    Place,
    after,
    argument,
    bare,
    becomes,
    block,
    call,
    compare,
    condition,
    constant,
    expression,
    function,
    inner,
    left_out,
    loosened,
    negated,
    plus,
    preceded_by,
    read_package,
    returned,
    returns_at_once,
    stale,
    statement,
    swapped,
    turned,
)

__all__ = ["FAULTS", "Fault", "copy_project", "copy_with", "planted"]


@dataclass(frozen=True, slots=True)
class Fault:
    """The promise that breaks, the place of the code that keeps it, and the change that breaks it.

    `found_by`: the test below `tests/contract` that fails under the fault, with one of its parameters at least.
    """

    breaks: str
    place: Place
    change: Change
    found_by: str

    @property
    def name(self) -> str:
        return self.breaks.replace(" ", "-")

    @property
    def test(self) -> str:
        return f"tests/contract/{self.found_by}"


# fmt: off
FAULTS: Final = (
    # --- the directory: its limit, its files, its books
    Fault("bytes that are being written count as used",
          expression("room_in", "sum(tables.reserved_bytes())"), becomes("0"),
          ""),
    Fault("a limit that is lowered holds at once",
          statement("Cache.size_limit", "_shrink"), left_out,
          ""),
    Fault("min_free of the disk stays free",
          returned("effective_limit"), becomes("limit_bytes"),
          ""),
    Fault("a setting that another process changes holds here",
          function("Cache._setting"), stale,
          ""),
    Fault("a setting that cannot be stored is not changed",
          statement("change_settings", "_write_copy", "changes"), after(block("change_settings", "transaction")),
          ""),
    Fault("200GB are decimal",
          constant("parse_size", 1000), becomes("1024"),
          ""),
    Fault("no more is evicted than has to be",
          expression("choose_victims", "row.size_bytes"), becomes("row.num_samples"),
          ""),
    Fault("what eviction frees is gone from the disk",
          statement("Reservations._unlink", "_remove_files"), left_out,
          ""),
    Fault("what no epoch has used is not evicted",
          call("Reservations.reserve", "_victims"), argument("used_only", "False"),
          ""),
    Fault("eviction takes what was used longest ago",
          call("Tables.mark_used", "executemany"), argument(0, "{}.replace('last_used = ?', 'last_used = last_used + 0 * ?')"),
          ""),
    Fault("a full cache turns over while an epoch holds it",
          function("bytes_to_leave"), returns_at_once("0"),
          ""),
    Fault("an epoch leases all its shards",
          call("_leased", "ranges_of"), argument(1, "chosen[:-1]"),
          ""),
    Fault("a dataset in another process holds its lease",
          call("EpochDataset.__setstate__", "join_lease"), becomes("None"),
          ""),
    Fault("a short epoch takes the least used samples",
          expression("select_shards", "uses[chosen]"), becomes("-uses[chosen]"),
          ""),
    Fault("an epoch is drawn from what is cached by then",
          compare("ReusableSnapshots._reuse", "revision"), becomes("False"),
          ""),
    Fault("a shard and the progress of its units are one transaction",
          statement("Publisher.publish", "headers", "encode_header"), preceded_by("self.commit(progress)"),
          ""),
    Fault("what replaces the settings is on the disk before",
          statement("replace_file", "fsync"), left_out,
          ""),
    Fault("damaged columns do not pass for whole ones",
          compare("ShardData.check", "checksums"), becomes("False"),
          ""),
    Fault("a damaged shard is fetched again",
          statement("Cache.quarantine", "evicted_shards"), left_out,
          ""),
    Fault("a lost catalogue is made from the shards with what they hold",
          function("_origin"), returns_at_once("0, []"),
          ""),
    Fault("files that belong to nobody are named and removed",
          returned("_unknown_files"), becomes("[]"),
          ""),
    Fault("the books are compared with the files",
          statement("check_sizes", "wrong", "actual_bytes", "shard_id"), left_out,
          ""),
    Fault("a cache is not cleared while a worker fills it",
          block("Cache.clear", "supervisor_lock"), bare,
          ""),
    Fault("wait returns when as many samples are cached",
          compare("wait_for_samples", "have", "wanted"), becomes("{} - 1"),
          ""),
    Fault("the size of a cache is that of its directory",
          returned("occupied_bytes"), becomes("shard_bytes"),
          ""),
    # --- the worker
    Fault("a second start attaches to the worker that runs",
          statement("_start_or_attach", "is_running", "has_worker"), becomes("is_running = False"),
          ""),
    Fault("a sampling process that dies is replaced",
          function("SamplingProcesses._reap"), returns_at_once("None"),
          ""),
    Fault("the units of a process that died are read by another one",
          function("_take_over"), returns_at_once("None"),
          ""),
    Fault("a worker that was killed is replaced",
          statement("WorkerMonitor._look", "_replace"), left_out,
          ""),
    Fault("a worker that is asked to stop stops",
          function("Attachments.stop_requested"), returns_at_once("False"),
          ""),
    Fault("a worker that nobody needs ends",
          returned("Attachments.is_needed"), becomes("True"),
          ""),
    Fault("a detached worker outlives its caller",
          call("Attachments.is_needed", "_is_requested"), becomes("False"),
          ""),
    Fault("a process that hangs is killed",
          function("SamplingProcess.kill_if_hanging"), returns_at_once("None"),
          ""),
    Fault("filling goes on after the last sample that was cached",
          statement("PendingProgress.add_samples", "claim_id", "position"), becomes("self._claims[claim_id] = (position, stop + 1)"),
          ""),
    Fault("a full cache is not changed where the filling is to wait",
          statement("BackgroundPublisher._try", "may_evict", "when_full"), becomes("may_evict = True"),
          ""),
    Fault("a worker that is to stop when the cache is full ends",
          compare("Supervisor._should_end", "when_full"), becomes("False"),
          ""),
    Fault("shard_size is the size of shards",
          statement("WorkerOptions._shard_bytes", "shard_bytes", "parse_size", "shard_size"),
          becomes("shard_bytes = min(parse_size(DEFAULT_SHARD), usable)"),
          ""),
    Fault("nodes read different units",
          returned("Partition.units"), becomes("places * self.count"),
          ""),
    Fault("the order of filling is of the seed",
          call("UnitOrder.__init__", "mix_key"), argument(1, "0"),
          ""),
    Fault("a sample that cannot be used is counted",
          statement("SampleEncoder._add", "transform", "skip"), left_out,
          ""),
    Fault("a transform draws the same for a sample in every run",
          call("Transformer.apply", "sample_generator"), becomes("__import__('numpy').random.default_rng()"),
          ""),
    Fault("the bandwidth limit holds",
          returned("Throttle.reserve"), becomes("0.0"),
          ""),
    # --- the way to the remote
    Fault("a part that was not asked for is refused",
          condition("_place_of", "fits"), becomes("False"),
          ""),
    Fault("parts of two versions are not mixed",
          condition("Version.merged", "resized"), becomes("False"),
          ""),
    Fault("a final error is not tried again",
          compare("_mapped", "_TRANSIENT"), becomes("True"),
          ""),
    Fault("a body that breaks off goes on where it broke off",
          function("Download._may_resume"), returns_at_once("False"),
          ""),
    Fault("every call to a server has a deadline",
          statement("result_of", "deadline_s", "timeout_s"), becomes("{} + 3600"),
          ""),
    Fault("no error shows a secret",
          call("_mapped", "redact_text"), inner(),
          ""),
    Fault("no URL is shown with its password",
          function("redact"), returns_at_once("url"),
          ""),
    Fault("an object above max_object_size is not read",
          compare("check", "nbytes", "most"), becomes("False"),
          ""),
    # --- listing
    Fault("the last number of a range belongs to it",
          call("_alternatives", "range"), argument(1, "int(last)"),
          ""),
    Fault("hidden files are left out",
          call("visible", "startswith"), becomes("False"),
          ""),
    Fault("recursive=False keeps the files of the folder itself",
          condition("open_pages", "recursive", "isdir"), becomes("os.path.isdir(path)"),
          ""),
    # --- sources
    Fault("a label is the rank of its folder among the sorted names",
          call("FileSource._label_by", "sorted"), becomes("sorted(folders, reverse=True)"),
          ""),
    Fault("an image is red, green, blue",
          call("_planes", "enumerate"), argument(0, "reversed({})"),
          ""),
    Fault("a resize is to height and width",
          expression("ImageOptions.resized", "(self.resize[1], self.resize[0])"), swapped(0, 1),
          ""),
    Fault("an image is upright",
          function("_orientation"), returns_at_once("1"),
          ""),
    Fault("an array of the other byte order keeps its values",
          call("decode_npy", "astype"), becomes('array.view(dtype.newbyteorder("="))'),
          ""),
    Fault("the last window of an array reaches its end",
          expression("WindowGrid.counts", "-(-(length - size) // stride) + 1"), becomes("(length - size) // stride + 1"),
          ""),
    Fault("a record with a wrong checksum is left out",
          returned("_crcs_match"), becomes("np.ones(len(places), np.bool_)"),
          ""),
    Fault("a sample of a tar has the name up to the first dot",
          call("split_name", "partition", "base", "."), becomes('base.rpartition(".")'),
          ""),
    Fault("the key of a row is its number in the file",
          statement("ParquetSource.__init__", "_first_rows", "cumsum"),
          becomes("self._first_rows: IntArray = np.concatenate([np.cumsum(rows) for rows in groups])"),
          ""),
    Fault("the default of a field takes the place of what is missing",
          compare("Defaults.fill", "value", "None"), turned,
          ""),
    Fault("a mixture is filled in proportion to its weights",
          returned("_whole_numbers"), becomes("[1 for _ in numbers]"),
          ""),
    # --- training
    Fault("a resume begins with the next batch",
          expression("Segment.rest_after", "done - self.request.done"), plus(-1),
          ""),
    Fault("ranks get different samples",
          expression("Plan.spans", "rank * shares"), becomes("0 * shares"),
          ""),
    Fault("all ranks make the same steps",
          call("Preparer._agree", "min", "batches", "answers"), becomes("plan.num_batches"),
          ""),
    Fault("every epoch has another order",
          call("Drawing._key", "mix_key"), argument(1, "0"),
          ""),
    Fault("an epoch waits for min_samples",
          call("Preparer._wait_for_samples", "wait_for_samples"), argument(1, "whole"),
          ""),
    Fault("the recorded epochs are those that were trained on",
          statement("Recorder._write", "save_manifest"), left_out,
          ""),
    Fault("the rest of an epoch is dropped where it is to be dropped",
          expression("count_batches", "not drop_last"), becomes("True"),
          ""),
    Fault("the rest of an epoch is a batch if it has a sample for each rank",
          compare("count_batches", "rest"), loosened,
          ""),
    Fault("what is held out is not trained on",
          compare("Split.rows", "held_out"), becomes("({}) | (hashes % 16 == 0)"),
          ""),
    Fault("a condition selects the samples for which it holds",
          call("View._select", "flatnonzero"), argument(0, "~mask"),
          ""),
    Fault("samples are drawn in proportion to their weights",
          expression("draw", "weights if total else np.ones(len(weights))"), becomes("np.ones(len(weights))"),
          ""),
    Fault("sources are trained on in the proportion of the mixture",
          statement("apportion", "shares", "rows"), becomes("shares = batch * np.ones_like(rows) / sources"),
          ""),
    Fault("a batch has at most max_tokens",
          call("group_by_length", "clip"), argument(0, "{} + 1"),
          ""),
    Fault("a batch transform draws the same in every run",
          call("BatchProducer._transform_of", "manual_seed"), becomes("torch.default_generator"),
          ""),
    Fault("a batch transform draws anew for every batch",
          call("BatchProducer._transform_of", "mix_key"), argument(1, "0"),
          ""),
    Fault("a batch transform draws on each rank its own",
          call("Preparer._make_segment", "mix_key"), argument(2, "0"),
          ""),
    Fault("a batch that was changed sample by sample is collated as it was changed",
          function("SampleBatch.whole"), returns_at_once("to_container(self._columns, self._schema)"),
          ""),
    Fault("looking at the next batch does not change it",
          call("EpochSequence.peek", "deepcopy"), inner(),
          ""),
    Fault("stream gives the loader its options",
          call("stream", "_selected", "EpochLoader"), becomes("dict()"),
          ""),
    # --- on top
    Fault("a checkpoint after an epoch's last batch begins with the next one",
          call("_state", "_state"), argument("leaves", "False"),
          ""),
    Fault("the Trainer counts the samples that it was trained on",
          returned("CacheTrainer.num_examples", "world_size"), becomes("len(dataloader)"),
          ""),
    Fault("a problem that is found ends in exit code 1",
          condition("verify", "ok", "report"), negated,
          ""),
    Fault("wrong use ends in exit code 2",
          call("main", "exit", "USAGE"), argument(0, "PROBLEM"),
          ""),
    Fault("data go to stdout",
          statement("_write", "stdout", "line"), becomes("sys.stderr.write(line + chr(10))"),
          ""),
    Fault("the dashboard asks for its token",
          function("_matches"), returns_at_once("True"),
          ""),
    Fault("the metrics have the values of the status",
          expression("_add_status", "value(status)"), plus(1),
          ""),
    Fault("a loader counts what it has delivered",
          statement("Meter.add_batch", "counts", "samples"), left_out,
          ""),
    Fault("a slow transform is named as the bottleneck",
          statement("Stages.rates", "min", "each", "transform"), left_out,
          ""),
    Fault("the price of a plan is of what is fetched",
          expression("Plan.of", "forecast.fetched_bytes / 1e9 * price_per_gb"),
          becomes("forecast.fetched_bytes / 1e9"),
          ""),
    Fault("what a recorded epoch needs and is cached is not fetched again",
          returned("_Restorer.hold_cached"), becomes("wanted"),
          ""),
    Fault("bench tells the share of memcpy",
          expression("BenchReport.to_dict", "self.alone.bytes_per_s / self.memcpy_bytes_per_s"),
          becomes("self.memcpy_bytes_per_s / self.alone.bytes_per_s"),
          ""),
)
# fmt: on


def planted(package: Path, fault: Fault) -> tuple[File, str]:
    """The module of `package` in which `fault` is planted, and its text with the fault.

    Raises ValueError if the place is not exactly one.
    """
    places = [(file, node) for file in read_package(package) for node in fault.place.find(file)]
    if len(places) != 1:
        found = [f"{file.path}:{getattr(node, 'lineno', 0)}" for file, node in places]
        raise ValueError(f"{fault.breaks}: its place is to be one, and is {found or 'gone'}")
    ((file, node),) = places
    return file, file.edited(fault.change(file, node))


def copy_with(root: Path, folder: Path, fault: Fault) -> None:
    """Copy the project at `root` into `folder`, with `fault`."""
    copy_project(root, folder)
    file, text = planted(root / "cachestream", fault)
    (folder / file.path.relative_to(root)).write_text(text, encoding="utf-8")


def copy_project(root: Path, folder: Path) -> None:
    """Copy from `root` what its tests run with into `folder`; what Python has compiled stays valid there."""
    for name in ("cachestream", "tests"):
        shutil.copytree(root / name, folder / name)
    shutil.copy(root / "pyproject.toml", folder)
