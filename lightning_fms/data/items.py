"""Rows that are no cut of a line of tokens: one item a row, made by the user's `Reader`.

Images, prompts with answers of which only the answer is a target, protein structures: what a row holds is the reader's to
say, and everything else (order, mixing, rescaling, exactly once) stays the same. A reader is a function of one document, so a
row can be made again from its position alone; randomness, if there is any, has to come from the item itself.

Legend: R rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from traceback import extract_tb
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from lightning_fms.data.draws import Draws
from lightning_fms.data.packing import IGNORE, Batch
from lightning_fms.data.sources import DocumentError


class Reader(Protocol):
    """Makes a row of an item; any function does."""

    def __call__(self, item: Any, /) -> Mapping[str, Any] | None:
        """Return the fields of a row.

        Args:
            item: What the source holds: the record of a JSON line or of a table row (a dict), the bytes of another file, with its
                `path`; text of text files, tokens (an array) of token files.

        Returns:
            Arrays, tensors or numbers by name, of equal shapes and dtypes for all items (pad to a fixed length); `None` leaves the
            item out. In a field named `labels`, -100 marks what is no target.

        Raises:
            Exception: If the item is of no use; the loader's `on_error` says what happens then.
        """
        ...


@dataclass(frozen=True)
class ItemRows:
    """Rows of items.

    Args:
        fields: `[R, ...]` each, by name; empty for rows that hold no item.
        held: bool `[R]`, whether a row holds an item; false behind the end of the data only.
    """

    fields: dict[str, np.ndarray]
    held: np.ndarray

    def __len__(self) -> int:
        return len(self.held)

    def take(self, rows: np.ndarray) -> "ItemRows":
        """Return the rows at the given indices, in that order."""
        return ItemRows({name: field[rows] for name, field in self.fields.items()}, self.held[rows])

    def between(self, low: int, high: int) -> "ItemRows":
        """Return rows `low` to `high - 1`; nothing is copied."""
        return ItemRows({name: field[low:high] for name, field in self.fields.items()}, self.held[low:high])

    def concatenate(self, others: "list[ItemRows]") -> "ItemRows":
        """Put rows of the same fields behind these."""
        parts = [self, *others]
        fields = next((part.fields for part in parts if part.fields), {})
        return ItemRows(
            {
                name: np.concatenate([_field(part, name, like, len(fields)) for part in parts])
                for name, like in fields.items()
            },
            np.concatenate([part.held for part in parts]),
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """Return what a process has to send."""
        return {"held": self.held, **{f"field.{name}": field for name, field in self.fields.items()}}


def _field(part: ItemRows, name: str, like: np.ndarray, fields: int) -> np.ndarray:
    if not part.fields:
        return np.zeros((len(part), *like.shape[1:]), like.dtype)
    if name not in part.fields or len(part.fields) != fields:
        raise DocumentError(
            f"the reader returned items with {sorted(part.fields)} and with {name!r}; every item needs the same fields"
        )
    field = part.fields[name]
    if field.shape[1:] != like.shape[1:] or field.dtype != like.dtype:
        raise DocumentError(
            f"the reader returned {name!r} as {field.dtype} {list(field.shape[1:])} and as {like.dtype} "
            f"{list(like.shape[1:])}; rows of a batch need one shape: pad or crop in the reader"
        )
    return field


class ItemBuffer:
    """Rows under way, put in any order.

    Args:
        count: R.
    """

    def __init__(self, count: int) -> None:
        self._rows: list[Any] = [None] * count

    def put(self, place: int, row: ItemRows) -> None:
        """Put one row at a place."""
        self._rows[place] = row

    def rows(self) -> ItemRows:
        """Return all rows; each place must have been put."""
        first, *others = self._rows
        return first.concatenate(others)


@dataclass(frozen=True)
class Items:
    """One item a row.

    Args:
        reader: Makes the row.
    """

    reader: Reader
    name: ClassVar[str] = "none"
    full: ClassVar[bool] = False
    row_tokens: ClassVar[int] = 1 << 16
    """As if: a row may be an image."""

    def prepare(self, item: Any) -> dict[str, np.ndarray] | None:
        """Return the fields of an item's row as arrays (without the row dimension).

        Raises:
            DocumentError: If the reader cannot make any.
        """
        try:
            fields = self.reader(item)
        except Exception as error:  # whatever a decoder makes of a broken image
            where = extract_tb(error.__traceback__)[-1]
            raise DocumentError(
                f"the reader fails at {where.filename}:{where.lineno} ({type(error).__name__}: {error})"
            ) from error
        if fields is None:
            return None
        if not isinstance(fields, Mapping) or not fields:
            raise DocumentError(
                f"the reader returned {type(fields).__name__}; it must return a dict of arrays, or None"
            )
        return {name: _array(name, value) for name, value in fields.items()}

    def next_row(self, draws: Draws) -> ItemRows:
        """Use up one item."""
        oldest = draws.oldest()
        if oldest is None:
            return ItemRows({}, np.zeros(1, dtype=bool))
        fields = {name: field[None] for name, field in oldest.content.items()}
        draws.use(oldest, 1)
        return ItemRows(fields, np.ones(1, dtype=bool))

    def next_rows(self, draws: Draws, buffer: ItemBuffer, places: np.ndarray) -> int:
        """Put no rows: each needs a draw."""
        return 0

    def buffer(self, count: int, memory: np.ndarray | None = None) -> ItemBuffer:
        """Return a place to put `count` rows; their memory is the reader's."""
        return ItemBuffer(count)

    def merge(self, parts: list[ItemRows], place: np.ndarray) -> ItemRows:
        """Return row `place[i]` of all parts, one after the other, as row `i`."""
        return parts[0].concatenate(parts[1:]).take(place)

    def rows(self, **arrays: np.ndarray) -> ItemRows:
        """Return rows from their arrays; none, if there are no arrays."""
        held = arrays.pop("held", np.empty(0, dtype=bool))
        return ItemRows({name.removeprefix("field."): array for name, array in arrays.items()}, held)

    def targets(self, rows: ItemRows) -> int:
        """Return how many labels are not -100; without a field of that name, how many rows there are."""
        labels = rows.fields.get("labels")
        return int(rows.held.sum()) if labels is None else int((labels[rows.held] != IGNORE).sum())

    def valid(self, rows: ItemRows) -> np.ndarray:
        """Return which rows hold an item (bool `[R]`)."""
        return rows.held

    def collate(self, rows: ItemRows, size: int) -> Batch:
        """Build the tensors of a micro-batch; missing rows are zeros, their labels -100, their `row_valid` false."""
        missing = size - len(rows)
        batch = {}
        for name, field in {**rows.fields, "row_valid": rows.held}.items():
            fill = IGNORE if name == "labels" else 0
            batch[name] = torch.from_numpy(
                np.concatenate((field, np.full((missing, *field.shape[1:]), fill, field.dtype)))
            )
        if "labels" in rows.fields:
            batch["labels"][~batch["row_valid"]] = IGNORE
        return batch


def _array(name: str, value: Any) -> np.ndarray:
    if name == "row_valid" or not isinstance(name, str):
        raise DocumentError(f"the reader returned a field {name!r}; use text for names, and another than 'row_valid'")
    try:
        array = np.asarray(value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value)
    except (ValueError, TypeError) as error:  # lists of unequal lengths; bfloat16
        raise DocumentError(f"the reader returned {name!r}, which is no array ({error})") from None
    if array.dtype.kind not in "biuf":
        raise DocumentError(f"the reader returned {name!r} as {array.dtype}; a batch holds numbers only")
    if name == "labels" and array.dtype.kind in "bu":
        raise DocumentError(f"the reader returned 'labels' as {array.dtype}, which has no {IGNORE}; make them int64")
    return array.astype(array.dtype.newbyteorder("="), copy=False)
