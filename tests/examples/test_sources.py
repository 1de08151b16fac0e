"""The examples of the sources run as a user runs them: each makes its data, trains, and learns something."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Final

import pytest

from tests.support.forked import fork_script

pytestmark = pytest.mark.usefixtures("forked")
ROOT: Final = Path(__file__).parents[2]
EXAMPLES: Final = (
    *("cache_source", "dataset_and_function", "manifest", "parquet_table", "tfrecords", "video_clips"),
)


def last_line(name: str, folder: Path) -> str:
    """The last line that the example prints, run in an empty folder."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = fork_script(ROOT / "examples" / f"{name}.py", cwd=folder, environment=environment, timeout_s=300)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout.splitlines()[-1]


def percent(line: str) -> float:
    """The number before the sign, of which there is one."""
    (found,) = re.findall(r"([0-9.]+)%", line)
    return float(found)


@pytest.mark.e2e
def test_the_example_of_parquet_tells_shapes_apart(tmp_path: Path) -> None:
    assert percent(last_line("parquet_table", tmp_path)) > 60  # by chance: 33


@pytest.mark.slow
def test_the_example_of_tfrecords_hears_the_pitch(tmp_path: Path) -> None:
    error_hz = int(last_line("tfrecords", tmp_path).split(" Hz off")[0])
    assert error_hz < 150  # who always says the middle is 250 off


@pytest.mark.e2e
def test_the_example_of_a_manifest_tells_shapes_apart(tmp_path: Path) -> None:
    assert percent(last_line("manifest", tmp_path)) > 65  # by chance: 50


@pytest.mark.e2e
def test_the_example_of_a_mix_tells_waves_apart(tmp_path: Path) -> None:
    assert percent(last_line("dataset_and_function", tmp_path)) > 45  # by chance: 33


@pytest.mark.e2e
@pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="FFmpeg is not installed")
def test_the_example_of_videos_tells_where_the_camera_turns(tmp_path: Path) -> None:
    assert percent(last_line("video_clips", tmp_path).partition(";")[0]) > 50  # by chance: 25


@pytest.mark.e2e
def test_the_example_of_a_cache_as_a_source_fills_the_second_host_from_the_first(tmp_path: Path) -> None:
    assert last_line("cache_source", tmp_path).endswith("in 500 samples")
    assert {path.name for path in tmp_path.iterdir()} == {"host-0", "host-1"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_of_a_source_fits_on_a_page_and_is_named_where_it_is_looked_for(name: str) -> None:
    assert len((ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 90
    assert f"`{name}.py`" in (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    pages = [*ROOT.glob("docs/guide/*.md"), *ROOT.glob("docs/cookbook/*.md")]
    assert any(f"/examples/{name}.py)" in page.read_text(encoding="utf-8") for page in pages)
