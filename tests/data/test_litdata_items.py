"""litdata items of text and of integer arrays, in every form in which litdata stores them, and litdata's dataset objects."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import litdata
import numpy as np
import pyarrow as pa
import pytest
import torch

from lightning_fms.data import StreamLoader
from lightning_fms.data.sources import DocumentError, LitdataChunks, open_source, open_sources
from lightning_fms.data.sources.litdata_datasets import folder_of
from tests.data.test_litdata_chunks import COUNT, documents, optimize

Item = Callable[[int], Any]


def text(number: int) -> str:
    return f"{number}: " + "wörd \u2028" * (number % 23)


def ids(number: int) -> list[int]:
    return [(number * 31 + i) % 50_000 for i in range(number * 37 % 90)]


def plain(number: int) -> str:
    return "" if number == 7 else text(number)


def row(number: int) -> dict:
    return {"id": number, "text": text(number), "meta": {"url": f"u{number}", "score": 0.5}}


def one_key(number: int) -> dict:
    return {"body": text(number)}


def lists(number: int) -> dict:
    return {"text": text(number), "input_ids": ids(number)}


def mixed(number: int) -> dict:
    return {
        "meta": {"name": f"n{number}", "ids": np.array(ids(number), dtype=np.uint16)},
        "text": text(number),
        "pair": (f"a{number}", number),
        "tokens": torch.tensor(ids(number), dtype=torch.int64),
    }


def array(number: int) -> np.ndarray:
    return np.array(ids(number), dtype=np.uint16)


def tensor(number: int) -> torch.Tensor:
    return torch.tensor(ids(number), dtype=torch.int32)


class Numbers:
    """Every item of some numbers; litdata wants the function at the top of a module."""

    def __init__(self, item: Item) -> None:
        self.item = item

    def __call__(self, numbers: range) -> Iterator[Any]:
        yield from map(self.item, numbers)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("litdata")
    items = (plain, row, one_key, lists, mixed, array, tensor)
    return {
        i.__name__: optimize(root / i.__name__, Numbers(i), item_loader=None, chunk_bytes=None, chunk_size=17)
        for i in items
    }


@pytest.mark.parametrize(
    ("folder", "key", "item"),
    [
        ("plain", None, plain),
        ("row", None, text),
        ("row", "text", text),
        ("row", "meta.url", lambda n: f"u{n}"),
        ("one_key", None, text),
        ("lists", None, text),
        ("lists", "input_ids", ids),
        ("mixed", None, text),
        ("mixed", "meta.name", lambda n: f"n{n}"),
        ("mixed", "meta.ids", ids),
        ("mixed", "pair.0", lambda n: f"a{n}"),
        ("mixed", "tokens", ids),
        ("array", None, ids),
        ("tensor", None, ids),
    ],
)
def test_documents_come_out_as_they_went_in(folders: dict[str, Path], folder: str, key: str | None, item: Item) -> None:
    source = open_source(folders[folder], text_key=key)
    assert isinstance(source, LitdataChunks)
    whole = [item(number) for number in range(COUNT)]
    assert documents(source) == whole
    size = int(source.listing.sizes.max())
    if all(len(value) for value in whole):
        for cuts in ([size // 2], [1, 700, 701, 702, size - 1], list(range(0, size, 13))):
            assert documents(source, cuts) == whole


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # litdata's own
def test_what_we_read_is_what_litdata_reads(folders: dict[str, Path]) -> None:
    for name, key in (("row", "text"), ("lists", "text"), ("mixed", "text")):
        assert documents(open_source(folders[name])) == [
            item[key] for item in litdata.StreamingDataset(str(folders[name]))
        ]


@pytest.mark.parametrize(
    ("folder", "key", "words"),
    [
        (
            "row",
            "body",
            r"no text, tokens or 1-D integer array 'body'; they hold id \(int\), text \(str\), meta.url \(str\)",
        ),
        ("row", "id", r"'id'; .* set text_key to one of \['text', 'meta.url'\]"),
        ("mixed", "pair.1", r"'pair.1'"),
        ("plain", "text", r"'text'; they hold the item \(str\)"),
    ],
)
def test_a_field_that_is_no_document(folders: dict[str, Path], folder: str, key: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"{folders[folder]}: .*{words}"):
        open_source(folders[folder], text_key=key)


@pytest.fixture
def copy(folders: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: shutil.copytree(folders[name], tmp_path / name)


def edit(folder: Path, **changes: object) -> Path:
    index = json.loads((folder / "index.json").read_text())
    index["config"].update(changes)
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def first_chunk(folder: Path) -> Path:
    return folder / json.loads((folder / "index.json").read_text())["chunks"][0]["filename"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compression": "zstd"}, "compressed or encrypted"),
        ({"ipc_compression": "zstd"}, "compressed or encrypted"),
        ({"item_loader": "ParquetLoader"}, "name the parquet files themselves"),
        ({"data_spec": None}, "its index does not say what items are made of"),
        ({"data_spec": "[1]"}, "its index does not say what items are made of"),
        ({"data_format": ["str"]}, "they hold id"),
    ],
)
def test_an_index_that_does_not_fit(copy: Callable[[str], Path], changes: dict, words: str) -> None:
    folder = edit(copy("row"), **changes)
    with pytest.raises(ValueError, match=f"{folder}: .*{words}"):
        open_source(folder)


def table_chunk(path: Path, table: pa.Table, items: int, compression: str | None = None) -> None:
    """Replace a chunk by one of table rows."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table)
    ipc, offsets = sink.getvalue().to_pybytes(), [items, *[4 * (items + 2)] * (items + 1)]
    path.write_bytes(np.array(offsets, np.uint32).tobytes() + ipc + np.uint32(len(ipc)).tobytes() + b"LDARW01\x00")


def test_a_table_of_rows_that_is_none(copy: Callable[[str], Path]) -> None:
    folder = copy("row")
    chunk, texts = first_chunk(folder), ["a", None, "ccc"]
    table_chunk(chunk, pa.table({"text": pa.array(texts, pa.large_string())}), 3)
    assert documents(open_source(folder))[:3] == ["a", "", "ccc"]
    for table, items, compression, words in (
        (pa.table({"other": texts}), 3, None, "its table of rows has no column 'text'"),
        (pa.table({"text": [1, 2, 3]}), 3, None, "its column 'text' holds int64"),
        (pa.table({"text": [[0.5]]}), 1, None, "its column .* must be text or lists of integers"),
        (pa.table({"text": texts}), 4, None, "its table of rows does not hold its 4 items"),
        (pa.table({"text": ["a" * 500] * 3}), 3, "zstd", "its table of rows is compressed"),
    ):
        table_chunk(chunk, table, items, compression)
        with pytest.raises(DocumentError, match=f"{chunk}: {words}"):
            documents(open_source(folder))
    table_chunk(chunk, pa.table({"text": texts}), 3)
    data = chunk.read_bytes()
    for broken, words in (
        (data[:-1], "has 3 items of 0 bytes and no table"),
        (data.replace(b"ARROW1", b"XXXXXX"), "cannot be"),
    ):
        chunk.write_bytes(broken)
        with pytest.raises(DocumentError, match=f"{chunk}: .*{words}"):
            documents(open_source(folder))


def test_an_item_that_is_broken(copy: Callable[[str], Path]) -> None:
    folder = copy("mixed")
    chunk = first_chunk(folder)
    data = bytearray(chunk.read_bytes())
    start = int(np.frombuffer(data[4:8], np.uint32)[0])
    data[start] += 1  # the size of the first field
    chunk.write_bytes(data)
    with pytest.raises(
        DocumentError, match=f"{chunk}: the item at byte {start} has .* bytes, which do not hold 6 field"
    ):
        documents(open_source(folder))
    folder = copy("plain")
    chunk = first_chunk(folder)
    chunk.write_bytes(chunk.read_bytes().replace("ö".encode(), b"\xff\xff"))
    with pytest.raises(DocumentError, match=f"{chunk}: the item at byte .* is not valid UTF-8"):
        documents(open_source(folder))


def list_of_mixed(number: int) -> dict:
    return {"text": ids(number), "array": np.array([number])}


def test_a_list_outside_a_table_is_refused(tmp_path: Path) -> None:
    folder = optimize(tmp_path, Numbers(list_of_mixed), item_loader=None, chunk_bytes=None, chunk_size=17)
    with pytest.raises(DocumentError, match="holds 'text' as a list in litdata's own form; write it as a 1-D array"):
        documents(open_source(folder))


# -- dataset objects -------------------------------------------------------------------------------------------------------


def test_a_streaming_dataset_is_a_source(folders: dict[str, Path]) -> None:
    dataset = litdata.StreamingDataset(str(folders["row"]), shuffle=True)
    assert documents(open_source(dataset)) == [text(number) for number in range(COUNT)]
    opened, weights = open_sources({"a": {"path": dataset, "text_key": "meta.url", "weight": 2}})
    assert (documents(opened["a"])[3], weights) == ("u3", {"a": 2})
    assert list(open_sources(dataset)[0]) == ["row"]


def test_a_combined_dataset_gives_folders_and_weights(folders: dict[str, Path], tmp_path: Path) -> None:
    row_, plain_ = (litdata.StreamingDataset(str(folders[name])) for name in ("row", "plain"))
    weighted = litdata.CombinedStreamingDataset([row_, plain_], weights=[3, 1], iterate_over_all=False)
    opened, weights = open_sources(weighted)
    assert (list(opened), weights) == (["row", "plain"], {"row": 0.75, "plain": 0.25})
    assert open_sources(litdata.CombinedStreamingDataset([row_, plain_]))[1] == {}
    batch = next(iter(StreamLoader(weighted, seq_len=32, global_batch_size=4)))
    assert batch["input_ids"].shape == (4, 32)
    other = litdata.StreamingDataset(str(shutil.copytree(folders["plain"], tmp_path / "else" / "row")))
    assert list(open_sources(litdata.CombinedStreamingDataset([row_, other]))[0]) == [
        f"{folders['row'].parent.name}/row",
        "else/row",
    ]


def test_a_remote_dataset_is_its_address(folders: dict[str, Path]) -> None:
    dataset = litdata.StreamingDataset(str(folders["row"]))
    dataset.input_dir.url = "s3://bucket/row"
    assert folder_of(dataset) == "s3://bucket/row"
    dataset.storage_options = {"endpoint_url": "http://here"}
    with pytest.raises(ValueError, match="give its address, s3://bucket/row, with storage_options of the source"):
        folder_of(dataset)


def test_dataset_objects_that_would_be_ignored_in_part(folders: dict[str, Path]) -> None:
    folder = str(folders["row"])
    whole = litdata.StreamingDataset(folder)

    class Own(litdata.streaming.item_loader.PyTreeLoader):
        pass

    for dataset, words in (
        (litdata.StreamingDataset(folder, subsample=0.5), "of 30 of 60 items .* leave subsample at 1"),
        (litdata.StreamingDataset(folder, transform=[str]), "with transform="),
        (litdata.StreamingDataset(folder, item_loader=Own()), "with item_loader=Own"),
        (litdata.CombinedStreamingDataset([whole]), "give it as `sources` itself"),
    ):
        with pytest.raises(ValueError, match=f"source 'a': .*{words}"):
            open_sources({"a": dataset})
    with pytest.raises(ValueError, match=r"names .*row twice; give each folder once"):
        open_sources(litdata.CombinedStreamingDataset([whole, litdata.StreamingDataset(folder)]))
