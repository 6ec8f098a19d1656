"""A plan in words: lines for the terminal, plain values for JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_fms.planner.candidates import Candidate, Run, chosen, pareto, ranked
from lightning_fms.planner.hardware import Hardware
from lightning_fms.planner.memory import GIB, Verdict
from lightning_fms.planner.space import Configuration
from lightning_fms.planner.throughput import DAY, IMPLAUSIBLE_MFU

Line = tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """Everything that a report shows.

    Attributes:
        name: of the experiment.
        hardware: of each device.
        run: how long.
        candidates: all configurations, for the devices asked for.
        what_if: the best candidate by number of devices; all but the number asked for are extrapolated.
        devices: asked for.
        years: over which a machine is paid for.
        notes: what the reader has to know.
        failed: configurations without a prediction, and why.
    """

    name: str
    hardware: Hardware
    run: Run
    candidates: Sequence[Candidate]
    what_if: Mapping[int, Candidate]
    devices: int
    years: float
    notes: Sequence[str] = ()
    failed: Sequence[str] = ()

    @property
    def best(self) -> Candidate | None:
        """What to run."""
        return chosen(self.candidates)


HEADS = (
    "", "fits", "GiB", "rows x times", "layout", "recompute", "precision", "kernels", "offload", "step s", "tokens/s", "MFU",
    "days", "GPU-hours", "rent $",
)  # fmt: skip
RIGHT = {"GiB", "rows x times", "step s", "tokens/s", "MFU", "days", "GPU-hours", "rent $", "own $", "GPUs"}
WHAT_IF_HEADS = ("GPUs", "", "fits", "layout", "rows x times", "step s", "days", "GPU-hours", "rent $", "own $", "")


def heading(plan: Plan) -> list[str]:
    """What is planned, in a few lines."""
    run, hardware = plan.run, plan.hardware
    return [
        f"{plan.name} on {plan.devices} x {hardware.name} ({hardware.memory_gib:g} GiB, {hardware.bf16_tflops:,.0f} TFLOP/s bf16)",
        f"  model  {_count(run.parameters)} parameters",
        f"  run    {run.steps:,} steps x {run.tokens_per_step:,} tokens = {_count(run.tokens)} tokens; {run.chinchilla()}",
        *(f"  note   {note}" for note in plan.notes),
    ]


def _count(number: float) -> str:
    return f"{number / 1e9:,.2f} B" if number >= 1e8 else f"{number / 1e6:,.2f} M"


def fits_lines(plan: Plan, shown: int) -> list[Line]:
    """The fastest configurations, as cells under `HEADS`."""
    best = plan.best
    order = ranked(plan.candidates)[:shown]
    if best is not None and best not in order:
        order = [*order[:-1], best]
    return [_cells(plan, c, "->" if c is best else "") for c in order]


def _cells(plan: Plan, c: Candidate, mark: str) -> Line:
    k, run = c.configuration, plan.run
    low, high = c.memory.low / GIB, c.memory.high / GIB
    mfu = c.time.mfu * c.time.estimate / c.seconds
    flag = " !" if mfu > IMPLAUSIBLE_MFU else ""
    return (
        mark, c.verdict.value, f"{low:.1f}-{high:.1f}", f"{k.micro_batch_size} x {k.micro_batches}", layout(k),
        k.activation_checkpointing, k.precision, k.kernels, offload(k), _spread(c.interval),
        f"{run.tokens_per_step / c.seconds:,.0f}", f"{mfu:.0%}{flag}", _spread(tuple(s * run.steps / DAY for s in c.interval)),
        f"{c.gpu_hours(run):,.0f}", _money(c.rent(run, plan.hardware)),
    )  # fmt: skip


def layout(k: Configuration) -> str:
    """Sharding, and how gradients wait where there are several micro-batches."""
    waits = k.devices > 1 and k.micro_batches > 1 and not k.accumulate_without_reduce
    return f"{k.sharding}{', reduce each' if waits else ''}"


def offload(k: Configuration) -> str:
    """What lies in the host's memory."""
    parts = ["weights" if k.cpu_offload else "", "activations" if k.activation_offload else ""]
    return ", ".join(part for part in parts if part) or "no"


def _spread(interval: Sequence[float]) -> str:
    low, high = interval
    if high < 0.1:
        return f"{low:.1g}-{high:.1g}"
    digits = 0 if high >= 100 else 1 if high >= 10 else 2 if high >= 1 else 3
    return f"{low:,.{digits}f}-{high:,.{digits}f}"


def _money(dollars: float | None) -> str:
    return "?" if dollars is None else f"{dollars:,.0f}"


def summary(plan: Plan) -> list[str]:
    """How many fit, and what is assumed."""
    count = {verdict: sum(c.verdict is verdict for c in plan.candidates) for verdict in Verdict}
    measured = sum(c.measured is not None for c in plan.candidates)
    lines = [
        f"{len(plan.candidates)} configurations: {count[Verdict.FIT]} FIT, {count[Verdict.MAYBE]} MAYBE (run them to know), "
        f"{count[Verdict.NO]} NO. GiB is the least and the most that a device has to have.",
    ]
    if measured:
        lines.append(f"Step times of {measured} configurations are measured on this machine, the others estimated.")
    else:
        lines.append(
            f"Times are estimates: matrix products at {plan.hardware.matmul_efficiency:.0%} of the peak; nothing was measured."
        )
    if any(c.time.mfu > IMPLAUSIBLE_MFU for c in plan.candidates):
        lines.append(
            f"! = an MFU above {IMPLAUSIBLE_MFU:.0%} is a mistake until proven: look at hardware.matmul_efficiency."
        )
    lines += [f"not predicted: {why}" for why in plan.failed]
    return lines


def what_if_lines(plan: Plan) -> list[Line]:
    """The best configuration by number of devices, as cells under `WHAT_IF_HEADS`; `*` is on the Pareto front."""
    counts = sorted(plan.what_if)
    front = set(front_of(plan))
    lines: list[Line] = []
    for n in counts:
        c = plan.what_if[n]
        k, run = c.configuration, plan.run
        days = tuple(s * run.steps / DAY for s in c.interval)
        lines.append((
            f"{n:,}", "*" if n in front else "", c.verdict.value, layout(k), f"{k.micro_batch_size} x {k.micro_batches}",
            _spread(c.interval), _spread(days), f"{c.gpu_hours(run):,.0f}", _money(c.rent(run, plan.hardware)),
            _money(c.amortised(run, plan.hardware, plan.years)), "" if n == plan.devices else "extrapolated",
        ))  # fmt: skip
    return lines


def front_of(plan: Plan) -> list[int]:
    """Numbers of devices for which no other is both faster and cheaper."""
    counts = sorted(plan.what_if)
    points = [(plan.what_if[n].days(plan.run), plan.what_if[n].gpu_hours(plan.run)) for n in counts]
    return [counts[i] for i in pareto(points)]


def as_plain(plan: Plan) -> dict[str, Any]:
    """For JSON: every number of the plan; memory in bytes, times in seconds."""
    return {
        "name": plan.name,
        "devices": plan.devices,
        "hardware": asdict(plan.hardware),
        "run": {**asdict(plan.run), "tokens": plan.run.tokens, "chinchilla": plan.run.chinchilla()},
        "notes": list(plan.notes),
        "not_predicted": list(plan.failed),
        "chosen": None if plan.best is None else _plain_candidate(plan, plan.best),
        "candidates": [_plain_candidate(plan, c) for c in plan.candidates],
        "what_if": {
            str(n): {**_plain_candidate(plan, c), "extrapolated": n != plan.devices}
            for n, c in sorted(plan.what_if.items())
        },
        "pareto_devices": front_of(plan),
    }


def _plain_candidate(plan: Plan, c: Candidate) -> dict[str, Any]:
    return {
        "configuration": asdict(c.configuration),
        "verdict": c.verdict.value,
        "memory": asdict(c.memory),
        "step_seconds": {
            "bound": c.time.bound, "estimate": c.time.estimate, "measured": c.measured, "interval": list(c.interval),
            "parts": c.time.parts,
        },
        "mfu": c.time.mfu,
        "days": c.days(plan.run),
        "gpu_hours": c.gpu_hours(plan.run),
        "rent": c.rent(plan.run, plan.hardware),
        "amortised": c.amortised(plan.run, plan.hardware, plan.years),
    }  # fmt: skip
