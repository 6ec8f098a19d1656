"""What torch's flight recorder knows of the collectives of this process: which ones wait, and when each was begun.

The recorder keeps the last 2,000 collectives of every process group, gloo's and NCCL's, at no cost to speak of; reading it
costs about 20 microseconds an entry. In a lockstep program a collective ends for all ranks together, so what lies
between its end and the beginning of the next one is a rank's own work: the rank that begins a collective last is the one
that the others wait for. Times are compared within one collective only. Clocks of hosts differ by an offset, which shows where
collectives follow each other without work between them.
"""

import pickle
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Waiting:
    """A collective that has begun and not ended: its group and number in it, sizes, seconds so far, where it was called."""

    name: str
    group: str
    number: int
    sizes: str
    seconds: float
    called: str

    def __str__(self) -> str:
        return (
            f"{self.name} number {self.number} of group {self.group}, {self.sizes}, {self.seconds:.0f} s, {self.called}"
        )


def _entries(**which: bool) -> list[dict[str, Any]]:
    """Entries of the recorders that this build of torch has; none where nothing was recorded."""
    found: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        dump = getattr(getattr(torch._C, "_distributed_c10d", None), name, None)
        if dump is not None:
            found += pickle.loads(dump(**which)).get("entries", [])  # made by torch in this process
    return found


def waiting() -> list[Waiting]:
    """Collectives that have not ended, in the order in which they began."""
    found = []
    for entry in sorted(_entries(includeStackTraces=True), key=lambda e: e["time_created_ns"]):
        if entry.get("retired") or entry["state"] == "completed":
            continue
        seconds = time.time() - entry["time_created_ns"] / 1e9
        frames = [f for f in entry.get("frames", []) if "/torch/" not in f["filename"]] or entry.get("frames", [])
        called = f"called at {frames[0]['filename']}:{frames[0]['line']}" if frames else "called from C++"
        number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
        group = " ".join(str(part) for part in entry["process_group"])
        found.append(Waiting(entry["profiling_name"], group, number, str(entry["input_sizes"]), seconds, called))
    return found


@dataclass(frozen=True)
class Begun:
    """When this rank began the last collectives of its busiest group.

    key: The same number on all members of the group. numbers, seconds: int64 and float64 `[N]`, ascending.
    """

    key: int
    numbers: list[int]
    seconds: list[float]


def begun(since: float, without: dist.ProcessGroup | None = None) -> Begun | None:
    """The collectives begun since a time (seconds since the epoch); `None` if there were none.

    Args:
        since: The beginning.
        without: A group that does not count.
    """
    names = dict(dist.distributed_c10d._world.pg_names)
    ignored = names.get(without) if without is not None else None
    entries = [
        entry
        for entry in _entries(includeStackTraces=False)
        if not entry["is_p2p"] and entry["time_created_ns"] >= since * 1e9 and entry["process_group"][0] != ignored
    ]
    if not entries:
        return None
    (busiest, _), *_ = Counter(entry["process_group"][0] for entry in entries).most_common(1)
    members = next((sorted(_members(group)) for group, name in names.items() if name == busiest), [])
    mine = sorted(
        (e["collective_seq_id"], e["time_created_ns"] / 1e9) for e in entries if e["process_group"][0] == busiest
    )
    key = crc32(f"{busiest} {members}".encode())
    return Begun(key, [number for number, _ in mine], [seconds for _, seconds in mine])


def _members(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


def lateness(begun_by_rank: list[Begun | None]) -> list[float]:
    """Seconds by which each rank's own work made its group wait, over the collectives that all members have on record."""
    late = [0.0] * len(begun_by_rank)
    for key in {one.key for one in begun_by_rank if one is not None}:
        members = [rank for rank, one in enumerate(begun_by_rank) if one is not None and one.key == key]
        times = {
            rank: dict(zip(one.numbers, one.seconds, strict=True)) for rank in members if (one := begun_by_rank[rank])
        }
        common = sorted(set.intersection(*(set(by_number) for by_number in times.values())))
        if not common or len(members) < 2:
            continue
        first = members[0]
        offset = {rank: min((times[rank][n] - times[first][n] for n in common), key=abs) for rank in members}
        for number in common:
            arrived = {rank: times[rank][number] - offset[rank] for rank in members}
            earliest = min(arrived.values())
            for rank in members:
                late[rank] += arrived[rank] - earliest
    return late
