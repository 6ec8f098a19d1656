"""How much of the communication is not hidden behind compute, from the intervals of kernels on one device.

Sharded training gathers the next block's weights while this one computes. What it costs is not how long collectives take, but how
long the device does nothing else meanwhile:

    communication    ####      ######
    compute          ..######..  ####....
    exposed          ##        ##

A collective's kernel also runs while it waits for a rank that is late, so a straggler shows as exposed communication. Copies
between host and device are neither: they take no multiprocessor, so a collective beside one is not hidden by it.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Interval = tuple[float, float]

_COMMUNICATION = re.compile(r"nccl|rccl|multimem|symm_mem", re.IGNORECASE)  # the last two: PyTorch's symmetric memory
_COPY = re.compile(r"^(Memcpy|Memset)")


@dataclass(frozen=True)
class Exposure:
    """Times on one device, in one unit: of all communication, of its part without compute beside it, of everything."""

    communication: float
    exposed: float
    total: float

    @property
    def share(self) -> float:
        """Part of the communication that is not hidden; 0 where there is none."""
        return self.exposed / self.communication if self.communication else 0.0

    @property
    def of_step(self) -> float:
        """Part of the whole time in which the device only communicates."""
        return self.exposed / self.total if self.total else 0.0


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals in order; those that touch are one, empty ones are none."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def difference(intervals: Iterable[Interval], without: Iterable[Interval]) -> list[Interval]:
    """The points of `intervals` that are in none of `without`, as disjoint intervals in order."""
    left: list[Interval] = []
    holes, first = union(without), 0
    for start, end in union(intervals):
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        hole = first
        while start < end:
            if hole == len(holes) or holes[hole][0] >= end:
                left.append((start, end))
                break
            if start < holes[hole][0]:
                left.append((start, holes[hole][0]))
            start = holes[hole][1]
            hole += 1
    return left


def length(intervals: Iterable[Interval]) -> float:
    """Total length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def exposure(kernels: Iterable[tuple[str, float, float]], total: float | None = None) -> Exposure:
    """Of kernels on one device, as (name, start, end).

    Args:
        kernels: in any order, of all streams.
        total: time in which they ran; None is from the first start to the last end.
    """
    communication, compute = [], []
    for name, start, end in kernels:
        if _COMMUNICATION.search(name):
            communication.append((start, end))
        elif not _COPY.match(name):
            compute.append((start, end))
    both = communication + compute
    if total is None:
        total = max(e for _, e in both) - min(s for s, _ in both) if both else 0.0
    return Exposure(length(union(communication)), length(difference(communication, compute)), total)


class DeviceTrace:
    """Kernels of a CUDA device between `start` and `stop`, without the host's operators: some percent slower meanwhile."""

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CUDA])

    def start(self) -> None:
        """Begin; the first time in a process takes a second."""
        self._profile.start()

    def stop(self) -> list[tuple[str, float, float]]:
        """End, and return (name, start, end) of each kernel and copy, in microseconds."""
        self._profile.stop()
        return kernels_of(self._profile.events() or [])


def kernels_of(events: Iterable[Any]) -> list[tuple[str, float, float]]:
    """Kernels and copies among a profiler's events; ranges that `record_function` marks on a device are none."""
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
