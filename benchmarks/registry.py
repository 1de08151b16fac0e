"""All benchmarks: what each measures, its figures with their targets, and the reason where a target is missed.

A benchmark is a module of this folder that emits its figures as the last line of its output. Benchmarks that have
a `command` need an environment of their own and save their records themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["BENCHMARKS", "TURNS", "Benchmark", "Figure"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure that the page shows, by the name under which it is emitted.

    `target`: the least that it should be, with `at_most` the most. `missed` says in sentences why it is missed, where it is.
    """

    name: str
    title: str
    unit: str = ""
    target: float | None = None
    at_most: bool = False
    missed: str = ""

    @property
    def bound(self) -> str:
        return "≤" if self.at_most else "≥"

    def misses(self, value: float) -> bool:
        if self.target is None:
            return False
        return value > self.target if self.at_most else value < self.target


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A section of the page. Figures that are called "row / column" become a table of their own below `figures`."""

    title: str
    what: str
    figures: tuple[Figure, ...] = ()
    timeout_s: float = 600.0
    command: str = ""  # of those that `python -m benchmarks` does not run
    plot: str = ""  # relative to the page
    needs_accelerator: bool = False  # left out where torch finds none, unless it is named

    def shown_command(self, name: str) -> str:
        return self.command or f"python -m benchmarks {name}"


TURNS: Final = "turns"
BENCHMARKS: Final[dict[str, Benchmark]] = {
    "warm": Benchmark(
        "Warm batches",
        "8,192 samples of 128 KiB in shuffled batches of 8 MiB, all in the page cache, beside memcpy and beside a gather of the "
        "same rows into one reused buffer, each on one thread, in turns.",
        (
            Figure("loader_gb_per_s", "`EpochLoader`", "GB/s"),
            Figure(
                "loader_to_memcpy",
                "of memcpy",
                target=0.8,
                missed="memcpy reads in order. The loader reads rows from random places, as the gather beside it does, which it beats.",
            ),
            Figure("loader_to_gather", "of the gather", target=0.85),
            Figure("gap_ms", "gap between epochs", "ms", target=5, at_most=True),
        ),
    ),
    "small": Benchmark(
        "Small samples",
        "60,000 samples of 784 bytes with a label in batches of 256, beside a gather into reused buffers on one thread.",
        (
            Figure("loader_samples_per_s", "`EpochLoader`", "samples/s"),
            Figure(
                "loader_to_gather",
                "of the gather",
                target=0.8,
                missed="An epoch lasts some 10 ms. A batch takes 36 µs of a processor for its copies, 20 for the trainer's own "
                "Python, and 25 for the places of its samples and the next epoch's preparation (by the kernel's counts), and the "
                "gather beside it has both processors to itself.",
            ),
        ),
    ),
    "ranks": Benchmark(
        "Two ranks",
        "Two processes under `torch.distributed` with the warm batches from above, together, beside two processes that copy.",
        (
            Figure("two_ranks_gb_per_s", "two ranks", "GB/s"),
            Figure(
                "ranks_to_memcpy",
                "of memcpy to one place",
                target=0.75,
                missed="This memcpy writes one place of 8 MiB, which the processor's cache holds. Batches lie in six places in "
                "turn, since the trainer may keep what it has, and are written to memory.",
            ),
            Figure("least_ranks_to_memcpy", "the least of any turn"),
            Figure("ranks_to_memcpy_in_turn", "of memcpy to six places in turn"),
        ),
    ),
    "interpreter": Benchmark(
        "The trainer's own Python",
        "A loop in pure Python that takes 1 GB/s from the loader, beside the same loop over views of a tensor in memory.",
        (
            Figure(
                "share_of_python_speed",
                "of the speed of the loop without a loader",
                target=0.97,
                missed="What is missing is the loader's Python in the trainer's thread, 0.04 to 0.1 ms for each batch, and that of "
                "the thread that prepares the next epoch.",
            ),
            Figure("lowest_share", "the least in any quarter of a second"),
            Figure("share_of_a_processor", "time of the loop on a processor, the share"),
            Figure(
                "share_beside_another_process",
                "of that speed beside another process that gathers as much, without a loader",
            ),
            Figure("lowest_beside_another_process", "the least of these in any quarter of a second"),
            Figure(
                "share_of_a_loop_that_takes_nothing",
                "with the loader, of the speed of a loop that takes no batch",
            ),
            Figure(
                "views_share_of_a_loop_that_takes_nothing", "with views of a tensor in memory, of that speed"
            ),
        ),
    ),
    "accelerator": Benchmark(
        "Batches on an accelerator",
        "The warm batches from above, delivered to the device, beside copies of one batch in pinned memory (the limit of the bus) and "
        "beside a `DataLoader` over the same cache with eight workers and pinned memory, in turns; then a training step of eight such "
        "copies' time over them, beside the same loop over one batch that stays on the device.",
        (
            Figure("copy_gb_per_s", "copies of a pinned batch", "GB/s"),
            Figure("loader_gb_per_s", "`EpochLoader(device=)`", "GB/s"),
            Figure("dataloader_gb_per_s", "`DataLoader`", "GB/s"),
            Figure(
                "loader_to_copy",
                "of the copies",
                target=0.8,
                missed="The copies read one place of 8 MiB. The loader's two threads first gather rows from random places into pinned "
                "memory: as fast as into host memory (16.4 GB/s by `benchmarks.warm` on the same machine, where one thread's memcpy "
                "reaches 8.4), which is less than the bus takes and several times what a training step asks for.",
            ),
            Figure("loader_to_dataloader", "to the `DataLoader`", target=1.0),
            Figure("step_ms", "a training step", "ms"),
            Figure("share_of_training_speed", "of the speed of the loop without a loader", target=0.97),
        ),
        needs_accelerator=True,
    ),
    "packing": Benchmark(
        "Packed tokens",
        "Sources of Python's standard library as JSON Lines on an S3 server, tokenised and packed into windows of 129 tokens by one "
        "process, beside `datasets` of Hugging Face, streaming with the same packing. A small language model trains for 30 s from each, "
        "from a network of 100 kB/s; then each goes over all windows twice, without a limit or a model.",
        (
            Figure(
                "tokens_per_s_ratio",
                "tokens trained on, to streaming's",
                target=1.0,
            ),
            Figure("ours_tokens_per_s", "`cs.stream`, training", "tokens/s"),
            Figure("theirs_tokens_per_s", "`datasets`, training", "tokens/s"),
            Figure("ours_waiting_percent", "`cs.stream`, waiting", "%"),
            Figure("theirs_waiting_percent", "`datasets`, waiting", "%"),
            Figure("ours_loss", "`cs.stream`, loss after 30 s", "nats a token"),
            Figure("theirs_loss", "`datasets`, loss after 30 s", "nats a token"),
            Figure("loss_lower_by", "loss lower by", "nats a token", target=0.0),
            Figure("ours_first_batch_s", "`cs.stream`, first batch", "s"),
            Figure("theirs_first_batch_s", "`datasets`, first batch", "s"),
            Figure("first_pass_per_s_ratio", "first pass over all, to streaming's", target=1.0),
            Figure("ours_first_pass_per_s", "`cs.stream`, first pass, start included", "tokens/s"),
            Figure("theirs_first_pass_per_s", "`datasets`, first pass, start included", "tokens/s"),
            Figure("later_passes_per_s_ratio", "a later pass, to streaming's", target=1.0),
            Figure("ours_later_passes_per_s", "`cs.stream`, a later pass", "tokens/s"),
            Figure("theirs_later_passes_per_s", "`datasets`, a later pass", "tokens/s"),
        ),
    ),
    "photographs": Benchmark(
        "Photographs that are decoded once",
        "2,000 JPEGs of 640 × 480 to 224 × 224, from the cache, and decoded in every epoch by a DataLoader with two processes.",
        (
            Figure("loader_images_per_s", "`EpochLoader`", "images/s"),
            Figure("loader_to_decoding", "times as fast", target=20),
        ),
    ),
    "ragged": Benchmark(
        "Ragged fields",
        "Samples of 1 to 512 tokens in batches of 256, by the values of `ragged=`.",
        tuple(
            Figure(f"{ragged}_million_tokens_per_s", f'`"{ragged}"`', "million tokens/s")
            for ragged in ("list", "padded", "nested")
        ),
    ),
    "plugins": Benchmark(
        "Plug-ins: Lance and video",
        "200,000 rows of 512 bytes in a Lance dataset, beside pylance; four films of 60 s in H.264, clips of 8 frames, beside torchcodec. "
        "From the page cache, in turns.",
        (
            Figure("lance_rows_per_s", "`LanceSource`", "rows/s"),
            Figure("lance_to_scan", "of the speed of a scan into arrays", target=0.8),
            Figure("lance_cached_rows_per_s", "`EpochLoader`, shuffled batches of 256", "rows/s"),
            Figure("lance_cached_to_take", "times as fast as `take` of such batches", target=1),
            Figure("video_clips_to_film", "four clips, times as fast as a decode of the film", target=2),
            Figure("video_cached_clips_per_s", "`EpochLoader`, clips", "clips/s"),
            Figure("video_cached_to_decoding", "times as fast as decoding them in each epoch", target=5),
        ),
    ),
    "select": Benchmark(
        "Selected samples and fields, batches by tokens",
        "60,000 samples with a picture of 4 KiB, a vector and a label: a tenth of them by `where=`, and all without the picture; "
        "16,384 samples of 1 to 512 tokens by `max_tokens=` and in batches of 64. Hugging Face `datasets` (`filter`, a DataLoader) "
        "does the same work in the same run, with batches cut by the same rule. Processor time, in turns.",
        (
            Figure("where_to_own_cache", "the selected tenth, of a cache of these alone", target=0.7),
            Figure("evaluate_s_per_million", "a condition on 1,000,000 samples", "s", 0.5, at_most=True),
            Figure("again_ms", "in an epoch without new shards", "ms", 5, at_most=True),
            Figure("evaluate_to_filter", "times as fast as `datasets` filters", target=1),
            Figure("columns_to_all", "without the picture, times as fast", target=2),
            Figure("padding_max_tokens", "padding with `max_tokens=`, share", "", 0.1, at_most=True),
            Figure("padding_fixed", "padding in batches of 64, share"),
            Figure("max_tokens_million_per_s", "`max_tokens=`", "million tokens/s"),
            Figure("fixed_million_per_s", "batches of 64", "million tokens/s"),
            Figure("datasets_million_per_s", "`datasets`", "million tokens/s"),
            Figure("max_tokens_to_datasets", "times as fast as `datasets`", target=5),
        ),
    ),
    "mixture": Benchmark(
        "The cost of a mixture",
        "16,384 samples of 32 KiB from two sources, in batches of 64 from the page cache: with `mixture=`, beside the same loader "
        "without, in turns. By step: a function whose shares change at every step. The trainer has no steps, so an epoch lasts 30 to 40 ms, "
        "and the next one, which is drawn meanwhile, takes the processor from it.",
        (
            Figure("fixed_to_without", "fixed weights, of the speed without"),
            Figure("by_step_to_without", "weights by step, of the speed without"),
            Figure("fixed_cpu_to_without", "fixed weights, processor time to that without"),
            Figure("by_step_cpu_to_without", "weights by step, processor time to that without"),
            Figure("without_samples_per_s", "without", "samples/s"),
            Figure("fixed_samples_per_s", "fixed weights", "samples/s"),
            Figure("by_step_samples_per_s", "weights by step", "samples/s"),
        ),
    ),
    "scale": Benchmark(
        "Large caches and many epochs",
        "Tiny shards: 10,000 and then 100,000 of them, opened by a process that knows nothing of them; 1,000 epochs over 100.",
        (
            Figure(
                "gap_third_new_ms",
                "gap between epochs, a third of 10,000 shards new",
                "ms",
                5,
                at_most=True,
                missed="Opening 3,333 new shards takes a little longer than the epoch of 1.1 s. The trainer comes before the next one is "
                "prepared; no more are opened then (388 of 10,000 are left), and it waits for the rest of the preparation.",
            ),
            Figure("gap_ms", "gap between epochs, of the same 10,000 shards", "ms", 5, at_most=True),
            Figure(
                "position_of_1e9_ms",
                "a position in an epoch of 10⁹ samples",
                "ms",
                1,
                at_most=True,
                missed="Its rounds differ by twice; on another machine all of them were below 0.5 ms.",
            ),
            Figure("first_batch_s_at_100000", "100,000 shards: first batch", "s", 2, at_most=True),
            Figure("memory_mb_at_100000", "100,000 shards: memory besides torch's", "MB", 300, at_most=True),
            Figure(
                "snapshot_s_at_100000",
                "100,000 shards: a snapshot",
                "s",
                0.3,
                at_most=True,
                missed="SQLite hands over 100,000 rows; the target was set on a machine twice as fast.",
            ),
            Figure("memory_growth_mb", "growth of memory over 900 epochs", "MB", 2, at_most=True),
            Figure("files_growth", "growth of open files over 900 epochs", "", 0, at_most=True),
        ),
    ),
    "beyond": Benchmark(
        "A cache larger than memory",
        "A cache of 3 GB, samples of 128 KiB, read by a process that a control group allows 1 GB (needs root).",
        (
            Figure("full_samples_per_s", "`EpochLoader`, a full shuffle", "samples/s"),
            Figure(
                "window_samples_per_s", "`EpochLoader`, in a window of a tenth of the memory", "samples/s"
            ),
            Figure("none_samples_per_s", "`EpochLoader`, in order", "samples/s"),
            Figure("DataLoader_samples_per_s", "`DataLoader(EpochDataset)`, shuffled", "samples/s"),
            Figure("memmap_samples_per_s", "a memmap, shuffled", "samples/s"),
            Figure(
                "full_bytes_read_for_each",
                "bytes read for each one delivered, a full shuffle",
                target=1.1,
                at_most=True,
            ),
        ),
        timeout_s=1800,
    ),
    "locality": Benchmark(
        "Shuffling within a window",
        "Entropy of the classes in a batch, of a full shuffle's: a cache filled class by class, 100 classes, 100,000 samples.",
        tuple(Figure(f"entropy_share_{n}", f"`locality={n}`") for n in (1_000, 4_000, 16_000, 64_000)),
    ),
    "fill": Benchmark(
        "Filling",
        "1 GiB of float32 arrays of 128 KiB by two processes, beside one that writes as much and syncs it.",
        (
            Figure("files_mb_per_s", "local .npy files", "MB/s"),
            Figure("function_mb_per_s", "a function", "MB/s"),
            Figure("disk_mb_per_s", "a plain write", "MB/s"),
            Figure("first_samples_s", "first samples after the call of `start_worker`", "s"),
        ),
    ),
    "raw": Benchmark(
        "Raw arrays",
        "Windows of 256 KiB of float32 arrays, 3 GiB; one process fills a cache with a shard size of 64 MB, beside a plain loop in one "
        "process that reads them to their places in a column and writes that, in turns. Arrays and cache lie in memory (/dev/shm), or the "
        "cache on a disk, beside bare writers that do not sync either. The trainer takes 10 ms for a step.",
        (
            Figure("npy_mb_per_s", "`.npy` files, one process", "MB/s"),
            Figure("loop_mb_per_s", "a plain loop over them", "MB/s"),
            Figure(
                "npy_to_loop",
                "of the plain loop",
                target=0.7,
                missed="A window takes some 150 µs more than the loop's 190: Python for its unit (its number, its key, its progress), and one "
                "more copy, into the column. Shards are hashed besides, by another thread.",
            ),
            Figure("npy_two_mb_per_s", "two processes", "MB/s"),
            Figure(
                "npy_two_to_one",
                "of one process",
                target=1.6,
                missed="One process reads in one thread and hashes and writes in another, which is more than one of the two processors.",
            ),
            Figure("npy_training_to_alone", "one process, while a trainer reads, of alone"),
            Figure("hdf5_mb_per_s", "HDF5, one process", "MB/s"),
            Figure("hdf5_loop_mb_per_s", "a plain loop of h5py", "MB/s"),
            Figure("hdf5_to_loop", "of the plain loop"),
            Figure("disk_mb_per_s", "on the disk, one process", "MB/s"),
            Figure("disk_writer_mb_per_s", "a bare writer", "MB/s"),
            Figure("disk_to_writer", "of the bare writer"),
            Figure("disk_loop_mb_per_s", "the plain loop that writes there", "MB/s"),
            Figure("disk_to_loop", "of that loop", target=0.7),
            Figure("disk_two_mb_per_s", "on the disk, two processes", "MB/s"),
            Figure("disk_two_writers_mb_per_s", "two bare writers", "MB/s"),
            Figure("disk_two_to_writers", "of these"),
            Figure("s3_mb_per_s", "objects of an S3 server on this machine, one process", "MB/s"),
            Figure("s3_two_mb_per_s", "two processes", "MB/s"),
        ),
        timeout_s=900.0,
    ),
    "remote": Benchmark(
        "A distant remote",
        "An S3 server behind 50 ms of latency and 40 MB/s, objects of 100 kB, four processes.",
        (
            Figure("share_of_bandwidth", "share of the bandwidth used by the filling", target=0.9),
            Figure(
                "first_sample_s", "first sample after the call of `open_source`, which loads the driver", "s"
            ),
        ),
    ),
    "trace": Benchmark(
        "The cost of a trace",
        "The speed with `cs.trace`, of that without, in turns: the warm batches from above, and one process that stores samples of "
        "a function, half a millisecond each.",
        (
            Figure("epochs_to_untraced", "warm batches", target=0.98),
            Figure("filling_to_untraced", "filling", target=0.98),
        ),
    ),
    "plan": Benchmark(
        "A forecast beside its run",
        "`cachestream plan` for a cache of a quarter of 4,000 arrays that turns over, and a trainer that begins at 600 samples, beside a run of 60 s: the longer time to the shorter.",
        (
            Figure(
                "full_ratio",
                "time until the cache is full",
                target=1.1,
                at_most=True,
                missed="By a thousandth, in one round.",
            ),
            Figure(
                "half_seen_ratio", "time until half of the remote was trained on", target=1.1, at_most=True
            ),
            Figure("most_seen_ratio", "time until 95 % was", target=1.1, at_most=True),
            Figure(
                "waiting_ratio",
                "time that the trainer waits",
                target=1.1,
                at_most=True,
                missed="The trainer waits for some four seconds in all, so that less than one of them is a fifth.",
            ),
            Figure("waiting_percent", "waiting of the trainer in the run", "%"),
        ),
    ),
    "cluster": Benchmark(
        "Filling on a Ray cluster",
        "Four nodes of a Ray cluster, all on this machine. Actors whose transform waits 50 ms; photographs of 512 x 512 decoded to 224 x 224 by "
        "one actor, beside one local process; four caches that share the filling from 400 arrays of 1 MiB on an S3 server, and a fifth "
        "that joins, beside copies of its shards, each synced.",
        (
            Figure("waiting_to_linear", "32 actors, of 32 times the speed of the wait", target=0.9),
            Figure("waiting_1_per_s", "1 actor", "samples/s"),
            Figure("waiting_4_per_s", "4 actors", "samples/s"),
            Figure("waiting_16_per_s", "16 actors", "samples/s"),
            Figure("waiting_32_per_s", "32 actors", "samples/s"),
            Figure(
                "photographs_to_local",
                "photographs by one actor, one at a time, of one local process",
                target=0.85,
            ),
            Figure("photographs_per_s", "photographs by one actor, one at a time", "photographs/s"),
            Figure("photographs_at_once_to_local", "up to 16 at a time, where both use both processors"),
            Figure(
                "shared_bytes_ratio", "bytes that four sharing caches read, of one", target=1.02, at_most=True
            ),
            Figure(
                "joined_bytes",
                "bytes that a fifth cache reads from the remote",
                "bytes",
                target=0,
                at_most=True,
            ),
            Figure(
                "joining_to_copying",
                "speed of the fifth cache from its first samples on, of copies",
                target=0.8,
                missed="One round of 24 shards; two rounds on another machine gave 0.91 and 1.02.",
            ),
            Figure("joining_mb_per_s", "the fifth cache", "MB/s"),
            Figure("joining_first_s", "its first samples after", "s"),
        ),
        timeout_s=1200.0,
    ),
    "listing": Benchmark(
        "A bucket that was never listed",
        "`cs.stream` over a folder of 20,000 objects on an S3 server that lists some thousand names a second, torch loaded.",
        (
            Figure(
                "first_batch_s",
                "first batch",
                "s",
                target=1.0,
                at_most=True,
                missed="As below, From nothing; and the server takes its time for the first page of names.",
            ),
        ),
    ),
    "cold": Benchmark(
        "From nothing",
        "An S3 server at 40 MiB/s for 60 s; the trainer takes batches of 8 MiB and computes for 25 ms each, so it wants 335 MB/s.",
        (
            Figure(
                "first_batch_s",
                "first batch",
                "s",
                target=1.0,
                at_most=True,
                missed="The next row shows a new Python that only loads numpy and s3fs and reads the same 64 objects: that takes longer than 1 s by "
                "itself, half of it to load s3fs and to make its client. The worker loads its own modules, too, and publishes the samples before they are trained on.",
            ),
            Figure("driver_alone_s", "s3fs alone: a new Python that reads those 64 objects", "s"),
            Figure(
                "steps",
                "steps, of 2,400",
                target=2280,
                missed="A first batch after two seconds costs 80 steps, and the waiting as many. The 25 ms of a step are `time.sleep`, which takes longer "
                "where sampling processes keep both cores busy.",
            ),
            Figure(
                "waiting_percent",
                "waiting after the first batch",
                "%",
                target=1,
                at_most=True,
                missed="Early epochs are short, and a fifth of the waiting is at their beginnings.",
            ),
            Figure("bandwidth_used_percent", "bandwidth used by the filling", "%", target=95),
        ),
    ),
    "sources": Benchmark(
        "Sources",
        "One process fills a cache: MB/s, and the ratio to the format's own library when it keeps the samples in files, and when it "
        "keeps nothing. From the page cache, from an S3 server on this machine, and from that behind 50 ms of latency. The rows of "
        "tfrecord are from before protobuf alone parsed its records.",
        timeout_s=3600,
    ),
    "diversity": Benchmark(
        "Diversity of the first epoch",
        "Distinct tars among the first 1,000 samples, of 100 tars with 200 samples each, at 20 MB/s.",
        (
            Figure("visits_distinct_tars", "`samples_per_visit=20`", "tars"),
            Figure("shuffled_distinct_tars", "shuffled tars", "tars"),
            Figure("sequential_distinct_tars", "one tar after another", "tars"),
        ),
    ),
    "waste": Benchmark(
        "What is fetched is trained on",
        "A cache of a fifth of the remote that fills at a multiple of the caches that an epoch takes: the share of the fetched samples "
        "that an epoch used before they were evicted.",
        tuple(
            Figure(
                f"trained_share_at_{ratio:g}",
                f"{ratio:g} caches fetched in an epoch, if nothing waited",
                target=0.95,
            )
            for ratio in (0.1, 0.5, 2.0, 8.0)
        ),
        plot="../docs/waste.png",
    ),
    "small_cache": Benchmark(
        "The price of a small cache",
        "Accuracy on handwritten digits after equally many steps, points behind training on all samples: a cache of a quarter of "
        "them that turns over, from tars in random order, and from tars of one class each (1.5 MB each: smaller ones are not read in parts); three seeds.",
        (
            Figure("all_percent", "all samples, accuracy", "%"),
            Figure("quarter_points_behind", "a quarter, points behind", target=0.3, at_most=True),
            Figure(
                "quarter_of_sorted_points_behind",
                "a quarter, of sorted tars, points behind",
                target=1.0,
                at_most=True,
            ),
        ),
    ),
    "importance": Benchmark(
        "Weights that draw and evict",
        "Views of 135 places in front of a cache of a quarter of them, of which a slow remote replaces 6 % an epoch. A small network "
        "after equally many steps, which fetch about as many samples: held-out accuracy (alike many views of each place), the mean of "
        "three seeds, and the least and the most at the end. Under a long tail, 100 to 2 views a place, a view weighs one by the square "
        "root of those of its place. Fetched by weight: these weights are the `order=` of what is fetched.",
        timeout_s=5400.0,
    ),
    "scale_out": Benchmark(
        "8 to 4,096 nodes, simulated",
        "A day of training on 4 TB, 256 GB of it in the cache of each node, 20 GB/s from the remote for all: the forecast of "
        "`cachestream plan` for one cache of each arrangement, since the nodes are alike. The measured runs are those of the section above.",
        (
            Figure(
                "worst_ratio",
                "model and measured runs of 3 to 5 caches, the most that they differ",
                target=1.3,
                at_most=True,
            ),
            Figure("simulation_s", "the whole simulation, on one processor", "s", target=5, at_most=True),
        ),
        plot="../docs/scale-out.png",
    ),
    "speeds": Benchmark(
        "Accuracy by the speed of the remote",
        "The network, the views and the loaders from above, each for 20 s, from a remote that gives a tenth of what the trainer could "
        "take (10 MB/s) up to twice as much; 48,000 views. One run each; the rows of cachestream were taken after the others, on the same "
        "machine.",
        command='make bench-accuracy ACCURACY_ARGS="--speeds 0.1,0.3,1,2 --seconds 20 --seeds 1 --save"',
        plot="../docs/remote-speeds.png",
    ),
    "peers": Benchmark(
        "Other loaders",
        "A: 8,192 samples of 128 KiB, batch 64, GB/s. B: 60,000 samples of 784 bytes with a label, batch 256, thousand samples/s. "
        "With 0, 1 and 2 worker processes, in turns, every delivery verified. `DataLoader(EpochDataset)` is compared worker by worker. "
        "FFCV is left out: pip alone does not install it, since it is compiled against an OpenCV of the system.",
        (
            Figure(
                "A_loader_to_gather",
                "A: `EpochLoader`, of a gather into a reused buffer",
                target=0.85,
                missed="See Warm batches.",
            ),
            Figure(
                "A_loader_to_memmap",
                "A: `EpochLoader`, of a memmap batched by hand",
                target=2,
                missed="A memmap whose batches malloc keeps in its heap comes near to memcpy, and memcpy is less than twice as fast.",
            ),
            Figure(
                "A_loader_to_caching_peer",
                "A: `EpochLoader`, of the best that caches remote data",
                target=7,
                missed="Both move the same bytes through the same memory, and `EpochLoader` moves them faster than memcpy does in one thread.",
            ),
            Figure(
                "B_loader_to_gather",
                "B: `EpochLoader`, of a gather into a reused buffer",
                target=0.8,
                missed="See Small samples.",
            ),
            Figure(
                "B_loader_to_caching_peer", "B: `EpochLoader`, of the best that caches remote data", target=10
            ),
            Figure(
                "A_dataset_to_peer",
                "A: `DataLoader(EpochDataset)`, of the fastest peer under a DataLoader, the least",
                target=1,
                missed="With worker processes, the way from a worker to the trainer takes most of the time, for both.",
            ),
            Figure(
                "B_dataset_to_peer",
                "B: `DataLoader(EpochDataset)`, of the fastest peer under a DataLoader, the least",
                target=1,
                missed="Of a batch's time, half is the DataLoader's own, a third the copy out of mapped files, and the rest ours.",
            ),
        ),
        command="make bench-peers",
    ),
    "mlperf": Benchmark(
        "MLPerf Storage",
        "Accelerators of the two training workloads of MLPerf Storage v3 on B200 that this machine feeds, of 1, 2, 4 and 8, by DLIO 2.0.0: "
        "the mean accelerator utilisation (AU) of the epochs is at least 90 (unet3d) or 85 % (retinanet). Not by the rules: the files are "
        "few and lie in the page cache, and so do the caches, filled before from the same files. unet3d: batches of 7 records of 147 MB "
        "(npz) in 0.162 s, of which DLIO's loader hands on 2 MiB each; the cache holds the records whole, or 2 MiB of each, in every epoch "
        "the same. retinanet: batches of 24 JPEGs of 568 × 568 in 0.048 s; the cache holds them decoded. No data: what DLIO, MPI and "
        "sleeping processes leave without a loader.",
        command="make bench-mlperf",
    ),
    "accuracy": Benchmark(
        "Time to accuracy over a slow remote",
        "The same network trained for 60 s from the same S3 server at 1 MB/s, a tenth of what the trainer could take; the accuracy on "
        "held-out views. The last column: when cachestream had the accuracy that the loader reached in the end, as a share of the budget.",
        (
            Figure(
                "ours_there_at",
                "cachestream reaches the best streaming loader's accuracy, share of the budget",
                target=1 / 3,
                at_most=True,
            ),
        ),
        command="make bench-accuracy",
        plot="../docs/time-to-accuracy.png",
    ),
}
