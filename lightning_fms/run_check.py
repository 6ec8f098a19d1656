"""What can be known of a run before anything is built: combinations, numbers and places that cannot work.

`config_check` compares each value with the signature that it goes to. Here is what a signature does not say: what is missing
and how to give it, what would have no effect, what two settings mean together. A mistake costs seconds and leaves nothing behind.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from lightning_fms.config_check import MISSING, ConfigError, check_targets, shown
from lightning_fms.depth import checked
from lightning_fms.override_hints import SUPPLIED
from lightning_fms.ranks import launcher
from lightning_fms.remote_path import place
from lightning_fms.trial_build import try_optimizer

VOCAB = "model.net.vocab_size"
NEEDED = {
    "data.sources": "data.sources.<name>='<files, e.g. /corpus/*.jsonl>'",
    "data.tokenizer": "data.tokenizer=<tokenizer.json>, or data.tokenizer=bytes",
}
_OF_DEPTH = re.compile(r"\$\{(of_depth:|depth\})")


def check(cfg: DictConfig) -> None:
    """Check a config without building anything.

    Raises:
        ConfigError: a key, a type or a combination that cannot work.
    """
    if OmegaConf.is_missing(cfg.paths, "run"):
        cfg = cfg.copy()
        cfg.paths.run = str(Path(cfg.paths.root) / cfg.name / "new")
    _check_depth(cfg)
    missing = [key for key in OmegaConf.missing_keys(cfg) if key != VOCAB]
    if missing:
        key = min(missing)
        raise ConfigError(f"{key} is missing: give {NEEDED.get(key, f'{key}=<value>')}")
    plain = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(plain, dict)
    # Others take values from these by interpolation; a mistake is reported where it was made.
    first = {group: plain[group] for group in ("trainer", "data", "optimizer", "scheduler") if group in plain}
    check_targets({**first, **plain}, supplied={VOCAB, *_filled_in(plain)})
    _check_supplied(cfg)
    _check_unread(cfg)
    _check_lists(plain)
    if cfg.get("weights") and cfg.resume not in (None, "auto"):
        raise ConfigError(
            f"weights={cfg.weights} with resume={cfg.resume}: the checkpoint brings weights; give one of the two"
        )
    if cfg.get("weights") and not place(cfg.weights).exists():
        raise ConfigError(
            f"weights={cfg.weights}: nothing there; give a checkpoint, or a file or folder of safetensors"
        )
    if cfg.get("meta_init") and str(cfg.strategy.get("_target_")).endswith("DDPStrategy"):
        raise ConfigError(
            "meta_init=true with DDP: it copies whole weights, which are not there yet; take meta_init=false, "
            "or strategy=fsdp_compile"
        )
    if cfg.get("objective_mode", "min") not in ("min", "max"):
        raise ConfigError(f"objective_mode={cfg.objective_mode}: give min, or max where more is better")
    _check_numbers(cfg)
    _check_processes(cfg)
    try_optimizer(plain.get("optimizer"), plain.get("scheduler"))


def _filled_in(plain: Mapping[Any, Any]) -> Iterator[str]:
    # Partials in a model's arguments are completed by the model.
    yield from (f"model.{key}" for key in ("optimizer", "scheduler") if plain["model"].get(key, MISSING) == MISSING)


def _check_supplied(cfg: DictConfig) -> None:
    for key, instead in SUPPLIED.items():
        if key in cfg.trainer:
            raise ConfigError(f"trainer.{key} would have no effect: give {instead}")


def _check_unread(cfg: DictConfig) -> None:
    """Keys beside those of our own config: only what another value refers to is read by anyone.

    An app that has a config of its own may read from it what it likes.
    """
    if not HydraConfig.initialized() or not _is_of_ours(HydraConfig.get()):
        return
    ours = OmegaConf.load(str(files("lightning_fms.conf").joinpath("train.yaml")))
    known = {str(key) for key in ours} | {
        str(key) for entry in ours.defaults if OmegaConf.is_dict(entry) for key in entry
    }
    text = OmegaConf.to_yaml(cfg)
    for key in map(str, cfg):
        if key not in known and not re.search(rf"\$\{{{re.escape(key)}[.\[}}]", text):
            near = difflib.get_close_matches(key, known, n=1)
            meant = f"did you mean {near[0]}?" if near else f"leave it out, or refer to it by ${{{key}}}."
            raise ConfigError(
                f"{key}={shown(OmegaConf.select(cfg, key))}: nothing reads this key, so it would do nothing; {meant} One more "
                "logger or callback goes into its group: +logger.<name>._target_=<class>"
            )


def _is_of_ours(hydra: Any) -> bool:
    main = [source.path for source in hydra.runtime.config_sources if source.provider == "main"]
    return hydra.job.config_name == "train" and main == ["lightning_fms.conf"]


def _check_lists(plain: Mapping[Any, Any]) -> None:
    """Entries of the groups that are lists with names: an entry without a class would make nothing."""
    for group in ("callbacks", "logger"):
        for name, node in (plain.get(group) or {}).items():
            if node is not None and not (isinstance(node, Mapping) and "_target_" in node):
                raise ConfigError(
                    f"{group}.{name}={shown(node)}: names no class, so it would do nothing; give {group}.{name}._target_=<class>, "
                    f"or take it out by ~{group}.{name}"
                )


def devices_asked(trainer: DictConfig) -> int:
    """How many devices a trainer config means on this node, as far as can be known before it is built."""
    devices = trainer.get("devices", "auto")
    if OmegaConf.is_list(devices):
        return len(devices)
    if isinstance(devices, str) and "," in devices:
        return len([part for part in devices.split(",") if part.strip()])
    if devices in ("auto", -1, "-1", None):
        on_gpu = trainer.get("accelerator", "auto") in ("auto", "gpu", "cuda") and torch.cuda.is_available()
        return torch.cuda.device_count() if on_gpu else 1
    if not str(devices).lstrip("-").isdecimal() or int(devices) < 1:
        raise ConfigError(f"trainer.devices={devices}: give a number of devices, a list of their indices, or auto")
    return int(devices)


def _check_processes(cfg: DictConfig) -> None:
    devices = cfg.trainer.get("devices", "auto")
    if OmegaConf.is_list(devices) and (cfg.trainer.get("accelerator") == "cpu" or not torch.cuda.is_available()):
        raise ConfigError(f"trainer.devices={devices}: a CPU has no indices; give a number of processes")
    processes = devices_asked(cfg.trainer) * cfg.trainer.get("num_nodes", 1)
    if cfg.trainer.get("num_nodes", 1) > 1 and launcher() is None:
        raise ConfigError(
            f"trainer.num_nodes={cfg.trainer.num_nodes}: the nodes must be started together; "
            "use torchrun --nnodes=... -m lightning_fms.train, or srun"
        )
    if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
        basic = HydraConfig.get().launcher._target_.endswith("BasicLauncher")
        if basic and (processes > 1 or launcher() is not None):
            raise ConfigError(
                f"-m with {processes} processes a job: the basic launcher would run every job in every process; "
                "leave out hydra/launcher=basic, or use trainer.devices=1"
            )


def _check_depth(cfg: DictConfig) -> None:
    """The dial for size has a value where something asks for it, and its model does ask where it has one."""
    depth = cfg.get("depth")
    if depth is None and not _OF_DEPTH.search(OmegaConf.to_yaml(cfg)):
        return
    try:
        checked(depth)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not _OF_DEPTH.search(OmegaConf.to_yaml(cfg.model)):
        raise ConfigError(f"depth={depth}: this model has a size of its own; take model=llama, or leave depth out")
    if "${of_depth:" in OmegaConf.to_yaml(cfg.data) and not isinstance(cfg.data.get("seq_len"), int):
        raise ConfigError(
            f"depth={depth}: rows of a batch follow from it in tokens; give data.seq_len, or data.global_batch_size"
        )


def _check_numbers(cfg: DictConfig) -> None:
    """Numbers that their target would take, and make something else of than was meant."""
    if not 0 <= cfg.seed < 2**32:
        raise ConfigError(f"seed={cfg.seed}: give a whole number from 0 to {2**32 - 1}")
    if not re.fullmatch(r"[\w.=,+@-]+", str(cfg.name)) or str(cfg.name).startswith("."):
        raise ConfigError(f"name={cfg.name}: it becomes a folder; give letters, digits, _, - and dots, e.g. name=mine")
    for key in ("seq_len", "global_batch_size", "micro_batch_size"):
        value = cfg.data.get(key)
        if str(cfg.data.get("_target_")).endswith("RescalableDataModule") and isinstance(value, int) and value < 1:
            raise ConfigError(f"data.{key}={value}: give a whole number of at least 1")
    trainer = cfg.trainer
    if (trainer.get("gradient_clip_val") or 0) < 0:
        raise ConfigError(
            f"trainer.gradient_clip_val={trainer.gradient_clip_val}: give a norm, or null to clip nothing"
        )
    if trainer.get("max_steps", -1) < 1 and trainer.get("max_steps", -1) != -1:
        raise ConfigError(
            f"trainer.max_steps={trainer.max_steps}: give the number of optimizer steps, "
            "or -1 with +trainer.max_epochs=<n> and +data.steps_per_epoch=<n>"
        )
    for key in ("limit_train_batches", "max_epochs"):
        if trainer.get(key) == 0:
            raise ConfigError(
                f"trainer.{key}=0: would train nothing; leave it out, and end a run by trainer.max_steps=<n>"
            )
    if (trainer.get("log_every_n_steps") or 0) < 0:
        raise ConfigError(
            f"trainer.log_every_n_steps={trainer.log_every_n_steps}: give a number of steps, or 0 to log nothing"
        )
