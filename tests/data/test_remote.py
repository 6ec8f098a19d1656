"""Remote files give the documents of local ones, through blocks that are fetched once."""

import gzip
import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import boto3
import fsspec
import litdata
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer

from lightning_fms.data.sources import (
    Cache,
    DocumentError,
    Source,
    blocks,
    list_files,
    open_source,
    open_sources,
    stores,
)
from lightning_fms.data.sources.stores import open_store, persist
from tests.data.chains import Phase, run_phase
from tests.data.cuts import documents, read_all


def write_formats(folder: Path) -> None:
    """A folder of each format, with a few hundred documents in two files."""
    for part in range(2):
        texts = [f"{part} {i} \u2028 {'x' * (i % 50)}" for i in range(200)]
        lines = "".join(json.dumps({"text": text, "n": 3}) + "\n" for text in texts).encode()
        table = pa.table({"text": texts, "n": [3] * 200})
        for name, data in (
            ("jsonl/{}.jsonl", lines),
            ("gz/{}.jsonl.gz", gzip.compress(lines, mtime=0)),
            ("text/deep/{}.txt", "\n".join(texts).encode()),
            ("tokens/{}.bin", np.arange(5000, dtype=np.uint16).tobytes()),
        ):
            path = folder / name.format(part)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        (folder / "parquet").mkdir(exist_ok=True)
        pq.write_table(table, folder / "parquet" / f"{part}.parquet", row_group_size=50)
        (folder / "arrow").mkdir(exist_ok=True)
        with pa.ipc.new_stream(str(folder / "arrow" / f"{part}.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=50)
        (folder / "arrow" / "dataset_info.json").write_text("{}")
    names = [{"filename": f"{part}.arrow"} for part in range(2)]
    (folder / "arrow" / "state.json").write_text(json.dumps({"_data_files": names}))
    write_litdata(folder / "litdata")


def write_litdata(folder: Path) -> None:
    writer = litdata.streaming.writer.BinaryWriter(str(folder), chunk_bytes=3000)
    for i in range(100):
        writer[i] = f"item {i} {'y' * i}"
    writer.done()
    writer.merge(1)


FORMATS = ("jsonl", "gz", "text", "tokens", "parquet", "arrow", "litdata")


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("formats")
    write_formats(folder)
    return folder


@pytest.fixture(scope="module")
def s3(local: Path) -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("AWS_ENDPOINT_URL", f"http://{host}:{port}"), ("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret"),
            ("AWS_DEFAULT_REGION", "us-east-1"), ("NO_PROXY", "*"), ("no_proxy", "*"),
        ):  # fmt: skip
            patch.setenv(name, value)
        client = boto3.client("s3")
        client.create_bucket(Bucket="bucket")
        for path in local.rglob("*"):
            if path.is_file():
                client.upload_file(str(path), "bucket", f"data/{path.relative_to(local)}")
        client.put_object(Bucket="bucket", Key="data/jsonl/_hidden.jsonl", Body=b"no")
        client.put_object(Bucket="bucket", Key="data/jsonl/", Body=b"")
        client.put_object(Bucket="bucket", Key="data/jsonl2/other.jsonl", Body=b"no")
        stores._stores.clear()
        yield "s3://bucket/data"
    server.stop()
    stores._stores.clear()


@pytest.fixture(scope="module")
def memory(local: Path) -> str:
    system = fsspec.filesystem("memory")
    for path in local.rglob("*"):
        if path.is_file():
            system.pipe_file(f"/formats/{path.relative_to(local)}", path.read_bytes())
    system.pipe_file("/formats/jsonl/.hidden/a.jsonl", b"no")
    return "memory://formats"


@pytest.fixture(params=["s3", "memory"])
def root(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(request.param)


def whole(source: Source) -> list:
    return [
        [(at, ref, np.asarray(document).tolist()) for at, ref, document in documents(source, [7, 999], file)]
        for file in range(len(source.listing.names))
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_reads_as_it_does_locally(
    root: str, local: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "REMOTE_BLOCK", 1000)
    remote = open_source(f"{root}/{name}", cache=tmp_path / "a")
    plain = open_source(local / name, cache=tmp_path / "b")
    assert remote.listing.names == plain.listing.names
    assert remote.listing.digest == plain.listing.digest
    assert whole(remote) == whole(plain)
    assert sum(map(len, whole(remote))) >= 2
    assert whole(pickle.loads(pickle.dumps(remote))) == whole(plain)


def test_what_an_address_stands_for(root: str) -> None:
    for path, names in (
        ("jsonl", ["0.jsonl", "1.jsonl"]),
        ("jsonl/", ["0.jsonl", "1.jsonl"]),
        ("jsonl/1.jsonl", ["1.jsonl"]),
        ("jsonl/*.jsonl", ["0.jsonl", "1.jsonl"]),
        ("*/[1-9].jsonl", ["1.jsonl"]),
        ("**/*.txt", ["0.txt", "1.txt"]),
        ("text", ["0.txt", "1.txt"]),
    ):
        assert list(list_files(f"{root}/{path}").names) == names
    listing = list_files([f"{root}/text/deep/1.txt", f"{root}/jsonl/0.jsonl"])
    assert listing.names == ("jsonl/0.jsonl", "text/deep/1.txt")
    assert str(listing.root) == root
    assert str(listing.path(0)) == f"{root}/jsonl/0.jsonl"


def test_listing_reads_nothing_and_blocks_are_fetched_once(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    store = open_store(memory)
    plain = type(store).read

    def read(self: object, url: str, start: int, length: int) -> bytes:
        asked.append((start, length))
        return plain(self, url, start, length)

    monkeypatch.setattr(type(store), "read", read)
    monkeypatch.setattr(blocks, "REMOTE_BLOCK", 4000)
    source = open_source(f"{memory}/jsonl/0.jsonl", cache=tmp_path)
    assert asked == []
    size = int(source.listing.sizes[0])
    read_all(source, list(range(0, size, 100)))
    read_all(open_source(f"{memory}/jsonl/0.jsonl", cache=tmp_path))
    assert asked == [(start, min(4000, size - start)) for start in range(0, size, 4000)]


def test_a_cache_smaller_than_a_block_works(memory: str, local: Path, tmp_path: Path) -> None:
    source = open_source(f"{memory}/jsonl", cache=Cache(tmp_path, limit=1))
    assert whole(source) == whole(open_source(local / "jsonl"))


def test_a_replaced_file_is_read_anew(root: str, tmp_path: Path) -> None:
    url = f"{root}/replaced/a.jsonl"

    def put(text: str) -> None:
        data = json.dumps({"text": text}).encode()
        if url.startswith("s3"):
            boto3.client("s3").put_object(Bucket="bucket", Key=url.removeprefix("s3://bucket/"), Body=data)
        else:
            fsspec.filesystem("memory").pipe_file(url.removeprefix("memory:/"), data)

    for text in ("one", "two"):
        put(text)
        assert read_all(open_source(url, cache=tmp_path)) == [text]


def test_options_reach_the_store(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = boto3.client("s3").meta.endpoint_url
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    options = {"endpoint_url": endpoint}
    sources, _ = open_sources({"a": {"path": f"{s3}/gz", "storage_options": options, "cache": tmp_path}})
    assert len(read_all(sources["a"])) == 200
    with pytest.raises(ValueError, match=r"storage_options=\['endpoint_url'\] apply to remote paths, not to /nowhere"):
        open_source("/nowhere", storage_options=options)


# -- what can be wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://bucket/nowhere", "no such file or folder"),
        ("s3://bucket/data/*.nothing", "the glob matches no file"),
        ("s3://no-such-bucket/a", "cannot be listed .*NoSuchBucket.*; check address, credentials and network"),
        ("memory://nowhere/a", "no such file or folder"),
        ("nonsense://a/b", "cannot be listed .*Protocol not known: nonsense"),
        (["memory://formats/jsonl", "/tmp"], "one source is all local, or all on one kind of store"),
    ],
)
def test_an_address_that_leads_nowhere(s3: str, memory: str, url: str | list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        open_source(url)


def test_a_store_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_FIRST_WAIT", 0.001)
    options = {"endpoint_url": "http://127.0.0.1:9", "aws_access_key_id": "a", "aws_secret_access_key": "b"}
    with pytest.raises(ValueError, match=r"s3://bucket/a: cannot be listed \(Could not connect to the endpoint"):
        open_source("s3://bucket/a", storage_options=options)


def test_a_file_that_is_gone_or_cut_after_the_listing(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "_FIRST_WAIT", 0.001)

    def put(data: bytes) -> None:
        if root.startswith("s3"):
            boto3.client("s3").put_object(Bucket="bucket", Key="data/cut/a.jsonl", Body=data)
        else:
            fsspec.filesystem("memory").pipe_file("/formats/cut/a.jsonl", data)

    put(b'{"text": "one"}\n')
    source = open_source(f"{root}/cut/a.jsonl", cache=tmp_path)
    put(b'{"text"')
    with pytest.raises(DocumentError, match=r"a.jsonl: has 7 bytes, 16 when the run listed it"):
        source.window(0, 0, 16)
    if root.startswith("s3"):
        boto3.client("s3").delete_object(Bucket="bucket", Key="data/cut/a.jsonl")
    else:
        fsspec.filesystem("memory").rm("/formats/cut/a.jsonl")
    with pytest.raises(DocumentError, match=r"a.jsonl: is gone since the run listed it"):
        source.window(0, 0, 16)


def test_a_read_that_fails_for_good_is_one_error(memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: object, url: str, start: int, length: int) -> bytes:
        raise ConnectionError("reset")

    monkeypatch.setattr(stores, "_FIRST_WAIT", 0.001)
    monkeypatch.setattr(stores.FsspecStore, "read", read)
    source = open_source(f"{memory}/jsonl", cache=tmp_path)
    with pytest.raises(ValueError, match=r"0.jsonl: cannot be read at byte 0 \(reset\); check credentials") as caught:
        source.window(0, 0, 10)
    assert not isinstance(caught.value, DocumentError)  # the document is not to blame: nothing may skip it


@pytest.mark.parametrize("name", ["gz", "parquet", "arrow"])
def test_a_store_that_fails_under_a_decoder_is_not_a_broken_file(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def read(self: object, url: str, start: int, length: int) -> bytes:
        raise ConnectionError("reset")

    source = open_source(f"{memory}/{name}", cache=tmp_path)
    monkeypatch.setattr(stores, "_FIRST_WAIT", 0.001)
    with monkeypatch.context() as patch:
        patch.setattr(stores.FsspecStore, "read", read)
        with pytest.raises(ValueError, match=r"cannot be read at byte 0 \(reset\)") as caught:
            source.window(0, 0, 10)
        assert not isinstance(caught.value, DocumentError)
    assert len(read_all(source)) == 200  # it is back


def test_rows_from_a_store_are_the_same_in_forked_workers(s3: str, tmp_path: Path) -> None:
    sources = {name: {"path": f"{s3}/{name}", "cache": tmp_path / "a"} for name in ("jsonl", "gz", "parquet")}
    options = {"sources": sources, "seq_len": 64, "num_streams": 4}
    expected, _ = run_phase(options, Phase(world=1, batch=4, micro=None, steps=4), None, 0)
    for spec in sources.values():
        spec["cache"] = tmp_path / "b"
    rows, _ = run_phase(options, Phase(world=1, batch=4, micro=None, steps=4, workers=2), None, 0)
    assert rows == expected


def test_a_file_system_that_says_little_about_a_lone_file(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    system = type(fsspec.filesystem("memory"))
    monkeypatch.setattr(system, "find", lambda self, path, detail: {path: {}})
    listing = list_files(f"{memory}/jsonl/0.jsonl")
    assert listing.total_bytes > 1000
    monkeypatch.setattr(system, "info", lambda self, path: {"size": None})
    with pytest.raises(ValueError, match=r"0.jsonl: cannot be listed \(the store does not say how large"):
        list_files(f"{memory}/jsonl/0.jsonl")


def test_what_may_pass_is_tried_again_a_bounded_number_of_times() -> None:
    waits: list[float] = []
    tries = iter([ConnectionError("reset"), TimeoutError("slow"), None])

    def action() -> str:
        if (error := next(tries)) is not None:
            raise error
        return "done"

    assert persist(action, waits.append) == "done"
    assert waits == [0.2, 0.4]
    waits.clear()
    with pytest.raises(ConnectionError, match="down"):
        persist(lambda: (_ for _ in ()).throw(ConnectionError("down")), waits.append)
    assert len(waits) == 4
    waits.clear()
    with pytest.raises(PermissionError):
        persist(lambda: (_ for _ in ()).throw(PermissionError("no")), waits.append)
    assert waits == []
