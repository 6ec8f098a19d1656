"""What ranks decide together, without waiting for each other inside a step.

A signal, a finished save or a slow disk is seen by one rank first, and the others must do the same at the same step. A
reduction at that moment would stop every step until the slowest rank has arrived. So each rank sends off its numbers at the
end of a step, and reads what all of them sent at the end of the next one, when it has long arrived: one step of delay, and the
same answer for everybody. The numbers travel on a gloo group of their own, beside the collectives of the strategy and on the
CPU, so that the device is never waited for. The wait is a loop in Python, so signals get through.
"""

import time
from weakref import WeakKeyDictionary

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor

_POLL_S = 1e-4
_LEAVE_S = 10.0


class Agreement:
    """Named numbers of this rank, and the largest of all ranks of a step ago.

    Making one is collective where there are several ranks. All ranks `put` the same names.

    Attributes:
        group: The gloo group; `None` for one rank.
    """

    def __init__(self) -> None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        group = dist.new_group(backend="gloo") if several else None
        assert group is None or isinstance(group, dist.ProcessGroup)
        self.group = group
        self._mine: dict[str, float] = {}
        self._agreed: dict[str, float] = {}
        self._sent: tuple[list[str], Tensor, dist.Work | None] | None = None
        self._at: object = None

    def put(self, name: str, value: float) -> None:
        """Say this rank's number; it stays until another one is put."""
        self._mine[name] = value

    def get(self, name: str) -> float:
        """The largest number of all ranks; 0 before any has arrived."""
        return self._agreed.get(name, 0.0)

    def exchange(self, at: object) -> None:
        """Read what was sent last time, and send off what is put now. Ranks call it in the same order.

        Args:
            at: Names the moment, for example by the step; a second call at the same one does nothing.
        """
        if at == self._at:
            return
        self._at = at
        self._receive()
        names = sorted(self._mine)
        values = torch.tensor([self._mine[name] for name in names], dtype=torch.float64)
        work = None
        if self.group is not None and names:
            work = dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group, async_op=True)
        self._sent = names, values, work
        if self.group is None:
            self._receive()  # nobody to wait for

    def _receive(self) -> None:
        if self._sent is None:
            return
        (names, values, work), self._sent = self._sent, None
        if work is not None:
            while not work.is_completed():
                time.sleep(_POLL_S)
            work.wait()  # raises if a rank is gone
        self._agreed = dict(zip(names, values.tolist(), strict=True))

    def everyone(self, value: float) -> list[float]:
        """The numbers of all ranks, by rank; waits for them, so it is for rare moments."""
        if self.group is None:
            return [value]
        mine = torch.tensor([value], dtype=torch.float64)
        everyone = [torch.zeros_like(mine) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(everyone, mine, group=self.group)
        return [float(one) for one in everyone]

    def close(self) -> None:
        """End the process group once the last numbers have arrived; leave it to the end of the process if they do not."""
        group, self.group = self.group, None
        if group is None:
            return
        deadline = time.monotonic() + _LEAVE_S
        work = self._sent[2] if self._sent is not None else None
        while work is not None and not work.is_completed():
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL_S)
        self._sent = None
        dist.destroy_process_group(group)


_OF: WeakKeyDictionary[L.Trainer, Agreement] = WeakKeyDictionary()


def agreement_of(trainer: L.Trainer) -> Agreement:
    """The one agreement that the callbacks of a trainer share. The first call of a fit is collective."""
    if trainer not in _OF:
        _OF[trainer] = Agreement()
    return _OF[trainer]


def end_agreement(trainer: L.Trainer) -> None:
    """Forget it at the end of a fit; a second call does nothing. Called where all ranks are at the same place."""
    agreement = _OF.pop(trainer, None)
    if agreement is not None:
        agreement.close()


def forget_agreement(trainer: L.Trainer) -> None:
    """Forget it where ranks may be anywhere, after an exception: nothing is waited for, and the next fit makes a new one."""
    _OF.pop(trainer, None)
