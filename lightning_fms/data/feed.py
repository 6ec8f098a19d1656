"""What Lightning iterates: a fixed number of micro-batches an epoch, from a loader that never ends.

The position belongs to the data module, so a feed has no state of its own; it says so by an empty `state_dict`, because
Lightning would otherwise warn that the loader cannot resume, or save one rank's position for all of them. It starts the
loader with its first batch and not before: `configure_optimizers` may ask for the number of steps, which makes Lightning
call `iter` before the checkpoint is loaded. With worker processes, the next micro-batch is loaded in a thread while one is trained.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from lightning_fms.data.ahead import Ahead
from lightning_fms.data.loader import MicroBatch, StreamLoader
from lightning_fms.data.packing import Batch

_LEAVE_S = 10.0  # for a micro-batch on its way, when the iteration ends


class Feed:
    """Micro-batches of a loader for one of Lightning's loops.

    Args:
        loader: The rank's loader.
        length: Micro-batches an epoch.
        rewind: Whether every iteration starts at the loader's position and ends after `length` (validation), or goes on
            where the last one was (training, where Lightning ends the epoch).
        pin: Whether batches lie in pinned memory. From there they are copied to a GPU while the host goes on; a copy
            from other memory makes the host wait until the device has done what it was told before.
    """

    def __init__(self, loader: StreamLoader, length: int, rewind: bool = False, pin: bool = False) -> None:
        self.loader, self.length, self.rewind, self.pin = loader, length, rewind, pin
        self.delivered: deque[MicroBatch] = deque()
        self._micro_batches: Iterator[MicroBatch] | None = None
        self._thread: Ahead | None = None
        self._next: MicroBatch | BaseException | None = None

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Batch]:
        if self.rewind:
            self.close()
            if self._thread is not None:
                raise RuntimeError(
                    f"the batch before is not there after {_LEAVE_S:g} s: the data is too slow, or a worker hangs"
                )
        left = self.length if self.rewind else -1
        while left:
            left -= 1
            micro, self._next = self._next or self._take(), None
            if isinstance(micro, BaseException):
                raise micro
            if left and self.loader.num_workers:
                self._begin_next()
            self.delivered.append(micro)
            yield micro.batch

    def look_ahead(self) -> MicroBatch | None:
        """Have the next micro-batch before it is asked for, and return it.

        Nothing but the time of loading changes: the position is that of the last trained step. `None` if it cannot be loaded;
        the error is raised when the batch is asked for, so that the step before it is trained.
        """
        self._next = self._next or self._take()
        return None if isinstance(self._next, BaseException) else self._next

    def _take(self) -> MicroBatch | BaseException:
        """Return the next micro-batch, or the error in its place."""
        if self._thread is not None and self._thread.busy:
            taken: MicroBatch | BaseException = self._thread.take()
            return taken
        try:
            return self._load()  # the first: workers are forked, and had better be from the main thread
        except Exception as error:
            return error

    def _begin_next(self) -> None:
        if self._thread is None:
            self._thread = Ahead(torch.cuda.current_device() if self.pin else None)
        self._thread.begin(self._load)

    def _load(self) -> MicroBatch:
        if self._micro_batches is None:
            self._micro_batches = self.loader.micro_batches()
        micro = next(self._micro_batches)
        if self.pin:
            return replace(micro, batch={name: tensor.pin_memory() for name, tensor in micro.batch.items()})
        return micro

    def close(self) -> None:
        """Drop what is on its way and end the workers.

        A batch that is still being loaded after 10 s is left to its thread; a later call waits for it again.
        """
        self.delivered.clear()
        if self._thread is not None and self._thread.busy:
            try:
                self._thread.take(_LEAVE_S)
            except TimeoutError:
                return  # nothing can be ended under it; workers end with this process
        self._thread = None
        self.loader.close()
        self._micro_batches = self._next = None

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the data module holds the position."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: the data module holds the position."""


def steps_of_one_pass(loader: StreamLoader) -> int:
    """Return the global batches after which this rank has no rows left; its documents are read for it.

    Args:
        loader: A loader with `one_pass`, at its beginning.
    """
    last = 0
    for stream in loader.streams():
        number = stream.index
        while loader.packing.valid(stream.next_row(number)).any():
            last = max(last, number)
            number += loader.slots.streams
    return last // loader.slots.batch + 1
