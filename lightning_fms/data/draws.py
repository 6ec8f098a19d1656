"""The documents of a stream in the order of its draws, with a look-ahead that survives a restart.

A draw takes the next position of the source that the mixture chooses. What is drawn waits here until the packing has used it
up: one document at a time where rows are cut from a line, up to `LOOK_AHEAD` where the packing chooses which one fits. A
source's position in the state moves on over a draw only when it, and all before it of that source, are used up. So the state
needs no tokens: whoever restores it draws the same positions again, reads the documents that are not used up, and passes
over the others. A document without tokens is a draw that is used up at once, and so is one that cannot be read where the run
is to go on without it.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightning_fms.data.cursor import LOOK_AHEAD
from lightning_fms.data.mixture import neediest, segment
from lightning_fms.data.quarantine import Where
from lightning_fms.data.segments import Segment, Unsearchable
from lightning_fms.data.sources import DocumentError

if TYPE_CHECKING:
    from lightning_fms.data.stream import Recipe

_FRUITLESS_EPOCHS = 1000
_NEVER = 1 << 62
_HALF = 32
_LOW = (1 << _HALF) - 1


class Place(NamedTuple):
    """Where a document is: its source, epoch, file (index in the listing), address and reference (see `Window`)."""

    source: int
    epoch: int
    file: int
    start: int
    ref: int


class Drawn:
    """A document that was drawn: its content until it is used up, its length, and the position behind it.

    A `hole` is a range of a file that cannot be read, and a single draw however many documents were in it.
    """

    __slots__ = ("content", "hole", "length", "place", "position", "source", "used")

    def __init__(self, source: int, used: bool = False) -> None:
        self.source, self.used = source, used
        self.position: tuple[int, int] | None = None  # (epoch, position); None: its source is not part of the run now
        self.content: Any = None
        self.length, self.hole = 0, False
        self.place: Place | None = None


class Draws:
    """Draws of one stream.

    Args:
        index: The stream's number.
        recipe: What it shares with the others.
        row: int64 `[K]`, its state row, kept up to date by `end_row`.
    """

    def __init__(self, index: int, recipe: "Recipe", row: np.ndarray) -> None:
        self.index, self.recipe, self.row = index, recipe, row
        self.offset = int(row[recipe.columns.offset])
        self.trace: list[tuple[Place, int, int]] | None = None
        self._pending: list[Drawn] = []
        self._restored = False
        self._moved = True  # whether documents were drawn or used up since the state row was written
        self._segments: dict[int, tuple[int, Segment]] = {}
        self._weights = np.empty(0)

    # -- for packings --------------------------------------------------------------------------------------------------

    def oldest(self) -> Drawn | None:
        """Return the oldest document that is not used up, of which `offset` tokens are; `None` at the end of the data."""
        while True:
            if (drawn := self.current()) is not None:
                return drawn
            self._commit()
            if not self._room():
                raise ValueError(
                    f"stream {self.index} holds {len(self._pending)} documents of sources that were taken out of the run, "
                    "half of a row each, and has no room for others; leave those sources in, with weight 0"
                )
            if not self._draw():
                return None

    def current(self) -> Drawn | None:
        """Return what `oldest` would, but draw nothing: `None` if everything is used up."""
        for drawn in self._pending:
            if not drawn.used and drawn.position is not None:
                return drawn
        return None

    def look_ahead(self) -> list[Drawn]:
        """Draw as many documents as may wait, and return those that do, oldest first."""
        while self._room() and self._draw():
            pass
        return list(self._waiting())

    def _waiting(self) -> Iterator[Drawn]:
        return (drawn for drawn in self._pending if not drawn.used and drawn.position is not None)

    def use(self, drawn: Drawn, count: int) -> None:
        """Use the next `count` tokens of a document; all that are left, unless it is the oldest."""
        if self.trace is not None and drawn.place is not None:
            self.trace.append((drawn.place, self.offset if drawn is self.oldest() else 0, count))
        self._tokens[drawn.source] += count
        if count == drawn.length:
            drawn.used, drawn.content, self._moved = True, None, True
            return
        self.offset += count
        if self.offset == drawn.length:
            drawn.used, drawn.content, self.offset, self._moved = True, None, 0, True

    def count(self, counter: int, amount: int) -> None:
        """Add to a counter of the state row."""
        self.row[counter] += amount

    # -- rows ----------------------------------------------------------------------------------------------------------

    def begin_row(self, number: int) -> None:
        """Make ready for row `number` of the run: restore what was drawn, and follow the mixture."""
        history, before = self.recipe.history, number - self.recipe.streams
        if not self._restored:
            self._restore()
            self._weights = self.recipe.weights(number)
        if len(history) == 1:
            return
        if before >= 0 and segment(history, before) != segment(history, number):
            self.row[self.recipe.columns.since] = 0  # start counting anew
        self._weights = self.recipe.weights(number)

    def rows_alike(self, number: int) -> int:
        """Return how many of this stream's rows from `number` on are under the same weights."""
        if len(self.recipe.history) == 1:
            return _NEVER
        later = [first for first, _ in self.recipe.history if first > number]
        return -(-(later[0] - number) // self.recipe.streams) if later else _NEVER

    def end_row(self) -> None:
        """Write the position behind the row that was made into the state row."""
        self._commit()
        row, columns = self.row, self.recipe.columns
        row[columns.epoch], row[columns.position] = self._base_epoch, self._base_position
        row[columns.window] = [low | later << _HALF for low, later in zip(self._window, self._later, strict=True)]
        row[columns.tokens], row[columns.offset] = self._tokens, self.offset
        columns.write_ahead(row, [(drawn.source, drawn.used) for drawn in self._pending])
        self._moved = False

    def end_rows(self, count: int, tokens: int) -> np.ndarray:
        """End `count` rows at once, each of `tokens` tokens of the document that is still current; return a state row for each."""
        current, columns, row = self.current(), self.recipe.columns, self.row
        assert current is not None
        place = columns.tokens_of(current.source)
        if self._moved:
            self.end_row()
        else:  # further into the same document: nothing else has changed
            row[place], row[columns.offset] = self._tokens[current.source], self.offset
        states = np.empty((count, len(row)), dtype=np.int64)
        states[:] = row
        behind = np.arange(tokens * (count - 1), -1, -tokens)
        states[:, columns.offset] -= behind
        states[:, place] -= behind
        return states

    def _restore(self) -> None:
        """Take the positions from the state row and draw again what was drawn from there on."""
        row, columns = self.row, self.recipe.columns
        self._base_epoch, self._base_position = row[columns.epoch].tolist(), row[columns.position].tolist()
        self._epoch, self._position = list(self._base_epoch), list(self._base_position)
        self._fruitful = list(self._epoch)
        windows = row[columns.window].tolist()
        self._window, self._later = [w & _LOW for w in windows], [w >> _HALF for w in windows]
        self._tokens = row[columns.tokens].tolist()
        self._restored, cut = True, row[columns.cut]
        begun = None  # the document that `offset` belongs to
        torn: set[int] = (
            set()
        )  # sources with a hole where there was none: what was drawn behind it is taken to be in it
        for source, used in columns.read_ahead(row):
            if source in torn:
                drawn = Drawn(source, used=True)
                drawn.position = (self._epoch[source], self._position[source])
            elif self._name(source) in self.recipe.sources:
                drawn = self._again(source, read=not used)
                if drawn.hole and not used:  # one that was there already is a used draw
                    torn.add(source)
            else:
                drawn = Drawn(source, used)
            begun = begun or (drawn if self.offset and not used else None)
            self._pending.append(drawn)
        row[columns.cut] = cut  # counted when they were drawn first
        if begun is not None and (begun.used or self.offset >= begun.length):
            begun.used, self.offset = True, 0  # unreadable now, or shorter: `max_document_tokens` or `eos` changed

    def _room(self) -> bool:
        if len(self._pending) >= LOOK_AHEAD:
            self._commit()
        return len(self._pending) < LOOK_AHEAD

    def _commit(self) -> None:
        """Let every source's position move on over its draws that are used up."""
        kept: list[Drawn] = []
        waiting: set[int] = set()
        for drawn in self._pending:
            if drawn.used and drawn.source not in waiting and drawn.position is not None:
                self._move_base(drawn.source, *drawn.position)
            else:
                waiting.add(drawn.source)
                kept.append(drawn)
        # Sources that are not there wait behind the others: the first unused document is the one that `offset` belongs to.
        self._pending = sorted(kept, key=lambda drawn: drawn.position is None)
        for source in range(len(self._epoch)):
            if source not in waiting:
                self._move_base(source, self._epoch[source], self._position[source])

    def _move_base(self, source: int, epoch: int, position: int) -> None:
        if epoch != self._base_epoch[source]:
            self._window[source] = self._later[source]
        self._base_epoch[source], self._base_position[source] = epoch, position
        if epoch == self._epoch[source]:
            self._later[source] = 0

    # -- drawing -------------------------------------------------------------------------------------------------------

    def _draw(self) -> bool:
        """Choose a source and draw its next document that has tokens; `False` at the end of the data.

        Also `True` if there was no room to draw so many: nothing is chosen then, and the next draw goes on from there.
        """
        since, self._moved = self.row[self.recipe.columns.since], True
        while True:
            weights = self._available()
            if weights is None:
                return False
            fresh = not since.any()
            counts = -self.recipe.phase(weights, self.index) if fresh else since
            source = neediest(weights, counts)
            length = self._draw_from(source)
            if length is None:
                since[:] = 0  # the source has run out: the others share what follows
                continue
            break
        if length:
            if fresh:
                since[:] = np.rint(counts * length)
                since[source] -= (
                    since.sum()
                )  # rounding must not make the counts all 0, which says that nothing was drawn
            since[source] += length  # when drawn: the rest of a document from before a change does not count
            if self._epoch[source] >= self.recipe.max_epochs.get(self._name(source), _NEVER):
                since[:] = 0  # that was its last: the others share what follows
        return True

    def _draw_from(self, source: int) -> int | None:
        """Draw until a document has tokens; return how many, 0 if there is no room for more, `None` at the last epoch's end."""
        while self._room():
            drawn = self._next(source)
            if drawn is None:
                return None
            self._pending.append(drawn)
            if not drawn.used:
                return drawn.length
        return 0

    def _available(self) -> np.ndarray | None:
        """Return the shares of the sources that have not reached their `max_epochs` (sum 1)."""
        caps = self.recipe.max_epochs
        if not caps:
            return self._weights
        weights = self._weights.copy()
        for name, most in caps.items():
            source = self.recipe.columns.sources.index(name)
            if self._epoch[source] >= most:
                weights[source] = 0.0
        total = weights.sum()
        if total > 0:
            return weights / total
        if self.recipe.one_pass:
            return None
        raise ValueError(
            f"every source with a weight has reached its max_epochs={caps}; "
            "leave one source without a limit, or train for fewer steps"
        )

    def _next(self, source: int) -> Drawn | None:
        """Draw the next position of a source; `None` if its `max_epochs` end first."""
        most = self.recipe.max_epochs.get(self._name(source), _NEVER)
        while self._epoch[source] < most:
            if most == _NEVER or not self._ended(source):
                return self._again(source, read=True)
            self._turn(source)
        return None

    def _again(self, source: int, read: bool) -> Drawn:
        """Draw the next position of a source, whether or not its `max_epochs` would allow it now."""
        drawn, found = Drawn(source, used=True), None
        while found is None:
            position = self._position[source]
            try:
                found = self._segment(source).find(position)
            except Unsearchable as error:
                if read:
                    self._give_up(source, error.span, error, ref=None)
                    self.row[self.recipe.columns.skipped] += error.counts
                self._position[source], drawn.hole = error.behind, error.alone
                break
            if found is None:
                self._turn(source)
        else:
            self._position[source] = found[0] + 1
            if read:
                self._read(drawn, Place(source, self._epoch[source], *found[1:]))
        drawn.position = (self._epoch[source], self._position[source])
        if self._name(source) in self.recipe.max_epochs and self._ended(source):
            self._turn(source)  # at once, so that nothing but positions says which sources have run out
        return drawn

    def _ended(self, source: int) -> bool:
        try:
            return self._segment(source).find(self._position[source]) is None
        except DocumentError:
            return False

    def _read(self, drawn: Drawn, place: Place) -> None:
        """Read a document into its draw; it stays used up if nothing is in it."""
        try:
            document = self._segment(place.source).read(place.file, place.start, place.ref)  # an error names the file
            try:
                drawn.content, drawn.length, cut = self.recipe.prepare(document)
            except DocumentError as error:
                path = self.recipe.sources[self._name(place.source)].listing.path(place.file)
                raise DocumentError(f"{path}: at {place.start}: {error}") from None
        except DocumentError as error:
            self._give_up(place.source, (place.file, place.start, None), error, place.ref)
            self.row[self.recipe.columns.skipped] += 1
            return
        drawn.used, drawn.place = drawn.length == 0, place
        self._fruitful[place.source] = place.epoch if drawn.length else self._fruitful[place.source]
        self.row[self.recipe.columns.cut] += cut

    def _give_up(self, source: int, span: tuple[int, int, int | None], error: DocumentError, ref: int | None) -> None:
        """Raise, or leave out what a `span` (file, start, stop) of a source holds, as the recipe says."""
        name, (file, start, stop) = self._name(source), span
        path = str(self.recipe.sources[name].listing.path(file))
        self.recipe.left_out.give_up(Where(name, path, start, stop, ref, self.index, self._epoch[source]), error)

    def _turn(self, source: int) -> None:
        """Begin the next epoch of a source."""
        self._epoch[source] += 1
        self._position[source] = 0
        self._later[source] = self._later[source] or self.recipe.shuffle_window
        fruitless = self._epoch[source] - self._fruitful[source]
        name, left_out = self._name(source), self.recipe.left_out
        if fruitless > 1:  # the first may have begun behind its last document
            left_out.warn_fruitless(name, self.index)
        if fruitless > _FRUITLESS_EPOCHS + 64 * self.recipe.streams:
            raise ValueError(f"source {name!r}: no document with a token in {fruitless} epochs: {left_out.found(name)}")

    def _name(self, source: int) -> str:
        return self.recipe.columns.sources[source]

    def _segment(self, source: int) -> Segment:
        """Return the segment of a source's current epoch; the last one asked for is kept."""
        epoch, kept = self._epoch[source], self._segments.get(source)
        if kept is None or kept[0] != epoch:
            window = (self._window if epoch == self._base_epoch[source] else self._later)[source]
            order = self.recipe.orders[self._name(source)]
            kept = self._segments[source] = (epoch, order.segment(self.index, epoch, window))
        return kept[1]
