"""A logical stream: choose a source, take its next document, tokenize, pack, emit a row.

The whole pipeline lives inside the stream, and the stream's position is one row of integers (`cursor`). Whoever holds that
row makes the same next row, on any rank, in any worker, in any run that goes on from here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightning_fms.data.cursor import Columns
from lightning_fms.data.draws import Draws
from lightning_fms.data.items import Items
from lightning_fms.data.left_out import LeftOut
from lightning_fms.data.mixture import History, phases, segment
from lightning_fms.data.packing import Packing
from lightning_fms.data.segments import SourceOrder
from lightning_fms.data.sources import Document, DocumentError, Source
from lightning_fms.data.tokenizer import Tokenizer


@dataclass
class Recipe:
    """Everything that the streams of a run have in common.

    Args:
        sources: Sources by name, in the order of `columns`. A source that the run used to have is absent.
        columns: Columns of the state rows.
        tokenizer: Makes tokens of text; token documents pass by it.
        history: Weights of the sources over the rows.
        packing: Makes rows of documents.
        seed: Seed of all orders.
        streams: S.
        shuffle_window: Documents permuted together, from a stream's next epoch on.
        eos: Whether a document ends with the tokenizer's EOS (one that ends with it already is left alone).
        bos: Whether a document begins with BOS.
        max_document_tokens: Longer documents are cut there; `None` never cuts.
        max_epochs: Epochs after which a source is no longer drawn, by name; a source without an entry repeats for ever.
        left_out: What happens to a document that cannot be read.
        one_pass: Whether rows are empty once every source has reached its `max_epochs`; otherwise that is an error.
    """

    sources: dict[str, Source]
    columns: Columns
    tokenizer: Tokenizer
    history: History
    packing: Packing
    seed: int
    streams: int
    shuffle_window: int = 4096
    eos: bool = True
    bos: bool = False
    max_document_tokens: int | None = None
    max_epochs: dict[str, int] = field(default_factory=dict)
    left_out: LeftOut = field(default_factory=LeftOut)
    one_pass: bool = False

    def __post_init__(self) -> None:
        self.orders = {
            name: SourceOrder(source, name, self.seed, self.streams) for name, source in self.sources.items()
        }
        self._phases: dict[tuple[int, ...], np.ndarray] = {}

    @property
    def holds_tokens(self) -> bool:
        """Whether every source holds tokens, so that rows cost no tokenizing."""
        return all(getattr(source, "holds_tokens", False) for source in self.sources.values())

    def weights(self, row: int) -> np.ndarray:
        """Return the shares in force at a row, one a column source (float64, sum 1)."""
        weights = self.history[segment(self.history, row)][1]
        return np.array([weights.get(name, 0.0) for name in self.columns.sources])

    def phase(self, weights: np.ndarray, stream: int) -> np.ndarray:
        """Return the deficits, in documents, that a stream starts from under new weights (one a column source)."""
        key = tuple(weights.tolist())
        if key not in self._phases:
            self._phases[key] = phases(weights, self.streams)
        return self._phases[key][stream]

    def prepare(self, document: Document) -> tuple[Any, int, int]:
        """Return what the packing needs of a document, its length in tokens (or 1 item; 0 if empty), and tokens cut off."""
        if isinstance(self.packing, Items):
            item = self.packing.prepare(document)
            return item, int(item is not None), 0
        if isinstance(document, (Mapping, bytes)):
            raise DocumentError(
                f"a {type(document).__name__} is neither text nor tokens; set text_key, or packing='none'"
            )
        tokens = self.encode(document)
        kept = self.mark(tokens[: self.max_document_tokens])
        return kept, len(kept), max(0, len(tokens) - (self.max_document_tokens or len(tokens)))

    def encode(self, document: str | np.ndarray) -> np.ndarray:
        """Return the tokens of a document (1-D integers), without special ones.

        Raises:
            DocumentError: If token ids are not the tokenizer's.
        """
        if isinstance(document, str):
            return self.tokenizer.encode(document)
        if len(document) and not _within(document, self.tokenizer.vocab_size):
            raise DocumentError(
                f"token ids from {document.min()} to {document.max()} are not all in [0, {self.tokenizer.vocab_size}), the "
                "vocabulary of the tokenizer; name the tokenizer that wrote them"
            )
        return document

    def mark(self, tokens: np.ndarray) -> np.ndarray:
        """Return a document with BOS and EOS where they belong (int32); an empty one stays empty."""
        if len(tokens) == 0:
            return np.empty(0, dtype=np.int32)
        bos, eos = self.tokenizer.bos_id, self.tokenizer.eos_id
        head = [bos] if self.bos and bos is not None and tokens[0] != bos else []
        tail = [eos] if self.eos and eos is not None and tokens[-1] != eos else []
        if not head and not tail:
            return np.ascontiguousarray(tokens, dtype=np.int32)
        return np.concatenate((head, tokens, tail), dtype=np.int32, casting="unsafe")


def _within(ids: np.ndarray, bound: int) -> bool:
    """Whether all ids are in `[0, bound)`; read once: a negative one, seen as unsigned, is larger than any vocabulary."""
    if ids.dtype.kind == "i" and bound <= np.iinfo(ids.dtype).max:
        ids = ids.view(ids.dtype.str.replace("i", "u"))
    if ids.dtype.kind == "i":  # a vocabulary beyond what the dtype can say
        return bool(ids.min() >= 0)
    return bool(ids.max() < bound)


class Stream:
    """One logical stream at its current position.

    Args:
        index: The stream's number.
        recipe: What it shares with the others.
        row: int64 `[K]`, its state row; the stream works on a copy.
    """

    def __init__(self, index: int, recipe: Recipe, row: np.ndarray) -> None:
        self.index, self.recipe, self.row = index, recipe, row.copy()
        self.draws = Draws(index, recipe, self.row)

    def next_row(self, number: int) -> Any:
        """Emit row `number` of the run, which must be this stream's next one.

        Raises:
            DocumentError: If a document cannot be read.
        """
        self.draws.begin_row(number)
        row = self.recipe.packing.next_row(self.draws)
        self.draws.end_row()
        return row

    def make_rows(self, numbers: np.ndarray, places: np.ndarray, buffer: Any, states: np.ndarray) -> None:
        """Emit several of this stream's rows.

        Args:
            numbers: int64 `[n]`, their numbers, ascending.
            places: int64 `[n]`, where each goes.
            buffer: Gets the rows; see `Packing.buffer`.
            states: int64 `[R, K]`, gets the state row behind each.
        """
        packing, draws, done = self.recipe.packing, self.draws, 0
        while done < len(numbers):
            number = int(numbers[done])
            draws.begin_row(number)
            alike = places[done : done + draws.rows_alike(number)]
            if count := packing.next_rows(draws, buffer, alike):
                states[alike[:count]] = draws.end_rows(count, packing.row_tokens)
            else:
                buffer.put(places[done], packing.next_row(draws))
                draws.end_row()
                states[places[done]], count = self.row, 1
            done += count


def produce(
    streams: Sequence[Stream], numbers: np.ndarray, which: np.ndarray, memory: np.ndarray | None = None
) -> tuple[Any, np.ndarray]:
    """Emit rows `numbers` from `streams[which]`; return them with each one's state row afterwards (int64 `[R, K]`).

    Tokens go into `memory` (int32 `[>= R, T + 1]`) if that is given and the packing makes tokens.
    """
    recipe = streams[0].recipe
    buffer = recipe.packing.buffer(len(numbers), memory)
    states = np.empty((len(numbers), recipe.columns.width), dtype=np.int64)
    order = np.argsort(which, kind="stable")
    for places in np.split(order, np.flatnonzero(np.diff(which[order])) + 1):
        streams[which[places[0]]].make_rows(numbers[places], places, buffer, states)
    return buffer.rows(), states
