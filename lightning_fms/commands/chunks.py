"""Documents written as litdata chunks that stay: what `litdata.optimize` makes, without its one process a whole input.

A chunk is the number of its items, a table of their offsets, and the items (all uint32): with a tokenizer bare token ids, which
litdata's `TokensLoader` reads as one line of tokens; else texts, each behind its length. Chunks are written aside and renamed,
so a file under a chunk's name is whole.
"""

import json
import os
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from litdata.constants import _INDEX_FILENAME
from litdata.utilities._pytree import tree_flatten, treespec_dumps

from lightning_fms.commands.documents import Span, documents
from lightning_fms.data.sources import Document, DocumentError, LitdataChunks, MegatronTokens, Source, TokenFiles
from lightning_fms.data.sources.units import Broken, Item
from lightning_fms.data.tokenizer import Tokenizer
from lightning_fms.distributed.commit import sync_folder, write_synced

Kind = Literal["text", "uint16", "int32"]

TOLD = 5
"""Documents left out that a unit tells of."""

_FORMATS = {"text": "str", "uint16": "no_header_tensor:20", "int32": "no_header_tensor:16"}  # litdata's codes of dtypes
_WORD = 4
_LONGEST = 1 << 31


@dataclass
class Written:
    """What became of a unit.

    chunks: for litdata's index. documents, tokens: written. empty: documents with nothing in them, which are not written.
    skipped: those that could not be read. told: what was wrong with the first of them.
    """

    unit: int
    source_bytes: int
    chunks: list[dict[str, Any]] = field(default_factory=list)
    documents: int = 0
    tokens: int = 0
    empty: int = 0
    skipped: int = 0
    told: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ChunkWriter:
    """Writes units of a source into a folder.

    Args:
        source: Where the documents are.
        folder: Where the chunks go.
        tokenizer: Makes tokens of text; `None` writes text as it is, and tokens as they are.
        kind: What the chunks hold.
        eos: Whether a tokenized document ends with EOS.
        chunk_bytes: A chunk is smaller, unless one document is larger.
        on_error: `"raise"` ends with a document that cannot be read, `"skip"` counts it.
    """

    source: Source
    folder: Path
    tokenizer: Tokenizer | None
    kind: Kind
    eos: bool
    chunk_bytes: int
    on_error: Literal["raise", "skip"]

    def write(self, unit: int, spans: Sequence[Span]) -> Written:
        """Write the chunks of a unit; its files are durable when this returns.

        Raises:
            DocumentError: For the first document that cannot be read, if `on_error` is `"raise"`.
        """
        written = Written(unit, sum(span.stop - span.start for span in spans))
        held: list[bytes] = []
        size = 0
        for data in self._encoded(documents(self.source, spans), written):
            if held and size + len(data) + (len(held) + 3) * _WORD > self.chunk_bytes:
                written.chunks.append(self._write_chunk(unit, len(written.chunks), held))
                held, size = [], 0
            held.append(data)
            size += len(data)
        if held:
            written.chunks.append(self._write_chunk(unit, len(written.chunks), held))
        return written

    def _encoded(self, items: Iterable[Item], written: Written) -> Iterator[bytes]:
        for item in items:
            try:
                if isinstance(item, (DocumentError, Broken)):
                    raise item if isinstance(item, DocumentError) else DocumentError(item.error)
                data = self._encode(item)
            except DocumentError as error:
                if self.on_error == "raise":
                    raise
                written.skipped += item.documents if isinstance(item, Broken) else 1
                written.told += [str(error)] if len(written.told) < TOLD else []
                continue
            if not data:
                written.empty += 1
                continue
            written.documents += 1
            written.tokens += len(data) // self._token_bytes if self.kind != "text" else 0
            yield struct.pack("<I", len(data)) + data if self.kind == "text" else data

    def _encode(self, document: Document) -> bytes:
        """Return the bytes of a document; none if it is empty."""
        if self.kind == "text":
            data = _as_text(document)
        else:
            data = self._ids(document).astype(self.kind).tobytes()
        if len(data) >= _LONGEST:
            raise DocumentError(f"a document of {len(data):,} bytes is longer than 2 GiB; split it")
        return data

    def _ids(self, document: Document) -> np.ndarray:
        if self.tokenizer is None:
            assert isinstance(document, np.ndarray), type(document)
            if len(document) and not 0 <= document.min() <= document.max() <= np.iinfo(self.kind).max:
                raise DocumentError(f"token ids from {document.min()} to {document.max()} do not fit into {self.kind}")
            return document
        if not isinstance(document, str):
            raise DocumentError(f"a {type(document).__name__} is no text to tokenize; leave out --tokenizer")
        ids = self.tokenizer.encode(document)
        eos = self.tokenizer.eos_id
        if not self.eos or eos is None or len(ids) == 0 or ids[-1] == eos:
            return ids
        return np.append(ids.astype(np.int64), eos)  # in uint8, 256 would be 0

    @property
    def _token_bytes(self) -> int:
        return np.dtype(self.kind).itemsize

    def _write_chunk(self, unit: int, number: int, items: list[bytes]) -> dict[str, Any]:
        header = (len(items) + 2) * _WORD
        ends = header + np.cumsum([0, *map(len, items)])
        name = f"chunk-{unit}-{number}.bin"
        aside = self.folder / f".{name}.{os.getpid()}"
        head = np.uint32(len(items)).tobytes() + ends.astype(np.uint32).tobytes()
        write_synced(aside, b"".join([head, *items]))
        aside.replace(self.folder / name)
        dim = None if self.kind == "text" else int(ends[-1] - header) // self._token_bytes
        return {"chunk_bytes": int(ends[-1]), "chunk_size": len(items), "dim": dim, "filename": name}


def write_index(folder: Path, chunks: list[dict[str, Any]], kind: Kind, chunk_bytes: int) -> None:
    """Write litdata's index: from then on the folder is a data set."""
    config = {
        "compression": None, "chunk_size": None, "chunk_bytes": chunk_bytes, "encryption": None,
        "data_format": [_FORMATS[kind]], "data_spec": treespec_dumps(tree_flatten("")[1]),
        "item_loader": "PyTreeLoader" if kind == "text" else "TokensLoader",
    }  # fmt: skip
    aside = folder / f".{_INDEX_FILENAME}"
    write_synced(aside, json.dumps({"chunks": chunks, "config": config, "updated_at": str(time.time())}).encode())
    aside.replace(folder / _INDEX_FILENAME)
    sync_folder(folder)


def kind_of(source: Source, tokenizer: Tokenizer | None, everything: Sequence[Span]) -> Kind:
    """Return what chunks of a source will hold.

    Raises:
        ValueError: If a tokenizer is given for documents that are tokens already.
    """
    first = None
    if isinstance(source, (LitdataChunks, MegatronTokens, TokenFiles)):
        first = next((item for item in documents(source, everything) if isinstance(item, (str, np.ndarray))), None)
    if not isinstance(first, np.ndarray):
        return "text" if tokenizer is None else "uint16" if tokenizer.vocab_size <= 1 << 16 else "int32"
    if tokenizer is not None:
        raise ValueError(f"{source.listing.root}: holds tokens already; leave out --tokenizer")
    return "uint16" if first.dtype.itemsize < _WORD else "int32"


def _as_text(document: Document) -> bytes:
    if not isinstance(document, str):
        raise DocumentError(f"a {type(document).__name__} is no text")
    try:
        return document.encode()
    except UnicodeEncodeError:
        raise DocumentError(
            f"a text beginning {document[:40]!r} holds half a surrogate pair, which UTF-8 cannot say; repair it"
        ) from None
