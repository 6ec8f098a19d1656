"""Producing the rows of a rank, in this process or in worker processes.

Workers only schedule streams: stream `j` of a rank belongs to worker `j mod N`, each worker emits the rows of its streams in
order, and the loader puts them together. Moving data between processes costs per message and per tensor, so a message holds
the rows of several steps in three arrays and the state rows that belong to them. The processes themselves (start, shared
memory, errors, death of the parent) are those of `torch.utils.data.DataLoader`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_fms.data.packing import Packing
from lightning_fms.data.slots import Slots
from lightning_fms.data.sources import DocumentError
from lightning_fms.data.stream import Recipe, Stream, produce

_MESSAGE_ROWS = 64
_MESSAGE_STEPS = 32


@dataclass(frozen=True)
class Step:
    """A rank's rows of one global batch.

    first_row: number of the batch's first row. rows: the packing's rows, by row number. states: int64 `[R, K]`, the state row of
    each row's stream after it. streams: int64 `[R]`, where each row is from.
    """

    first_row: int
    rows: Any
    states: np.ndarray
    streams: np.ndarray


class RankRows(IterableDataset):
    """The rows of some streams of a rank, in chunks of several steps.

    Args:
        recipe: What the streams have in common.
        slots: How rows fall on ranks.
        first_row: Row number to go on from.
        owned: int64 `[n]`, the rank's streams.
        states: int64 `[n, K]`, their state rows.
    """

    def __init__(self, recipe: Recipe, slots: Slots, first_row: int, owned: np.ndarray, states: np.ndarray) -> None:
        self._recipe, self._slots, self._first_row, self._owned, self._states = recipe, slots, first_row, owned, states

    def chunk_steps(self, chunk: int, workers: int) -> int:
        """Return how many steps chunk number `chunk` holds: 1 at first, so that the first batch comes soon, then more."""
        streams = -(-len(self._owned) // workers)
        rows = max(1, streams * self._slots.batch // self._slots.streams)
        return min(2**chunk, max(1, _MESSAGE_ROWS // rows), _MESSAGE_STEPS)

    def chunks(self, worker: int, workers: int) -> Iterator[dict[str, Any]]:
        """Yield, without end, the rows of one worker's streams."""
        mine = range(worker, len(self._owned), workers)
        try:
            streams = [Stream(int(self._owned[j]), self._recipe, self._states[j]) for j in mine]
        except ValueError as error:
            yield {"error": str(error)}
            return
        place = {stream.index: i for i, stream in enumerate(streams)}
        first_row, chunk = self._first_row, 0
        while True:
            steps = self.chunk_steps(chunk, workers)
            numbers = [
                number
                for step in range(steps)
                for number in self._slots.rows(first_row + step * self._slots.batch)
                if int(number) % self._slots.streams in place
            ]
            which = [place[int(number) % self._slots.streams] for number in numbers]
            yield self._produce(streams, numbers, which)
            first_row += steps * self._slots.batch
            chunk += 1

    def _produce(self, streams: list[Stream], numbers: list[int], which: list[int]) -> dict[str, Any]:
        if not numbers:
            return {}
        try:
            rows, states = produce(streams, numbers, which)
        except ValueError as error:  # its message is for the user; a traceback through a worker would bury it
            return {"error": str(error)}
        arrays = {**rows.arrays(), "states": states}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = torch.utils.data.get_worker_info()
        return self.chunks(*(info.id, info.num_workers) if info else (0, 1))


def steps(
    recipe: Recipe, slots: Slots, first_row: int, states: np.ndarray, workers: int, context: str | None
) -> Iterator[Step]:
    """Yield, without end, the rank's part of each global batch from `first_row` on.

    Args:
        recipe: What the streams have in common.
        slots: How rows fall on ranks.
        first_row: Row number to go on from.
        states: int64 `[n, K]`, state rows of the rank's streams.
        workers: Worker processes; 0 produces in this process.
        context: Start method of the workers (`"fork"`, `"spawn"`, `"forkserver"`); `None` is the platform's default.

    Raises:
        DocumentError: If a document cannot be read.
    """
    owned = slots.owned()
    workers = min(workers, len(owned))
    source = RankRows(recipe, slots, first_row, owned, states)
    # A generator of its own: the loader's seed must not come out of the run's random numbers.
    messages: Iterator[dict[str, Any]] = iter(
        DataLoader(
            source, batch_size=None, num_workers=workers, multiprocessing_context=context, generator=torch.Generator()
        )
        if workers
        else source
    )
    workers = max(workers, 1)
    chunk = 0
    while True:
        parts = [_Message(next(messages), recipe.packing, states[:0]) for _ in range(workers)]  # workers answer in turn
        for _ in range(source.chunk_steps(chunk, workers)):
            streams = slots.rows(first_row) % slots.streams
            owners = (streams - slots.rank) // slots.world % workers
            yield Step(first_row, *_gather(parts, owners), streams=streams)
            first_row += slots.batch
        chunk += 1


class _Message:
    """A worker's chunk, taken apart row by row."""

    def __init__(self, message: dict[str, Any], packing: Packing, no_states: np.ndarray) -> None:
        if "error" in message:
            raise DocumentError(message["error"])
        arrays = {name: tensor.numpy() for name, tensor in message.items()}
        self._states = arrays.pop("states", no_states)
        self._rows = packing.rows(**arrays)
        self._next = 0

    def take(self, count: int) -> tuple[Any, np.ndarray]:
        """Return the next rows and the state rows that belong to them."""
        low, self._next = self._next, self._next + count
        return self._rows.between(low, self._next), self._states[low : self._next]


def _gather(parts: list[_Message], owners: np.ndarray) -> tuple[Any, np.ndarray]:
    """Put a step's rows in row order, where `owners` (int64 `[R]`) says which worker has each."""
    if len(parts) == 1:
        return parts[0].take(len(owners))
    taken = [part.take(int((owners == worker).sum())) for worker, part in enumerate(parts)]
    (first, *others), states = [rows for rows, _ in taken], np.concatenate([states for _, states in taken])
    place = np.empty(len(owners), dtype=np.int64)
    place[np.argsort(owners, kind="stable")] = np.arange(len(owners))
    return first.concatenate(others).take(place), states[place]
