"""What a plan looks for: `conf/plan.yaml`, group `plan`."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PlanSettings:
    """Which configurations are compared, and for how long a run.

    Args:
        tokens: the run trains on so many; None = steps x rows x tokens of the config. The step stays as it is.
        vocab_size: ids, where neither the model nor the tokenizer says; 128,256 are Llama 3's.
        checkpointing: modes of activation checkpointing to try.
        offload: whether to try the host's memory for weights and optimizer.
        activation_offload: whether to try it for activations. Off by default: it is slow, and twice the probes.
        precisions: options of `precision` to try, or recipes of `fp8`; None = the config's, and where the hardware has FP8 the
            fastest recipe (`fused` on one device, `fp8` on several, where `fused` has not been measured).
        kernels: options of `kernels` to try. `none` is left out by default: it never needs less memory, and twice the probes.
        largest_micro_batch: rows of a device at once, at most; None = all of its rows.
        probe_rows: two numbers of rows at which memory is followed; others are on the straight line.
        device_counts: what-if over these; an extrapolation.
        amortise_years: over which a bought machine is paid for.
        shown: rows of the table in the terminal.
        out: folder for plan.json, pictures and the experiment; None = <paths.root>/plans/<name>.
        plots: draw pictures; None = where matplotlib is installed.
        processes: for probes; None = one for each core, at most 4.
        measure: run the best ones for a few steps each on this machine.
        measure_steps: optimizer steps of each round of measuring; each keeps the faster third.
        measure_first: configurations in the first round.

    Raises:
        ValueError: a number that cannot be.
    """

    tokens: float | None = None
    vocab_size: int = 128256
    checkpointing: Sequence[str] = ("none", "selective", "full")
    offload: Sequence[bool] = (False, True)
    activation_offload: Sequence[bool] = (False,)
    precisions: Sequence[str] | None = None
    kernels: Sequence[str] = ("all",)
    largest_micro_batch: int | None = 64
    probe_rows: Sequence[int] = (2, 3)
    device_counts: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    amortise_years: float = 3.0
    shown: int = 10
    out: str | None = None
    plots: bool | None = None
    processes: int | None = None
    measure: bool = False
    measure_steps: Sequence[int] = (5, 15, 50)
    measure_first: int = 9

    def __post_init__(self) -> None:
        rows = list(self.probe_rows)
        if len(rows) != 2 or rows[0] < 1 or rows[0] >= rows[1]:
            raise ValueError(f"plan.probe_rows={rows}: give two numbers, the smaller one first, as [2, 3]")
        for name in (
            "tokens",
            "vocab_size",
            "amortise_years",
            "shown",
            "processes",
            "measure_first",
            "largest_micro_batch",
        ):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"plan.{name}={value}: give a number above 0")
        for name in ("device_counts", "measure_steps"):
            values = list(getattr(self, name))
            if not values or min(values) < 1:
                raise ValueError(f"plan.{name}={values}: give whole numbers above 0")
        if odd := [mode for mode in self.checkpointing if mode not in ("none", "selective", "full")]:
            raise ValueError(f"plan.checkpointing={odd}: a plan knows none, selective (every n-th block) and full")
        for name in ("checkpointing", "offload", "activation_offload", "kernels"):
            if not list(getattr(self, name)):
                raise ValueError(f"plan.{name}=[]: give at least one")
