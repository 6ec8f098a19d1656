"""From a config to a plan: what `fms-plan` does.

In this order: check the config, build the model without memory and count what it computes, list the configurations, probe
the memory of their structures in other processes, estimate times, measure where asked to, and write table, JSON, pictures and
experiment.
"""

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from omegaconf import DictConfig

from lightning_fms import app
from lightning_fms.config_check import ConfigError
from lightning_fms.planner import report
from lightning_fms.planner.candidates import Candidate, Run, chosen
from lightning_fms.planner.hardware import Hardware
from lightning_fms.planner.memory import GIB, Outside, Verdict
from lightning_fms.planner.settings import PlanSettings
from lightning_fms.planner.space import Configuration
from lightning_fms.planner.throughput import Work, step_time
from lightning_fms.planning.experiment import write_experiment
from lightning_fms.planning.jobs import Probed, activation_bytes, prediction, probe, structure_of
from lightning_fms.planning.measure import measured
from lightning_fms.planning.scope import Scope, check_plan, scope_of, space_of
from lightning_fms.planning.subject import Structure
from lightning_fms.tables import table


def plan(cfg: DictConfig, choices: Mapping[str, Any]) -> report.Plan:
    """Plan as the config says, print it, and write the files.

    Args:
        cfg: the composed `plan` config.
        choices: chosen options by group.

    Raises:
        ConfigError: for a mistake in the config, before anything is probed.
        ValueError: for a value that a part refuses, or where nothing fits.
    """
    app.quiet()
    as_given = cfg.copy()
    check_plan(cfg)
    settings: PlanSettings = app.plugin(cfg.plan)
    nodes = cfg.trainer.get("num_nodes", 1)
    scope = scope_of(cfg, choices, settings, app.plugin(cfg.hardware), nodes)
    run = _run(cfg, settings, scope.work)
    structures = {structure_of(c) for c in scope.configurations}
    print(
        f"fms-plan: {len(scope.configurations)} configurations, probing {len(structures)} structures without a GPU ...",
        flush=True,
    )
    found = predicted(scope)
    candidates = found.candidates
    if settings.measure:
        if nodes > 1:
            raise ConfigError(f"plan.measure=true with trainer.num_nodes={nodes}: measure on one machine")
        print(f"fms-plan: measuring on this machine, rounds of {list(settings.measure_steps)} steps", flush=True)
        candidates = measured(candidates, as_given, choices, settings.measure_first, list(settings.measure_steps))
    what_if = _what_if(cfg, scope, found, candidates)
    made = report.Plan(
        cfg.name, scope.hardware, run, candidates, what_if, scope.devices, settings.amortise_years, scope.notes, found.failed
    )  # fmt: skip
    _publish(made, as_given, choices, settings)
    return made


@dataclass(frozen=True)
class Predicted:
    """What the probes of a plan's scope say.

    Attributes:
        candidates: configurations with memory and time, whether they fit or not.
        failed: a line for each reason for which some have none.
        work: of a step, with what a row keeps for its backward.
        probed: by structure.
    """

    candidates: Sequence[Candidate]
    failed: Sequence[str]
    work: Work
    probed: Mapping[Structure, Probed]


def predicted(scope: Scope) -> Predicted:
    """Probe what the configurations need, in other processes, and judge each.

    Raises:
        ValueError: none of them could be probed.
    """
    probed = probe(scope.job, scope.configurations, scope.settings.processes)
    work = with_activations(scope.work, probed)
    candidates, failed = candidates_of(scope.configurations, probed, work, scope.hardware, scope.checkpoint_every)
    return Predicted(candidates, failed, work, probed)


def _run(cfg: DictConfig, settings: PlanSettings, work: Work) -> Run:
    tokens_per_step = cfg.data.global_batch_size * cfg.data.seq_len
    if settings.tokens is not None:
        return Run(max(round(settings.tokens / tokens_per_step), 1), tokens_per_step, work.parameters)
    if cfg.trainer.max_steps < 1:
        raise ConfigError(
            f"trainer.max_steps={cfg.trainer.max_steps}: give the number of steps, or plan.tokens=<value>"
        )
    return Run(cfg.trainer.max_steps, tokens_per_step, work.parameters)


def with_activations(work: Work, probed: Mapping[Structure, Probed]) -> Work:
    """The work with what a row keeps for its backward, as the probes without recomputation have seen it."""
    known = [activation_bytes(p) for s, p in probed.items() if not p.error and s.activation_checkpointing == "none"]
    every = [activation_bytes(p) for p in probed.values() if not p.error]
    return replace(work, activation_bytes=max(known or every, default=0.0))


def candidates_of(
    space: Sequence[Configuration], probed: Mapping[Structure, Probed], work: Work, hardware: Hardware, every: int
) -> tuple[list[Candidate], list[str]]:
    """Configurations with memory and time, and a line for each reason for which some have none."""
    found, failed = [], {}
    for configuration in space:
        structure = structure_of(configuration)
        if probed[structure].error is not None:
            failed[structure] = probed[structure].error
            continue
        found.append(judged(configuration, probed[structure], work, hardware, every))
    if not found:
        raise ValueError(f"no configuration could be predicted: {next(iter(failed.values()))}")
    return found, sorted(f"{len(failed)} structures: {error}" for error in set(failed.values()))


def judged(
    configuration: Configuration, known: Probed, work: Work, hardware: Hardware, every: int, shard: int | None = None
) -> Candidate:
    """A configuration with its memory and time; `shard` is that of the probe where it is another."""
    memory = prediction(configuration, known, work.seq_len, Outside(), shard)
    verdict = memory.verdict(hardware.memory_gib * GIB)
    return Candidate(configuration, memory, verdict, step_time(work, configuration, hardware, every))


def _what_if(cfg: DictConfig, scope: Scope, found: Predicted, candidates: Sequence[Candidate]) -> dict[int, Candidate]:
    """The best for each number of devices: what was probed, with the shards of another number of ranks."""
    best_of: dict[int, Candidate] = {}
    precisions = sorted({structure.precision for structure in found.probed})
    for count in sorted({*scope.settings.device_counts, scope.devices}):
        if count > cfg.data.global_batch_size:
            continue
        others = list(candidates)
        if count != scope.devices:
            others = [
                c
                for k in space_of(cfg, scope.settings, precisions, count)
                if (c := elsewhere(k, found.probed, found.work, scope.hardware, scope.devices, scope.checkpoint_every))
                is not None
            ]
        best = chosen(others)
        if best is not None:
            best_of[count] = best
    return best_of


def elsewhere(
    configuration: Configuration,
    probed: Mapping[Structure, Probed],
    work: Work,
    hardware: Hardware,
    devices: int,
    every: int,
) -> Candidate | None:
    """A configuration for another number of devices, from the probe of the same layout on `devices`."""
    wanted = structure_of(configuration)
    sharded = configuration.shard > 1 or configuration.cpu_offload
    near = replace(
        wanted, wrapped=True, shard=devices if sharded else 1, replicate=1 if sharded else devices,
        reshard_after_forward=configuration.reshard_after_forward or devices == 1,
    )  # fmt: skip
    known = probed.get(near)
    if known is None or known.error is not None:
        return None
    variant = "held" if configuration.micro_batches > 1 and "held" in known.grids else next(iter(known.grids))
    exact = replace(
        known, grids={name: known.grids.get(name, known.grids[variant]) for name in ("single", "held", "reduced")}
    )
    return judged(configuration, exact, work, hardware, every, near.shard)


def _publish(made: report.Plan, cfg: DictConfig, choices: Mapping[str, Any], settings: PlanSettings) -> None:
    folder = Path(settings.out) if settings.out else Path(cfg.paths.root) / "plans" / cfg.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(report.as_plain(made), indent=1) + "\n")
    print("\n".join([*report.heading(made), ""]))
    best = made.best
    if best is None:
        least = min(made.candidates, key=lambda c: c.memory.low)
        raise ValueError(
            f"nothing fits on {made.devices} x {made.hardware.name}: the smallest configuration needs at least "
            f"{least.memory.low / GIB:.1f} GiB of {made.hardware.memory_gib:g}; give more or larger devices ({folder}/plan.json)"
        )
    print("\n".join(table(report.HEADS, report.fits_lines(made, settings.shown), report.RIGHT)))
    print(
        "\n".join(["", *report.summary(made), "", "Other numbers of devices (* = no other is both faster and cheaper)"])
    )
    print("\n".join(table(report.WHAT_IF_HEADS, report.what_if_lines(made), report.RIGHT)))
    written = [folder / "plan.json", *_pictures(made, folder, settings), _experiment(made, best, cfg, choices, folder)]
    print("\n".join(["", *(f"  wrote  {path}" for path in written), "", "Next:"]))
    if best.verdict is Verdict.MAYBE:
        print(f"  no configuration fits for sure; this one may (at most {best.memory.high / GIB:.1f} GiB)")
    print(f"  {_command(best, folder, cfg.trainer.get('num_nodes', 1))}", flush=True)


def _pictures(made: report.Plan, folder: Path, settings: PlanSettings) -> list[Path]:
    installed = importlib.util.find_spec("matplotlib") is not None
    if settings.plots and not installed:
        raise ConfigError("plan.plots=true: matplotlib is not installed; pip install 'lightning_fms[plot]'")
    if not installed or settings.plots is False:
        return []
    return list(importlib.import_module("lightning_fms.planner.plots").draw(made, folder))


def _experiment(made: report.Plan, best: Candidate, cfg: DictConfig, choices: Mapping[str, Any], folder: Path) -> Path:
    path = folder / "experiment" / "planned.yaml"
    remark = (
        f"{made.devices} x {made.hardware.name}: {best.memory.low / GIB:.1f} to {best.memory.high / GIB:.1f} GiB, "
        f"{best.days(made.run):.3g} days; {'measured' if best.measured is not None else 'estimated'}"
    )
    write_experiment(
        path,
        cfg,
        choices,
        best.configuration.overrides(),
        _command(best, folder, cfg.trainer.get("num_nodes", 1)),
        remark,
    )
    return path


def _command(best: Candidate, folder: Path, nodes: int = 1) -> str:
    start, local = "fms-train", best.configuration.devices // nodes
    if nodes > 1:
        meeting = f"--nnodes={nodes} --rdzv-backend=c10d --rdzv-endpoint=<host>"
        start = f"torchrun {meeting} --nproc-per-node={local} -m lightning_fms.train"
    elif local > 1:
        start = f"torchrun --nproc-per-node={local} -m lightning_fms.train"
    return f"{start} --config-dir {quote(str(folder))} experiment=planned"
