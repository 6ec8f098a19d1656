"""Seconds from the construction of a loader to its first batch, wherever the run is that it goes on from.

    python benchmarks/resume.py                     # a million documents, 200 MB in a temporary folder; two minutes

A run reads most of an epoch of JSON lines in one process and saves its state on the way. Then loaders are built from these
states, as at a resume: listing the files, finding the place of every stream, and making the first global batch. A loader
that replays takes longer the further the run is; one that seeks does not. Each is done five times; `reads` is how many
documents one takes: those of the first batch, and for `best_fit` the look-ahead of every stream.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np

from lightning_fms.data import State, StreamLoader
from lightning_fms.data.sources import Document, JsonLines

STREAMS, SEQ_LEN = 64, 2048


class Counted(JsonLines):
    """JSON lines that count the documents read."""

    reads = 0

    def read(self, file: int, start: int, length: int) -> Document:
        self.reads += 1
        return super().read(file, start, length)


def write(folder: Path, documents: int, files: int = 16) -> int:
    """Write documents of log-normal lengths, 190 bytes on average; return all bytes."""
    lengths = np.clip(np.random.default_rng(0).lognormal(4.7, 0.9, documents), 1, 5000).astype(int)
    text, total = "the quick brown fox " * 251, 0
    for file in range(files):
        lines = [json.dumps({"text": f"{n} {text[:length]}"}) for n, length in enumerate(lengths[file::files].tolist())]
        total += (folder / f"{file:02}.jsonl").write_text("\n".join(lines))
    return total


def loader(folder: Path, packing: str, state: State | None = None) -> tuple[StreamLoader, Counted]:
    source = Counted(folder)
    return StreamLoader({"text": source}, SEQ_LEN, STREAMS, packing=packing, state=state), source


def states(folder: Path, packing: str, fractions: list[float], size: int) -> Iterator[State]:
    """Run through an epoch and give the state at every fraction of it."""
    running, _ = loader(folder, packing)
    batches = iter(running)
    for fraction in fractions:
        while running.mix_report()["text"]["tokens"] < fraction * size:
            next(batches)
        yield running.state_dict()


def first_batch(folder: Path, packing: str, state: State) -> tuple[float, int]:
    """Return seconds from construction to the first global batch, and the documents read for it."""
    began = time.perf_counter()
    resumed, source = loader(folder, packing, state)
    next(iter(resumed))
    return time.perf_counter() - began, source.reads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=1_000_000)
    args = parser.parse_args()
    print(f"{'packing':<9} {'epoch':>6} {'median s':>8} {'worst s':>8} {'reads':>6}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write(folder, args.documents)
        for packing in ("concat", "best_fit"):
            for state, fraction in zip(
                states(folder, packing, [0, 0.5, 0.9], int(size * 0.93)), (0, 0.5, 0.9), strict=True
            ):
                seconds, again = zip(*(first_batch(folder, packing, state) for _ in range(5)), strict=True)
                print(
                    f"{packing:<9} {fraction:>6.0%} {median(seconds):>8.2f} {max(seconds):>8.2f} {again[0]:>6}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
