"""Documents from Arrow's columns: what parquet and Arrow files have in common."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.types as types

from lightning_fms.data.sources.source import Document, DocumentError, one_line
from lightning_fms.data.sources.units import Item

_TEXT = (types.is_string, types.is_large_string, types.is_string_view, types.is_null)  # the last: nothing but nulls

READ_BYTES = 8 << 20
"""About how much is decoded at a time."""


def check_text_column(schema: pa.Schema, text_key: str | None) -> None:
    """Raise unless a column of text has the name.

    Raises:
        DocumentError: With the columns and types that there are.
    """
    if text_key is None:
        return
    columns = ", ".join(f"{field.name!r} ({field.type})" for field in schema) or "none"
    if schema.get_field_index(text_key) < 0:
        raise DocumentError(
            f"has no column {text_key!r} (or has it twice); it has {columns}: set text_key to one of them"
        )
    kind = schema.field(text_key).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not any(is_text(kind) for is_text in _TEXT):
        raise DocumentError(
            f"has a column {text_key!r} of type {kind}, not text; it has {columns}: set text_key to text"
        )


def to_documents(batch: pa.RecordBatch, text_key: str | None, first_row: int) -> Iterator[Item]:
    """Yield the documents of a batch whose first row has a number in its file; whole records if `text_key` is `None`."""
    values = batch.column(text_key) if text_key is not None else batch
    try:
        documents = _checked(values)
    except (pa.ArrowException, ValueError, OverflowError):  # in some row
        documents = [_one(values, row, first_row) for row in range(len(values))]
    for row, document in enumerate(documents):
        if document is None:
            yield DocumentError(f"row {first_row + row} has null in {text_key!r}; it must be text")
        else:
            yield document


def _checked(values: pa.Array | pa.RecordBatch) -> list[Any]:
    """Return Python objects, once it is certain that offsets and indices stay within the buffers: damaged ones do not."""
    values.validate(full=True)
    return values.to_pylist()


def _one(values: pa.Array | pa.RecordBatch, row: int, first_row: int) -> Document | DocumentError | None:
    try:
        return _checked(values.slice(row, 1))[0]
    except (pa.ArrowException, ValueError, OverflowError) as error:  # UnicodeDecodeError is a ValueError
        return DocumentError(f"row {first_row + row} cannot be read ({one_line(error)})")
