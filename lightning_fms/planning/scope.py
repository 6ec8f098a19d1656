"""What a plan is about: the configurations to judge on a machine, the work of a step, and what their probes are asked.

`fms-plan` and `hydra/sweeper=plan` begin alike, here: from a checked config, without memory and before anything is probed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from lightning_fms.planner.hardware import Hardware
from lightning_fms.planner.probe import keep_blocks
from lightning_fms.planner.settings import PlanSettings
from lightning_fms.planner.space import FP8_RECIPES, Configuration, enumerate_space, precision_overrides
from lightning_fms.planner.throughput import Work


@dataclass(frozen=True)
class Scope:
    """What is to be predicted.

    Attributes:
        settings: what to try, the config's own offload among it.
        hardware: of each device.
        devices: in all.
        configurations: all of them.
        work: of a step, without what only probes see.
        job: what all probes have in common; see `planning.probe`.
        checkpoint_every: which blocks selective checkpointing recomputes.
        notes: what was assumed.
    """

    settings: PlanSettings
    hardware: Hardware
    devices: int
    configurations: Sequence[Configuration]
    work: Work
    job: Mapping[str, Any]
    checkpoint_every: int
    notes: Sequence[str]


def scope_of(
    cfg: DictConfig, choices: Mapping[str, Any], settings: PlanSettings, hardware: Hardware, nodes: int = 1
) -> Scope:
    """What a config is planned over.

    Args:
        cfg: checked by `check_plan`; its vocabulary is filled in.
        choices: chosen options by group.
        settings: what to try.
        hardware: of each device.
        nodes: machines, each with as many devices as the trainer asks for.

    Raises:
        ConfigError: devices or precisions that there are not.
    """
    notes: list[str] = []
    fill_vocabulary(cfg, settings, notes)
    devices = app.devices_asked(cfg.trainer) * nodes
    work = count_work(cfg)
    precisions = precisions_for(cfg, choices, settings, hardware, devices)
    settings = with_own_offload(cfg, settings)
    return Scope(
        settings, hardware, devices, space_of(cfg, settings, precisions, devices, nodes), work,
        job_for(cfg, settings, precisions, choices), cfg.strategy.get("checkpoint_every", 2), notes,
    )  # fmt: skip


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


def with_own_offload(cfg: DictConfig, settings: PlanSettings) -> PlanSettings:
    """Settings whose space has what the config says of offloaded activations, too."""
    own = bool(cfg.strategy.get("activation_offload", False))
    return replace(settings, activation_offload=sorted({*settings.activation_offload, own}))


def space_of(
    cfg: DictConfig, settings: PlanSettings, precisions: Sequence[str], devices: int, nodes: int = 1
) -> list[Configuration]:
    """What the settings say to try on so many devices."""
    return enumerate_space(
        devices, cfg.data.global_batch_size, nodes, list(settings.checkpointing), list(settings.offload), list(precisions),
        list(settings.kernels), settings.largest_micro_batch, list(settings.activation_offload),
    )  # fmt: skip


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
