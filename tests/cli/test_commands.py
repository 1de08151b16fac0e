"""The commands as a person and as a script use them: what they do, exit codes, both outputs, wrong use."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from cachestream import Cache
from tests.cli.support import COUNT, cli, cli_here, done, fill_command, look
from tests.support.s3 import S3Server
from tests.worker.support import keys_of

pytestmark = pytest.mark.usefixtures("forked")


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
