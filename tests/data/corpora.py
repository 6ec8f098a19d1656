"""A small corpus in every format that the loader reads, and its documents, found without the loader's code."""

import gzip
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import litdata
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from litdata.streaming.writer import BinaryWriter

from tests.data.chains import document

EOS = 256
BLOCK = 150
"""Bytes of a document of plain text; a test sets the loader's own size to this."""

FORMATS = (
    "jsonl", "gz", "parquet", "giant", "arrow", "text", "litdata", "litdata text", "megatron", "bin", "memory",
)  # fmt: skip
TOKENS = ("litdata", "megatron", "bin")
"""Formats whose documents are token ids: bytes, and 256 at the end of each."""


@dataclass(frozen=True, repr=False)
class Corpus:
    """What `sources` takes, and every document: a text, or a list of token ids."""

    spec: Any
    documents: list

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(f"<{len(self.documents)} documents>")  # reports of failures would list them all


def text_of(source: str, number: int) -> str:
    """A text that says which document it is; some are empty, and some hold what tends to break readers."""
    if number % 17 == 9:
        return ""
    return document(source, number) + ("\u2028é😀" if number % 5 == 0 else "")


def write(folder: Path, kind: str, source: str, count: int, files: int = 3) -> Corpus:
    """Write a corpus of `count` documents in one format, and read it back with the format's own library."""
    folder.mkdir(parents=True)
    parts = [[text_of(source, n) for n in range(part, count, files)] for part in range(files)]
    if kind in TOKENS:
        parts = [[text for text in part if text] for part in parts]
    _WRITERS[kind](folder, parts)
    spec: Any = {"path": folder, "cache": folder.parent / f"cache of {source}"}
    if kind == "memory":
        spec["path"] = f"memory://{folder.name}"
    elif kind == "bin":
        spec = {"path": folder, "dtype": "uint16", "eos_id": EOS}
    return Corpus(spec, list(_READERS[kind](folder)))


def _lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode()


def _ids(text: str) -> list[int]:
    return [*text.encode(), EOS]


def _write_jsonl(folder: Path, parts: list[list[str]]) -> None:
    for i, part in enumerate(parts):
        (folder / f"{i}.jsonl").write_bytes(_lines(part))


def _write_gz(folder: Path, parts: list[list[str]]) -> None:
    for i, part in enumerate(parts):
        (folder / f"{i}.jsonl.gz").write_bytes(gzip.compress(_lines(part), mtime=0))


def _write_parquet(folder: Path, parts: list[list[str]]) -> None:
    for i, part in enumerate(parts):
        pq.write_table(pa.table({"text": part}), folder / f"{i}.parquet", row_group_size=7)


def _write_giant(folder: Path, parts: list[list[str]]) -> None:
    """One row group for everything."""
    pq.write_table(pa.table({"text": [text for part in parts for text in part]}), folder / "all.parquet")


def _write_arrow(folder: Path, parts: list[list[str]]) -> None:
    for i, part in enumerate(parts):
        table = pa.table({"text": part})
        with pa.ipc.new_file(str(folder / f"{i}.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=7)


def _write_text(folder: Path, parts: list[list[str]]) -> None:
    for i, part in enumerate(parts):
        (folder / f"{i}.txt").write_bytes("\n".join(part).encode())


def _write_litdata(folder: Path, parts: list[list[str]]) -> None:
    writer = BinaryWriter(str(folder), chunk_bytes=1000, item_loader=litdata.TokensLoader())
    for i, text in enumerate(text for part in parts for text in part):
        writer[i] = np.array(_ids(text), dtype=np.int64)
    writer.done()
    writer.merge(1)


def _write_litdata_text(folder: Path, parts: list[list[str]]) -> None:
    writer = BinaryWriter(str(folder), chunk_bytes=1000)
    for i, text in enumerate(text for part in parts for text in part):
        writer[i] = text
    writer.done()
    writer.merge(1)


def _write_megatron(folder: Path, parts: list[list[str]]) -> None:
    for i, part in enumerate(parts):
        lengths = np.array([len(_ids(text)) for text in part], dtype=np.int32)
        starts = np.concatenate(([0], np.cumsum(lengths[:-1]))).astype(np.int64) * 2
        header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, len(part), len(part) + 1)
        arrays = (lengths, starts, np.arange(len(part) + 1, dtype=np.int64))
        (folder / f"{i}.idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))
        (folder / f"{i}.bin").write_bytes(np.array([t for text in part for t in _ids(text)], dtype=np.uint16).tobytes())


def _write_bin(folder: Path, parts: list[list[str]]) -> None:
    for i, part in enumerate(parts):
        (folder / f"{i}.bin").write_bytes(np.array([t for text in part for t in _ids(text)], dtype=np.uint16).tobytes())


def _write_memory(folder: Path, parts: list[list[str]]) -> None:
    for i, part in enumerate(parts):
        fsspec.filesystem("memory").pipe_file(f"/{folder.name}/{i}.jsonl", _lines(part))


_WRITERS = {
    "jsonl": _write_jsonl, "gz": _write_gz, "parquet": _write_parquet, "giant": _write_giant, "arrow": _write_arrow,
    "text": _write_text, "litdata": _write_litdata, "litdata text": _write_litdata_text, "megatron": _write_megatron,
    "bin": _write_bin, "memory": _write_memory,
}  # fmt: skip


def _parse(data: bytes) -> Iterator[str]:
    for line in data.split(b"\n"):
        if line:
            yield json.loads(line)["text"]


def _read_jsonl(folder: Path) -> Iterator[str]:
    for path in folder.iterdir():
        yield from _parse(path.read_bytes())


def _read_gz(folder: Path) -> Iterator[str]:
    for path in folder.iterdir():
        yield from _parse(gzip.decompress(path.read_bytes()))


def _read_parquet(folder: Path) -> Iterator[str]:
    for path in folder.iterdir():
        yield from pq.read_table(path)["text"].to_pylist()


def _read_arrow(folder: Path) -> Iterator[str]:
    for path in folder.iterdir():
        yield from pa.ipc.open_file(str(path)).read_all()["text"].to_pylist()


def _read_text(folder: Path) -> Iterator[str]:
    """Lines are put together until a block is full: the next one begins at the first line behind a multiple of `BLOCK`."""
    for path in folder.iterdir():
        held, at, mark = b"", 0, BLOCK
        for line in path.read_bytes().splitlines(keepends=True):
            if held and at >= mark:
                yield held.decode()
                held, mark = b"", (at // BLOCK + 1) * BLOCK
            held, at = held + line, at + len(line)
        yield held.decode()


def _read_litdata(folder: Path) -> Iterator[list[int]]:
    line = litdata.StreamingDataset(str(folder), item_loader=litdata.TokensLoader(block_size=1))
    yield from _cut([int(token) for i in range(len(line)) for token in line[i]])


def _read_litdata_text(folder: Path) -> Iterator[str]:
    items = litdata.StreamingDataset(str(folder))
    yield from (items[i] for i in range(len(items)))


def _read_tokens(folder: Path) -> Iterator[list[int]]:
    for path in folder.glob("*.bin"):
        yield from _cut(np.fromfile(path, dtype=np.uint16).tolist())


def _cut(line: list[int]) -> Iterator[list[int]]:
    start = 0
    for end in [i + 1 for i, token in enumerate(line) if token == EOS]:
        yield line[start:end]
        start = end


def _read_memory(folder: Path) -> Iterator[str]:
    system = fsspec.filesystem("memory")
    for path in system.ls(f"/{folder.name}", detail=False):
        yield from _parse(system.cat_file(path))


_READERS = {
    "jsonl": _read_jsonl, "gz": _read_gz, "parquet": _read_parquet, "giant": _read_parquet, "arrow": _read_arrow,
    "text": _read_text, "litdata": _read_litdata, "litdata text": _read_litdata_text, "megatron": _read_tokens,
    "bin": _read_tokens, "memory": _read_memory,
}  # fmt: skip
