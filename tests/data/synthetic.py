"""A source of any size that holds nothing: its documents are computed, and what is asked of it is counted."""

from pathlib import Path

import numpy as np

from lightning_fms.data.sources import Listing, Window


class Synthetic:
    """Files of documents of `spacing` bytes each; document `n` of the source has `lengths[n % len(lengths)]` tokens.

    windows, reads, searched: how many windows were asked for, documents read, and documents in the windows.
    """

    def __init__(self, files: int, documents: int, lengths: np.ndarray, spacing: int = 200, token: int = 1) -> None:
        self.documents, self.spacing = documents, spacing
        self._lengths = lengths.astype(np.int64)
        self._line = np.full(int(lengths.max()), token, dtype=np.uint8)
        sizes = np.full(files, documents * spacing, dtype=np.int64)
        self.listing = Listing(Path("synthetic"), tuple(f"{i:06}" for i in range(files)), sizes)
        self.windows = self.reads = self.searched = 0

    def window(self, file: int, start: int, stop: int) -> Window:
        numbers = np.arange(-(-start // self.spacing), -(-stop // self.spacing))
        self.windows += 1
        self.searched += len(numbers)
        return Window((numbers * self.spacing - start).astype(np.uint32), numbers.astype(np.uint32))

    def read(self, file: int, start: int, number: int) -> np.ndarray:
        self.reads += 1
        return self._line[: self._lengths[(file * self.documents + number) % len(self._lengths)]]
