"""What a source holds, from a sample of it.

Random places are read: windows of a file where documents are found from any byte on, the beginnings of row groups and of
compressed files elsewhere. A document is in the sample if it starts in such a place, so long ones are not preferred. What
follows for the whole: where documents stand one behind the other, their number is the bytes of the source by those of a mean
document; in decoded formats the files say it, and for compressed ones it is in proportion to the compressed bytes.
"""

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path
from random import Random

import numpy as np
from litdata.constants import _INDEX_FILENAME

from lightning_fms.commands.documents import Found, Span, is_decoded, located, row_edges
from lightning_fms.data.sources import (
    CompressedLines,
    Document,
    DocumentError,
    LitdataChunks,
    MegatronTokens,
    Source,
    TokenFiles,
)
from lightning_fms.data.sources.decoded import Decoded
from lightning_fms.data.sources.lines import Lines
from lightning_fms.data.sources.units import Broken

_WINDOW = 16 << 10
_HEAD = 4 << 20  # of a compressed file: what the decoder holds back at its end is little beside it
_FEWEST, _MOST = 32, 1024  # places
_FILES = 1000


@dataclass
class Sample:
    """A sample of a source, and what follows from it.

    lengths: tokens of the documents that were measured, with 0 for empty and unreadable ones. places: that were read. odd: by kind,
    how many and the first of them. documents: of the source. exact: whether they were counted. complete: whether the sample is all
    there is. tokens: of the source. exact_tokens: whether they were counted.
    """

    lengths: list[int] = field(default_factory=list)
    places: int = 0
    odd: dict[str, tuple[int, str]] = field(default_factory=dict)
    documents: int = 0
    exact: bool = False
    complete: bool = True
    tokens: int = 0
    exact_tokens: bool = False

    def percentiles(self) -> dict[str, int]:
        """Tokens of a document that so many per cent are no longer than; empty and unreadable ones do not count."""
        filled = [length for length in self.lengths if length] or [0]
        found = {f"p{q}": int(np.percentile(filled, q, method="inverted_cdf")) for q in (10, 50, 90, 99)}
        return {**found, "longest": max(filled)}

    def note(self, kind: str, what: str, count: int = 1) -> None:
        """Count something odd."""
        before, first = self.odd.get(kind, (0, what))
        self.odd[kind] = before + count, first


def sample(source: Source, wanted: int, measure: Callable[[Document], int], seed: int = 0) -> Sample:
    """Sample a source.

    Args:
        source: What to sample.
        wanted: About how many documents to measure; more where they are short, fewer where they are long.
        measure: Returns the tokens of a document; raises `DocumentError` if it has none.
        seed: Of the places.
    """
    result, covered, seen = Sample(), 0, 0
    random = Random(seed)
    numbers = range(len(source.listing.names))
    files = list(numbers) if len(numbers) <= _FILES else sorted(random.sample(numbers, _FILES))
    places = _Places(source, files)
    order = random.sample(range(places.count), min(places.count, _MOST))
    most = -(-wanted // min(_FEWEST, max(1, len(order))))
    for place in order:
        if len(result.lengths) >= wanted and result.places >= _FEWEST:
            break
        part, measured = places.read(place), 0
        for found in part.found:
            count = found.item.documents if isinstance(found.item, Broken) else 1
            seen += count
            covered += part.covers(found)
            if part.decoded and measured >= most:
                result.complete = False
                if part.known:
                    break
                continue
            measured += 1
            result.lengths.append(_length(source, found, measure, result))
        covered += part.bytes
        result.complete &= part.whole
        result.places += 1
    result.complete &= result.places == places.count and len(files) == len(numbers)
    _extrapolate(source, result, places.rows if len(files) == len(numbers) else None, seen, covered)
    return result


def _extrapolate(source: Source, result: Sample, rows: int | None, seen: int, covered: int) -> None:
    documents, tokens = counted(source)
    documents = rows if documents is None else documents
    result.exact, result.exact_tokens = result.complete or documents is not None, result.complete or tokens is not None
    if result.complete:
        result.documents, result.tokens = seen, sum(result.lengths)
        return
    estimate = round(seen / covered * source.listing.total_bytes) if covered else 0
    result.documents = documents if documents is not None else estimate
    mean = sum(result.lengths) / max(1, len(result.lengths))
    result.tokens = tokens if tokens is not None else round(result.documents * mean)


def counted(source: Source) -> tuple[int | None, int | None]:
    """Return documents and tokens of a source where its metadata says them, else `None`."""
    if isinstance(source, MegatronTokens):
        indexes = [source._index(file) for file in range(len(source.listing.names))]
        sizes = source.listing.sizes.tolist()
        tokens = sum(size // index.dtype.itemsize for size, index in zip(sizes, indexes, strict=True))
        return sum(index.documents for index in indexes), tokens
    if isinstance(source, LitdataChunks) and isinstance(source.listing.root, Path):
        chunks = json.loads((source.listing.root / _INDEX_FILENAME).read_text())["chunks"]
        dims = [chunk.get("dim") for chunk in chunks]
        return sum(chunk["chunk_size"] for chunk in chunks), None if None in dims else sum(dims)
    return None, None


@dataclass(frozen=True)
class _Part:
    """A place and its documents.

    decoded: whether reading on costs. known: whether the files say how many documents there are. bytes: of the source, where
    `covers` does not count them. whole: whether all of its documents come.
    """

    found: Iterator[Found]
    decoded: bool
    known: bool
    bytes: int
    whole: bool
    covers: Callable[[Found], int]


class _Places:
    """What can be read alone, by number, without making a list of it."""

    def __init__(self, source: Source, files: list[int]) -> None:
        self._source, self._files = source, files
        self._edges: dict[int, list[int]] = {}
        counts = []
        self.rows: int | None = 0
        for file in files:
            size = int(source.listing.sizes[file])
            if is_decoded(source, file):
                self._edges[file] = row_edges(source, file)
            self._count_rows(file)
            counts.append(len(self._edges[file]) - 1 if file in self._edges else -(-size // _WINDOW))
        self._ends = np.cumsum(counts)
        self.count = int(self._ends[-1]) if files else 0

    def _count_rows(self, file: int) -> None:
        if not isinstance(self._source, Decoded) or isinstance(self._source, CompressedLines):
            self.rows = None
        elif self.rows is not None:
            with suppress(DocumentError):  # one that cannot be opened has none
                self.rows += self._source.layout(file).rows[-1]

    def read(self, number: int) -> _Part:
        """Return a place."""
        at = int(np.searchsorted(self._ends, number, side="right"))
        file, source = self._files[at], self._source
        ordinal = number - (int(self._ends[at - 1]) if at else 0)
        size = int(source.listing.sizes[file])
        if isinstance(source, CompressedLines) and file in self._edges:
            head = min(size, _HEAD)
            found = located(_cut(source, file, head), [Span(file, 0, head)])
            return _Part(_unless_cut(found) if head < size else found, True, False, head, head == size, _nothing)
        if file in self._edges:
            start, stop = next(islice(pairwise(self._edges[file]), ordinal, None))
            return _Part(located(source, [Span(file, start, stop)]), True, True, stop - start, True, _nothing)
        start, stop = ordinal * _WINDOW, min(size, (ordinal + 1) * _WINDOW)
        found = located(source, [Span(file, start, stop)])
        tiling = isinstance(source, (Lines, TokenFiles, MegatronTokens))  # documents stand one behind the other
        newline = int(isinstance(source, Lines))
        covers = (lambda one: one.size + newline) if tiling else _nothing
        return _Part(found, False, False, 0 if tiling else stop - start, True, covers)


def _nothing(found: Found) -> int:
    return 0


def _cut(source: CompressedLines, file: int, size: int) -> CompressedLines:
    """Return the source as if a file ended at a byte."""
    short, sizes = copy.copy(source), source.listing.sizes.copy()
    sizes[file] = size
    short.listing = replace(source.listing, sizes=sizes)
    return short


def _unless_cut(found: Iterator[Found]) -> Iterator[Found]:
    """Leave out the error at the end of a file that was cut on purpose."""
    return (
        one for one in found if not (isinstance(one.item, DocumentError) and "cannot be decompressed" in str(one.item))
    )


def _length(source: Source, found: Found, measure: Callable[[Document], int], result: Sample) -> int:
    """Return the tokens of a document, and note what is odd about it."""
    if isinstance(found.item, Broken):
        result.note("broken", found.item.error, found.item.documents)
        return 0
    try:
        if isinstance(found.item, DocumentError):
            raise found.item
        length = measure(found.item)
    except DocumentError as error:
        result.note(_kind(str(error)), str(error))
        return 0
    if length == 0:
        unit = "row" if is_decoded(source, found.file) else "byte"
        result.note("empty", f"{source.listing.path(found.file)}: {unit} {found.at}")
    return length


def _kind(what: str) -> str:
    if "has null in" in what or "of type NoneType" in what:
        return "null"
    return "bad UTF-8" if "utf-8" in what.lower() else "broken"
