"""N, the targets of a global batch, where the ranks have to add it up.

Where every row is full, N follows from the number of rows. Otherwise (masked first tokens, padding) each rank knows its own
count only, and it needs the sum before it scales a gradient. A reduction at that moment would stop every step until the
slowest rank has arrived. So each count is sent off when its batch is loaded, which the feed does a step ahead, and is
waited for a step later, when it has long arrived.

The reductions have a process group of their own, on the CPU: they run beside those of the strategy, in any order relative to
them, and the device is never waited for. Every rank starts one a step, in the order of the steps; so whichever rank is ahead,
the others will start the same one, or end, which ends the waiting too. The wait is a loop in Python, so Ctrl-C gets through.
"""

import time
from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

_POLL_S = 1e-4
_LEAVE_S = 10.0


class TargetCount:
    """Counts of the steps to come, added up over the ranks.

    Making one is collective: all ranks do it at the same time.

    Args:
        copies: Ranks that share a data rank, and so count the same rows.
    """

    def __init__(self, copies: int = 1) -> None:
        self._copies = copies
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        self._group = group
        self._sent: deque[tuple[int, Tensor, dist.Work]] = deque()
        self._last = -1

    def start(self, step: int, targets: int) -> None:
        """Send off this rank's count of a step; nothing happens if that was done.

        Args:
            step: Names the step, by a whole number that grows.
            targets: The rank's targets in it.
        """
        if step <= self._last:
            return
        self._last = step
        total = torch.tensor(targets, dtype=torch.int64)
        work = dist.all_reduce(total, group=self._group, async_op=True)
        assert work is not None
        self._sent.append((step, total, work))

    def wait(self, step: int) -> int:
        """Return the sum over all ranks for a step that was started; those before it are dropped."""
        while self._sent[0][0] != step:
            self._sent.popleft()
        _, total, work = self._sent.popleft()
        while not work.is_completed():
            time.sleep(_POLL_S)
        work.wait()  # raises if a rank is gone
        return int(total) // self._copies

    def close(self) -> None:
        """End the process group, once the last count has arrived; leave it to the end of the process if one does not."""
        deadline = time.monotonic() + _LEAVE_S
        while not all(work.is_completed() for _, _, work in self._sent):
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL_S)
        self._sent.clear()
        dist.destroy_process_group(self._group)
