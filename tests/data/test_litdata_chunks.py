"""litdata's chunks of tokens give back every document exactly, the tails of chunks included."""

import itertools
import json
import multiprocessing
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import litdata
import numpy as np
import pytest
import torch

from lightning_fms.data.sources import DocumentError, LitdataChunks, open_source

COUNT = 60


def tokens_of(number: int) -> list[int]:
    return [(number * 31 + i) % 50_000 for i in range(number * 37 % 90 + 1)]


def as_tensors(numbers: range) -> Iterator[torch.Tensor]:
    for number in numbers:
        yield torch.tensor(tokens_of(number), dtype=torch.int32)


def as_uint16(numbers: range) -> Iterator[np.ndarray]:
    for number in numbers:
        yield np.array(tokens_of(number), dtype=np.uint16)


def optimize(folder: Path, items: object, **options: object) -> Path:
    method = multiprocessing.get_start_method()
    options = {"chunk_bytes": 1500, "item_loader": litdata.TokensLoader(block_size=16), **options}
    litdata.optimize(
        fn=items, inputs=[range(COUNT // 2), range(COUNT // 2, COUNT)], output_dir=str(folder), num_workers=1,
        verbose=False, start_method="fork", **options,
    )  # fmt: skip
    multiprocessing.set_start_method(method, force=True)  # litdata changes it for the whole process
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return optimize(tmp_path_factory.mktemp("litdata"), as_tensors)


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "copy")


def documents(source: LitdataChunks, cuts: list[int] | None = None) -> list[Any]:
    found: list[Any] = []
    for file, size in enumerate(source.listing.sizes.tolist()):
        edges = sorted({0, size, *(cut for cut in cuts or [] if 0 < cut < size)})
        for start, stop in itertools.pairwise(edges):
            window = source.window(file, start, stop)
            assert np.all(window.starts < stop - start)
            for first, length in zip(window.starts.tolist(), window.refs.tolist(), strict=True):
                document = source.read(file, start + first, length)
                found.append(document.tolist() if isinstance(document, np.ndarray) else document)
    return found


def test_documents_come_out_as_they_went_in(written: Path) -> None:
    source = open_source(written)
    assert isinstance(source, LitdataChunks)
    assert len(source.listing.names) > 3
    assert documents(source) == [tokens_of(number) for number in range(COUNT)]
    file, start, size = source.listing.fragments  # a chunk is one fragment: its table stands at its start
    assert file.tolist() == list(range(len(source.listing.names)))
    assert not start.any()
    assert size.tolist() == source.listing.sizes.tolist()


def test_every_cut_gives_each_document_once(written: Path) -> None:
    source = LitdataChunks(written)
    whole = documents(source)
    for cut in range(1, int(source.listing.sizes.max()), 11):
        assert documents(source, [cut]) == whole
    assert documents(source, list(range(0, int(source.listing.sizes.max()), 2))) == whole


def test_arrays_of_uint16(tmp_path: Path) -> None:
    assert documents(LitdataChunks(optimize(tmp_path, as_uint16))) == [tokens_of(number) for number in range(COUNT)]


def test_documents_without_tokens(folder: Path) -> None:
    index = json.loads((folder / "index.json").read_text())
    index["chunks"] = index["chunks"][:1]
    (folder / "index.json").write_text(json.dumps(index))
    header = np.array([3, 20, 20, 20, 28], dtype=np.uint32)  # three items: none, none, two tokens
    (folder / index["chunks"][0]["filename"]).write_bytes(header.tobytes() + np.array([5, 6], dtype=np.int32).tobytes())
    assert documents(LitdataChunks(folder)) == [[], [], [5, 6]]


# -- folders that are no token chunks -------------------------------------------------------------------------------------


def edit_index(folder: Path, **changes: object) -> None:
    index = json.loads((folder / "index.json").read_text())
    index["config"].update(changes)
    (folder / "index.json").write_text(json.dumps(index))


def test_an_index_that_is_none(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "chunk-0-0.bin").write_bytes(bytes(10))
    with pytest.raises(ValueError, match=r"index.json: not a readable litdata index \(.*No such file"):
        LitdataChunks(tmp_path / "other")
    for content, words in (
        ('{"chunks": [', "not a readable litdata index"),
        ("[]", "not a litdata index with chunks"),
        ('{"chunks": [], "config": {}}', "not a litdata index with chunks"),
        (
            '{"chunks": [{"filenbme": "chunk-0-0.bin"}], "config": {}}',
            r"not a readable litdata index \(a chunk without filename",
        ),
    ):
        (folder / "index.json").write_text(content)
        with pytest.raises(ValueError, match=rf"{folder}/index.json: {words}"):
            open_source(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compression": "zstd"}, "compressed or encrypted litdata chunks are not read"),
        ({"encryption": {"algorithm": "fernet"}}, "compressed or encrypted"),
        ({"data_format": ["str"]}, r"litdata items of format \['str'\], not tokens"),
        ({"data_format": ["int", "int"]}, "not tokens"),
        ({"data_format": ["no_header_tensor:1"]}, "not tokens"),
        ({"data_format": ["no_header_tensor:10"]}, "not tokens"),
        ({"data_format": ["no_header_tensor:99"]}, "not tokens"),
        ({"data_format": ["no_header_numpy:9"]}, "not tokens"),
        ({"data_format": ["no_header_numpy:"]}, "not tokens"),
        ({"data_format": None}, "not tokens"),
    ],
)
def test_chunks_that_hold_something_else(folder: Path, changes: dict, words: str) -> None:
    edit_index(folder, **changes)
    with pytest.raises(ValueError, match=rf"{folder}: .*{words}"):
        LitdataChunks(folder)


def test_a_chunk_that_is_missing(folder: Path) -> None:
    chunk = next(folder.glob("*.bin"))
    chunk.unlink()
    with pytest.raises(ValueError, match=f"{chunk}: the chunk is named in index.json but missing; restore it"):
        LitdataChunks(folder)


@pytest.mark.parametrize(
    ("first_words", "words"),
    [
        ([10**6], "claims 1000000 items, more than its .* bytes can hold"),
        ([2, 16, 12, 20], "its table of offsets is broken"),
        ([1, 12, 10**9], "its table of offsets is broken"),
    ],
)
def test_a_chunk_with_a_broken_table(folder: Path, first_words: list[int], words: str) -> None:
    chunk = sorted(folder.glob("*.bin"))[0]
    data = np.array(first_words, dtype=np.uint32).tobytes()
    chunk.write_bytes(data + chunk.read_bytes()[len(data) :])
    with pytest.raises(DocumentError, match=f"{chunk}: {words}"):
        documents(LitdataChunks(folder))


def test_a_chunk_cut_after_the_listing(folder: Path) -> None:
    source = LitdataChunks(folder)
    whole = documents(source)
    chunk = source.listing.path(0)
    chunk.write_bytes(chunk.read_bytes()[:-8])
    with pytest.raises(DocumentError, match=f"{chunk}: ends at byte .* restore it"):
        documents(source)
    assert len(whole) == COUNT


def test_options_of_other_formats(written: Path) -> None:
    with pytest.raises(ValueError, match="text_key='x' does not apply to a litdata folder"):
        open_source(written, text_key="x")
