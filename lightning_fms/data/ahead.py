"""The next micro-batch while this one is trained, and not too many of them.

Workers make tokens; labels, positions and pinned memory come from the rank's own process, a millisecond or two a batch. A thread
makes them while the host launches work or waits for the device, so that the loop finds its batch ready.

A host may run dozens of small steps ahead of a GPU. Each of their batches keeps its pinned memory until it is copied, and to get
more of that the driver waits until the device is idle. So the host is held to `MOST` micro-batches ahead: more than any pause of
Python, and soon no new memory is needed.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

import torch

MOST = 16
"""Micro-batches that a host may be ahead of its GPU."""

Call = Callable[[], Any]


class Ahead:
    """Makes one call at a time in a thread of its own, whose result or error is taken later.

    Args:
        device: Index of the CUDA device whose pinned memory the calls take; `None` if they do not.
    """

    def __init__(self, device: int | None = None) -> None:
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._results: SimpleQueue[Any] = SimpleQueue()
        self.busy = False  # a call has begun whose result was not taken
        thread = threading.Thread(target=_work, args=(self._calls, self._results, device), name="fms-data", daemon=True)
        thread.start()
        weakref.finalize(self, self._calls.put, None)

    def begin(self, call: Call) -> None:
        """Make a call; the one before it must have been taken."""
        assert not self.busy
        self.busy = True
        self._calls.put(call)

    def take(self, seconds: float | None = None) -> Any:
        """Return the call's result, or the exception that it raised.

        Raises:
            TimeoutError: If it is not done after so many seconds; it may be taken later.
        """
        assert self.busy
        try:
            result = self._results.get(timeout=seconds)
        except Empty:
            raise TimeoutError(f"not done after {seconds} s") from None
        self.busy = False
        return result


def _work(calls: SimpleQueue, results: SimpleQueue, device: int | None) -> None:
    while (call := calls.get()) is not None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # a new thread is at the first one
            result = call()
        except BaseException as error:  # whatever it is: who waits for a result must get one
            result = error
        results.put(result)
        del call, result  # a batch is not to wait here for the next one


class Pace:
    """Keeps the host at most `MOST` micro-batches ahead of a GPU.

    Args:
        most: How many.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most, self._begun = most, deque[torch.cuda.Event]()

    def begin(self) -> None:
        """Begin a micro-batch, once the device has begun the one that was `most` before it."""
        event = self._begun.popleft() if len(self._begun) == self._most else torch.cuda.Event(blocking=True)
        event.synchronize()
        event.record()
        self._begun.append(event)
