"""Looking for the documents of a file in ranges, whatever the cuts."""

import itertools

import numpy as np

from lightning_fms.data.sources import Document, Source


def documents(source: Source, cuts: list[int] | None = None, file: int = 0) -> list[tuple[int, int, Document]]:
    """`(address, ref, document)` of a file, looked for in the ranges between the cuts."""
    size = int(source.listing.sizes[file])
    edges = sorted({0, size, *(cut for cut in cuts or [] if 0 < cut < size)})
    found = []
    for start, stop in itertools.pairwise(edges):
        window = source.window(file, start, stop)
        assert window.starts.dtype == window.refs.dtype == np.uint32
        assert np.all(window.starts < stop - start)
        for first, ref in zip(window.starts.tolist(), window.refs.tolist(), strict=True):
            found.append((start + first, ref, source.read(file, start + first, ref)))
    assert [at for at, _, _ in found] == sorted(at for at, _, _ in found)
    return found


def read_all(source: Source, cuts: list[int] | None = None, file: int = 0) -> list[Document]:
    return [document for _, _, document in documents(source, cuts, file)]
