"""What `cachestream diagnose` says of the machine: every check, with advice where something is amiss, and no secret."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from cachestream.tools import machine
from cachestream.tools.machine import check_machine, credentials


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
