"""Which run `resume=` means, with which settings it goes on, and the command that does it.

A run that goes on keeps its settings, and those decide what else may be said: `data.tokenizer=bytes` is a mistake with the
default data and none with `data=text`. So the overrides that the run was started with are put in front of the command line
before Hydra sees it, and all are composed together. With `experiment=` the command says itself what it means, and the run
is looked for by the name that this composes to. All ranks take the first one's answer.
"""

from collections.abc import Sequence
from pathlib import Path
from shlex import quote

import lightning as L
import torch
from omegaconf import DictConfig, OmegaConf

from lightning_fms.command_line import paths_of, program
from lightning_fms.config_check import ConfigError
from lightning_fms.launch.words import flags_in, key_of, override_of, overrides_in, value_in
from lightning_fms.ranks import agree
from lightning_fms.remote_path import place
from lightning_fms.run_folder import attempts, is_run, locate, newest_checkpoint, newest_run


def with_settings_of_run(words: Sequence[str]) -> list[str]:
    """The words of a command line with `resume=auto` behind those that the run was started with.

    Args:
        words: without the program's name.

    Raises:
        ConfigError: if there is no such run.
    """
    if value_in(words, "resume") != "auto" or value_in(words, "experiment") is not None:
        return list(words)
    found = agree("run", lambda: _run_meant(words))
    if found is None:
        return list(words)
    given = {key_of(override) for override in overrides_in(words)}
    recorded = attempts(Path(found))[-1]["overrides"]
    kept = [override for override in recorded if key_of(override) not in given | {"resume", "paths.run"}]
    place = [] if "paths.run" in given else [override_of("paths.run", found)]
    return [*flags_in(words), *kept, *overrides_in(words), *place]


def _run_meant(words: Sequence[str]) -> str | None:
    paths = paths_of(words)
    if not OmegaConf.is_missing(paths, "run"):
        return paths.run if is_run(Path(paths.run)) else None
    name = value_in(words, "name")
    found = newest_run(Path(paths.root), name)
    if found is None and name is None:
        raise ConfigError(f"resume=auto: no run under {paths.root}/ has a checkpoint; start one with experiment=<name>")
    return str(found) if found else None


def find_former(cfg: DictConfig) -> dict[str, str | None]:
    """The run to go on with, and the checkpoint to load; to be asked on the first rank."""
    if cfg.resume is None:
        return {"run": None, "checkpoint": None}
    if not isinstance(cfg.resume, str):
        raise ConfigError(f"resume={cfg.resume}: give auto, null, or the path of a checkpoint or of a run")
    if cfg.resume != "auto":
        return {"run": None, "checkpoint": str(locate(place(cfg.resume)))}
    if not OmegaConf.is_missing(cfg.paths, "run"):
        return _find_in(Path(cfg.paths.run))
    run = newest_run(Path(cfg.paths.root), cfg.name)
    if run is None:
        _say(f"resume=auto: no checkpoint of {cfg.name} under {cfg.paths.root}/, so this run starts at step 0")
        return {"run": None, "checkpoint": None}
    return _find_in(run)


def _find_in(run: Path) -> dict[str, str | None]:
    """The same for a folder; a run that ended before its first checkpoint starts again in it, where it had started."""
    checkpoint = newest_checkpoint(run) if is_run(run) else None
    if checkpoint is None and is_run(run):
        first = value_in(attempts(run)[0]["overrides"], "resume")
        checkpoint = locate(place(first)) if first not in (None, "auto", "null") else None
    if checkpoint is None:
        _say(f"resume=auto: no checkpoint in {run}/, so this run starts at step 0")
    else:
        _say(f"resume=auto: goes on from {checkpoint}")
    return {"run": str(run) if is_run(run) else None, "checkpoint": str(checkpoint) if checkpoint else None}


def resume_command(folder: Path) -> str:
    """What goes on with a run, whichever others there are by then."""
    return f"{program()} resume=auto {quote(override_of('paths.run', folder))}"


def longer_command(trainer: L.Trainer, folder: Path) -> str:
    """What goes on with a run that has ended, with a word on what it does."""
    longer = f"trainer.max_steps={2 * max(trainer.max_steps, trainer.global_step)}"
    if trainer.max_steps < 1 and (trainer.max_epochs or 0) > 0:
        longer = f"++trainer.max_epochs={2 * (trainer.max_epochs or 1)}"
    more_devices = trainer.strategy.root_device.type == "cpu" or torch.cuda.device_count() > trainer.world_size
    if trainer.world_size > 1 or not more_devices:
        return f"{resume_command(folder)} {longer}    # goes on where it ended"
    return f"{resume_command(folder)} trainer.devices=2 {longer}    # goes on where it ended, on two processes"


def is_given(cfg: DictConfig, folder: Path) -> bool:
    """Whether the user named a run's folder."""
    return folder.parent != Path(cfg.paths.root) / cfg.name


def _say(text: str) -> None:
    print(text, flush=True)
