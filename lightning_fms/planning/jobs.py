"""Which probes a set of configurations needs, and running them in processes of their own.

Configurations that differ in rows only share their probes, and so do those that differ in what follows from a probe by
arithmetic: offload, and whether gradients wait. What is left is a `Structure`.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lightning_fms.kernels.linear_cross_entropy import CHUNK_BYTES, plan_chunks
from lightning_fms.planner.memory import Grid, Outside, Prediction, predict, resharded
from lightning_fms.planner.space import Configuration
from lightning_fms.planning.subject import Structure

MOST_PROCESSES = 4
_SAID_EVERY_S = 5.0


@dataclass(frozen=True)
class Probed:
    """What the probes of a structure found; sizes in bytes.

    Attributes:
        grids: peaks by variant.
        depth: blocks of the model.
        head: shape [V, D] of an output head with deferred logits.
        groups: parameters of the two largest groups, unsharded.
        error: why there is nothing else.
    """

    grids: Mapping[str, Grid]
    depth: int = 0
    head: Sequence[int] | None = None
    groups: Sequence[int] = ()
    error: str | None = None


def structure_of(configuration: Configuration) -> Structure:
    """The structure that a configuration needs, with no variants yet."""
    c = configuration
    wrapped = c.devices > 1 or c.cpu_offload
    return Structure(
        c.replicate, c.shard, wrapped, c.activation_checkpointing, c.reshard_after_forward, c.precision, c.kernels, (),
        c.activation_offload,
    )  # fmt: skip


def variant_of(configuration: Configuration) -> str:
    """Which step of a probe is that of the configuration."""
    if configuration.micro_batches == 1:
        return "single"
    return "held" if configuration.accumulate_without_reduce else "reduced"


def probe(
    job: Mapping[str, Any], configurations: Sequence[Configuration], processes: int | None
) -> dict[Structure, Probed]:
    """Run the probes that configurations need.

    Args:
        job: all of a job but its structures; see `planning.probe`.
        configurations: to predict afterwards.
        processes: at once; None = one for each core, at most 4.
    """
    variants: dict[Structure, set[str]] = {}
    for configuration in configurations:
        variants.setdefault(structure_of(configuration), set()).add(variant_of(configuration))
    order = sorted(variants, key=lambda s: (s.precision, s.kernels, s.wrapped, s.shard, s.activation_checkpointing))
    count = max(min(processes or _cores(), len(order)), 1)
    shares = [order[len(order) * i // count : len(order) * (i + 1) // count] for i in range(count)]
    found: dict[Structure, Probed] = {}
    with tempfile.TemporaryDirectory() as folder:
        running = []
        try:
            for i, share in enumerate(shares):
                asked = [asdict(replace(s, variants=tuple(sorted(variants[s])))) for s in share]
                path = Path(folder) / f"{i}.json"
                path.write_text(json.dumps({**job, "structures": asked}))
                running.append((share, path, _start(path)))
            progress = Progress([path.with_suffix(".jsonl") for _, path, _ in running], len(order))
            for share, path, process in running:
                errors = _errors_at_end(process, progress)
                found |= dict(zip(share, _results(path, len(share), errors), strict=True))
        finally:
            for _, _, process in running:
                process.kill()  # only after an interruption is there one that still runs
    return found


class Progress:
    """Says how many structures are done, at most once for each number."""

    def __init__(self, results: Sequence[Path], total: int) -> None:
        self._results, self._total = results, total
        self._started, self._said = time.monotonic(), -1

    def say(self) -> None:
        """A line, where there is news since the last one."""
        done = sum(len(path.read_text().splitlines()) for path in self._results if path.exists())
        if done == self._said:
            return
        self._said = done
        seconds = (time.monotonic() - self._started) / max(done, 1) * (self._total - done)
        left = f", about {remaining(seconds)} left" if 0 < done < self._total else ""
        print(f"  {done} of {self._total} structures{left}", flush=True)


def remaining(seconds: float) -> str:
    """A time, as short as an estimate deserves: `50 s`, `2 min`."""
    return f"{max(round(seconds, -1), 10):.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _errors_at_end(process: "subprocess.Popen[str]", progress: Progress) -> str:
    while True:
        try:
            return process.communicate(timeout=_SAID_EVERY_S)[1]
        except subprocess.TimeoutExpired:
            progress.say()


def _cores() -> int:
    return min(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, MOST_PROCESSES
    )


def _start(path: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "lightning_fms.planning.probe", str(path), str(path.with_suffix(".jsonl"))]
    # Nothing here is distributed, and no GPU is used; a launcher's variables would say otherwise.
    hidden = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _results(path: Path, count: int, errors: str) -> list[Probed]:
    results = path.with_suffix(".jsonl")
    lines = results.read_text().splitlines() if results.exists() else []
    last = (errors.strip().splitlines() or ["no message"])[-1]
    missing = Probed({}, error=f"the probe's process ended: {last}")
    return [*map(_probed, lines), *[missing] * (count - len(lines))]


def _probed(line: str) -> Probed:
    fields = json.loads(line)
    if "error" in fields:
        return Probed({}, error=fields["error"])
    grids = {
        variant: {
            (int(size.split(",")[0]), int(size.split(",")[1])): {
                name: (peak, movable) for name, (peak, movable) in peaks.items()
            }
            for size, peaks in grid.items()
        }
        for variant, grid in fields["grid"].items()
    }
    return Probed(grids, fields["depth"], fields["head"], fields["groups"])


def prediction(
    configuration: Configuration, probed: Probed, seq_len: int, outside: Outside, probed_shard: int | None = None
) -> Prediction:
    """Memory of a configuration.

    Args:
        configuration: to predict.
        probed: for its structure.
        seq_len: tokens of a row.
        outside: what is added to the step's tensors.
        probed_shard: ranks that shared the model in the probe, where those are not the configuration's.
    """
    grid = probed.grids[variant_of(configuration)]
    if probed_shard is not None:
        grid = resharded(grid, probed_shard, configuration.shard)
    rows = configuration.micro_batch_size
    return predict(
        grid,
        rows,
        probed.depth,
        configuration.devices,
        scratch=0.0 if probed.head is None else scratch_bytes(rows * seq_len, *probed.head),
        offload_copies=sum(probed.groups) / configuration.shard if configuration.cpu_offload else None,
        outside=outside,
    )


def scratch_bytes(tokens: int, vocab: int, dim: int) -> float:
    """Buffers of the fused loss: logits of a chunk in bf16, and an fp32 gradient of the weight where chunks are many."""
    rows, wide = plan_chunks(tokens, (vocab, dim), 2, CHUNK_BYTES)
    return rows * vocab * 2.0 + (4.0 * vocab * dim if wide else 0.0)


def activation_bytes(probed: Probed) -> float:
    """What a row keeps for its backward, from the line through the probes; for estimates of time."""
    grid = next(iter(probed.grids.values()))
    rows = sorted({size[0] for size in grid})
    if len(rows) < 2:
        return 0.0
    depth = max(size[1] for size in grid)
    last, first = ([grid[r, depth].get(name, (0, 0))[0] for r in rows] for name in ("forward -1", "forward 0"))
    kept = [a - b for a, b in zip(last, first, strict=True)]
    blocks = max(depth - 1, 1)
    return max((kept[1] - kept[0]) / (rows[1] - rows[0]) / blocks, 0.0) * probed.depth
