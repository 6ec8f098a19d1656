"""From probes of a few small sizes to the memory that a configuration needs on a device, with a band.

A phase's peak is `a + b m + c L + d m L` for micro-batches of m rows and L blocks, so four probes (two m, two L) fix it, and
the step's peak is the largest of its phases. What the probes cannot see is added:

- scratch buffers inside kernels, by a formula of the kernel;
- the allocator, which holds more than is in use; libraries' context and workspaces; NCCL's buffers;
- with offload, copies of the shards on their way to an all-gather, twice (one is used while the next is fetched).

The band says what is not known: predictions are within 6 % of the real runs so far, nearly all within 2 % (docs/planning.md).
`low` takes 10 % less than predicted, and no fragmentation; `high` 5 % more with what fragmentation has cost. FIT means that `high`
fits, NO that even `low` does not. Only NO is left out of a search: a MAYBE may be the fastest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from lightning_fms.planner.probe import Peaks

GIB = 2**30


class Verdict(Enum):
    """Whether a configuration fits on a device."""

    FIT = "FIT"
    MAYBE = "MAYBE"
    NO = "NO"


@dataclass(frozen=True)
class Outside:
    """Memory of a device that no tensor of the step accounts for, in GiB unless said.

    Args:
        context: driver and libraries; 0.45 to 0.6 on recent NVIDIA GPUs.
        workspace: of cuBLAS, which PyTorch's allocator counts: 32 MiB on Hopper and later (8 before) for each thread that
            multiplies, and forward and backward are two.
        communication: buffers of NCCL, for several ranks.
        fragmentation: what the allocator reserves above what is in use, as a share of it, at most `fragmentation_limit`.
        below: how far the real peak may lie under the predicted one, as a share.
        above: how far over it.
    """

    context: float = 0.55
    workspace: float = 0.0625
    communication: float = 0.6
    fragmentation: float = 0.06
    fragmentation_limit: float = 5.0
    below: float = 0.10
    above: float = 0.05


@dataclass(frozen=True)
class Prediction:
    """Memory of one rank.

    Attributes:
        active: bytes of tensors and workspaces at the peak, what `torch.cuda.max_memory_allocated` shows.
        phase: where the peak is.
        phases: peak of each phase.
        low: least that the device has to have.
        high: with this it fits in any case.
    """

    active: float
    phase: str
    phases: Mapping[str, float]
    low: float
    high: float

    def verdict(self, capacity: float) -> Verdict:
        """For a device with so many bytes."""
        if self.high <= capacity:
            return Verdict.FIT
        return Verdict.NO if self.low > capacity else Verdict.MAYBE


Grid = Mapping[tuple[int, int], Peaks]  # peaks by (rows, depth)


def at_size(grid: Grid, rows: int, depth: int) -> Peaks:
    """Peaks for a micro-batch of `rows` rows and `depth` blocks, on the straight lines through the probes.

    Raises:
        ValueError: probes that are no grid of one or two sizes each way.
    """
    all_rows, depths = (sorted({key[i] for key in grid}) for i in (0, 1))
    if not 1 <= len(all_rows) <= 2 or not 1 <= len(depths) <= 2 or len(grid) != len(all_rows) * len(depths):
        raise ValueError(f"probes at {sorted(grid)}: give one or two numbers of rows times one or two depths")
    row_weights, depth_weights = _weights(all_rows, rows), _weights(depths, depth)
    first, *others = grid.values()
    found = {}
    for phase in (name for name in first if all(name in peaks for peaks in others)):
        values = [(grid[r, d][phase], wr * wd) for r, wr in row_weights.items() for d, wd in depth_weights.items()]
        found[phase] = (
            round(sum(value[0] * weight for value, weight in values)),
            round(sum(value[1] * weight for value, weight in values)),
        )
    return found


def resharded(grid: Grid, before: int, after: int) -> Grid:
    """The grid for another number of ranks to shard over: what is sharded scales, the rest stays. An extrapolation."""
    return {
        size: {
            name: (round(peak + movable * (before / after - 1)), round(movable * before / after))
            for name, (peak, movable) in peaks.items()
        }
        for size, peaks in grid.items()
    }


def _weights(sizes: list[int], size: int) -> dict[int, float]:
    """How much each probed size counts on the line through them."""
    if len(sizes) == 1:
        return {sizes[0]: 1.0}
    first, second = sizes
    share = (size - first) / (second - first)
    return {first: 1 - share, second: share}


def predict(
    grid: Grid,
    rows: int,
    depth: int,
    ranks: int = 1,
    scratch: float = 0.0,
    offload_copies: float | None = None,
    outside: Outside = Outside(),
) -> Prediction:
    """Memory of one rank.

    Args:
        grid: probes.
        rows: of a micro-batch.
        depth: blocks of the model.
        ranks: in all; more than one needs buffers for communication.
        scratch: bytes of buffers inside the loss' kernel.
        offload_copies: None without offload; with it, bytes of the shards of the two largest groups.
        outside: what is added.
    """
    phases = {}
    for phase, (peak, movable) in at_size(grid, rows, depth).items():
        size = float(peak) if offload_copies is None else max(peak - movable, 0) + offload_copies
        phases[phase] = size + (scratch if phase == "loss" else 0.0)
    phase = max(phases, key=lambda name: phases[name])
    active = phases[phase] + outside.workspace * GIB
    fixed = (outside.context + (outside.communication if ranks > 1 else 0.0)) * GIB
    spare = min(outside.fragmentation * active, outside.fragmentation_limit * GIB)
    high = (1 + outside.above) * active + spare + fixed
    return Prediction(active, phase, phases, (1 - outside.below) * active + 0.8 * fixed, high)
