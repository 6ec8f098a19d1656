"""Producing the rows of a rank, in this process or in worker processes.

Workers only schedule streams: stream `j` of a rank belongs to worker `j mod N`, each worker emits the rows of its streams in
order, and the loader puts them together. Moving data between processes costs per message and per tensor, so a message holds
the rows of several steps in three arrays and the state rows that belong to them. The processes themselves (start, shared
memory, errors, death of the parent) are those of `torch.utils.data.DataLoader`.
"""

import itertools
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

_MESSAGE_TOKENS = 1 << 20  # 4 MB: what a message costs beside its bytes no longer shows
_MESSAGE_STEPS = 64
_TEXT_ROWS = 64  # in this process, so that tokenizing does not hold up one step for many


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
        ahead: Whether worker processes make them, ahead of their use.
    """

    def __init__(
        self, recipe: Recipe, slots: Slots, first_row: int, owned: np.ndarray, states: np.ndarray, ahead: bool
    ) -> None:
        self._recipe, self._slots, self._first_row, self._owned, self._states = recipe, slots, first_row, owned, states
        self._ahead = ahead

    def chunk_steps(self, chunk: int, workers: int) -> int:
        """Return how many steps chunk number `chunk` holds: 1 at first, so that the first batch comes soon, then more."""
        streams = -(-len(self._owned) // workers)
        rows = max(1, streams * self._slots.batch // self._slots.streams)
        most = max(1, _MESSAGE_TOKENS // self._recipe.packing.row_tokens)
        if not self._ahead and not self._recipe.holds_tokens:
            most = min(most, _TEXT_ROWS)
        return min(2**chunk, max(1, most // rows), _MESSAGE_STEPS)

    def chunks(self, worker: int, workers: int) -> Iterator[dict[str, Any]]:
        """Yield, without end, the rows of one worker's streams."""
        mine = range(worker, len(self._owned), workers)
        try:
            streams = [Stream(int(self._owned[j]), self._recipe, self._states[j]) for j in mine]
        except ValueError as error:
            yield {"error": str(error)}
            return
        first_row, chunk = self._first_row, 0
        while True:
            steps = self.chunk_steps(chunk, workers)
            numbers, _ = self._slots.rows_of_steps(first_row, steps)
            owned = self.owned_index(numbers)
            numbers, owned = numbers[owned % workers == worker], owned[owned % workers == worker]
            yield self._produce(streams, numbers, owned // workers)
            first_row += steps * self._slots.batch
            chunk += 1

    def owned_index(self, numbers: np.ndarray) -> np.ndarray:
        """Return which of the rank's streams each of its rows comes from (int64)."""
        return (numbers % self._slots.streams - self._slots.rank) // self._slots.world

    def _produce(self, streams: list[Stream], numbers: np.ndarray, which: np.ndarray) -> dict[str, Any]:
        if not len(numbers):
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
    source = RankRows(recipe, slots, first_row, owned, states, ahead=workers > 0)
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
        count = source.chunk_steps(chunk, workers)
        numbers, begins = slots.rows_of_steps(first_row, count)
        messages_of_chunk = [next(messages) for _ in range(workers)]  # workers answer in turn
        rows, states_after = _gather(
            messages_of_chunk, source.owned_index(numbers) % workers, recipe.packing, states[:0]
        )
        for low, high in itertools.pairwise(begins.tolist()):
            part = slice(low, high)
            yield Step(first_row, rows.between(low, high), states_after[part], numbers[part] % slots.streams)
            first_row += slots.batch
        chunk += 1


def _gather(
    messages: list[dict[str, Any]], owners: np.ndarray, packing: Packing, no_states: np.ndarray
) -> tuple[Any, np.ndarray]:
    """Put the rows of a chunk in row order, where `owners` (int64 `[R]`) says which worker made each."""
    parts, states = [], []
    for message in messages:
        if "error" in message:
            raise DocumentError(message["error"])
        arrays = {name: tensor.numpy() for name, tensor in message.items()}
        states.append(arrays.pop("states", no_states))
        parts.append(packing.rows(**arrays))
    if len(parts) == 1:
        return parts[0], states[0]
    place = np.empty(len(owners), dtype=np.int64)
    place[np.argsort(owners, kind="stable")] = np.arange(len(owners))
    return parts[0].concatenate(parts[1:]).take(place), np.concatenate(states)[place]
