"""Every epoch has a new order, files mix from its first batch to its last, and memory goes by fragments, not documents."""

import tracemalloc

import numpy as np
import pytest

from lightning_fms.data import StreamLoader
from lightning_fms.data.report import describe, streams_to_mix
from lightning_fms.data.segments import SourceOrder
from tests.data.corpora import Corpus
from tests.data.synthetic import Synthetic
from tests.data.test_exactly_once import every_format  # noqa: F401

STREAMS = 64


def files_of(order: SourceOrder, epoch: int) -> np.ndarray:
    """Which file each stream's documents are from (`[streams, documents]`, as many as every stream has)."""
    lines = []
    for stream in range(order.streams):
        segment, position, files = order.segment(stream, epoch, 4096), 0, []
        while (found := segment.find(position)) is not None:
            files.append(found[1])
            position = found[0] + 1
        lines.append(files)
    shortest = min(map(len, lines))
    return np.array([line[:shortest] for line in lines])


def entropy(values: np.ndarray) -> float:
    share = np.unique(values, return_counts=True)[1] / values.size
    return float(-(share * np.log2(share)).sum())


def test_d8_files_mix_from_the_first_batch_of_an_epoch_to_the_last() -> None:
    """1,024 files of 100 documents, 64 streams: in any window of batches, nearly as mixed as drawn at random."""
    rng, order = np.random.default_rng(0), SourceOrder(Synthetic(1024, 100, np.ones(1)), "a", 0, STREAMS)
    for epoch in range(2):
        files = files_of(order, epoch)
        assert files.shape[1] >= 1590
        for batches in (1, 2, 8, 32, 128):
            ideal = np.mean([entropy(rng.integers(0, 1024, STREAMS * batches)) for _ in range(10)])
            starts = range(0, files.shape[1] - batches + 1, batches)
            assert min(entropy(files[:, start : start + batches]) for start in starts) >= 0.9 * ideal


def test_d8_small_files_of_1_mb_mix_with_as_many_streams_as_rows() -> None:
    """256 files, 16 streams: what the default makes of a global batch of 16 rows."""
    source = Synthetic(256, 64, np.ones(1), spacing=1 << 14)
    files = files_of(SourceOrder(source, "a", 0, 16), 0)
    rng = np.random.default_rng(0)
    ideal = np.mean([entropy(rng.integers(0, 256, 16 * 16)) for _ in range(10)])
    assert min(entropy(files[:, start : start + 16]) for start in range(0, 1024, 16)) >= 0.9 * ideal
    assert streams_to_mix(source.listing, 16, 16) == 16


def test_d8_a_run_says_how_many_streams_mix_its_large_files() -> None:
    source = Synthetic(256, 64, np.ones(1), spacing=1 << 17)  # of 8 MB: a stream reads one at a time
    wanted = streams_to_mix(source.listing, 16, 16)
    assert 16 < wanted <= 128
    rng = np.random.default_rng(0)
    ideal = np.mean([entropy(rng.integers(0, 256, 16 * 16)) for _ in range(10)])
    for streams, enough in ((16, False), (wanted, True)):
        files = files_of(SourceOrder(source, "a", 0, streams), 0)[:, : 16 * 16 // streams]
        assert (entropy(files) >= 0.9 * ideal) == enough
        hints = describe(StreamLoader({"a": source}, 8, 16, num_streams=streams))[2:]
        assert hints == ([] if enough else [_hint(streams, wanted)])


def _hint(streams: int, wanted: int) -> str:
    return (
        f"    {streams} streams read few of the 256 files at a time; if each is of one subject, "
        f"start with num_streams={wanted}"
    )


def test_d8_files_of_unequal_lengths_mix_too() -> None:
    """The last documents of long files are read when the short ones beside them are over: a little less mixed."""
    source = Synthetic(1024, 100, np.ones(1))
    sizes = np.clip(np.random.default_rng(1).lognormal(3.5, 1.0, 1024), 1, 1000).astype(np.int64) * source.spacing
    source.listing = type(source.listing)(source.listing.root, source.listing.names, sizes)
    files = files_of(SourceOrder(source, "a", 0, STREAMS), 0)
    rng, weights = np.random.default_rng(0), sizes / sizes.sum()
    for batches in (4, 32):
        ideal = np.mean([entropy(rng.choice(1024, STREAMS * batches, p=weights)) for _ in range(10)])
        starts = range(0, files.shape[1] - batches + 1, batches)
        assert np.mean([entropy(files[:, start : start + batches]) for start in starts]) >= 0.9 * ideal


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "litdata", "text"])
def test_d8_each_epoch_has_an_order_of_its_own(every_format: dict[str, Corpus], kind: str) -> None:  # noqa: F811
    source = StreamLoader({"a": every_format[kind].spec}, 8, 1)._sources["a"]
    order = SourceOrder(source, "a", 0, 1)
    orders = set()
    for epoch in range(3):
        segment, position, read = order.segment(0, epoch, 4096), 0, []
        while (found := segment.find(position)) is not None:
            read.append(str(segment.read(*found[1:])))
            position = found[0] + 1
        assert sorted(read) == sorted(map(str, _documents(every_format[kind])))
        orders.add(tuple(read))
    assert len(orders) == 3


def _documents(corpus: Corpus) -> list:
    return [np.array(document) if isinstance(document, list) else document for document in corpus.documents]


def test_d8_memory_goes_by_fragments() -> None:
    """Ten billion documents in 100,000 files: nothing is held for each document, and little for each file."""
    source = Synthetic(100_000, 100_000, np.full(1, 100))
    tracemalloc.start()
    loader = StreamLoader({"a": source}, 2048, STREAMS)
    next(iter(loader))
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 30e6
    assert peak < 60e6
