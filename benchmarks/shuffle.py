"""How well an epoch is shuffled: ours, a true global shuffle, and the schemes that others have published.

    python benchmarks/shuffle.py --plot docs/shuffle.png      # a minute on 2 cores

Two corpora of 262,144 documents of 4 KB: 1,024 files of 1 MB, and 32 files of 32 MB. A global batch has 64 rows, a document
each. Ours is the loader's own code. The others are written anew here, `py1e` after its source, litdata's and
IBM's after their descriptions, a shard being a file:

- litdata `FullShuffle`: files in random order, dealt out to 16 workers, each file shuffled within; workers make batches in turn.
- mosaicml-streaming `py1e` (its default), 8 canonical nodes: files in random order, each document moved at random within a block
  of `shuffle_block_size` documents: 262,144, the default, which is all of this corpus, and 8,192.
- IBM's fms-fsdp: 1,024 logical shards, each a walk at random through its stretch of the documents; a worker (8) draws the shard of
  each document by what is left in it. With and without its buffer of 10,000 rows.

`entropy`: of the file in 16 batches, over that of the global shuffle. `noise`: the variance of a mean gradient over 16 batches,
over that of independent draws, if a tenth of the variance of a document's gradient lies between files (or between neighbourhoods of
64 documents in a file, which are often of one site or day): 1 is perfect, 2 is as if half of the documents were missing.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lightning_fms.data.segments import Segment, SourceOrder
from lightning_fms.data.sources import Document, Listing, Window

DOCUMENTS, SPACING, FILES, NEIGHBOURS = 1 << 18, 4096, (1024, 32), 64
BATCH, STREAMS, WORKERS, NODES, SHARDS = 64, 64, 16, 8, 1024
BATCHES, BINS, BETWEEN = 16, 16, 0.1


class Imagined:
    """Files of documents of equal size that do not exist."""

    def __init__(self, files: int) -> None:
        sizes = np.full(files, DOCUMENTS // files * SPACING, dtype=np.int64)
        self.listing = Listing(Path("imagined"), tuple(f"{i:06}" for i in range(files)), sizes)

    def window(self, file: int, start: int, stop: int) -> Window:
        starts = np.arange(-(-start // SPACING), -(-stop // SPACING)) * SPACING - start
        return Window(starts.astype(np.uint32), starts.astype(np.uint32))

    def read(self, file: int, start: int, ref: int) -> Document:
        raise NotImplementedError


def global_shuffle(files: int) -> np.ndarray:
    """A true shuffle."""
    return np.random.default_rng(0).permutation(DOCUMENTS)


def ours(files: int, shuffle_window: int, streams: int = STREAMS) -> np.ndarray:
    """Row `g` from stream `g mod S`; a stream that ends its epoch goes on with the next."""
    order = SourceOrder(Imagined(files), "a", 0, streams)
    rows = np.empty((DOCUMENTS // streams, streams), dtype=np.int64)
    for stream in range(streams):
        lines = [line for epoch in (0, 1) for line in _windows(order.segment(stream, epoch, shuffle_window), files)]
        rows[:, stream] = np.concatenate(lines)[: len(rows)]
    return rows.ravel()


def _windows(segment: Segment, files: int) -> list[np.ndarray]:
    """The documents of each window as `Segment.find` yields them one by one, at once."""
    lines = []
    for window in range(segment.windows):
        segment._open(window)
        parts = [part for i in range(len(segment._ranges)) if isinstance(part := segment._part(i), tuple)]
        turns = [np.arange(len(part.order)) * len(parts) + i for i, part in enumerate(parts)]
        found = [
            part.file * (DOCUMENTS // files) + (part.base + part.starts[part.order].astype(np.int64)) // SPACING
            for part in parts
        ]
        lines.append(np.concatenate(found)[np.argsort(np.concatenate(turns))])
    return lines


def litdata(files: int) -> np.ndarray:
    """A worker reads its files one after the other, each in random order; workers make batches in turn."""
    generator = np.random.default_rng(0)
    documents = np.arange(DOCUMENTS).reshape(files, -1)[generator.permutation(files)]
    line = generator.permuted(documents, axis=1)
    ranks = line.reshape(
        WORKERS // 2, 2, -1, BATCH // (WORKERS // 2)
    )  # ranks of two workers, batch after batch in turn
    return ranks.transpose(2, 1, 0, 3).ravel()


def py1e(files: int, block: int) -> np.ndarray:
    """Files in random order, documents at random in them; each then moves by up to half a block, within its node's stretch."""
    generator, size = np.random.default_rng(0), DOCUMENTS // files
    documents = np.arange(DOCUMENTS).reshape(files, -1)[generator.permutation(files)]
    line = generator.permuted(documents, axis=1).reshape(NODES, -1)
    starts = np.arange(line.shape[1]) // size * size  # of the file, in the stretch
    reach = max(block - size, 0) / 2
    low, high = -np.minimum(reach, starts), np.minimum(reach, line.shape[1] - starts - size)
    place = np.arange(line.shape[1]) + generator.uniform(low, high, size=line.shape)
    moved = np.take_along_axis(line, np.argsort(place, axis=1), axis=1)
    return moved.reshape(NODES, -1, BATCH // NODES).transpose(1, 0, 2).ravel()


def ibm(files: int, buffer: int) -> np.ndarray:
    """A logical shard walks its stretch of the documents at random; a worker chooses among its shards by what is left."""
    generator = np.random.default_rng(0)
    lines = generator.permuted(np.arange(DOCUMENTS).reshape(SHARDS, -1), axis=1)
    outputs = []
    for own in np.split(np.arange(SHARDS), NODES):
        chosen = generator.permutation(np.repeat(own, lines.shape[1]))  # the same law
        out = np.empty(len(chosen), dtype=np.int64)
        out[np.argsort(chosen, kind="stable")] = lines[own].ravel()
        outputs.append(through_buffer(out, buffer, generator))
    return np.stack(outputs).reshape(NODES, -1, BATCH // NODES).transpose(1, 0, 2).ravel()


def through_buffer(line: np.ndarray, size: int, generator: np.random.Generator) -> np.ndarray:
    """A random one of the buffer is taken, and the next of the line put in its place."""
    if size == 0:
        return line
    held, out = line[:size].copy(), np.empty_like(line)
    places = generator.integers(min(size, len(held)), size=len(line))
    for i in range(len(line) - len(held)):
        out[i], held[places[i]] = held[places[i]], line[len(held) + i]
    out[len(line) - len(held) :] = generator.permutation(held)
    return out


def measure(labels: np.ndarray, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Return entropy (nats) and noise of windows of 16 batches, in bins over the epoch (`[BINS]` each)."""
    size = BATCHES * BATCH
    entropies, noises = [], []
    for window in labels[: len(labels) // size * size].reshape(-1, size):
        share = np.unique(window, return_counts=True)[1] / size
        entropies.append(-(share * np.log(share)).sum())
        squares = (share**2).sum() - 1 / groups  # sum of (share - 1 / groups)^2 over all groups
        noises.append(1 - BETWEEN + BETWEEN * size * squares / (1 - 1 / groups))
    bins = np.array_split(np.arange(len(noises)), BINS)
    return np.array([np.mean(np.take(entropies, b)) for b in bins]), np.array(
        [np.mean(np.take(noises, b)) for b in bins]
    )


def schemes() -> dict[str, Callable[[int], np.ndarray]]:
    """Return what makes the files of an epoch's rows, by name."""
    return {
        "global shuffle": global_shuffle,
        **{f"ours, shuffle_window {w:,}": (lambda files, w=w: ours(files, w)) for w in (16, 256, 4096)},
        "ours, 4,096, 1,024 streams": lambda files: ours(files, 4096, 1024),
        "litdata": litdata,
        "mosaic py1e, block 262,144": lambda files: py1e(files, 1 << 18),
        "mosaic py1e, block 8,192": lambda files: py1e(files, 1 << 13),
        "IBM, 1,024 shards": lambda files: ibm(files, 0),
        "IBM, 1,024 shards, buffer 10,000": lambda files: ibm(files, 10_000),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, help="where to draw the noise over an epoch")
    args = parser.parse_args()
    curves = {}
    for files in FILES:
        size = DOCUMENTS // files
        ideal = measure(global_shuffle(files) // size, files)[0].mean()
        print(f"\n{files:,} files of {size:,} documents")
        for name, scheme in schemes().items():
            rows = scheme(files)
            entropy, noise = measure(rows // size, files)
            near = measure(rows // NEIGHBOURS, DOCUMENTS // NEIGHBOURS)[1]
            curves[files, name] = noise
            print(
                f"{name:36} entropy {entropy.mean() / ideal:5.3f}, at the end {entropy[-1] / ideal:5.3f}   "
                f"noise by file {noise.mean():5.2f}, at the end {noise[-1]:5.2f}   by neighbourhood {near.mean():5.2f}",
                flush=True,
            )
    if args.plot:
        draw(curves, args.plot)


def draw(curves: dict[tuple[int, str], np.ndarray], path: Path) -> None:
    """Draw the noise over an epoch."""
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for axis, files in zip(axes, FILES, strict=True):
        for (of, name), noise in curves.items():
            if of == files:
                axis.plot((np.arange(BINS) + 0.5) / BINS, noise, label=name, linewidth=2.5 if "4,096" in name else 1.2)
        axis.set(title=f"{files:,} files", xlabel="epoch", yscale="log")
    axes[0].set_ylabel("gradient noise of 16 batches,\nof that of independent draws")
    axes[1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
