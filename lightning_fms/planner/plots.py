"""A plan as pictures (extra `plot`): memory of the fastest configurations, and time against cost by number of devices."""

from pathlib import Path

from matplotlib.figure import Figure

from lightning_fms.planner.candidates import ranked
from lightning_fms.planner.memory import GIB, Verdict
from lightning_fms.planner.report import Plan, front_of, layout
from lightning_fms.planner.space import Configuration

_COLOURS = {Verdict.FIT: "#3b7a57", Verdict.MAYBE: "#c98a1b", Verdict.NO: "#a33b3b"}


def draw(plan: Plan, folder: Path) -> list[Path]:
    """Write `memory.png` and `cost.png`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "memory.png", folder / "cost.png"]
    _memory(plan, paths[0])
    _cost(plan, paths[1])
    return paths


def _memory(plan: Plan, path: Path) -> None:
    largest = sorted(plan.candidates, key=lambda c: c.memory.active)
    shown = [*ranked(plan.candidates)[:12], *[c for c in largest if c.verdict is Verdict.NO][:4]]
    figure = Figure(figsize=(9, 0.4 * len(shown) + 1.6), layout="constrained")
    axes = figure.add_subplot()
    for y, c in enumerate(shown):
        low, high = c.memory.low / GIB, c.memory.high / GIB
        axes.barh(y, c.memory.active / GIB, color=_COLOURS[c.verdict], alpha=0.35)
        axes.plot([low, high], [y, y], color=_COLOURS[c.verdict], linewidth=4, solid_capstyle="butt")
    axes.axvline(plan.hardware.memory_gib, color="black", linewidth=1)
    axes.set_yticks(range(len(shown)), [_label(c.configuration) for c in shown], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("GiB per device: predicted tensors (bar), needed (line); device (black)")
    axes.set_title(f"{plan.name} on {plan.devices} x {plan.hardware.name}", fontsize=10)
    figure.savefig(path, dpi=120)


def _label(k: Configuration) -> str:
    rows = f"{k.micro_batch_size} x {k.micro_batches}"
    moved = ", offload" if k.cpu_offload or k.activation_offload else ""
    return f"{rows}, {layout(k)}, {k.activation_checkpointing}, {k.precision}{moved}"


def _cost(plan: Plan, path: Path) -> None:
    counts = sorted(plan.what_if)
    rent = plan.hardware.rent
    value = {n: plan.what_if[n].gpu_hours(plan.run) * (rent or 1.0) for n in counts}
    days = {n: plan.what_if[n].days(plan.run) for n in counts}
    figure = Figure(figsize=(6.5, 4.2), layout="constrained")
    axes = figure.add_subplot()
    front = front_of(plan)
    axes.plot([days[n] for n in front], [value[n] for n in front], color="#3b7a57", linewidth=1)
    for n in counts:
        filled = "#3b7a57" if n in front else "white"
        axes.plot(
            days[n], value[n], "o", color=filled, markeredgecolor="#3b7a57", markersize=9 if n == plan.devices else 6
        )
        axes.annotate(str(n), (days[n], value[n]), xytext=(5, 5), textcoords="offset points", fontsize=8)
    axes.set_xscale("log")
    axes.set_xlabel("days")
    axes.set_ylabel("GPU-hours" if rent is None else "rent, $")
    axes.set_title(
        f"{plan.name} on {plan.hardware.name} by number of devices (all but {plan.devices} extrapolated)", fontsize=9
    )
    figure.savefig(path, dpi=120)
