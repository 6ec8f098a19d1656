"""A logical stream: choose a source, take its next document, tokenize, pack, emit a row.

The whole pipeline lives inside the stream, and the stream's position is one row of integers (`cursor`). Whoever holds that
row makes the same next row, on any rank, in any worker, in any run that goes on from here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lightning_fms.data.cursor import NO_FLIGHT, Columns
from lightning_fms.data.mixture import History, neediest, phases, segment
from lightning_fms.data.packing import Rows
from lightning_fms.data.segments import Segment, SourceOrder
from lightning_fms.data.sources import DocumentError, Source
from lightning_fms.data.tokenizer import Tokenizer

_FRUITLESS_EPOCHS = 1000


@dataclass
class Recipe:
    """Everything that the streams of a run have in common.

    Args:
        sources: Sources by name, in the order of `columns`. A source that the run used to have is absent.
        columns: Columns of the state rows.
        tokenizer: Makes tokens of text; token documents pass by it.
        history: Weights of the sources over the rows.
        seq_len: T, tokens of a row.
        seed: Seed of all orders.
        streams: S.
        shuffle_window: Documents permuted together, from a stream's next epoch on.
        eos: Whether a document ends with the tokenizer's EOS (one that ends with it already is left alone).
        bos: Whether a document begins with BOS.
        max_document_tokens: Longer documents are cut there; `None` never cuts.
        max_epochs: Epochs after which a source is no longer drawn, by name; a source without an entry repeats for ever.
    """

    sources: dict[str, Source]
    columns: Columns
    tokenizer: Tokenizer
    history: History
    seq_len: int
    seed: int
    streams: int
    shuffle_window: int = 4096
    eos: bool = True
    bos: bool = False
    max_document_tokens: int | None = None
    max_epochs: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.orders = {
            name: SourceOrder(source, name, self.seed, self.streams) for name, source in self.sources.items()
        }
        self._phases: dict[tuple[int, ...], np.ndarray] = {}

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

    def encode(self, document: str | np.ndarray) -> np.ndarray:
        """Return the tokens of a document, special ones included (int32); empty for an empty document."""
        tokens = self.tokenizer.encode(document) if isinstance(document, str) else document
        if len(tokens) == 0:
            return np.empty(0, dtype=np.int32)
        if not isinstance(document, str) and not 0 <= tokens.min() <= tokens.max() < self.tokenizer.vocab_size:
            raise DocumentError(
                f"token ids from {tokens.min()} to {tokens.max()} are not all in [0, {self.tokenizer.vocab_size}), the "
                "vocabulary of the tokenizer; name the tokenizer that wrote them"
            )
        tokens = np.asarray(tokens)[: self.max_document_tokens]
        bos, eos = self.tokenizer.bos_id, self.tokenizer.eos_id
        head = [bos] if self.bos and bos is not None and tokens[0] != bos else []
        tail = [eos] if self.eos and eos is not None and tokens[-1] != eos else []
        return np.concatenate((head, tokens, tail), dtype=np.int32, casting="unsafe")


class Stream:
    """One logical stream at its current position.

    Args:
        index: The stream's number.
        recipe: What it shares with the others.
        row: int64 `[K]`, its state row; the stream works on a copy.
    """

    def __init__(self, index: int, recipe: Recipe, row: np.ndarray) -> None:
        self.index, self.recipe = index, recipe
        self.row = row.copy()
        self._columns = recipe.columns
        self._segments: dict[int, tuple[int, Segment]] = {}
        self._weights = np.empty(0)
        self._tokens = np.empty(0, dtype=np.int32)
        self._take_off()

    def next_row(self, number: int) -> Rows:
        """Emit row `number` of the run, which must be this stream's next one.

        Raises:
            DocumentError: If a document cannot be read.
        """
        self._follow_mixture(number)
        seq_len = self.recipe.seq_len
        out = np.empty(seq_len + 1, dtype=np.int32)
        starts: list[int] = []
        filled = 0
        while filled < seq_len:
            offset = self._ensure_flight()
            if offset == 0:
                starts.append(filled)
            taken = min(seq_len - filled, len(self._tokens) - offset)
            out[filled : filled + taken] = self._tokens[offset : offset + taken]
            self._advance(taken)
            filled += taken
        offset = self._ensure_flight()
        if offset == 0:
            starts.append(seq_len)
        out[seq_len] = self._tokens[offset]
        return Rows(out[None], np.array(starts, dtype=np.int32), np.array([len(starts)], dtype=np.int32))

    def _follow_mixture(self, number: int) -> None:
        """Start counting anew where the weights have changed since this stream's previous row."""
        recipe, before = self.recipe, number - self.recipe.streams
        if before >= 0 and segment(recipe.history, before) != segment(recipe.history, number):
            self.row[self._columns.since] = 0
        self._weights = recipe.weights(number)

    def _ensure_flight(self) -> int:
        """Make sure that a document with tokens left is in flight; return the offset of its next token."""
        if self.row[self._columns.flight_source] == NO_FLIGHT:
            self._draw()
        return int(self.row[self._columns.flight_offset])

    def _advance(self, taken: int) -> None:
        columns, source = self._columns, int(self.row[self._columns.flight_source])
        self.row[columns.tokens][source] += taken
        self.row[columns.flight_offset] += taken
        if self.row[columns.flight_offset] == len(self._tokens):
            self.row[columns.flight] = NO_FLIGHT

    def _draw(self) -> None:
        """Choose a source and put its next document that has tokens in flight."""
        columns = self._columns
        since = self.row[columns.since]
        while True:
            weights = self._available()
            fresh = not since.any()
            drawn = -self.recipe.phase(weights, self.index) if fresh else since
            source = neediest(weights, drawn)
            if self._next_document(source):
                break
            since[:] = 0  # the source has run out: the others share what follows
        if fresh:
            since[:] = np.rint(drawn * len(self._tokens))
            since[source] -= since.sum()  # rounding must not make the counts all 0, which says that nothing was drawn
        since[source] += len(self._tokens)  # when drawn: the rest of a document from before a change does not count

    def _available(self) -> np.ndarray:
        """Return the shares of the sources that have not reached their `max_epochs` (sum 1)."""
        if not self.recipe.max_epochs:
            return self._weights
        weights = self._weights.copy()
        for name, most in self.recipe.max_epochs.items():
            source = self._columns.sources.index(name)
            if self.row[self._columns.epoch][source] >= most:
                weights[source] = 0.0
        total = weights.sum()
        if total <= 0:
            raise ValueError(
                f"every source with a weight has reached its max_epochs={self.recipe.max_epochs}; "
                "leave one source without a limit, or train for fewer steps"
            )
        return weights / total

    def _next_document(self, source: int) -> bool:
        """Put the next document of a source in flight; `False` if its `max_epochs` end first."""
        columns, name = self._columns, self._columns.sources[source]
        most = self.recipe.max_epochs.get(name)
        epochs, positions = self.row[columns.epoch], self.row[columns.position]
        first_epoch = epochs[source]
        while most is None or epochs[source] < most:
            if epochs[source] - first_epoch > _FRUITLESS_EPOCHS + 64 * self.recipe.streams:
                raise ValueError(f"source {name!r}: no document with a token in {epochs[source] - first_epoch} epochs")
            window = int(self.row[columns.window][source])
            segment_ = self._segment(source, int(epochs[source]), window)
            found = segment_.find(int(positions[source]))
            if found is None:
                epochs[source] += 1
                positions[source] = 0
                self.row[columns.window][source] = self.recipe.shuffle_window
                continue
            position, file, start, ref = found
            positions[source] = position + 1
            self._tokens = self._encode(name, segment_, file, start, ref)
            if len(self._tokens):
                self.row[columns.flight] = (source, epochs[source], position, window, 0)
                return True
        return False

    def _take_off(self) -> None:
        """Read the document in flight again, after its row came from elsewhere."""
        source, epoch, position, window, _ = (int(value) for value in self.row[self._columns.flight])
        if source == NO_FLIGHT:
            return
        name = self._columns.sources[source]
        if name not in self.recipe.sources:
            self.row[self._columns.flight] = NO_FLIGHT  # the source was taken out of the run
            return
        segment_ = self._segment(source, epoch, window)
        found = segment_.find(position)
        if found is None or found[0] != position:
            raise DocumentError(
                f"source {name!r}: the document at position {position} of epoch {epoch} is no longer there"
            )
        self._tokens = self._encode(name, segment_, *found[1:])
        if self.row[self._columns.flight_offset] >= len(self._tokens):
            self.row[self._columns.flight] = NO_FLIGHT  # shorter than it was: `max_document_tokens` or `eos` changed

    def _encode(self, name: str, segment_: Segment, file: int, start: int, ref: int) -> np.ndarray:
        try:
            document = segment_.read(file, start, ref)
            if not isinstance(document, (str, np.ndarray)):
                raise DocumentError(f"a {type(document).__name__} is neither text nor tokens; set text_key")
            return self.recipe.encode(document)
        except DocumentError as error:
            raise DocumentError(f"source {name!r}: {error}") from None

    def _segment(self, source: int, epoch: int, window: int) -> Segment:
        """Return the segment of a source and epoch; the last one asked for is kept."""
        kept = self._segments.get(source)
        if kept is None or kept[0] != epoch:
            order = self.recipe.orders[self._columns.sources[source]]
            kept = self._segments[source] = (epoch, order.segment(self.index, epoch, window))
        return kept[1]


def skip_flight(rows: np.ndarray, columns: Columns) -> int:
    """Give up the documents in flight that were begun, because their offsets count other tokens than now.

    Args:
        rows: int64 `[S, K]`, changed in place.
        columns: Their columns.

    Returns:
        How many documents lose their rest. One of which nothing has been an input yet is kept and read as a whole.
    """
    begun = (rows[:, columns.flight_source] != NO_FLIGHT) & (rows[:, columns.flight_offset] > 0)
    rows[begun, columns.flight] = NO_FLIGHT
    return int(begun.sum())


def produce(streams: Sequence[Stream], numbers: Sequence[int], which: Sequence[int]) -> tuple[Rows, np.ndarray]:
    """Emit rows `numbers` from `streams[which]`; return them with each one's state row afterwards (int64 `[R, K]`)."""
    parts, states = [], []
    for number, index in zip(numbers, which, strict=True):
        parts.append(streams[index].next_row(int(number)))
        states.append(streams[index].row.copy())
    return Rows.concatenate(parts), np.stack(states)
