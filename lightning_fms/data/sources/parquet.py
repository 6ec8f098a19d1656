"""Parquet files. A unit is one large row group or several small ones.

Only the pages of the columns that are asked for are read, and a row group is decoded page by page: one of any size takes
megabytes of memory.
"""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lightning_fms.data.sources.cache import Cache
from lightning_fms.data.sources.columns import READ_BYTES, check_text_column, to_documents
from lightning_fms.data.sources.decoded import Decoded, Layout, group
from lightning_fms.data.sources.files import ListedFile
from lightning_fms.data.sources.listing import Listing
from lightning_fms.data.sources.source import DocumentError, one_line
from lightning_fms.data.sources.units import Broken, Item

_PAGE_BUFFER = 1 << 20
_MAX_BATCH = 8192


class Parquet(Decoded):
    """Parquet files; a document is the text in a column, or a whole row.

    Args:
        listing: Where the files are.
        cache: Where decoded row groups are kept.
        text_key: Name of the column; `None` makes a document (a dictionary) of the whole row.
    """

    def __init__(self, listing: Listing, cache: Cache, text_key: str | None = "text") -> None:
        super().__init__(listing, cache, (text_key,), pickled=text_key is None)
        self.text_key = text_key

    def layout(self, file: int) -> Layout:
        """Read the footer."""
        metadata = self._open(file).metadata
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        sizes = [sum(g.column(c).total_compressed_size for c in range(g.num_columns)) for g in groups]
        rows = np.array([g.num_rows for g in groups], dtype=np.int64)
        self._check_rows(metadata, groups)
        return group(np.array(sizes, dtype=np.int64), rows, int(self.listing.sizes[file]))

    def decode(self, file: int, layout: Layout, unit: int) -> Iterator[Item]:
        """Decode the row groups of a unit."""
        parquet = self._open(file)
        row = layout.rows[unit]
        columns = [self.text_key] if self.text_key is not None else None
        for part in range(layout.parts[unit], layout.parts[unit + 1]):
            metadata = parquet.metadata.row_group(part)
            size = max(1, READ_BYTES * metadata.num_rows // max(metadata.total_byte_size, 1))
            batches = parquet.iter_batches(min(size, _MAX_BATCH), [part], columns, use_threads=False)
            end = row + metadata.num_rows
            while row < end:
                try:
                    batch = next(batches)
                except StopIteration:
                    raise DocumentError(f"ends at row {row}, before row {end}; restore the file") from None
                except (OSError, pa.ArrowException) as error:  # a broken page; the next row group may be whole
                    what = f"rows {row} to {end - 1} cannot be decoded ({one_line(error)}); restore the file"
                    yield Broken(end - row, what)
                    row = end
                else:
                    yield from to_documents(batch, self.text_key, row)
                    row += len(batch)

    def _check_rows(self, metadata: pq.FileMetaData, groups: list[pq.RowGroupMetaData]) -> None:
        """Raise unless a footer agrees with itself: rows that do not exist would be looked for one by one."""
        total = sum(g.num_rows for g in groups)
        columns = [c for g in groups for c in map(g.column, range(g.num_columns)) if c.path_in_schema == self.text_key]
        values = sum(c.num_values for c in columns) if self.text_key is not None else total
        if min((g.num_rows for g in groups), default=0) < 0 or not total == metadata.num_rows == values:
            raise DocumentError(
                f"counts {metadata.num_rows:,} rows, {total:,} in its row groups and {values:,} in its column; restore the file"
            )

    def _open(self, file: int) -> pq.ParquetFile:
        raw = pa.PythonFile(ListedFile(self._files, self.listing, file), mode="r")
        try:
            parquet = pq.ParquetFile(raw, buffer_size=_PAGE_BUFFER, pre_buffer=False)
        except (OSError, pa.ArrowException) as error:
            raise DocumentError(f"is not a readable parquet file ({one_line(error)})") from None
        check_text_column(parquet.schema_arrow, self.text_key)
        return parquet
