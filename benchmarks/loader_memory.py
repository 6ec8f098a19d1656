"""Memory of a loader's worker process, above that of a process that has imported torch.

    python benchmarks/loader_memory.py                   # 100,000 files in a temporary folder; two minutes

USS, the memory that is the process's own, after a spawned worker has made rows for a while: nothing is shared with a parent,
which is the worst case. Two sources: 100,000 real files of JSON lines, and ten billion documents in 100,000 files of 20 MB of
which only the listing exists. What a worker holds goes by fragments of files; documents are computed, not listed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from lightning_fms.data import StreamLoader
from lightning_fms.data.sources import Document, JsonLines, Listing, Window
from lightning_fms.data.tokenizer import ByteTokenizer

STREAMS, SEQ_LEN, SPACING = 64, 2048, 200


def uss() -> int:
    """Bytes that are this process's alone."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


class Measured(ByteTokenizer):
    """Bytes, and a note of the memory of whoever encodes them."""

    def __init__(self, note: Path) -> None:
        self._note, self._calls = note, 0

    def encode(self, text: str) -> np.ndarray:
        self._calls += 1
        if self._calls % 1000 == 0:
            self._note.write_text(f"{os.getpid()} {uss()}")
        return super().encode(text)


class Imagined:
    """Documents of 200 bytes in files that do not exist."""

    def __init__(self, files: int, documents: int) -> None:
        sizes = np.full(files, documents * SPACING, dtype=np.int64)
        self.listing = Listing(Path("imagined"), tuple(f"part-{i:06}.jsonl" for i in range(files)), sizes)

    def window(self, file: int, start: int, stop: int) -> Window:
        numbers = np.arange(-(-start // SPACING), -(-stop // SPACING))
        return Window((numbers * SPACING - start).astype(np.uint32), np.full(len(numbers), SPACING, np.uint32))

    def read(self, file: int, start: int, length: int) -> Document:
        return f"{file} {start} ".ljust(length, "x")


def write(folder: Path, files: int) -> None:
    """Files of ten documents, a thousand to a folder."""
    lines = "".join(json.dumps({"text": "x" * 190}) + "\n" for _ in range(10))
    for file in range(files):
        path = folder / f"{file // 1000:03}" / f"part-{file:06}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(lines)


def worker_bytes(source: Imagined | JsonLines, batches: int) -> int:
    """Run a loader with one spawned worker that owns all streams; return the worker's USS."""
    with tempfile.TemporaryDirectory() as name:
        note = Path(name, "note")
        loader = StreamLoader(
            {"a": source}, SEQ_LEN, STREAMS, tokenizer=Measured(note), num_workers=1, multiprocessing_context="spawn"
        )
        for _ in zip(range(batches), loader, strict=False):
            pass
        loader.close()
        process, size = map(int, note.read_text().split())
        assert process != os.getpid()
        return size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--batches", type=int, default=200)
    args = parser.parse_args()
    alone = "import torch; lines = open('/proc/self/smaps_rollup').read().splitlines(); "
    alone += "print(sum(int(line.split()[1]) * 1024 for line in lines if line.startswith('Private_')))"
    torch_only = int(subprocess.run([sys.executable, "-c", alone], check=True, capture_output=True, text=True).stdout)
    print(f"{'a process with torch':<44} {torch_only / 1e6:>7.0f} MB")
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), args.files)
        size = worker_bytes(JsonLines(Path(name)), args.batches)
        print(f"{f'worker, {args.files:,} files':<44} {(size - torch_only) / 1e6:>+7.0f} MB")
    size = worker_bytes(Imagined(100_000, 100_000), args.batches)
    print(f"{'worker, 10,000,000,000 imagined documents':<44} {(size - torch_only) / 1e6:>+7.0f} MB")


if __name__ == "__main__":
    main()
