"""How long the host waits for batches: one clock for all callbacks that show it.

What lies between two batches is more than waiting for data: Lightning's own work, other callbacks, and, where a device is
behind, waiting for that device. Lightning tells its profiler when it asks a data loader for a batch and when it has it, whatever
the loader and whether or not anybody profiles; our data module does the same for batches that it loads ahead. So the clock
listens to the profiler.
"""

import time
from weakref import WeakKeyDictionary

import lightning as L
from lightning.pytorch.profilers import Profiler

FETCH = ".train_dataloader_next"
"""How the names of these actions end."""


class DataClock:
    """Counts the time between the beginning and the end of each fetch of a training batch.

    Args:
        profiler: The trainer's.

    Attributes:
        seconds: Spent fetching so far.
    """

    def __init__(self, profiler: Profiler) -> None:
        self.seconds = 0.0
        self._began: float | None = None
        start, stop = profiler.start, profiler.stop

        def started(action_name: str) -> None:
            if action_name.endswith(FETCH):
                self._began = time.monotonic()
            start(action_name)

        def stopped(action_name: str) -> None:
            stop(action_name)
            if action_name.endswith(FETCH) and self._began is not None:
                self.seconds, self._began = self.seconds + time.monotonic() - self._began, None

        self._attributes = vars(profiler)
        self._listeners = {"start": started, "stop": stopped}
        self._before = {name: self._attributes[name] for name in self._listeners if name in self._attributes}
        self._attributes.update(self._listeners)

    def end(self) -> None:
        """Listen no longer. Where somebody else listens through a listener of ours, it stays, and goes on counting."""
        for name, listener in self._listeners.items():
            if self._attributes.get(name) is listener:
                del self._attributes[name]
                if name in self._before:
                    self._attributes[name] = self._before[name]


class DataWait:
    """Seconds spent fetching since a reader last asked."""

    def __init__(self, clock: DataClock) -> None:
        self._clock, self._read = clock, clock.seconds

    def take(self) -> float:
        """Return them, and begin anew."""
        taken, self._read = self._clock.seconds - self._read, self._clock.seconds
        return taken


_OF: WeakKeyDictionary[L.Trainer, DataClock] = WeakKeyDictionary()


def data_wait_of(trainer: L.Trainer) -> DataWait:
    """A reader of its own of the trainer's clock, which runs from the first one on; whoever takes one ends the clock, too."""
    if trainer not in _OF:
        _OF[trainer] = DataClock(vars(trainer)["profiler"])
    return DataWait(_OF[trainer])


def end_data_clock(trainer: L.Trainer) -> None:
    """Let nothing listen behind a fit, whether it ended or failed; a second call does nothing. Readers keep what was counted."""
    clock = _OF.pop(trainer, None)
    if clock is not None:
        clock.end()
