"""The commands as a person and as a script use them: what they do, exit codes, both outputs, wrong use."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import cachestream as cs
from cachestream import Cache
from cachestream.training.batches.transfer import accelerator
from tests.cli.support import COUNT, TIMEOUT_S, cli, cli_here, done, fill_command, look, refused
from tests.support.caches import fill
from tests.support.s3 import S3Server
from tests.worker.support import keys_of

PLAN = ["plan", "IMAGES", "--size-limit", "1GB", "--batch-size", "1"]
pytestmark = pytest.mark.usefixtures("forked")


def test_a_cache_is_filled_seen_checked_limited_evicted_and_cleared_by_commands(
    images: Path, cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    filled = cli(*fill_command(images, cache))
    assert done(filled) == ""
    assert f"{COUNT} samples" in filled.stderr
    assert "complete" in filled.stderr

    seen = json.loads(done(cli_here(capfd, "status", cache, "--json")))
    assert (seen["num_samples"], seen["fill_state"], seen["pass_done"]) == (COUNT, "complete", 1.0)
    assert seen["worker"] is None
    shown = done(cli_here(capfd, "status", cache))
    assert f"{COUNT} in " in shown
    assert "image: uint8[3, 16, 16]" in shown

    assert "all sound" in done(cli_here(capfd, "verify", cache))
    assert json.loads(done(cli_here(capfd, "verify", cache, "--json")))["ok"] is True

    done(cli_here(capfd, "limit", cache, "20MB"))
    assert look(cache).size_limit == 20_000_000

    picture = tmp_path / "growth.png"
    assert done(cli_here(capfd, "plot", cache, "-o", picture)).strip() == str(picture)
    with Image.open(picture) as drawn:
        assert min(drawn.size) > 400

    assert "freed" in cli_here(capfd, "evict", cache, "--to", 0).stderr
    assert look(cache).num_samples == 0
    done(cli_here(capfd, "clear", cache))
    assert look(cache).fill_state == "none"


@pytest.mark.e2e
def test_a_bucket_is_read_with_options_for_its_driver_and_secrets_from_the_environment(
    images: Path, cache: Path, s3_server: S3Server, s3_bucket: Path
) -> None:
    shutil.copytree(images, s3_bucket, dirs_exist_ok=True)
    command = fill_command(Path("SOURCE"), cache)
    command[1] = f"s3://{s3_bucket.name}/"
    options = (f"endpoint_url={s3_server.endpoint_url}", "client_kwargs.region_name=us-east-1")
    more = [word for option in options for word in ("--storage-option", option)]
    secrets = {"AWS_ACCESS_KEY_ID": s3_server.key, "AWS_SECRET_ACCESS_KEY": s3_server.secret}
    filled = cli(*command, *more, environment=secrets)
    assert filled.returncode == 0, filled.stderr
    assert len(filled.stderr.splitlines()) == 1  # what drivers log of themselves is not shown
    assert look(cache).num_samples == COUNT


def test_a_source_and_a_transform_may_be_named_as_module_and_object(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "items = [{'x': i} for i in range(20)]\n"
        "def even(sample):\n    return sample if sample['x'] % 2 == 0 else None\n"
    )
    command = fill_command(Path("mine:items"), cache, "--transform", "mine:even")
    done(cli(*command, cwd=tmp_path))
    assert look(cache).num_samples == 10


@pytest.mark.e2e
def test_images_are_resized_and_cropped_and_the_format_is_named_by_flags_called_as_in_python(
    images: Path, cache: Path
) -> None:
    done(cli(*fill_command(images, cache, "--resize", "12x24", "--crop", 8, "--format", "files")))
    with Cache(cache) as filled, filled.snapshot() as dataset:
        assert len(dataset) == COUNT
        assert tuple(dataset[0]["image"].shape) == (3, 8, 8)
        source = cs.open_source(str(images), resize=(12, 24), crop=8, format="files")
        with cs.start_worker(filled, source) as worker:  # the same source: else it would be refused
            assert worker.wait(TIMEOUT_S)


def test_a_failing_transform_ends_with_what_was_skipped_and_why(
    tmp_path: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "items = [{'x': i} for i in range(4)]\n"
        "def odd_only(sample):\n    if sample['x'] % 2: return sample\n    raise ValueError('even!')\n"
    )
    filled = cli(*fill_command(Path("mine:items"), cache, "--transform", "mine:odd_only"), cwd=tmp_path)
    assert filled.returncode == 0, filled.stderr
    assert "2 skipped, most often: transform: ValueError: even! (first: " in filled.stderr
    shown = done(cli_here(capfd, "status", cache))
    assert "2 samples" in shown
    assert "ValueError: even!" in shown


@pytest.mark.e2e
def test_a_worker_whose_transform_left_nothing_says_so_and_ends_as_a_problem(
    tmp_path: Path, cache: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "items = [{'x': i} for i in range(4)]\ndef broken(sample):\n    sample['y'] = 1\n"
    )
    filled = cli(*fill_command(Path("mine:items"), cache, "--transform", "mine:broken"), cwd=tmp_path)
    assert filled.returncode == 1
    assert "transform returned None for 4 samples, which leaves them out" in filled.stderr
    assert "Traceback" not in filled.stderr


def test_damage_is_found_repaired_and_then_gone(cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fill(cache, 3, 8).close()
    shard = sorted((cache / "shards").iterdir())[1]
    content = bytearray(shard.read_bytes())
    content[-20] ^= 1
    shard.write_bytes(content)
    found = cli_here(capfd, "verify", cache)
    assert found.returncode == 1
    assert f"corrupt: {shard}" in found.stdout
    assert "verify CACHE --repair" in found.stdout
    assert "repaired" in done(cli_here(capfd, "verify", cache, "--repair"))
    assert "2 shards, 16 samples: all sound" in done(cli_here(capfd, "verify", cache))
    status = look(cache)
    assert status.quarantined == 1
    (failure,) = status.failures
    assert (failure.kind, failure.count, failure.example) == ("quarantined", 8, str(shard))
    assert "mismatch" in failure.reason
    assert "--repair" not in failure.reason  # which is done
    assert "1 damaged shard" in done(cli_here(capfd, "status", cache))


def test_what_epochs_hold_stays_and_the_command_says_so(
    cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    opened = fill(cache, 3, 8)
    _, lease = opened.take_snapshot()
    opened.close()
    try:
        assert "epochs in use hold their shards" in refused(cli_here(capfd, "evict", cache, "--to", 0), 1)
        assert "leased by epochs in use" in refused(cli_here(capfd, "clear", cache), 1)
        assert "1 in use" in done(cli_here(capfd, "status", cache))
    finally:
        lease.release()
    done(cli_here(capfd, "evict", cache, "--to", 0))
    assert look(cache).num_shards == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["status", "CACHE"], "holds no cache"),
        (["stop", "CACHE"], "holds no cache"),
        (["verify", "CACHE"], "holds no cache"),
        (["limit", "CACHE", "5GB"], "holds no cache"),
        (["worker", "nowhere://bucket", "CACHE"], "nowhere"),
        (["worker", "/no/such/folder", "CACHE"], "/no/such/folder"),
        (["worker", "no_such_module:thing", "CACHE"], "no_such_module"),
        (["worker", "IMAGES", "CACHE", "--size-limit", "much"], "size_limit='much'"),
        (["worker", "IMAGES", "CACHE", "--size-limit", "10"], "too small"),
        (["worker", "IMAGES", "CACHE", "--order", "backwards"], "order='backwards'"),
        (["worker", "IMAGES", "CACHE", "--workers", "0"], "--workers"),
        (["worker", "IMAGES", "CACHE", "--partition", "2/2"], "node i of n, counted from 0"),
        (["worker", "IMAGES", "CACHE", "--when-full", "explode"], "when_full='explode'"),
        (["worker", "IMAGES", "CACHE", "--bandwidth-limit", "0"], "bandwidth_limit"),
        (["worker", "IMAGES", "CACHE", "--shard-size", "much"], "shard_size='much'"),
        (["worker", "IMAGES", "CACHE", "--eviction", "oldest"], "eviction='oldest'"),
        (["worker", "IMAGES", "CACHE", "--resize", "large"], "--resize 'large': give pixels"),
        (["worker", "IMAGES", "CACHE", "--crop", "0"], "crop=0: give a number of pixels above 0"),
        (["worker", "IMAGES", "CACHE", "--format", "zip"], "format='zip': give one of"),
        (["refetch", "/no/manifest", "IMAGES", "CACHE"], "/no/manifest cannot be read"),
        (["worker", "IMAGES", "CACHE", "--transform", "json:no_such"], "--transform='json:no_such'"),
        (["worker", "IMAGES", "CACHE", "--source-option", "colour=red"], "no argument 'colour'"),
        (["worker", "IMAGES", "CACHE", "--storage-option", "a=1", "--storage-option", "a.b=2"], "'a'"),
        (["stop", "CACHE", "--timeout", "nan"], "--timeout"),
        (["status", "CACHE", "--watch", "--interval", "inf"], "--interval"),
        (["bench", "CACHE", "--seconds", "inf"], "--seconds"),
        (["diagnose", "IMAGES", "--seconds", "inf"], "--seconds"),
        (["diagnose", "IMAGES", "--workers", "0"], "--workers"),
        ([*PLAN, "--step-time", "1", "--days", "inf"], "--days"),
        ([*PLAN, "--step-time", "nan"], "--step-time"),
        (["status"], "CACHE"),
        (["frobnicate"], "frobnicate"),
        (["status", "CACHE", "--frob"], "--frob"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_is_one_clear_message_and_leaves_nothing(
    arguments: list[str], said: str, images: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    places = {"CACHE": str(cache), "IMAGES": str(images)}
    result = cli_here(capfd, *(places.get(argument, argument) for argument in arguments))
    # A remote that is missing is a problem found; the rest is wrong use.
    assert said in refused(result, 1 if "/no/such/folder" in arguments else 2)
    assert not cache.exists()  # what is wrong in itself is found before one is made


def test_what_is_given_for_the_storage_driver_is_not_repeated_in_a_message(
    cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for wrong in ("=canary", "canary", "secret=canary"):
        result = cli_here(capfd, "worker", "s3://bucket:bad/x", cache, "--storage-option", wrong)
        assert result.returncode in (1, 2)
        assert "canary" not in result.stderr


@pytest.mark.e2e
def test_the_environment_gives_options_and_arguments_win(
    images: Path, cache: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {
        "CACHESTREAM_CACHE": str(cache),
        "CACHESTREAM_WORKER_SIZE_LIMIT": "30MB",
        "CACHESTREAM_WORKER_WORKERS": "1",
        "CACHESTREAM_WORKER_MIN_FREE": "0",
    }
    done(cli("worker", images, environment=environment))
    assert look(cache).size_limit == 30_000_000
    done(cli("worker", images, "--size-limit", "40MB", environment=environment))
    assert look(cache).size_limit == 40_000_000
    monkeypatch.setenv("CACHESTREAM_CACHE", str(cache))
    assert json.loads(done(cli_here(capfd, "status", "--json")))["num_samples"] == COUNT
    monkeypatch.setenv("CACHESTREAM_STATUS_JSON", "1")
    assert json.loads(done(cli_here(capfd, "status")))["num_samples"] == COUNT


def test_the_loader_is_measured_beside_memcpy(
    cache: Path, device: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    fill(cache, 4, 64).close()
    told = json.loads(done(cli_here(capfd, "bench", cache, "--seconds", 0.2, "--batch-size", 32, "--json")))
    # Samples are 5 float32 and one int64: 28 bytes.
    assert told["bytes_per_s"] == pytest.approx(28 * told["samples_per_s"])
    assert told["num_batches"] >= 8
    assert told["share_of_memcpy"] == pytest.approx(told["bytes_per_s"] / told["memcpy_bytes_per_s"])
    assert told["batch_transform"] is None
    assert (told["device"] is None) is (device is None)
    assert "less than a batch of 1000" in refused(cli_here(capfd, "bench", cache, "--batch-size", 1000), 1)


@pytest.mark.e2e
def test_the_loader_is_measured_with_the_users_work_on_batches_and_shown_in_eighty_columns(
    cache: Path, tmp_path: Path
) -> None:
    fill(cache, 4, 64).close()
    (tmp_path / "mine.py").write_text("def only(batch):\n    return batch['number'].double()\n")
    options = ("--seconds", 0.2, "--batch-size", 32, "--batch-transform")
    told = json.loads(done(cli("bench", cache, *options, "mine:only", "--json", cwd=tmp_path)))
    rate = told["batch_transform"]
    assert rate["bytes_per_s"] == pytest.approx(8 * rate["samples_per_s"])
    shown = done(cli("bench", cache, *options, "mine:only", cwd=tmp_path))
    lines = shown.splitlines()
    assert [line.split("  ")[0] for line in lines[3:7]] == [
        "memcpy, one thread",
        "loader alone",
        "with the batch transform",
        "onto the device",
    ]
    assert accelerator() or "no accelerator" in lines[6]
    assert lines[7].startswith("disk, random 4.1 kB")
    assert max(map(len, lines[1:])) <= 80
    assert "give module:name" in refused(cli("bench", cache, *options, "mine:missing", cwd=tmp_path), 2)


def test_every_command_explains_itself_and_the_version_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    commands = ["worker", "stop", "status", "limit", "evict", "clear", "verify", "refetch", "plot", "bench"]
    commands += ["diagnose", "plan", "demo"]
    listed = done(cli_here(capfd, "--help"))
    for command in commands:
        assert f"  {command}" in listed
    assert "..." not in listed.partition("Commands:")[2], "a line is too long for 80 columns"
    assert "CACHESTREAM_WORKER_SIZE_LIMIT" in done(cli_here(capfd, "worker", "--help"))
    assert [line.split()[0] for line in done(cli_here(capfd, "--version")).splitlines()][:3] == [
        "cachestream",
        "Python",
        "torch",
    ]
    assert "--install-completion" in listed


@pytest.mark.e2e
def test_a_run_is_planned_from_a_look_at_the_source(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    for number in range(300):
        (tmp_path / "data" / f"{number}.bin").write_bytes(bytes(20_000))
    run = ["plan", tmp_path / "data", "--size-limit", "20MB", "--batch-size", "32", "--step-time", "0.01"]
    run += ["--days", "0.01", "--bandwidth", "4MB", "--seconds", "0.3", "--price-per-gb", "0.1"]
    told = json.loads(done(cli_here(capfd, *run, "--json", "-o", tmp_path / "plan.svg")))
    assert told["forecast"]["setup"]["num_samples"] == 300
    assert told["forecast"]["setup"]["fill_per_s"] == pytest.approx(200)
    assert told["forecast"]["seen_share"] == 1.0
    assert told["price"] == pytest.approx(300 * 20_000 / 1e9 * 0.1)
    assert "<svg" in (tmp_path / "plan.svg").read_text()
    assert "a batch takes" in refused(cli_here(capfd, *run, "--size-limit", "300kB"), 2)


def test_the_machine_is_checked_where_no_source_is_given(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = json.loads(done(cli_here(capfd, "diagnose", "--json", "--folder", tmp_path)))
    assert told["ok"]
    assert "disk" in [check["name"] for check in told["checks"]]
    monkeypatch.chdir(tmp_path)
    assert "OK       compiled" in done(cli_here(capfd, "diagnose"))
    assert "no such folder" in refused(cli_here(capfd, "diagnose", "--folder", tmp_path / "nothing"), 2)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(20):
        np.save(folder / f"{number:02d}.npy", np.full(3, number))
    (folder / "list.csv").write_text("path,label\n" + "".join(f"{n:02d}.npy,{n % 2}\n" for n in range(10)))
    return folder


def keys_in(path: Path) -> list[str]:
    with Cache(path) as cache:
        return sorted(keys_of(cache))


@pytest.mark.e2e
def test_two_nodes_fetch_a_share_each(data: Path, tmp_path: Path) -> None:
    names = []
    for node in range(2):
        done(cli("worker", f"{data}/*.npy", tmp_path / f"{node}", "--workers", 1, "--partition", f"{node}/2"))
        names += keys_in(tmp_path / f"{node}")
    assert sorted(names) == [f"{number:02d}.npy" for number in range(20)]


def test_a_curriculum_and_a_manifest_are_named_on_the_command_line(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.py").write_text("def easy(progress):\n    return range(10, 0, -1)\n", encoding="utf-8")
    cache = tmp_path / "cache"
    arguments = ["worker", data / "list.csv", cache, "--workers", 1, "--order", "plan:easy"]
    done(cli(*arguments, "--source-option", "manifest.label=label", cwd=tmp_path))
    assert keys_in(cache) == [f"{number:02d}.npy" for number in range(10)]
    status = json.loads(done(cli_here(capfd, "status", cache, "--json")))
    assert status["num_samples"] == 10
    with Cache(cache) as filled, filled.snapshot() as dataset:
        found = sorted((int(dataset[i]["array"][0]), int(dataset[i]["label"])) for i in range(len(dataset)))
    assert found == [(number, number % 2) for number in range(10)]
