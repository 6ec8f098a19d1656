"""Which row goes where: the arithmetic that makes batches independent of ranks, workers and micro-batches.

Row `g` of the run always comes from stream `g mod S`, and stream `i` belongs to data rank `i mod W`. A global batch is a
range of rows, so its content depends on nothing but its first row and its size; ranks, workers and micro-batches only say
who produces which part. Everything here is a pure function of plain integers.

Legend: S streams, W data ranks, B rows a global batch, g row number, A micro-batches a step.
"""

import itertools
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lightning_fms.data.whole_numbers import check_whole


def rows_of_rank(first_row: int, batch: int, streams: int, world: int, rank: int) -> np.ndarray:
    """Return, ascending, the row numbers of a global batch that belong to a data rank (int64)."""
    rows = np.arange(first_row, first_row + batch, dtype=np.int64)
    return rows[(rows % streams) % world == rank]


@lru_cache(maxsize=64)
def most_rows(batch: int, streams: int, world: int) -> int:
    """Return the most rows of one global batch that any rank can get, over every possible first row.

    Rows pass through the streams in laps of S. Whole laps give every rank its streams; the rest of the batch is a window of
    `batch mod S` streams, which may start anywhere and wrap around.
    """
    laps, rest = divmod(batch, streams)
    start = np.arange(streams if rest else 1)
    stop = start + rest

    def rows(rank: int) -> int:
        def owned_below(stream: np.ndarray | int) -> np.ndarray | int:
            return (stream + world - 1 - rank) // world

        window = (
            owned_below(np.minimum(stop, streams)) - owned_below(start) + owned_below(np.maximum(stop - streams, 0))
        )
        return int(laps * owned_below(streams) + np.max(window))

    return max(rows(rank) for rank in range(world))


@dataclass(frozen=True)
class Slots:
    """How the rows of a step fall on one data rank.

    Args:
        streams: S, number of logical streams.
        batch: B, rows of a global batch.
        world: W, number of data ranks; at most S and at most B.
        rank: This data rank.
        micro: Most rows that fit on a device at once; `None` takes all rows of the rank.

    Raises:
        ValueError: If some rank would own no stream or no row.
    """

    streams: int
    batch: int
    world: int
    rank: int
    micro: int | None = None

    def __post_init__(self) -> None:
        check_whole(1, num_streams=self.streams, global_batch_size=self.batch, world_size=self.world)
        if self.micro is not None and (
            isinstance(self.micro, bool) or not isinstance(self.micro, int) or self.micro < 1
        ):
            raise ValueError(
                f"micro_batch_size={self.micro} must be a whole number of at least 1, or None for all rows of a rank"
            )
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank={self.rank} must be in [0, world_size={self.world})")
        if self.world > self.batch:
            raise ValueError(
                f"global_batch_size={self.batch} is smaller than the number of data ranks {self.world}: "
                f"set global_batch_size >= {self.world} or use fewer ranks"
            )
        if self.world > self.streams:
            raise ValueError(
                f"num_streams={self.streams} is smaller than the number of data ranks {self.world}: a run can use at most "
                "num_streams ranks (fixed when the run starts; default: the global batch size)"
            )

    @property
    def accumulate(self) -> int:
        """A, the micro-batches a step: equal on every rank and at every step."""
        most = most_rows(self.batch, self.streams, self.world)
        return -(-most // (self.micro or most))

    @property
    def micro_rows(self) -> int:
        """Rows of every micro-batch, padding included."""
        return -(-most_rows(self.batch, self.streams, self.world) // self.accumulate)

    def rows(self, first_row: int) -> np.ndarray:
        """Return the row numbers of this rank in the global batch that starts at `first_row`."""
        return rows_of_rank(first_row, self.batch, self.streams, self.world, self.rank)

    def rows_of_steps(self, first_row: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Return this rank's row numbers in several global batches, and where each batch begins among them (`[steps + 1]`)."""
        rows = rows_of_rank(first_row, steps * self.batch, self.streams, self.world, self.rank)
        return rows, np.searchsorted(rows, first_row + self.batch * np.arange(steps + 1))

    def owned(self) -> np.ndarray:
        """Return the streams of this rank, ascending."""
        return np.arange(self.rank, self.streams, self.world, dtype=np.int64)

    def split(self, rows: int) -> list[slice]:
        """Spread a rank's rows of a step evenly over its A micro-batches (a slice may be empty)."""
        bounds = [rows * k // self.accumulate for k in range(self.accumulate + 1)]
        return [slice(lo, hi) for lo, hi in itertools.pairwise(bounds)]
