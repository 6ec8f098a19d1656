"""Producing the rows of a rank, in this process or in worker processes.

Workers only schedule streams: stream `j` of a rank belongs to worker `j mod N`, each worker emits the rows of its streams in
order, and the loader puts them together. Moving data between processes costs per message and per new piece of shared memory, so
a message holds the rows of many steps, their tokens stay in a ring of memory that both sides keep, and only what is small is
sent: where documents start, and the state row behind each row. The processes themselves (start, errors, death of the parent)
are those of `torch.utils.data.DataLoader`.
"""

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lightning_fms.data.packing import Packing, TokenPacking
from lightning_fms.data.slots import Slots
from lightning_fms.data.sources import DocumentError
from lightning_fms.data.stream import Recipe, Stream, produce

_MESSAGE_TOKENS = 1 << 19  # 2 MB: what a message costs beside its bytes no longer shows
_MESSAGE_STEPS = 64
_MESSAGES = 2  # more would let a worker outlive a killed run: it looks for its parent only when nothing is asked of it
_LARGE_BYTES = 1 << 18
_RING_TOKENS = 1 << 22  # in a portion; what would take more (very many rows a rank) goes with the message
_TEXT_ROWS = 64  # of a message, so that tokenizing does not hold up one step for many


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


class Ring:
    """Memory in which workers leave the tokens of their rows, a portion a message.

    Torch's loader asks a worker for at most `_MESSAGES` more than it has handed over, and asks again while it hands one
    over. So one portion more is enough, if what a message left is copied before the next one is taken from that worker.

    Args:
        workers: How many there are.
        rows: Rows of a portion.
        row_tokens: Tokens of a row.
    """

    def __init__(self, workers: int, rows: int, row_tokens: int) -> None:
        self._memory = torch.empty((workers, _MESSAGES + 1, rows, row_tokens), dtype=torch.int32).share_memory_()

    def portion(self, worker: int, chunk: int) -> np.ndarray:
        """Return the memory of a worker's message number `chunk` (int32 `[rows, row_tokens]`)."""
        return self._memory[worker, chunk % self._memory.shape[1]].numpy()


class RankRows(IterableDataset):
    """The rows of some streams of a rank, in chunks of several steps.

    Args:
        recipe: What the streams have in common.
        slots: How rows fall on ranks.
        first_row: Row number to go on from.
        owned: int64 `[n]`, the rank's streams.
        states: int64 `[n, K]`, their state rows.
        workers: Worker processes that make them, ahead of their use; 0 if this one does.
    """

    def __init__(
        self, recipe: Recipe, slots: Slots, first_row: int, owned: np.ndarray, states: np.ndarray, workers: int
    ) -> None:
        self._recipe, self._slots, self._first_row, self._owned, self._states = recipe, slots, first_row, owned, states
        self._workers = max(workers, 1)
        self.ring: Ring | None = None
        rows = -(-slots.micro_rows * slots.accumulate * self._most_steps() // self._workers)
        if workers and isinstance(recipe.packing, TokenPacking) and rows * recipe.packing.row_tokens <= _RING_TOKENS:
            self.ring = Ring(workers, rows, recipe.packing.row_tokens + 1)

    def chunk_steps(self, chunk: int) -> int:
        """Return how many steps chunk number `chunk` holds: 1 at first, so that the first batch comes soon, then more."""
        return min(2**chunk, self._most_steps())

    def _most_steps(self) -> int:
        rows = max(1, -(-len(self._owned) // self._workers) * self._slots.batch // self._slots.streams)
        most = max(1, _MESSAGE_TOKENS // self._recipe.packing.row_tokens)
        most = most if self._recipe.holds_tokens else min(most, _TEXT_ROWS)
        return min(max(1, most // rows), _MESSAGE_STEPS)

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
            steps = self.chunk_steps(chunk)
            numbers, _ = self._slots.rows_of_steps(first_row, steps)
            owned = self.owned_index(numbers)
            numbers, owned = numbers[owned % workers == worker], owned[owned % workers == worker]
            memory = self.ring.portion(worker, chunk) if self.ring is not None else None
            yield self._produce(streams, numbers, owned // workers, memory)
            first_row += steps * self._slots.batch
            chunk += 1

    def owned_index(self, numbers: np.ndarray) -> np.ndarray:
        """Return which of the rank's streams each of its rows comes from (int64)."""
        return (numbers % self._slots.streams - self._slots.rank) // self._slots.world

    def _produce(
        self, streams: list[Stream], numbers: np.ndarray, which: np.ndarray, memory: np.ndarray | None
    ) -> dict[str, Any]:
        if not len(numbers):
            return {}
        fits = memory is not None and len(numbers) <= len(memory)
        try:
            rows, states = produce(streams, numbers, which, memory if fits else None)
        except ValueError as error:  # its message is for the user; a traceback through a worker would bury it
            return {"error": str(error)}
        arrays = rows.arrays()
        if fits:
            del arrays["tokens"]  # they lie in the ring
        large = {name: torch.from_numpy(array) for name, array in arrays.items() if array.nbytes >= _LARGE_BYTES}
        return {**arrays, **large, "states": states}  # tensors travel through shared memory, arrays in the message

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = torch.utils.data.get_worker_info()
        return self.chunks(*(info.id, info.num_workers) if info else (0, 1))


def _settle_worker(_: int) -> None:
    """One thread for a tokenizer, and silence about what is not this worker's.

    Each worker tokenizes one document at a time, for which the library would keep as many threads as there are cores. And a forked
    worker holds copies of other loaders' iterators, which print errors where they are collected: 'can only test a child process',
    as in https://github.com/optuna/optuna/issues/5024.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _MultiProcessingDataLoaderIter.__del__ = lambda self: None  # type: ignore[method-assign]


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
    source = RankRows(recipe, slots, first_row, owned, states, workers)
    messages: Iterator[dict[str, Any]] = iter(source)
    if workers:
        # A generator of its own: the loader's seed must not come out of the run's random numbers.
        loader = DataLoader(
            source, batch_size=None, num_workers=workers, multiprocessing_context=context, generator=torch.Generator(),
            prefetch_factor=_MESSAGES, collate_fn=_as_it_is, worker_init_fn=_settle_worker,
        )  # fmt: skip
        messages = iter(loader)
    workers = max(workers, 1)
    chunk = 0
    while True:
        numbers, begins = slots.rows_of_steps(first_row, source.chunk_steps(chunk))
        taken = [next(messages) for _ in range(workers)]  # workers answer in turn
        owners = source.owned_index(numbers) % workers
        rows, states_after = _gather(taken, owners, recipe.packing, states[:0], source.ring, chunk)
        for low, high in itertools.pairwise(begins.tolist()):
            yield Step(first_row, rows.between(low, high), states_after[low:high], numbers[low:high] % slots.streams)
            first_row += slots.batch
        chunk += 1


def _as_it_is(message: Any) -> Any:
    return message


def _gather(
    messages: list[dict[str, Any]],
    owners: np.ndarray,
    packing: Packing,
    no_states: np.ndarray,
    ring: Ring | None,
    chunk: int,
) -> tuple[Any, np.ndarray]:
    """Put the rows of a chunk in row order, where `owners` (int64 `[R]`) says which worker made each."""
    parts, states = [], []
    for worker, message in enumerate(messages):
        if "error" in message:
            raise DocumentError(message["error"])
        arrays = {name: value.numpy() if isinstance(value, Tensor) else value for name, value in message.items()}
        states.append(arrays.pop("states", no_states))
        if ring is not None and arrays and "tokens" not in arrays:
            arrays["tokens"] = ring.portion(worker, chunk)[: len(states[-1])]
        parts.append(packing.rows(**arrays))
    if len(parts) == 1 and ring is None:
        return parts[0], states[0]
    place = np.empty(len(owners), dtype=np.int64)
    place[np.argsort(owners, kind="stable")] = np.arange(len(owners))
    return packing.merge(parts, place), np.concatenate(states)[place]
