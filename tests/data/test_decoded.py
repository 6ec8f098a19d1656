"""Decoded formats keep the guarantees of the loader: each document once, the same rows on any ranks and workers."""

import gzip
import json
import os
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_fms.data import segments
from lightning_fms.data.segments import SourceOrder
from lightning_fms.data.sources import DocumentError, decoded, open_source
from tests.data.chains import Phase, document, run_phase, through_disk


def write(folder: Path, name: str, count: int) -> Path:
    """Two files of a format in a folder of its name."""
    folder = folder / name
    folder.mkdir(parents=True)
    for part in range(2):
        texts = [document(name[0], i) for i in range(part, count, 2)]
        if name == "gz":
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
            (folder / f"{part}.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
        elif name == "parquet":
            pq.write_table(pa.table({"text": texts}), folder / f"{part}.parquet", row_group_size=40)
        else:
            with pa.ipc.new_file(str(folder / f"{part}.arrow"), pa.schema([("text", pa.string())])) as writer:
                writer.write_table(pa.table({"text": texts}), max_chunksize=40)
    return folder


@pytest.mark.parametrize("name", ["gz", "parquet", "arrow"])
@pytest.mark.parametrize("streams", [1, 7, 600])
def test_each_document_is_read_by_one_stream_once_an_epoch(
    tmp_path: Path, name: str, streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoded, "UNIT_BYTES", 500)
    monkeypatch.setattr(segments, "WINDOW_BYTES", 300)
    source = open_source(write(tmp_path, name, 300), cache=tmp_path / "cache")
    order = SourceOrder(source, name, seed=0, streams=streams)
    orders = []
    for epoch in (0, 1):
        texts = [text for stream in range(streams) for text in read_segment(order, stream, epoch)]
        assert Counter(texts) == Counter(document(name[0], i) for i in range(300))
        orders.append(texts)
    assert orders[0] != orders[1]


def read_segment(order: SourceOrder, stream: int, epoch: int) -> list[str]:
    segment, position, texts = order.segment(stream, epoch, shuffle_window=16), 0, []
    while (found := segment.find(position)) is not None:
        position = found[0] + 1
        texts.append(str(segment.read(*found[1:])))
    return texts


def test_rows_are_the_same_on_any_ranks_and_workers_and_through_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoded, "UNIT_BYTES", 500)
    folders = {name: write(tmp_path, name, 200) for name in ("gz", "parquet", "arrow")}

    def options(cache: str) -> dict:
        sources = {name: {"path": folder, "cache": tmp_path / cache} for name, folder in folders.items()}
        return {"sources": sources, "seq_len": 64, "num_streams": 6, "seed": 3}

    expected, _ = run_phase(options("a"), Phase(world=1, batch=6, micro=None, steps=20), None, 0)
    rows, state = run_phase(options("b"), Phase(world=2, batch=6, micro=2, steps=9, workers=2), None, 0)
    more, _ = run_phase(options("c"), Phase(world=3, batch=6, micro=1, steps=11), through_disk(state), 54)
    assert {**rows, **more} == expected


def test_a_broken_file_is_decoded_once_and_fails_at_once_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n' * 1000, mtime=0)[:-4])
    source = open_source(path, cache=tmp_path / "cache")
    for _ in range(3):
        with pytest.raises(DocumentError, match=r"a.jsonl.gz: cannot be decompressed .*Truncated"):
            source.window(0, 0, 10)
        monkeypatch.setattr(decoded, "write_unit", None)


def test_a_source_of_many_files_keeps_few_open(tmp_path: Path) -> None:
    for i in range(80):
        (tmp_path / f"{i}.jsonl.gz").write_bytes(gzip.compress(json.dumps({"text": str(i)}).encode(), mtime=0))
    source = open_source(tmp_path / "*.gz", cache=tmp_path / "cache")
    before = len(os.listdir("/proc/self/fd"))
    for file in [*range(80), *range(80)]:
        assert source.read(file, 0, 0) == source.listing.names[file].removesuffix(".jsonl.gz")
    assert len(os.listdir("/proc/self/fd")) <= before + 40
    del source
    assert len(os.listdir("/proc/self/fd")) <= before
