"""From a stream's line of tokens to the tensors of a batch.

A stream concatenates its documents into one endless line and cuts it every `seq_len` tokens. A row carries one token more
than its inputs: `labels[t]` is the token after `input_ids[t]`, so the last label is the first input of the stream's next
row, and every token is an input once and a target once. Only the tokens and the places where documents start travel
between processes; everything else follows from them here.

Legend: R rows, T seq_len.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

IGNORE = -100
"""Label of a position that is no target: the `ignore_index` that `cross_entropy` has by default."""

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Rows:
    """Packed rows of one or more streams.

    Args:
        tokens: int32 `[R, T + 1]`.
        starts: int32, the places in `[0, T]` where a document starts, row after row.
        counts: int32 `[R]`, how many of `starts` belong to each row.
    """

    tokens: np.ndarray
    starts: np.ndarray
    counts: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, rows: np.ndarray) -> "Rows":
        """Return the rows at the given indices, in that order."""
        ends = np.cumsum(self.counts)
        pieces = [self.starts[ends[r] - self.counts[r] : ends[r]] for r in rows]
        starts = np.concatenate(pieces) if pieces else self.starts[:0]
        return Rows(self.tokens[rows], starts, self.counts[rows])

    @staticmethod
    def concatenate(parts: "list[Rows]") -> "Rows":
        """Stack rows of equal length."""
        if len(parts) == 1:
            return parts[0]
        return Rows(*(np.concatenate([getattr(p, name) for p in parts]) for name in ("tokens", "starts", "counts")))

    def labels_count(self, mask_first: bool) -> int:
        """Return how many positions are targets."""
        total = self.tokens.shape[0] * (self.tokens.shape[1] - 1)
        return total - int(np.count_nonzero(self.starts)) if mask_first else total


def collate(rows: Rows, size: int, mask_first: bool = False) -> Batch:
    """Build the tensors of a micro-batch.

    Args:
        rows: At most `size` packed rows.
        size: Rows of the micro-batch; missing ones are filled with zeros, all labels ignored.
        mask_first: Whether the first token of a document is no target.

    Returns:
        `input_ids`, `labels`, `position_ids`, `document_ids`: int64 `[size, T]`; `row_valid`: bool `[size]`, false for rows
        that are no part of the step.
        `position_ids` count from the document's first token in the row, `document_ids` number the documents of a row from 0.
    """
    count, seq_len = rows.tokens.shape[0], rows.tokens.shape[1] - 1
    tokens = np.zeros((size, seq_len + 1), dtype=np.int64)
    tokens[:count] = rows.tokens
    row_of_start = np.repeat(np.arange(count), rows.counts)
    first = np.zeros((size, seq_len + 1), dtype=bool)
    first[row_of_start, rows.starts] = True
    labels = tokens[:, 1:].copy()
    if mask_first:
        labels[first[:, 1:]] = IGNORE
    labels[count:] = IGNORE
    first[:, 0] = True
    place = np.arange(seq_len)
    document_start = np.maximum.accumulate(np.where(first[:, :-1], place, 0), axis=1)
    return {
        "input_ids": torch.from_numpy(tokens[:, :-1].copy()),
        "labels": torch.from_numpy(labels),
        "position_ids": torch.from_numpy(place - document_start),
        "document_ids": torch.from_numpy(np.cumsum(first[:, :-1], axis=1) - 1),
        "row_valid": torch.from_numpy(np.arange(size) < count),
    }
