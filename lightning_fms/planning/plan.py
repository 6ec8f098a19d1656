"""From a config to a plan: what `fms-plan` does.

In this order: check the config, build the model without memory and count what it computes, list the configurations, probe
the memory of their structures in other processes, estimate times, measure where asked to, and write table, JSON, pictures and
experiment.
"""

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from hydra import compose
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import nn

from lightning_fms import app
from lightning_fms.callbacks.flops import count_train_flops, matmul_weights
from lightning_fms.config_check import ConfigError
from lightning_fms.data.tokenizer import open_tokenizer
from lightning_fms.distributed.blocks import find_blocks
from lightning_fms.planner import report
from lightning_fms.planner.candidates import Candidate, Run, chosen
from lightning_fms.planner.hardware import Hardware
from lightning_fms.planner.memory import GIB, Outside, Verdict
from lightning_fms.planner.probe import keep_blocks
from lightning_fms.planner.settings import PlanSettings
from lightning_fms.planner.space import FP8_RECIPES, Configuration, enumerate_space, precision_overrides
from lightning_fms.planner.throughput import Work, step_time
from lightning_fms.planning.experiment import write_experiment
from lightning_fms.planning.jobs import Probed, activation_bytes, prediction, probe, structure_of
from lightning_fms.planning.measure import measured
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
    notes: list[str] = []
    as_given = cfg.copy()
    check_plan(cfg)
    settings: PlanSettings = app.plugin(cfg.plan)
    hardware: Hardware = app.plugin(cfg.hardware)
    fill_vocabulary(cfg, settings, notes)
    nodes = cfg.trainer.get("num_nodes", 1)
    devices = app.devices_asked(cfg.trainer) * nodes
    work = count_work(cfg)
    run = _run(cfg, settings, work)
    precisions = precisions_for(cfg, choices, settings, hardware, devices)
    settings = with_own_offload(cfg, settings)
    space = space_of(cfg, settings, precisions, devices, nodes)
    structures = {structure_of(c) for c in space}
    print(f"fms-plan: {len(space)} configurations, probing {len(structures)} structures without a GPU ...", flush=True)
    probed = probe(job_for(cfg, settings, precisions, choices), space, settings.processes)
    work = with_activations(work, probed)
    every = cfg.strategy.get("checkpoint_every", 2)
    candidates, failed = candidates_of(space, probed, work, hardware, every)
    if settings.measure:
        if nodes > 1:
            raise ConfigError(f"plan.measure=true with trainer.num_nodes={nodes}: measure on one machine")
        print(f"fms-plan: measuring on this machine, rounds of {list(settings.measure_steps)} steps", flush=True)
        candidates = measured(candidates, as_given, choices, settings.measure_first, list(settings.measure_steps))
    what_if = _what_if(cfg, settings, hardware, work, probed, candidates, devices, every)
    made = report.Plan(
        cfg.name, hardware, run, candidates, what_if, devices, settings.amortise_years, notes, failed
    )  # fmt: skip
    _publish(made, as_given, choices, settings)
    return made


def check_plan(cfg: DictConfig) -> None:
    """As for a run, whatever data it may have: a plan needs none."""
    copy = cfg.copy()
    with open_dict(copy):
        copy.trainer.devices, copy.trainer.num_nodes = 1, 1
        copy.paths.run = "unplanned"
        for key, value in (("sources", {"any": "unread"}), ("tokenizer", "bytes")):
            if key in copy.data.keys() and OmegaConf.is_missing(copy.data, key):  # noqa: SIM118, `in` is false for ???
                copy.data[key] = value
    app.check(copy)
    if not isinstance(cfg.data.get("seq_len"), int):
        raise ConfigError(
            f"data.seq_len={cfg.data.get('seq_len')}: a plan needs the tokens of a row; give data.seq_len=<value>"
        )
    unknown = {"tensor": 1, "save_ops": None}
    for key, default in unknown.items():
        if cfg.strategy.get(key, default) != default:
            raise ConfigError(f"strategy.{key}={cfg.strategy[key]}: a plan does not know it yet; leave it out here")
    if not str(cfg.strategy._target_).endswith("FSDPCompileStrategy"):
        raise ConfigError(
            f"strategy={cfg.strategy._target_}: only FSDPCompileStrategy can be planned; give strategy=fsdp_compile"
        )


def space_of(
    cfg: DictConfig, settings: PlanSettings, precisions: Sequence[str], devices: int, nodes: int = 1
) -> list[Configuration]:
    """What the settings say to try on so many devices."""
    return enumerate_space(
        devices, cfg.data.global_batch_size, nodes, list(settings.checkpointing), list(settings.offload), list(precisions),
        list(settings.kernels), settings.largest_micro_batch, list(settings.activation_offload),
    )  # fmt: skip


def with_own_offload(cfg: DictConfig, settings: PlanSettings) -> PlanSettings:
    """Settings whose space has what the config says of offloaded activations, too."""
    own = bool(cfg.strategy.get("activation_offload", False))
    return replace(settings, activation_offload=sorted({*settings.activation_offload, own}))


def fill_vocabulary(cfg: DictConfig, settings: PlanSettings, notes: list[str]) -> None:
    """Take the vocabulary's size from the tokenizer or the settings where the config leaves it open."""
    net = OmegaConf.select(cfg, "model.net")
    if not isinstance(net, DictConfig) or "vocab_size" not in net.keys() or not OmegaConf.is_missing(net, "vocab_size"):  # noqa: SIM118
        return
    size = None
    if not OmegaConf.is_missing(cfg.data, "tokenizer") and isinstance(cfg.data.tokenizer, str):
        size = open_tokenizer(cfg.data.tokenizer).vocab_size
    if size is None:
        size = settings.vocab_size
        notes.append(f"vocabulary of {size:,} ids assumed; give plan.vocab_size or data.tokenizer for another")
    with open_dict(cfg):
        cfg.model.net.vocab_size = size


def count_work(cfg: DictConfig) -> Work:
    """Parameters and operations of a config's model, from a copy without memory."""
    with torch.device("meta"):
        module = app.lightning_module(cfg)
    parameters = sum(p.numel() for p in module.parameters())
    flops = count_train_flops(module).at(cfg.data.seq_len)
    vocab = max((m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding)), default=0)
    blocks = find_blocks(module, cfg.strategy.get("blocks"))
    weights = sum(matmul_weights(block) for block in blocks.values())
    shorter = flops
    if len(blocks) > 1 and keep_blocks(module, list(blocks), len(blocks) - 1):
        shorter = count_train_flops(module).at(cfg.data.seq_len)
    one_pass = cfg.strategy.get("one_pass_optimizer", "auto") is not False
    return Work(parameters, weights, flops, (flops - shorter) * len(blocks), cfg.data.seq_len, vocab, 0.0, one_pass)


def _run(cfg: DictConfig, settings: PlanSettings, work: Work) -> Run:
    tokens_per_step = cfg.data.global_batch_size * cfg.data.seq_len
    if settings.tokens is not None:
        return Run(max(round(settings.tokens / tokens_per_step), 1), tokens_per_step, work.parameters)
    if cfg.trainer.max_steps < 1:
        raise ConfigError(
            f"trainer.max_steps={cfg.trainer.max_steps}: give the number of steps, or plan.tokens=<value>"
        )
    return Run(cfg.trainer.max_steps, tokens_per_step, work.parameters)


def precisions_for(
    cfg: DictConfig, choices: Mapping[str, Any], settings: PlanSettings, hardware: Hardware, devices: int
) -> list[str]:
    """Those of the settings, else the config's own and the fastest FP8 that the hardware has."""
    if settings.precisions is not None:
        wanted = [precision for precision in settings.precisions if precision in FP8_RECIPES]
        if wanted and hardware.fp8_tflops is None:
            raise ConfigError(
                f"plan.precisions={list(settings.precisions)}: {hardware.name} has no FP8; leave {', '.join(wanted)} out"
            )
        return list(settings.precisions)
    own = str(choices.get("precision", "bf16"))
    if own == "fp8":
        return [str(cfg.precision.get("recipe", own)) if cfg.precision.get("recipe") != "tensorwise" else own]
    faster = ["fused" if devices == 1 else "fp8"] if hardware.fp8_tflops is not None and own == "bf16" else []
    return [own, *faster]


def job_for(
    cfg: DictConfig, settings: PlanSettings, precisions: Sequence[str], choices: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What all probes have in common, in plain values; the config's own options, by group in `choices`, stay as it has them."""
    copy = cfg.copy()
    with open_dict(copy):
        for key in ("plan", "hardware", "paths", "callbacks", "logger"):
            copy.pop(key, None)
    keep = ("model", "optimizer", "scheduler", "strategy", "trainer")
    resolved = {key: OmegaConf.to_container(copy[key], resolve=True) for key in keep if copy.get(key) is not None}
    return {
        "config": {**resolved, "data": {"seq_len": cfg.data.seq_len}},
        "precision": {option: _option(cfg, choices or {}, "precision", option) for option in precisions},
        "kernels": {option: _option(cfg, choices or {}, "kernels", option) for option in settings.kernels},
        "rows": list(settings.probe_rows),
    }


def _option(cfg: DictConfig, choices: Mapping[str, Any], group: str, option: str) -> Any:
    """An option of a group: as the user has it where it is the chosen one."""
    overrides = precision_overrides(option) if group == "precision" else [f"{group}={option}"]
    chosen = overrides[0].partition("=")[2]
    if choices.get(group) == chosen:
        own = cfg[group].copy()
        for override in overrides[1:]:
            key, _, value = override.removeprefix(f"{group}.").partition("=")
            own[key] = value
        return OmegaConf.to_container(own, resolve=True)
    return OmegaConf.to_container(compose("train", overrides=overrides)[group], resolve=True)


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


def _what_if(
    cfg: DictConfig, settings: PlanSettings, hardware: Hardware, work: Work, probed: Mapping[Structure, Probed],
    candidates: Sequence[Candidate], devices: int, every: int,
) -> dict[int, Candidate]:  # fmt: skip
    """The best for each number of devices: what was probed, with the shards of another number of ranks."""
    found: dict[int, Candidate] = {}
    for count in sorted({*settings.device_counts, devices}):
        if count > cfg.data.global_batch_size:
            continue
        others = list(candidates)
        if count != devices:
            space = space_of(cfg, settings, sorted({s.precision for s in probed}), count)
            others = [c for k in space if (c := elsewhere(k, probed, work, hardware, devices, every)) is not None]
        best = chosen(others)
        if best is not None:
            found[count] = best
    return found


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
