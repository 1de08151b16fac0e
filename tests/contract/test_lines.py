"""No line, row or listed file is lost without being counted, whatever its file looks like or becomes."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import http.server
import io
import json
import lzma
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cachestream as cs

RNG = np.random.default_rng(0)


def read(source: Any) -> tuple[list[Any], int, str]:
    """Return the samples of a source, how many it counts as lost, and the first reason."""
    samples, lost, reason = list[Any](), 0, ""
    for unit in range(source.num_units):
        try:
            for _, sample in source.read(unit, RNG):
                samples.append(sample)
        except cs.SampleError as error:
            lost, reason = lost + error.lost, reason or str(error)
    return samples, lost, reason


@pytest.mark.parametrize("padding", [1000, 300 << 10, 600 << 10])
@pytest.mark.parametrize(
    ("ending", "pack"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)]
)
def test_members_that_lie_apart_by_zeros_are_all_read(
    tmp_path: Path, ending: str, pack: Callable[[bytes], bytes], padding: int
) -> None:
    lines = [b'{"n": %d}\n' % i for i in range(200)]
    path = tmp_path / f"a.jsonl.{ending}"
    path.write_bytes(
        pack(b"".join(lines[:100])) + bytes(padding) + pack(b"".join(lines[100:])) + bytes(padding)
    )
    assert read(cs.open_source(str(path))) == ([{"n": i} for i in range(200)], 0, "")


def test_what_follows_a_packed_file_and_is_no_padding_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"n": 1}\n') + bytes(600 << 10) + b"no member")
    samples, lost, _ = read(cs.open_source(str(path)))
    assert (samples, lost) == ([{"n": 1}], 1)


def tar_of(*names: str) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 1
            tar.addfile(member, io.BytesIO(b"1"))
    return packed.getvalue()


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_an_archive_behind_the_end_of_another_is_counted(
    tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    (tmp_path / "a.tar").write_bytes(pack(tar_of("0.cls", "1.cls") + tar_of("2.cls")))
    samples, lost, reason = read(cs.open_source(str(tmp_path / "a.tar")))
    assert (len(samples), lost) == (2, 1)
    assert "another archive follows its end mark" in reason


@pytest.mark.parametrize("rest", [slice(None, -8), slice(None)])
def test_a_packed_archive_whose_end_mark_is_whole_gives_all_of_its_samples(
    tmp_path: Path, rest: slice
) -> None:
    packed = gzip.compress(tar_of("0.cls", "1.cls"))[rest]
    (tmp_path / "a.tar.gz").write_bytes(packed if rest.stop else packed + b"\n")
    samples, lost, _ = read(cs.open_source(str(tmp_path / "a.tar.gz")))
    assert (len(samples), lost) == (2, 0)


@pytest.mark.parametrize(
    "kind",
    ["jsonl", pytest.param("csv", marks=pytest.mark.e2e), pytest.param("jsonl.gz", marks=pytest.mark.e2e)],
)
def test_a_file_that_is_cut_while_it_is_read_counts_what_is_gone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    numbers = RNG.integers(1 << 60, size=200_000)
    head, line = ("n,m\n", "{},1\n") if kind == "csv" else ("", '{{"n": {}}}\n')
    text = (head + "".join(line.format(n) for n in numbers)).encode()
    path.write_bytes(gzip.compress(text) if kind == "jsonl.gz" else text)
    items = iter(cs.open_source(str(path)).read(0, RNG))
    next(items)
    os.truncate(path, path.stat().st_size // 2 // 28 * 28)
    with pytest.raises(cs.SampleError, match="cut while it was read"):
        list(items)


def test_ranges_that_are_gone_from_a_large_file_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    line = json.dumps({"text": "x" * 100_000}) + "\n"
    path.write_text(line * 500)
    source = cs.open_source(str(path))
    os.truncate(path, len(line) * 100)
    samples, lost, reason = read(source)
    assert source.num_units == 3
    assert (len(samples), lost) == (100, 3)
    assert "its last lines are gone" in reason


@contextlib.contextmanager
def storage_that_keeps_it_packed(packed: bytes, name: str) -> Iterator[dict[str, Any]]:
    """Serve one object of Google's storage with `contentEncoding: gzip`, whose size is that of the packed one."""
    about = {
        "kind": "storage#object", "name": name, "bucket": "b", "size": str(len(packed)), "contentEncoding": "gzip",
        "generation": "1", "etag": "a", "updated": "2024-01-01T00:00:00Z", "timeCreated": "2024-01-01T00:00:00Z",
    }  # fmt: skip

    class Storage(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_data = "alt=media" in self.path
            listed: dict[str, Any] = about if self.path.split("?")[0].endswith(name) else {"items": []}
            body = packed if is_data else json.dumps(listed).encode()
            self.send_response(200)
            if is_data:
                self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Storage) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield {"token": "anon", "endpoint_url": f"http://127.0.0.1:{server.server_port}"}
        server.shutdown()
        thread.join()


# In a process of its own: the driver looks at the environment when it is imported, and asks by gRPC otherwise.
READ_PACKED = """
import json, sys
import numpy as np
import cachestream as cs
name, options = sys.argv[1], json.loads(sys.argv[2])
source, samples, lost = cs.open_source(f"gs://b/{name}", storage_options=options), [], 0
try:
    for _, sample in source.read(0, np.random.default_rng(0)):
        samples.append(sample)
except cs.SampleError as error:
    lost = error.lost
print(json.dumps([samples, lost]))
"""


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.txt"])
def test_an_object_that_a_storage_keeps_packed_and_its_client_unpacks_comes_whole(name: str) -> None:
    pytest.importorskip("gcsfs")
    text = "".join(f'{{"i":{i}}}\n' if name == "a.jsonl" else f"{i},{2 * i}\n" for i in range(3000))
    packed = gzip.compress((f"id,v\n{text}").encode())
    with storage_that_keeps_it_packed(packed, name) as options:
        told = subprocess.run(
            [sys.executable, "-c", READ_PACKED, name, json.dumps(options)],
            env={**os.environ, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"},
            check=False,
            capture_output=True,
            text=True,
            timeout=100,
        )
    assert told.returncode == 0, told.stderr
    samples, lost = json.loads(told.stdout)
    assert samples == [{"text": f"id,v\n{text}"}] if name == "a.txt" else len(samples) == 3000
    assert lost == (name == "a.jsonl")  # the line "id,v"


@pytest.mark.parametrize("second", ['119\t"Other', "119\tno other"])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_quotes_that_are_only_signs_take_no_row_into_a_value(
    tmp_path: Path, second: str, ending: str
) -> None:
    rows = [f"{i}\ttext number {i}" for i in range(300)]
    rows[49], rows[119] = '49\t"Hello, he said', second
    (tmp_path / "a.tsv").write_text(ending.join(["id\ttext", *rows, ""]), newline="")
    samples, lost, reason = read(cs.open_source(str(tmp_path / "a.tsv")))
    assert (samples, lost, reason) == (
        [{"id": int(i), "text": text} for i, text in (row.split("\t") for row in rows)],
        0,
        "",
    )


def test_rows_that_a_quote_may_have_taken_are_all_counted(tmp_path: Path) -> None:
    rows = ["0,x", '1,"a', "2,b,b", "3,c", '4,"d', "5,y"]
    (tmp_path / "a.csv").write_text("id,text\n" + "\n".join(rows) + "\n")
    samples, lost, reason = read(cs.open_source(str(tmp_path / "a.csv")))
    assert (samples, lost) == ([{"id": 0, "text": "x"}, {"id": 5, "text": "y"}], 4)
    assert "row 1: a quote takes 4 lines into one value; if the quote belongs to the text, write" in reason
    (tmp_path / "b.csv").write_text('id,"text\n0,x\n1,"y\n2,z\n')
    with pytest.raises(cs.ConfigError, match="a quote is left open"):
        cs.open_source(str(tmp_path / "b.csv"))


def test_texts_of_several_lines_and_quotes_within_texts_are_values_as_before(tmp_path: Path) -> None:
    text = 'id,text\n0,"two\nlines, and a ""quote"""\n1,5" wide\n2,"x" y\n3,"Dear Ann,\n\nbye"\n4,"x\ny"'
    (tmp_path / "a.csv").write_text(text)
    samples, lost, _ = read(cs.open_source(str(tmp_path / "a.csv")))
    wanted = ['two\nlines, and a "quote"', '5" wide', "x y", "Dear Ann,\n\nbye", "x\ny"]
    assert [sample["text"] for sample in samples] == wanted
    assert lost == 0
    (tmp_path / "b.csv").write_text('title,body\nx,"Hi\nDear Ann, hello"\n')
    assert read(cs.open_source(str(tmp_path / "b.csv")))[0] == [{"title": "x", "body": "Hi\nDear Ann, hello"}]
    (tmp_path / "c.csv").write_text('id,text\n1,"a\n2,b"\n3,c\n')
    assert read(cs.open_source(str(tmp_path / "c.csv"))) == (
        [{"id": 1, "text": "a\n2,b"}, {"id": 3, "text": "c"}], 0, "",
    )  # fmt: skip
    (tmp_path / "d.tsv").write_text('id\ttext\n1\t"a\n2\tb"\n3\tc\n')
    assert read(cs.open_source(str(tmp_path / "d.tsv"))) == (
        [{"id": 1, "text": "a\n2\tb"}, {"id": 3, "text": "c"}], 0, "",
    )  # fmt: skip


def test_a_quote_in_a_manifest_takes_no_file_out_of_the_list(tmp_path: Path) -> None:
    for i in range(4):
        np.save(tmp_path / f"{i}.npy", np.arange(3))
    (tmp_path / "list.csv").write_text('url,label\n0.npy,x\n1.npy,"y\n2.npy,"z\n3.npy,x\n')
    with pytest.raises(cs.SourceError, match=r"list\.csv.*row 3: a quote takes 2 lines into one value"):
        cs.open_source(cs.Manifest(tmp_path / "list.csv", label="label"))
    (tmp_path / "list.csv").write_text('url,label\n0.npy,x\n1.npy,"y\n2.npy,z\n3.npy,x\n')
    with pytest.raises(cs.SourceError, match=r"list\.csv.*row 3: a quote takes 3 lines into one value"):
        cs.open_source(cs.Manifest(tmp_path / "list.csv"))


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_a_manifest_may_have_captions_of_several_lines(tmp_path: Path, ending: str) -> None:
    for i in range(2):
        np.save(tmp_path / f"{i}.npy", np.arange(3))
    rows = ["url,caption", '0.npy, "two', 'lines, and a ""quote"""', "1.npy,one", ""]
    (tmp_path / "list.csv").write_text(ending.join(rows), newline="")
    manifest = cs.Manifest(tmp_path / "list.csv")
    assert list(manifest) == [str(tmp_path / "0.npy"), str(tmp_path / "1.npy")]
    assert len(read(cs.open_source(manifest))[0]) == 2
