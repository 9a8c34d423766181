from __future__ import annotations

import gzip
import hashlib
import http.server
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from fedloom.config import DataConfig
from fedloom.errors import ConfigError, DataError
from fedloom.federation import archives, idx
from fedloom.federation.archives import FILES, Archive
from fedloom.federation.building import build_federation
from fedloom.federation.download import get
from fedloom.streams import Streams

IMAGES = np.random.default_rng(0).integers(0, 256, (40, 28, 28), dtype=np.uint8)
LABELS = np.arange(40, dtype=np.uint8) % 10
RAW = {file: idx.encode(IMAGES if kind == "images" else LABELS) for (_, kind), file in FILES.items()}
PACKED = {file: gzip.compress(raw, mtime=0) for file, raw in RAW.items()}
LARGE = FILES["train", "images"]


@pytest.fixture(autouse=True)
def toy_archive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A tiny data set takes the place of MNIST, and no variable of the user's reaches the tests."""
    sums = {file: hashlib.sha256(raw).hexdigest() for file, raw in RAW.items()}
    monkeypatch.setitem(archives.ARCHIVES, "mnist", Archive("mnist", (), sums))
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)


@dataclass
class Mirror:
    """A file server on loopback that can be told to misbehave."""

    files: dict[str, bytes] = field(default_factory=lambda: dict(PACKED))
    ranges: bool = True
    cut_after: list[int] = field(default_factory=list)  # bytes sent before the next answers break off
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    state = Mirror()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            file, wanted = self.path.lstrip("/"), self.headers.get("Range")
            state.requests.append((file, wanted))
            body, start = state.files.get(file), 0
            if body is None:
                return self.send_error(404)
            if wanted and state.ranges:
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                if start >= len(body):
                    return self.send_error(416)
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            end = start + state.cut_after.pop() if state.cut_after else len(body)
            self.wfile.write(body[start:end])
            return None

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}/"
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def assert_complete(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == set(PACKED)
    assert all(gzip.decompress((folder / file).read_bytes()) == raw for file, raw in RAW.items())


def test_a_download_goes_to_the_cache_and_becomes_a_source(mirror: Mirror, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    folder = get("mnist", progress=lambda done, total: seen.append((done, total)), mirrors=[mirror.url])
    assert folder == tmp_path / "cache" / "mnist"
    assert_complete(folder)
    assert [total for done, total in seen if done == total] == [len(content) for content in PACKED.values()]
    federation = build_federation(DataConfig(source="mnist", silos=4), Streams(0))
    assert [len(silo) for silo in federation.silos] == [10] * 4
    assert np.array_equal(federation.test.x[:, 0].numpy(), IMAGES)
    get("mnist", mirrors=[mirror.url])
    assert len(mirror.requests) == 4  # nothing is fetched twice


def test_a_cut_download_goes_on_where_it_stopped(mirror: Mirror) -> None:
    mirror.cut_after = [1000]
    assert_complete(get("mnist", mirrors=[mirror.url]))
    assert mirror.requests[:2] == [(LARGE, None), (LARGE, "bytes=1000-")]


def test_what_one_call_fetched_serves_the_next(mirror: Mirror) -> None:
    mirror.cut_after = [10, 20, 30]
    with pytest.raises(DataError, match="kept breaking off"):
        get("mnist", mirrors=[mirror.url])
    assert_complete(get("mnist", mirrors=[mirror.url]))
    assert mirror.requests[3] == (LARGE, "bytes=60-")


def test_a_server_without_ranges_sends_everything_again(mirror: Mirror) -> None:
    mirror.ranges, mirror.cut_after = False, [1000]
    assert_complete(get("mnist", mirrors=[mirror.url]))
    assert mirror.requests[:2] == [(LARGE, None), (LARGE, "bytes=1000-")]


@pytest.mark.parametrize("spoil", [lambda part: part[:-1] + b"x", lambda part: part + b"x" * 99])
def test_a_spoilt_part_is_thrown_away_and_fetched_anew(mirror: Mirror, spoil: object) -> None:
    mirror.cut_after = [10, len(PACKED[LARGE]) - 30, 10]
    with pytest.raises(DataError):
        get("mnist", mirrors=[mirror.url])
    (part,) = (archives.cache_folder() / "mnist").glob("*.part")
    part.write_bytes(spoil(part.read_bytes()))  # type: ignore[operator]
    assert_complete(get("mnist", mirrors=[mirror.url]))


@pytest.mark.parametrize(
    "content",
    [b"<html>sorry</html>", gzip.compress(b"other", mtime=0), PACKED[LARGE][:-9]],
    ids=["page", "other", "cut"],
)
def test_a_damaged_file_is_refused_and_the_next_mirror_asked(mirror: Mirror, content: bytes) -> None:
    mirror.files["bad/" + LARGE] = content
    with pytest.raises(DataError, match="sent a damaged file"):
        get("mnist", mirrors=[mirror.url + "bad/"])
    assert not list(archives.cache_folder().rglob("*.gz"))
    mirror.files |= {"bad/" + file: PACKED[file] for file in PACKED if file != LARGE}
    assert_complete(get("mnist", mirrors=[mirror.url + "bad/", mirror.url]))
    assert mirror.requests[-5:-3] == [("bad/" + LARGE, None), (LARGE, None)]


def test_unreachable_mirrors_end_in_one_sentence_that_says_what_to_do() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        with pytest.raises(DataError, match=r"--from PATH, or set FEDLOOM_DATA to a folder that holds mnist/"):
            get("mnist", mirrors=[f"http://127.0.0.1:{listener.getsockname()[1]}/"])


def test_a_missing_file_on_the_mirror_is_named(mirror: Mirror) -> None:
    with pytest.raises(DataError, match=f"could not download {LARGE}.*Not Found"):
        get("mnist", mirrors=[mirror.url + "nowhere/"])


@pytest.mark.parametrize("subfolder", ["", "mnist"])
def test_from_a_folder_or_its_parent(tmp_path: Path, subfolder: str) -> None:
    write(tmp_path / "mine" / subfolder, PACKED)
    assert_complete(get("mnist", tmp_path / "mine", tmp_path / "kept"))


def test_fedloom_data_serves_both_get_and_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "data" / "mnist", PACKED)
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "data"))
    assert archives.locate("mnist") == tmp_path / "data" / "mnist"
    assert_complete(get("mnist"))
    assert archives.locate("mnist") == tmp_path / "cache" / "mnist"


def test_a_damaged_file_that_is_there_is_replaced(tmp_path: Path, mirror: Mirror) -> None:
    write(tmp_path / "cache" / "mnist", PACKED | {LARGE: b"rubbish"})
    assert_complete(get("mnist", mirrors=[mirror.url]))
    assert mirror.requests == [(LARGE, None)]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({LARGE: PACKED[LARGE]}, "holds neither train-labels-idx1-ubyte.gz nor mnist/train-labels"),
        (PACKED | {LARGE: gzip.compress(b"other")}, "checksum differs"),
        (PACKED | {LARGE: PACKED[LARGE][:50]}, "not a whole gzip file"),
    ],
)
def test_a_bad_folder_is_named(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    with pytest.raises(DataError, match=message):
        get("mnist", write(tmp_path / "mine", files))


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot write 'mnist' into .*file"):
        get("mnist", write(tmp_path / "mine", PACKED), tmp_path / "file")


def test_loading_verifies_the_checksum(tmp_path: Path) -> None:
    write(tmp_path / "cache" / "mnist", PACKED | {LARGE: gzip.compress(idx.encode(IMAGES[:39]))})
    with pytest.raises(DataError, match="checksum differs"):
        build_federation(DataConfig(source="mnist"), Streams(0))


@pytest.mark.parametrize(("source", "missing"), [("mnist", "mnist"), ("mixed-mnist", "mnist")])
def test_absent_data_say_how_to_get_them(source: str, missing: str) -> None:
    with pytest.raises(DataError, match=f"run 'fedloom data get {missing}'"):
        build_federation(DataConfig(source=source), Streams(0))


def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'mnist'"):
        get("mnits")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"PNG", "not an IDX file"),
        (b"\0\0\x0d\x01\0\0\0\0", "not an IDX file of unsigned bytes"),
        (b"\0\0\x08\x03\0\0", "not an IDX file"),
        (idx.encode(LABELS)[:-1], "announces 40 values but holds 39"),
    ],
)
def test_idx_complains_about_foreign_bytes(raw: bytes, message: str) -> None:
    with pytest.raises(DataError, match=f"^toy.*{message}|^toy {message}"):
        idx.decode(raw, "toy")


def test_idx_reads_what_it_writes() -> None:
    assert np.array_equal(idx.decode(idx.encode(IMAGES), "toy"), IMAGES)
