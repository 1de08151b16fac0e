"""What `cachestream diagnose` says of the machine: every check, with advice where something is amiss, and no secret."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from cachestream.errors import ConfigError
from cachestream.tools.diagnose import machine
from cachestream.tools.diagnose.machine import check_machine, credentials

NAMES = ["versions", "compiled", "device", "filesystem", "space", "disk", "open files", "credentials"]


def test_every_property_is_checked_and_nothing_is_left_behind(tmp_path: Path) -> None:
    report = check_machine(str(tmp_path), {})
    assert [check.name for check in report.checks] == NAMES
    assert report.ok == (not any(check.advice for check in report.checks))
    assert "cachestream 0." in report.checks[0].found
    assert not list(tmp_path.iterdir())
    assert json.loads(json.dumps(report.to_dict()))["folder"] == str(tmp_path)
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith(("OK ", "warning ")) for line in lines) == len(NAMES)


def test_a_network_filesystem_and_one_in_memory_are_warned_of() -> None:
    assert "refused" in machine._filesystem("nfs4").advice
    assert "memory" in machine._filesystem("tmpfs").advice
    assert not machine._filesystem("ext4").advice
    assert not machine._filesystem("").advice


def test_few_open_files_are_warned_of(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    try:
        report = check_machine(str(tmp_path), {})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    (check,) = (one for one in report.checks if one.name == "open files")
    assert "ulimit -n" in check.advice
    assert not report.ok
    assert f"warning  open files   {check.found}" in str(report)


def test_credentials_are_found_and_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert credentials({}).startswith("none found")
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text("[default]\naws_secret_access_key = s3cr3t\n")
    environment = {
        "AWS_ACCESS_KEY_ID": "s3cr3t",
        "HF_TOKEN": "hf_s3cr3t",
        "GOOGLE_APPLICATION_CREDENTIALS": "",
    }
    found = credentials(environment)
    assert found == "S3 (AWS_ACCESS_KEY_ID, ~/.aws/credentials); Hugging Face (HF_TOKEN)"
    report = check_machine(str(tmp_path), environment)
    assert found in [check.found for check in report.checks]
    assert "s3cr3t" not in str(report) + json.dumps(report.to_dict())


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        check_machine(str(tmp_path / "nothing"), {})
