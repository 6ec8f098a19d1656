"""JSON lines and plain text in gzip or Zstandard files.

Neither can be entered in the middle, so a file is one unit, decoded from its start without ever being held whole. What a
document is, and when it is broken, is left to the plain format: byte positions in messages are those of the decoded text.
"""

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import IO, cast

import pyarrow as pa

from lightning_fms.data.sources.cache import Cache
from lightning_fms.data.sources.decoded import Decoded, Layout
from lightning_fms.data.sources.files import ListedFile
from lightning_fms.data.sources.lines import BLOCK_BYTES, MAX_DOCUMENT_BYTES, JsonLines, Lines, Text
from lightning_fms.data.sources.source import Document, DocumentError, Window, one_line
from lightning_fms.data.sources.units import Item

CODECS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
"""File suffixes and what Arrow calls the codec."""


def codec(name: str) -> str | None:
    """Return the codec that a file name says, or `None`."""
    return CODECS.get(PurePosixPath(name).suffix.lower())


def plain_suffix(name: str) -> str:
    """Return the suffix of a file name, that of the compression left out: `.jsonl` of `a.jsonl.gz`."""
    path = PurePosixPath(name)
    return (path.with_suffix("") if codec(name) else path).suffix.lower()


def open_lines(plain: JsonLines | Text, cache: Cache) -> "JsonLines | Text | CompressedLines":
    """Return a source for files that may be compressed: `plain` itself if none is."""
    if not any(map(codec, plain.listing.names)):
        return plain
    if isinstance(plain, JsonLines):
        return CompressedLines(plain, cache, ("json", plain.text_key), pickled=plain.text_key is None)
    return CompressedLines(plain, cache, ("text", plain.split, BLOCK_BYTES), pickled=False)


class CompressedLines(Decoded):
    """Compressed files of lines; plain ones between them are read in place.

    Args:
        plain: The same files as their plain format, which says what a document is.
        cache: Where decoded files are kept.
        options: What the documents of `plain` depend on.
        pickled: Whether documents are records rather than texts.
    """

    def __init__(self, plain: Lines, cache: Cache, options: tuple, pickled: bool) -> None:
        super().__init__(plain.listing, cache, options, pickled)
        self._plain = plain
        self.cut, self.text_key = getattr(plain, "cut", {}), getattr(plain, "text_key", None)
        self._codecs = [codec(name) for name in plain.listing.names]

    def window(self, file: int, start: int, stop: int) -> Window:
        """Find the documents whose addresses lie in bytes `[start, stop)`."""
        return super().window(file, start, stop) if self._codecs[file] else self._plain.window(file, start, stop)

    def read(self, file: int, start: int, ref: int) -> Document:
        """Read a document by its number, in a plain file by its bytes."""
        return super().read(file, start, ref) if self._codecs[file] else self._plain.read(file, start, ref)

    def layout(self, file: int) -> Layout:
        """Take the file as one unit."""
        return Layout([0, int(self.listing.sizes[file])], [0, self.count(file)], [0, 1])

    def decode(self, file: int, layout: Layout, unit: int) -> Iterator[Item]:
        """Decode the documents of the file in order."""
        raw = ListedFile(self._files, self.listing, file)
        stream = _Decompressed(raw, str(self._codecs[file]))
        for at, data in self._plain.split_stream(cast(IO[bytes], stream)):
            if len(data) > MAX_DOCUMENT_BYTES:
                raise DocumentError(f"the document at byte {at} is longer than 4 GiB; split it")
            try:
                yield self._plain.parse(data, at)
            except DocumentError as error:
                yield error


class _Decompressed:
    """The decoded bytes of a stream, with errors that say where."""

    def __init__(self, raw: ListedFile, codec: str) -> None:
        self._stream = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), codec)
        self._codec, self._at = codec, 0

    def read(self, size: int) -> bytes:
        try:
            data = self._stream.read(size)
        except OSError as error:
            raise DocumentError(
                f"cannot be decompressed as {self._codec} beyond byte {self._at} of the decoded text ({one_line(error)}); "
                "the file is cut or damaged: restore it"
            ) from None
        self._at += len(data)
        return data
