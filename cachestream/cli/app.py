"""The command line: data on stdout, logs and progress on stderr.

Exit codes: 0 done, 1 a problem was found, 2 wrong use. Every option can be given in the environment as
CACHESTREAM_<COMMAND>_<OPTION>, called as its flag is, and CACHE as CACHESTREAM_CACHE; arguments win.
"""

from __future__ import annotations

import functools
import importlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from cachestream.cli import display
from cachestream.cli.arguments import (
    CacheArgument,
    CropOption,
    FormatOption,
    HoldoutOption,
    JsonOption,
    OrderOption,
    PartitionOption,
    ResizeOption,
    SecondsOption,
    ShardSizeOption,
    SizeLimitOption,
    SourceArgument,
    SourceOption,
    StorageOption,
    TraceOption,
    TransformOption,
    WorkersOption,
    finite,
    load,
    pairs_of,
    source_of,
)
from cachestream.cli.facts import one_line
from cachestream.cli.main import PROBLEM
from cachestream.config import format_size, parse_size, require
from cachestream.errors import ConfigError
from cachestream.storage.cache import Cache
from cachestream.storage.layout import Directory
from cachestream.storage.os_errors import translated_disk_errors
from cachestream.storage.status import lost_worker
from cachestream.storage.telemetry import read_history
from cachestream.tools.plots import figure_class, plot_forecast, plot_growth
from cachestream.tracing import Trace
from cachestream.transport.remote_errors import redact
from cachestream.worker.launch import WorkerOptions
from cachestream.worker.worker import Worker, start_worker

app = typer.Typer(
    name="cachestream",
    help="A growing local sample cache for PyTorch training on remote data.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"auto_envvar_prefix": "CACHESTREAM", "help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(
            "\n".join(f"{name} {found}" for name, found in _import_late("tools.versions").versions().items())
        )
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            allow_from_autoenv=False,
            help="Show the versions of cachestream and of what it uses.",
        ),
    ] = False,
) -> None:
    pass


def _open(path: str) -> Cache:
    """The cache at `path`, which must be there: a mistyped path should not make a new one."""
    directory = Directory(os.path.realpath(os.path.expanduser(path)))
    with translated_disk_errors(directory.root, "looking for a cache"):
        for file in (directory.catalogue, directory.settings):
            with suppress(FileNotFoundError, NotADirectoryError):
                os.stat(file)  # unlike os.path.exists raises where this user has no access
                break
        else:
            shown = redact(path)  # a URL in a cache's place may hold a password
            raise ConfigError(f"{shown} holds no cache; 'cachestream worker SOURCE {shown}' makes one")
    return Cache(path)


@app.command()
def worker(
    context: typer.Context,
    source: SourceArgument,
    cache: CacheArgument,
    *,
    size_limit: SizeLimitOption = None,
    min_free: Annotated[str | None, typer.Option(help="What stays free on the disk: 1GB unless set.")] = None,
    eviction: Annotated[
        str | None, typer.Option(help="lru (unless set), fifo, least-fresh, least-weight or none.")
    ] = None,
    workers: WorkersOption = None,
    transform: TransformOption = None,
    shard_size: ShardSizeOption = None,
    order: OrderOption = "shuffle",
    seed: Annotated[int, typer.Option(help="The seed of the order and of random transforms.")] = 0,
    bandwidth_limit: Annotated[
        str | None, typer.Option(help='The most that is fetched, such as "40MB/s".')
    ] = None,
    when_full: Annotated[str, typer.Option(help="What a full CACHE does: evict, wait or stop.")] = "evict",
    on_change: Annotated[
        str, typer.Option(help="What happens to samples of another transform: replace, keep or refuse.")
    ] = "replace",
    partition: PartitionOption = None,
    holdout: HoldoutOption = None,
    engine: Annotated[str, typer.Option(help="local, or ray: actors of a Ray cluster read.")] = "local",
    ray_option: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE for Ray's actors, such as num_cpus=2; repeatable.")
    ] = None,
    share: Annotated[str | None, typer.Option(help="The group of caches that share one filling.")] = None,
    share_required: Annotated[
        bool, typer.Option("--share-required", help="Read nothing without a Ray cluster.")
    ] = False,
    storage_option: StorageOption = None,
    source_option: SourceOption = None,
    format: FormatOption = None,  # noqa: A002  the name gives the flag, and its name in the environment
    resize: ResizeOption = None,
    crop: CropOption = None,
    trace: TraceOption = None,
    detach: Annotated[bool, typer.Option("--detach", help="Leave it running and return.")] = False,
) -> None:
    """Fill CACHE from SOURCE.

    It ends when SOURCE has been read once, or on Ctrl-C. A full CACHE keeps it waiting until a training has
    used what is there. With --detach it runs in the background until it is stopped. Started again, it goes on
    where it stopped.
    """
    if detach and trace is not None:
        raise ConfigError("--trace writes its file when the command ends: leave --detach out")
    if trace is not None:
        context.with_resource(Trace(trace))
    function = load(transform, "--transform")
    opened = source_of(source, source_option, storage_option, format=format, resize=resize, crop=crop)
    options: dict[str, Any] = {
        "num_workers": workers,
        "transform": function,
        "shard_size": shard_size,
        "order": load(order, "--order") if ":" in order else order,
        "partition": partition,
        "seed": seed,
        "bandwidth_limit": bandwidth_limit,
        "when_full": when_full,
        "on_change": on_change,
        "engine": engine,
        "ray_options": pairs_of(ray_option or (), "--ray-option"),
        "share": share,
        "share_required": share_required,
    }
    WorkerOptions(**options).check()  # before a cache is made
    with Cache(cache, size_limit, min_free=min_free, eviction=eviction) as filled:
        started = start_worker(filled, opened, detach=detach, holdout=holdout, **options)
        if detach:
            display.say(f"filling {filled.path} in the background; see: cachestream status {cache}")
        else:
            _follow(started, filled)


def _follow(started: Worker, filled: Cache) -> None:
    """Show progress until the worker is done, or until Ctrl-C; then the final status."""
    try:
        with started:
            display.follow(started)
    finally:
        display.say_result(status := filled.status())
    if status.fill_state == "complete" and status.fill_message and not status.num_samples:
        raise typer.Exit(PROBLEM)


@app.command()
def stop(
    cache: CacheArgument,
    timeout: Annotated[
        float, typer.Option(min=0.0, callback=finite, help="Seconds to wait until it has ended.")
    ] = 5.0,
) -> None:
    """Stop the worker of CACHE.

    What it has sampled stays, and the next worker goes on from there.
    """
    with _open(cache) as filled:
        if filled.has_worker() or lost_worker(filled.directory) is not None:
            Worker(filled, None, None).stop(timeout)
            typer.echo(f"stopped: {one_line(filled.status())}", err=True)
        else:
            typer.echo(f"no worker is running for {filled.path}", err=True)


@app.command()
def status(
    cache: CacheArgument,
    json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Look again and again, until Ctrl-C.")] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, callback=finite, help="Seconds between looks of --watch.")
    ] = 1.0,
) -> None:
    """Show what CACHE holds and what its worker does."""
    with _open(cache) as filled:
        if watch:
            display.watch(filled, interval, as_json=json)
        else:
            display.show(filled.status(), as_json=json)


@app.command()
def limit(
    cache: CacheArgument,
    size: Annotated[str, typer.Argument(metavar="SIZE", help='The new limit, such as "500GB".')],
) -> None:
    """Set the size limit of CACHE.

    It takes effect at once, also while a worker fills it; lowering it evicts.
    """
    with _open(cache) as filled:
        filled.size_limit = parse_size(size, "SIZE")
        used = filled.size_bytes
        typer.echo(f"{filled.path}: {format_size(used)} of {format_size(filled.size_limit)}", err=True)
        _report_shortfall(used, filled.size_limit)


@app.command()
def evict(
    cache: CacheArgument, to: Annotated[str, typer.Option("--to", help='What may stay, such as "100GB".')]
) -> None:
    """Evict from CACHE down to a size.

    Epochs in use keep their shards until they end.
    """
    with _open(cache) as filled:
        to_bytes = parse_size(to, "--to")
        freed = filled.evict(to_bytes)
        used = filled.size_bytes
        typer.echo(f"freed {format_size(freed)}; {filled.path} takes {format_size(used)}", err=True)
        if filled.num_shards:
            _report_shortfall(used, to_bytes)


def _report_shortfall(used_bytes: int, wanted_bytes: int) -> None:
    if used_bytes > wanted_bytes:
        typer.echo(
            f"still {format_size(used_bytes - wanted_bytes)} more than asked for: epochs in use hold their "
            "shards, which go when these epochs end",
            err=True,
        )
        raise typer.Exit(PROBLEM)


@app.command()
def clear(cache: CacheArgument) -> None:
    """Remove all samples of CACHE.

    The progress of its filling goes too; its settings stay.
    """
    with _open(cache) as filled:
        held = filled.num_samples
        filled.clear()
        typer.echo(f"removed {held:,} samples from {filled.path}", err=True)


@app.command()
def verify(
    cache: CacheArgument,
    repair: Annotated[bool, typer.Option("--repair", help="Put damaged shards aside.")] = False,
    json: JsonOption = False,
) -> None:
    """Check CACHE for damage.

    Compares every shard with its checksums, and the catalogue with the directory.
    """
    with _open(cache) as filled:
        with display.progress("verifying") as advance:
            report = filled.verify(repair=repair, on_progress=advance)
        display.show_verification(report, as_json=json)
        if not report.ok:
            raise typer.Exit(PROBLEM)


@app.command()
def refetch(
    manifest: Annotated[
        Path, typer.Argument(metavar="MANIFEST", help="What record= wrote: a file, or a folder of them.")
    ],
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="What the worker was given.")],
    cache: CacheArgument,
    *,
    transform: Annotated[str | None, typer.Option(help="module:function, as the worker had it.")] = None,
    size_limit: SizeLimitOption = None,
    storage_option: StorageOption = None,
    source_option: SourceOption = None,
    format: FormatOption = None,  # noqa: A002  the name gives the flag, and its name in the environment
    resize: ResizeOption = None,
    crop: CropOption = None,
) -> None:
    """Bring the shards of recorded epochs back into CACHE.

    They come back identical, to replay those epochs. Needed shards that are cached stay, others may be
    evicted. CACHE may be a new directory.
    """
    function = load(transform, "--transform")
    opened = source_of(source, source_option, storage_option, format=format, resize=resize, crop=crop)
    refetching = _import_late("tools.refetching")
    wanted = refetching.wanted_shards(manifest)
    with Cache(cache, size_limit) as filled, display.progress("refetching") as advance:
        report = refetching.refetch(wanted, filled, opened, transform=function, on_progress=advance)
    for reason in report.failed:
        typer.echo(reason, err=True)
    typer.echo(str(report), err=True)
    if not report.ok:
        raise typer.Exit(PROBLEM)


@app.command()
def plot(
    cache: CacheArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="The picture: a .png, .svg or .pdf.")] = Path(
        "growth.png"
    ),
) -> None:
    """Draw how CACHE grew."""
    with _open(cache) as filled:
        rows = read_history(filled.directory.worker_file("history"))
        output = output if output.suffix else output.with_suffix(".png")
        plot_growth(rows, output, f"{filled.path}: {filled.num_samples:,} samples")
        typer.echo(str(output))


@app.command()
def bench(
    context: typer.Context,
    cache: CacheArgument,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples in a batch.")] = 64,
    seconds: SecondsOption = 5.0,
    batch_transform: Annotated[
        str | None, typer.Option(help="module:function, run on whole batches, as in training.")
    ] = None,
    trace: TraceOption = None,
    json: JsonOption = False,
) -> None:
    """Measure the loader over CACHE.

    Measures it alone, with your batch transform, and onto the accelerator, beside memcpy.
    """
    function = load(batch_transform, "--batch-transform")
    if trace is not None:
        context.with_resource(Trace(trace))
    with _open(cache) as filled:
        report = _import_late("tools.bench").bench(filled, batch_size, seconds, function)
    display.show(report, as_json=json)


@app.command()
def diagnose(
    source: Annotated[
        str | None,
        typer.Argument(metavar="SOURCE", help="URL, path, wildcard or module:name; none: check the machine."),
    ] = None,
    *,
    transform: TransformOption = None,
    seconds: SecondsOption = 5.0,
    workers: WorkersOption = None,
    folder: Annotated[
        str | None,
        typer.Option(
            help="A folder on the disk of the future cache; by default that of temporary files, and without "
            "SOURCE the current one."
        ),
    ] = None,
    storage_option: StorageOption = None,
    source_option: SourceOption = None,
    format: FormatOption = None,  # noqa: A002  the name gives the flag, and its name in the environment
    resize: ResizeOption = None,
    crop: CropOption = None,
    json: JsonOption = False,
) -> None:
    """Find what slows filling from SOURCE, or check this machine.

    With SOURCE it shows the time of every stage, and which one holds up the rest; without SOURCE, whether the
    machine has what a cache needs. It needs no cache, and leaves nothing behind.
    """
    if source is None:
        report = _import_late("tools.machine").check_machine(folder or ".")
        display.show(report, as_json=json)
        if not report.ok:
            raise typer.Exit(PROBLEM)
        return
    function = load(transform, "--transform")
    named = {"format": format, "resize": resize, "crop": crop}
    opener = functools.partial(source_of, source, source_option, storage_option, **named)
    limits = {"seconds": seconds, "workers": workers, "folder": folder, "on_progress": display.say}
    found = _import_late("tools.diagnose").diagnose(redact(source), opener, function, **limits)
    display.show(found, as_json=json)


@app.command()
def plan(
    source: SourceArgument,
    *,
    size_limit: Annotated[str, typer.Option(help='The limit of the cache, such as "200GB".')],
    batch_size: Annotated[int, typer.Option(min=1, help="Samples in a batch, of all ranks together.")],
    step_time: Annotated[
        float, typer.Option(min=1e-6, callback=finite, help="Seconds that the model takes for a batch.")
    ],
    days: Annotated[float, typer.Option(min=1e-6, callback=finite, help="How long to train.")] = 1.0,
    bandwidth: Annotated[
        str | None, typer.Option(help='The most that the network brings a second, such as "300MB".')
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Samples of the remote, if SOURCE does not tell.")
    ] = None,
    turnover: Annotated[
        float,
        typer.Option(min=0, max=1, callback=finite, help="The share of a full cache that an epoch replaces."),
    ] = 0.25,
    min_samples: Annotated[int, typer.Option(min=0, help="Samples that the first epoch waits for.")] = 0,
    price_per_gb: Annotated[
        float | None,
        typer.Option(min=0, callback=finite, help="The price of a GB that is fetched, in your currency."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Draw the forecast: a .png, .svg or .pdf.")
    ] = None,
    transform: TransformOption = None,
    seconds: SecondsOption = 5.0,
    workers: WorkersOption = None,
    storage_option: StorageOption = None,
    source_option: SourceOption = None,
    format: FormatOption = None,  # noqa: A002  the name gives the flag, and its name in the environment
    resize: ResizeOption = None,
    crop: CropOption = None,
    json: JsonOption = False,
) -> None:
    """Forecast a training over SOURCE before it runs.

    Reads SOURCE for some seconds, and simulates the run: when the first batch comes, how epochs grow, when
    the cache is full and all has been seen, what is fetched and what it costs, and what would be better.
    """
    if output is not None:
        figure_class()  # what is missing is said now, and not after the reading
    function = load(transform, "--transform")
    named = {"format": format, "resize": resize, "crop": crop}
    opener = functools.partial(source_of, source, source_option, storage_option, **named)
    link = None if bandwidth is None else parse_size(bandwidth, "--bandwidth")
    run = {
        "size_limit": parse_size(size_limit, "--size-limit"),
        "batch_size": batch_size,
        "step_s": step_time,
        "duration_s": 86_400 * days,
        "turnover": turnover,
        "min_samples": min_samples,
    }
    limits = {"seconds": seconds, "workers": workers, "on_progress": display.say}
    stages = _import_late("tools.diagnose").diagnose(redact(source), opener, function, **limits)
    planning = _import_late("tools.forecast")
    planned = planning.RunPlan.of(planning.setup_of(stages, samples, link, **run), stages, price_per_gb)
    display.show(planned, as_json=json)
    if output is not None:
        plot_forecast(planned.forecast, output, redact(source))


@app.command()
def dashboard(
    caches: Annotated[list[str], typer.Argument(metavar="CACHE...", help="The directories of caches.")],
    *,
    host: Annotated[
        str, typer.Option(help="The address to listen at; 0.0.0.0: for other machines, too.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65_535, help="The port to listen at; 0: any free one.")
    ] = 8788,
    token: Annotated[
        str | None, typer.Option(help='What a reader must give; by default a new one, "" for none.')
    ] = None,
) -> None:
    """Show caches and their trainers live in a browser.

    Prints the URL of the page and serves it until Ctrl-C, with metrics for Prometheus at /metrics. It only
    reads. Needs the extra 'dashboard'.
    """
    server = require("cachestream.dashboard.server", "dashboard", "the dashboard")
    for path in caches:
        _open(path).close()
    shown = server.Dashboard(caches, host, port, token)
    shown.run(lambda: typer.echo(shown.url))


@app.command()
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for what it makes.")] = Path(
        "demo-output"
    ),
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the remote data and the cache, to look at.")
    ] = False,
) -> None:
    """Show cachestream at work on this machine.

    Two ranks train on a growing cache, without a network.
    """
    raise typer.Exit(_import_late("demo").run(output, keep=keep))


def _import_late(name: str) -> Any:
    """Import a module that takes long to load, for which the other commands should not wait."""
    return importlib.import_module(f"cachestream.{name}")
