"""The protocol that every format implements, and the errors they raise."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from lightning_fms.data.sources.listing import Listing


class DocumentError(ValueError):
    """A document that cannot be read: the message names file, position and what is wrong."""


def one_line(error: Exception) -> str:
    """Return what a library says, which may be several lines, as one."""
    return " ".join(str(error).split())


class Window(NamedTuple):
    """Documents whose address lies in a byte range of one file, in file order.

    starts: uint32, addresses, relative to the range: the first byte of a document. In formats without byte addresses (a row
    group, a compressed file) row `i` of `n` has the address that is the same fraction of the bytes.
    refs: uint32, what else `read` needs: the bytes of a document where it is read by byte, its row where it is read by row.
    """

    starts: np.ndarray
    refs: np.ndarray


Document = str | np.ndarray | Mapping[str, Any] | bytes
"""Text to be tokenized, a 1-D integer array of tokens; or, for `packing="none"`, a whole record (its fields by name) or file."""


@runtime_checkable
class Source(Protocol):
    """A format: where documents start, and what they say.

    A document belongs to the byte range that holds its address, so any cut of a file into ranges gives each document to
    exactly one of them. Sources hold no position: the same call gives the same answer in every process.

    Optional attributes: `holds_tokens = True` if all documents are tokens (rows are then made in larger portions); `cut`, a
    dictionary of plain values that say by which options documents are found (a run does not go on with others); `text_key`,
    which field of a record they are.
    """

    listing: Listing

    def window(self, file: int, start: int, stop: int) -> Window:
        """Find the documents that start in bytes `[start, stop)` of a file."""
        ...

    def read(self, file: int, start: int, ref: int, /) -> Document:
        """Read the document at address `start` of a file, with the `ref` that `window` gave.

        Raises:
            DocumentError: If it cannot be read.
        """
        ...
