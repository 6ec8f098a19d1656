"""Arrow IPC: files and streams, also Feather 2 and what `datasets.save_to_disk` writes.

They are decoded into the cache although an uncompressed batch could be read in place: a stream reads documents in a permuted
order from batches that may be compressed, hold dictionaries, or be gigabytes large, and a map of files that belong to
others would end the process when one is cut. Decoding reads one record batch into memory at a time.
"""

import json
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from lightning_fms.data.sources.arrow_messages import Messages, find_messages
from lightning_fms.data.sources.cache import Cache
from lightning_fms.data.sources.columns import check_text_column, to_documents
from lightning_fms.data.sources.decoded import Decoded, Layout, group
from lightning_fms.data.sources.files import FileReader
from lightning_fms.data.sources.listing import Listing
from lightning_fms.data.sources.source import DocumentError, one_line
from lightning_fms.data.sources.units import Broken, Item

_SLICE = 1024  # rows made Python objects at a time


class Arrow(Decoded):
    """Arrow IPC files or streams; a document is the text in a column, or a whole row.

    Args:
        listing: Where the files are.
        cache: Where decoded record batches are kept.
        text_key: Name of the column; `None` makes a document (a dictionary) of the whole row.
    """

    def __init__(self, listing: Listing, cache: Cache, text_key: str | None = "text") -> None:
        super().__init__(listing, cache, (text_key,), pickled=text_key is None)
        self.text_key = text_key

    def layout(self, file: int) -> Layout:
        """Survey the messages of the file."""
        messages = self._messages(file)
        check_text_column(self._reader(file, messages.others[:1]).schema, self.text_key)
        sizes = np.array([end - start for start, end in messages.batches], dtype=np.int64)
        return group(sizes, np.array(messages.rows, dtype=np.int64), int(self.listing.sizes[file]))

    def decode(self, file: int, layout: Layout, unit: int) -> Iterator[Item]:
        """Decode the record batches of a unit, behind the schema and the dictionaries that come before them."""
        messages = self._messages(file)
        batches = messages.batches[layout.parts[unit] : layout.parts[unit + 1]]
        if not batches:
            return
        before = [span for span in messages.others if span[0] < batches[0][0]]
        reader = self._reader(file, [*before, (batches[0][0], batches[-1][1])])
        row, end = layout.rows[unit], layout.rows[unit + 1]
        while row < end:
            try:
                batch = reader.read_next_batch()
            except StopIteration:
                raise DocumentError(f"ends at row {row}, before row {end}; restore the file") from None
            except (OSError, pa.ArrowException) as error:
                yield Broken(
                    end - row, f"rows {row} to {end - 1} cannot be decoded ({one_line(error)}); restore the file"
                )
                return
            for start in range(0, len(batch), _SLICE):
                yield from to_documents(batch.slice(start, _SLICE), self.text_key, row + start)
            row += len(batch)

    def _messages(self, file: int) -> Messages:
        return find_messages(lambda start, length: self._files.read(file, start, length), int(self.listing.sizes[file]))

    def _reader(self, file: int, spans: list[tuple[int, int]]) -> pa.RecordBatchStreamReader:
        raw = pa.PythonFile(_Spans(self._files, file, spans), mode="r")
        try:
            return pa.ipc.open_stream(raw, options=pa.ipc.IpcReadOptions(use_threads=False))
        except (OSError, pa.ArrowException) as error:
            raise DocumentError(f"has no readable Arrow schema ({one_line(error)})") from None


class _Spans:
    """Parts of a file, one after the other, as a stream."""

    closed = False

    def __init__(self, files: FileReader, file: int, spans: list[tuple[int, int]]) -> None:
        self._files, self._file, self._spans = files, file, list(spans)

    def read(self, size: int) -> bytes:
        parts = []
        while self._spans and size > 0:
            start, end = self._spans.pop(0)
            length = min(size, end - start)
            parts.append(self._files.read(self._file, start, length))
            size -= length
            if start + length < end:
                self._spans.insert(0, (start + length, end))
        return b"".join(parts)

    def close(self) -> None:
        self.closed = True


def saved_dataset(listing: Listing) -> Listing:
    """Return what a folder that `datasets.save_to_disk` wrote holds as data, in its order; another listing as it is.

    Raises:
        ValueError: If the folder holds several splits, or an order that only `datasets` can follow.
    """
    if "dataset_dict.json" in listing.names:
        splits = _read_json(listing, "dataset_dict.json")["splits"]
        raise ValueError(
            f"{listing.root}: holds the splits {splits}; name the folder of one, such as {listing.root / splits[0]}"
        )
    if not {"state.json", "dataset_info.json"} <= set(listing.names):
        return listing
    state = _read_json(listing, "state.json")
    if state.get("_indices_data_files"):
        raise ValueError(f"{listing.root}: its rows are chosen by an index; save dataset.flatten_indices() instead")
    names = [file["filename"] for file in state["_data_files"]]
    files = listing.existing(names)
    if missing := sorted(set(names) - set(files.names)):
        raise ValueError(f"{listing.root / missing[0]}: the file is named in state.json but missing; restore it")
    return files


def _read_json(listing: Listing, name: str) -> dict:
    file = listing.names.index(name)
    return json.loads(FileReader(listing).read(file, 0, int(listing.sizes[file])))
