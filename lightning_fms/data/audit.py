"""Which documents were in a row: the first question after a loss spike.

Nothing is logged while training. A row is a function of its stream's state, so whoever has a state from before it makes the
row again and notes what it is made of. A state every N steps (`DataTrail` keeps them) bounds the work to N steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_fms.data.draws import Place
from lightning_fms.data.loader import StreamLoader


@dataclass(frozen=True)
class Reading:
    """A stretch of a document in a row.

    row: number of the row in the run. source: name. epoch: of the source, in the row's stream. file: its name in the listing.
    start, ref: where the document is in the file, for `Source.read`. first_token, tokens: which of the document's tokens are
    inputs of the row, in the order in which they stand there.
    """

    row: int
    source: str
    epoch: int
    file: str
    start: int
    ref: int
    first_token: int
    tokens: int


def readings(loader: StreamLoader, first_row: int, stop_row: int) -> Iterator[Reading]:
    """Yield what rows `[first_row, stop_row)` of a run are made of, row by row.

    Args:
        loader: A loader of all streams (`world_size=1`) at a state of the run before these rows, with the run's settings of
            that time: they decide what a row holds. It is not moved.
        first_row: Number of the first row: batch `t` of `B` rows begins at row `t * B`, as long as B never changed.
        stop_row: Number of the first row that is not wanted.

    Raises:
        ValueError: If the loader is behind these rows already, or has a part of the streams only.
    """
    at = loader.state_dict()["header"]["row"]
    if loader.slots.world != 1:
        raise ValueError(
            f"world_size={loader.slots.world}: an audit needs all streams; open the loader with world_size=1"
        )
    if first_row < at:
        raise ValueError(f"row {first_row} is before row {at}, where the state is; take an earlier state")
    streams = loader.streams()
    for number in range(at, stop_row):
        stream = streams[number % loader.slots.streams]
        trace: list[tuple[Place, int, int]] = []
        stream.draws.trace = trace
        stream.next_row(number)
        for place, first_token, tokens in trace if number >= first_row else ():
            name = loader.source_names[place.source]
            file = loader.listings[name].names[place.file]
            yield Reading(number, name, place.epoch, file, place.start, place.ref, first_token, tokens)
