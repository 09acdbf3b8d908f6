"""Data in an object store: moto's S3 server on this machine, with injected faults."""

import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import s3fs
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

import data.storage
from data.indexed import IndexedDataset
from data.sources import open_indexed, prefixes
from data.storage import BLOCK_BYTES
from tests.data.streams import write

pytestmark = pytest.mark.slow

BIG, SMALL = "s3://bucket/corpus/big", "s3://bucket/corpus/small"
NUM_TOKENS = 1_300_000  # of BIG: three blocks of 1 MiB, the last one not full


class Store:
    """An S3 server with faults. fault: returns, for the number of a request, `500`, `403`, `cut` (half of the body) or
    None. requests: (method, range) of each request."""

    def __init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self.server = make_server("127.0.0.1", 0, self, threaded=True)
        self._lock = threading.Lock()
        self.reset()
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def reset(self) -> None:
        self.fault: Callable[[int], str | None] = lambda number: None
        self.requests: list[tuple[str, str | None]] = []

    def ranges(self) -> list[int]:
        """The number of bytes that each request asked for."""
        found = (re.fullmatch(r"bytes=(\d+)-(\d+)", asked) for _, asked in self.requests if asked)
        return [int(match[2]) - int(match[1]) + 1 for match in found if match]

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        with self._lock:
            fault = self.fault(len(self.requests))
            self.requests.append((environ["REQUEST_METHOD"], environ.get("HTTP_RANGE")))
        if fault in ("500", "403"):
            start_response(f"{fault} fault", [("Content-Length", "0")])
            return [b""]
        content = b"".join(self._app(environ, start_response))
        return [content[: len(content) // 2] if fault == "cut" else content]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, Path]]:
    """The server, and a folder with the files that it serves as objects."""
    folder, store = tmp_path_factory.mktemp("local"), Store()
    rng = np.random.default_rng(0)
    for name, documents in (("big", NUM_TOKENS // 100), ("small", 300)):
        write(folder / name, rng.integers(0, 1000, (documents, 100)))
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{store.server.server_port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",  # else botocore retries by itself
        }.items():
            patch.setenv(name, value)
        patch.setattr(s3fs.S3FileSystem, "retries", 1)
        patch.setattr(data.storage, "RETRY_SECONDS", (0.01,) * 5)
        s3fs.S3FileSystem.clear_instance_cache()
        client = s3fs.S3FileSystem()
        client.mkdir("bucket")
        client.put(str(folder), "bucket/corpus", recursive=True)
        yield store, folder
    store.server.shutdown()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def store(running: tuple[Store, Path]) -> Iterator[Store]:
    s3fs.S3FileSystem.clear_instance_cache()  # it caches listings
    running[0].reset()
    yield running[0]
    running[0].reset()


@pytest.fixture
def remote(store: Store, tmp_path: Path) -> IndexedDataset:
    return IndexedDataset(BIG, remote_cache=tmp_path)


@pytest.fixture
def local(running: tuple[Store, Path]) -> IndexedDataset:
    return IndexedDataset(running[1] / "big")


def test_objects_are_read_as_files_are(store: Store, remote: IndexedDataset, local: IndexedDataset, tmp_path) -> None:
    assert (remote.num_tokens, remote.num_documents) == (NUM_TOKENS, NUM_TOKENS // 100)
    rng = np.random.default_rng(0)
    for start in (0, BLOCK_BYTES // 2 - 5, NUM_TOKENS - 10, *rng.integers(0, NUM_TOKENS - 10, 9).tolist()):
        assert np.array_equal(remote.tokens(start, 10), local.tokens(start, 10))
    assert np.array_equal(remote.tokens(0, NUM_TOKENS), local.tokens(0, NUM_TOKENS))
    assert np.array_equal(remote.document_offsets(0, 13000), local.document_offsets(0, 13000))
    assert remote.identity() == local.identity() and str(remote) == BIG
    # One block is the .idx, three are the .bin, and the identity hashes 16 ranges.
    assert len(store.ranges()) == 1 + 3 + 16 and max(store.ranges()) == BLOCK_BYTES
    # All of it is cached: the next start only asks the store for versions.
    store.requests.clear()
    again = IndexedDataset(BIG, remote_cache=tmp_path)
    assert again.identity() == local.identity() and np.array_equal(again.tokens(600_000, 10), local.tokens(600_000, 10))
    assert {method for method, _ in store.requests} == {"HEAD"}
    blocks = sorted(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file() and "-" not in path.name)
    assert blocks[2:] == [BLOCK_BYTES + 64 * 8] * 2 and len(blocks) == 4


def test_sources_may_be_patterns_and_lists_of_urls(store: Store, local: IndexedDataset, tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text(f"- {SMALL}\n- {BIG}.idx\n- {local.prefix}\n")
    value = f"{tmp_path}/list.yaml"
    bundle = open_indexed(1000, {"all": "s3://bucket/corp*/*", "mixed": value}, remote_cache=tmp_path / "cache")
    assert [str(part) for part in bundle.train["all"].parts] == [BIG, SMALL]
    assert [str(part) for part in bundle.train["mixed"].parts] == [SMALL, BIG, str(local.prefix)]
    assert np.array_equal(bundle.train["mixed"].tokens(30_000, 2000), local.tokens(0, 2000))
    with pytest.raises(ValueError, match=r"no file matches s3://bucket/corpus/none_\*\.idx"):
        prefixes("data.sources.web", "s3://bucket/corpus/none_*")


@pytest.mark.parametrize("fault", ["500", "cut"])
def test_temporary_faults_are_retried_and_lasting_ones_raised(
    store: Store, local: IndexedDataset, tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.fault = lambda number: fault if number % 3 == 1 or number == 0 else None
    remote = IndexedDataset(BIG, remote_cache=tmp_path)
    assert np.array_equal(remote.tokens(0, 700_000), local.tokens(0, 700_000))
    assert "trying again in" in caplog.text and BIG in caplog.text
    store.fault = lambda number: fault
    with pytest.raises(ConnectionError) as failure:
        remote.tokens(NUM_TOKENS - 10, 10)
    message = str(failure.value)
    assert message.startswith(f"{BIG}.bin: ") and "\n" not in message and "(6 attempts in " in message
    assert not list(tmp_path.rglob("*.tmp"))
    store.fault = lambda number: None
    assert np.array_equal(remote.tokens(NUM_TOKENS - 10, 10), local.tokens(NUM_TOKENS - 10, 10))


def test_errors_that_a_retry_cannot_fix_are_raised_at_once(store: Store, tmp_path: Path, monkeypatch) -> None:
    for prefix in ("s3://bucket/corpus/none", "s3://no-such-bucket/none"):
        with pytest.raises(FileNotFoundError, match=f"^{prefix}.idx does not exist; name a dataset by"):
            IndexedDataset(prefix, remote_cache=tmp_path)
    asked = len(store.requests)
    store.fault = lambda number: "403"
    with pytest.raises(PermissionError, match=f"^{SMALL}.idx: "):
        IndexedDataset(SMALL, remote_cache=tmp_path)
    assert len(store.requests) <= asked + 3
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(data.storage, "RETRY_SECONDS", (60.0,))
    with pytest.raises(PermissionError, match="log in to the store on every host"):
        IndexedDataset(SMALL, remote_cache=tmp_path)


def test_an_object_replaced_in_use_is_refused(store: Store, tmp_path: Path) -> None:
    """A reader that was opened before refuses blocks that it has not cached; a new reader reads the new object."""
    client, readers = s3fs.S3FileSystem(), []
    for token in (1, 2):
        write(tmp_path / "o", np.full((2000, 1000), token))
        for ending in ("idx", "bin"):
            client.put(str(tmp_path / f"o.{ending}"), f"bucket/open/o.{ending}")
        s3fs.S3FileSystem.clear_instance_cache()
        readers.append(IndexedDataset("s3://bucket/open/o", remote_cache=tmp_path / "c"))
        assert set(readers[-1].tokens(0, 1000).tolist()) == {token}
    with pytest.raises(ValueError, match=r"o\.bin was replaced while this run used it"):
        readers[0].tokens(1_000_000, 1000)


def test_on_a_full_disk_nothing_is_cached(
    store: Store, remote: IndexedDataset, local: IndexedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=1000, free=49))
    store.requests.clear()
    assert np.array_equal(remote.tokens(500, 10), local.tokens(500, 10))
    assert store.ranges() == [20] and sorted(tmp_path.rglob("*")) == before


def test_a_damaged_block_is_fetched_again(remote: IndexedDataset, local: IndexedDataset, tmp_path: Path) -> None:
    remote.tokens(300_000, 10)
    (block,) = (path for path in tmp_path.rglob("0") if path.is_file() and path.stat().st_size > BLOCK_BYTES)
    whole = block.read_bytes()
    for damaged in (whole[:5], whole[:600_001] + bytes([whole[600_001] ^ 16]) + whole[600_002:]):  # cut, a bit flipped
        block.write_bytes(damaged)
        assert np.array_equal(remote.tokens(300_000, 10), local.tokens(300_000, 10))
        assert block.read_bytes() == whole
