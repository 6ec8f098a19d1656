"""The documents of a source in its natural order: files as they are listed, documents as they stand in them.

A run reads in a permuted order through a cache. A command that reads everything once needs neither, so formats that are decoded
are decoded straight through here, a few documents at a time, and nothing is kept.

A span is what can be read alone: a byte range where documents are found from any byte on, some row groups, a compressed file.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from lightning_fms.data.segments import WINDOW_BYTES
from lightning_fms.data.sources import CompressedLines, DocumentError, Source
from lightning_fms.data.sources.compressed import codec
from lightning_fms.data.sources.decoded import Decoded, Layout
from lightning_fms.data.sources.units import Broken, Item


class Span(NamedTuple):
    """Documents whose address lies in bytes `[start, stop)` of a file."""

    file: int
    start: int
    stop: int


class Found(NamedTuple):
    """A document and where it is: its first byte and its bytes, or its row (and 0) where its file is decoded."""

    file: int
    at: int
    size: int
    item: Item


def is_decoded(source: Source, file: int) -> bool:
    """Whether a file cannot be read in place, so that its documents are known by their row and not by their first byte."""
    if isinstance(source, CompressedLines):
        return codec(source.listing.names[file]) is not None
    return isinstance(source, Decoded)


def spans(source: Source, most_bytes: int) -> Iterator[Span]:
    """Cut all files of a source into spans, of at most so many bytes where its format can be cut there."""
    for file, size in enumerate(source.listing.sizes.tolist()):
        edges = [0, size] if size else []
        if size and is_decoded(source, file):
            edges = row_edges(source, file)
        elif source.listing.splittable:
            edges = [*range(0, size, most_bytes), size]
        yield from (Span(file, start, stop) for start, stop in pairwise(edges))


def row_edges(source: Source, file: int) -> list[int]:
    """Return where the units of a decoded file begin, and its end; a file that cannot be opened is one unit."""
    size = int(source.listing.sizes[file])
    if isinstance(source, Decoded) and not isinstance(source, CompressedLines):
        try:
            return source.layout(file).starts
        except DocumentError:  # whoever reads the span is told
            pass
    return [0, size]


def grouped(parts: Iterator[Span], least_bytes: int) -> list[list[Span]]:
    """Put neighbouring spans together until they have so many bytes."""
    groups: list[list[Span]] = []
    size = least_bytes
    for span in parts:
        if size >= least_bytes:
            groups.append([])
            size = 0
        groups[-1].append(span)
        size += span.stop - span.start
    return groups


def documents(source: Source, parts: Sequence[Span]) -> Iterator[Item]:
    """Yield the documents of spans in order, and what is wrong in place of those that cannot be read.

    A file that breaks off (cut, damaged) yields what stands before the break, and then the error.
    """
    return (found.item for found in located(source, parts))


def located(source: Source, parts: Sequence[Span]) -> Iterator[Found]:
    """Yield what `documents` does, with where each stands."""
    layout: tuple[int, Layout] | None = None
    for span in parts:
        path = source.listing.path(span.file)
        try:
            if isinstance(source, Decoded) and is_decoded(source, span.file):
                if isinstance(source, CompressedLines):
                    layout = span.file, Layout([0, span.stop], [0, 0], [0, 1])
                elif layout is None or layout[0] != span.file:
                    layout = span.file, source.layout(span.file)
                items = _decoded(source, span, layout[1])
            else:
                items = _read(source, span)
            for found in items:
                wrong = isinstance(found.item, (DocumentError, Broken))
                yield found._replace(item=_named(found.item, path)) if wrong else found  # type: ignore[arg-type]
        except DocumentError as error:
            yield Found(span.file, span.start, 0, _named(error, path))


def _named(error: DocumentError | Broken, path: object) -> DocumentError | Broken:
    """Put the file's path in front of what is wrong, if it is not there."""
    what = error.error if isinstance(error, Broken) else str(error)
    what = what if what.startswith(str(path)) else f"{path}: {what}"
    return Broken(error.documents, what) if isinstance(error, Broken) else DocumentError(what)


def _decoded(source: Decoded, span: Span, layout: Layout) -> Iterator[Found]:
    for unit, start in enumerate(layout.starts[:-1]):
        if not span.start <= start < span.stop:
            continue
        row = layout.rows[unit]
        for item in source.decode(span.file, layout, unit):
            yield Found(span.file, row, 0, item)
            row += item.documents if isinstance(item, Broken) else 1


def _read(source: Source, span: Span) -> Iterator[Found]:
    for start in range(span.start, span.stop, WINDOW_BYTES):
        try:
            window = source.window(span.file, start, min(start + WINDOW_BYTES, span.stop))
        except DocumentError as error:
            yield Found(span.file, start, 0, error)
            continue
        for first, ref in zip(window.starts.tolist(), window.refs.tolist(), strict=True):
            try:
                yield Found(span.file, start + first, ref, source.read(span.file, start + first, ref))
            except DocumentError as error:
                yield Found(span.file, start + first, ref, error)
