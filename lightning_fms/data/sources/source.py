"""The protocol that every format implements, and the errors they raise."""

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from lightning_fms.data.sources.listing import Listing


class DocumentError(ValueError):
    """A document that cannot be read: the message names file, position and what is wrong."""


class Window(NamedTuple):
    """Documents whose first byte lies in a byte range of one fragment, in file order.

    starts: uint32, first bytes, relative to the range. lengths: uint32, bytes of each document.
    """

    starts: np.ndarray
    lengths: np.ndarray


Document = str | np.ndarray
"""Text to be tokenized, or a 1-D integer array of tokens."""


@runtime_checkable
class Source(Protocol):
    """A format: where documents start, and what they say.

    A document belongs to the byte range that holds its first byte, so any cut of a file into ranges gives each document to
    exactly one of them. Sources hold no position: the same call gives the same answer in every process.
    """

    listing: Listing

    def window(self, file: int, start: int, stop: int) -> Window:
        """Find the documents that start in bytes `[start, stop)` of a file."""
        ...

    def read(self, file: int, start: int, length: int) -> Document:
        """Read the document of `length` bytes that starts at byte `start` of a file.

        Raises:
            DocumentError: If it cannot be read.
        """
        ...
