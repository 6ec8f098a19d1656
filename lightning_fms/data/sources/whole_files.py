"""Any file as one document of bytes: images, audio, what only the caller's own reader can make sense of."""

import numpy as np

from lightning_fms.data.sources.files import FileReader
from lightning_fms.data.sources.listing import Listing, Paths, list_files
from lightning_fms.data.sources.remote import Location
from lightning_fms.data.sources.source import Document, Window


class FileBytes(bytes):
    """The bytes of a file; `path` says which one it is: a folder's name is often the label."""

    path: Location


class WholeFiles:
    """Files that are one document each; an empty file is none.

    Args:
        paths: File, folder, glob or list of them, or their listing.
    """

    listing: Listing

    def __init__(self, paths: Paths | Listing) -> None:
        listing = paths if isinstance(paths, Listing) else list_files(paths)
        self.listing = listing.unsplittable()
        self._files = FileReader(self.listing)

    def window(self, file: int, start: int, stop: int) -> Window:
        """Find the document, whose address is byte 0."""
        found = np.zeros(1 if start <= 0 < stop else 0, dtype=np.uint32)
        return Window(found, found)

    def read(self, file: int, start: int, ref: int) -> Document:
        """Read the file."""
        document = FileBytes(self._files.read(file, 0, int(self.listing.sizes[file])))
        document.path = self.listing.path(file)
        return document
