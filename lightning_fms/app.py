"""From a config to a trained model: the only place that instantiates.

The parts know nothing of each other and nothing of Hydra; here they meet. In this order, so that a mistake costs
seconds and leaves nothing behind: find what to resume, check the config, reserve the run's folder, build, train.
"""

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import join
from typing import Any

import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf, open_dict

from lightning_fms.callbacks import InitialWeights
from lightning_fms.command_line import program
from lightning_fms.config_check import ConfigError
from lightning_fms.depth import described
from lightning_fms.launch.process_group import JOB, RESTART, RUN_FILE
from lightning_fms.launch.result import Result, objective_in, write_result
from lightning_fms.launch.words import key_of
from lightning_fms.lost_rank import is_lost_connection, watching
from lightning_fms.out_of_memory import OutOfMemory, cause_of, explained
from lightning_fms.ranks import agree, launcher
from lightning_fms.resume import find_former, is_given, longer_command, resume_command
from lightning_fms.run_check import VOCAB, check, devices_asked
from lightning_fms.run_folder import (
    Reservation,
    RunRecord,
    discard,
    is_run,
    reserve,
    reserve_given,
    saved,
    step_of,
)
from lightning_fms.tensorboard_record import TensorBoardRecord

# What Lightning tells every user at every start, and what a product would not show.
_UNSHOWN_WARNINGS = (
    r".*does not have many workers which may be a bottleneck.*",
    r".*Checkpoint directory .* exists and is not empty.*",
    r".*No device id is provided via `init_process_group`.*",
    r".*You have overridden `on_before_backward`.*",
    r".*The number of training batches .* is smaller than the logging interval.*",
    r".*`isinstance\(treespec, LeafSpec\)` is deprecated.*",
)


def train(cfg: DictConfig, overrides: list[str] | None = None) -> float | None:
    """Train as the config says.

    Args:
        cfg: the composed `train` config.
        overrides: the command line that it was composed from. `None` = that of the Hydra app that runs.

    Returns:
        The objective: the metric that `objective` names, as it was logged last.

    Raises:
        ConfigError: for a mistake in the config, before anything is built.
        ValueError: for a value that a part refuses.
    """
    quiet()
    overrides = _given() if overrides is None else overrides
    _follow_launcher(cfg)
    former = agree("resume", lambda: find_former(cfg))
    check(cfg)
    reserved: list[Reservation] = []  # On the rank that reserves.
    folder = former["run"] or agree("folder", lambda: _reserve(cfg, reserved))
    _tell_supervisor(folder)
    try:
        return _fit(cfg, overrides, Path(folder), former["checkpoint"])
    except BaseException as error:
        for reservation in reserved:
            discard(reservation)
        if (cause := cause_of(error)) is not None:
            raise _out_of_memory(cause, cfg, overrides) from error
        raise


def _given() -> list[str]:
    """The overrides of the running Hydra app as they were typed; read one by one, those with `${...}` would be resolved."""
    found = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    assert isinstance(found, list)
    return [str(override) for override in found]


def _out_of_memory(cause: BaseException, cfg: DictConfig, overrides: list[str]) -> OutOfMemory:
    plain = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(plain, dict)
    on_gpu = isinstance(cause, torch.OutOfMemoryError)
    ranks = devices_asked(cfg.trainer) * cfg.trainer.get("num_nodes", 1)
    return OutOfMemory(explained(cause, {str(k): v for k, v in plain.items()}, ranks, on_gpu, overrides))


def _follow_launcher(cfg: DictConfig) -> None:
    """Take the number of processes from torchrun where the config leaves it open: it can change with every restart."""
    if not isinstance(launcher(), TorchElasticEnvironment):
        return
    if cfg.trainer.get("devices", "auto") == "auto":
        cfg.trainer.devices = int(os.environ["LOCAL_WORLD_SIZE"])
    if cfg.trainer.get("num_nodes", 1) == 1:
        cfg.trainer.num_nodes = int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])


def _reserve(cfg: DictConfig, reserved: list[Reservation]) -> str:
    """Make the run's folder, and note what is to be undone if nothing is trained."""
    if OmegaConf.is_missing(cfg.paths, "run"):
        try:
            reserved.append(reserve(Path(cfg.paths.root), cfg.name))
        except OSError as error:
            raise ConfigError(f"paths.root={cfg.paths.root}: no folder can be made there ({error.strerror})") from None
    else:
        restarted = os.environ.get(RESTART, "0") != "0"
        reserved.append(reserve_given(Path(cfg.paths.run), resume=cfg.resume == "auto" or restarted))
    return str(reserved[0].folder)


def _tell_supervisor(folder: str) -> None:
    """Write down where the run is, so that the next attempt is in the same place."""
    file = os.environ.get(RUN_FILE)
    if file and os.environ.get("RANK", "0") == "0":
        aside = Path(f"{file}.aside")
        aside.write_text(json.dumps({"run": folder}))
        aside.replace(file)


def data_module(cfg: DictConfig) -> Any:
    """Build the data module of a config, which needs no trainer."""
    return instantiate(cfg.data, _convert_="all")


def lightning_module(cfg: DictConfig) -> Any:
    """Build the LightningModule of a config, on the device that is the default."""
    return instantiate(cfg.model, _convert_="all")


def plugin(cfg: DictConfig) -> Any:
    """Build what a group's config names, e.g. `cfg.precision` or `cfg.hardware`."""
    return instantiate(cfg, _convert_="all")


def _fit(cfg: DictConfig, overrides: list[str], folder: Path, checkpoint: str | None) -> float | None:
    with open_dict(cfg):
        cfg.paths.run = str(folder)
    L.seed_everything(cfg.seed, workers=True, verbose=False)
    datamodule = data_module(cfg)
    _fill_vocabulary(cfg, datamodule)
    with torch.device("meta") if cfg.meta_init else nullcontext():
        module = lightning_module(cfg)
    record = RunRecord(folder, cfg, overrides)
    record.report = [described(cfg.depth)] if cfg.get("depth") else []
    trainer = _trainer(cfg, record)
    started = time.monotonic()
    _until_the_end(trainer, cfg, folder, partial(trainer.fit, module, datamodule=datamodule, ckpt_path=checkpoint))
    seconds = time.monotonic() - started
    if trainer.is_global_zero:
        print("\n".join(closing_lines(trainer, cfg, overrides, folder, seconds)), flush=True)
    return _result(trainer, cfg, folder, seconds)


def _until_the_end(trainer: L.Trainer, cfg: DictConfig, folder: Path, fit: Callable[[], None]) -> None:
    """Train; where that is cut short from outside, say how to go on."""

    def say(how: str) -> None:
        if line := _interrupted(trainer, cfg, folder, how):
            print(f"fms-train: {line}", file=sys.stderr, flush=True)

    with watching(lambda: getattr(trainer.strategy.launcher, "procs", ()), say) as watch:
        try:
            fit()
        except SystemExit as stop:
            if isinstance(stop.__context__, KeyboardInterrupt):  # Lightning leaves with code 1.
                raise Interrupted(_interrupted(trainer, cfg, folder)) from None
            if stop.code:
                say("stopped")
            raise
        except RuntimeError as error:
            if is_lost_connection(error) and not cfg.debug.traceback and watch.settles():
                raise SystemExit(1) from None  # The watch has said which rank.
            raise


class Interrupted(KeyboardInterrupt):
    """A Ctrl-C, with what to say about it; nothing on ranks other than the first."""


def _interrupted(trainer: L.Trainer, cfg: DictConfig, folder: Path, how: str = "interrupted") -> str:
    if not trainer.is_global_zero:
        return ""
    if not is_run(folder):
        return f"{how} before the first step"
    kept = saved(folder)
    start = f"step {step_of(kept[0])}" if kept else "the start (no checkpoint was due yet)"
    command = resume_command(folder)
    return f"{how} at step {trainer.global_step}; go on from {start} with: {command}"


def _result(trainer: L.Trainer, cfg: DictConfig, folder: Path, seconds: float) -> float | None:
    """Put what the run came to into its folder; the objective."""
    metrics = {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
    result = Result(trainer.global_step, seconds, metrics, None)
    keeps = trainer.is_global_zero and is_run(folder)
    if keeps:  # Also if the objective turns out to be a mistake.
        write_result(folder, result)
    result = replace(result, objective=objective_in(metrics, cfg.get("objective")))
    if keeps:
        write_result(folder, result)
    return result.value


def _fill_vocabulary(cfg: DictConfig, datamodule: Any) -> None:
    """Take the vocabulary's size from the tokenizer where the config leaves it open, and compare where it does not."""
    size = getattr(getattr(datamodule, "tokenizer", None), "vocab_size", None)
    net = OmegaConf.select(cfg, "model.net")
    if not isinstance(net, DictConfig) or "vocab_size" not in net.keys():  # noqa: SIM118, for `in` is false for ???
        return
    if not OmegaConf.is_missing(net, "vocab_size"):
        if size is not None and net.vocab_size < size:
            raise ConfigError(
                f"{VOCAB}={net.vocab_size}: the tokenizer has {size} ids; leave it out, or give at least {size}"
            )
        return
    if size is None:
        raise ConfigError(
            f"{VOCAB} is missing, and the data module has no tokenizer to take it from; give {VOCAB}=<value>"
        )
    net.vocab_size = size


def _trainer(cfg: DictConfig, record: RunRecord) -> L.Trainer:
    """The Trainer with everything that goes into it."""
    loggers = list(_instances(cfg.logger, "logger", Logger))
    callbacks = list(_instances(cfg.callbacks, "callbacks", L.Callback))
    if not loggers:  # Lightning would refuse it; nothing is lost.
        callbacks = [callback for callback in callbacks if not isinstance(callback, LearningRateMonitor)]
    if "_target_" in cfg.kernels:
        callbacks.insert(0, instantiate(cfg.kernels, _convert_="all"))
    if cfg.get("weights"):
        callbacks.insert(0, InitialWeights(cfg.weights))
    precision: dict[str, Any] = {"precision": cfg.precision.get("name")}
    if "_target_" in cfg.precision:
        precision = {"plugins": [instantiate(cfg.precision, _convert_="all")]}
    return instantiate(
        cfg.trainer,
        strategy=instantiate(cfg.strategy, _convert_="all"),
        callbacks=[record, TensorBoardRecord(record.config, record.overrides, program()), *callbacks],
        logger=loggers or False,
        default_root_dir=str(record.folder),
        _convert_="all",
        **precision,
    )


def _instances(group: DictConfig | None, name: str, kind: type) -> Iterator[Any]:
    """The objects of a group `{name: node}`; a node that is null was taken out by the user."""
    for key, node in (group or {}).items():
        if node is not None:
            made = instantiate(node, _convert_="all")
            if not isinstance(made, kind):
                what = f"{type(made).__name__} is no {kind.__name__} of Lightning"
                entry = f"{name}.{key!s}"
                raise ConfigError(f"{entry}: {what}; name one, or leave it out by ~{entry}")
            yield made


def closing_lines(
    trainer: L.Trainer, cfg: DictConfig, overrides: Sequence[str], folder: Path, seconds: float
) -> list[str]:
    """What a run says at its end: results, where they are, and three commands to try."""
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.endswith("loss")}
    results = "".join(f", {name} {value:.4f}" for name, value in metrics.items())
    swept = [
        *(o for o in overrides if key_of(o) not in ("resume", "paths.run", "optimizer.lr")),
        "optimizer.lr=1e-3,3e-3",
    ]
    kept = saved(folder)  # Not verified: that reads all of it again, and who loads it does so.
    ended = [
        f"{trainer.global_step} steps, {seconds:.0f} s{results}",
        f"  run         {folder}",
        f"  checkpoint  {kept[0] if kept else 'none'}",
    ]
    if JOB in os.environ:
        return ended
    return [
        *ended,
        "",
        "Next:",
        f"  tensorboard --logdir {folder if is_given(cfg, folder) else cfg.paths.root}",
        f"  {longer_command(trainer, folder)}",
        f"  {program()} -m {join(swept)}    # a sweep",
    ]


def quiet() -> None:
    """Silence what Lightning says to everybody."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_utilities", "lightning_fms"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # It would rather have one collective where a tensor lies on two dimensions of the mesh.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    for message in _UNSHOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
