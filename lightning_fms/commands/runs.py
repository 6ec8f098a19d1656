"""What a run's folder tells: its data module, and the states of its data that it kept."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf, open_dict

from lightning_fms.app import data_module, quiet
from lightning_fms.config_check import ConfigError
from lightning_fms.data import RescalableDataModule, State
from lightning_fms.distributed.checkpoint import is_committed, load_plain_file, load_state
from lightning_fms.distributed.commit import CheckpointError
from lightning_fms.run_folder import CHECKPOINTS, config_of, step_of


@dataclass(frozen=True)
class Kept:
    """A state of the data in a run's folder: the optimizer steps before it, its file, and the state."""

    step: int
    file: Path
    state: State

    @property
    def row(self) -> int:
        """Rows before it."""
        return self.state["header"]["row"]

    @property
    def written(self) -> float:
        """When its file was written."""
        return self.file.stat().st_mtime


def open_run(run: Path, sources: Mapping[str, str] | None = None) -> tuple[DictConfig, RescalableDataModule]:
    """Return the config of a run's last start, and the data module that it names.

    Args:
        run: Folder of the run.
        sources: Paths of sources that this config does not have, or has elsewhere, by name.

    Raises:
        ValueError: If the folder is no run, or its data is none of ours.
    """
    quiet()
    cfg = config_of(run)
    for name, path in (sources or {}).items():
        with open_dict(cfg):
            cfg.data.sources[name] = path
    try:
        module = data_module(cfg)
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("hydra", "omegaconf"):
            raise
        raise ConfigError(f"{run}: its data cannot be built ({error.__cause__ or error})") from None
    if not isinstance(module, RescalableDataModule):
        raise ConfigError(f"{run}: its data is a {type(module).__name__}; this command reads RescalableDataModule")
    return cfg, module


def around(run: Path, cfg: DictConfig, step: int) -> tuple[Kept, Kept | None]:
    """Return the last state of the data at or before an optimizer step, and the first after it, if there is one.

    A state that was written before an earlier one is of a start whose later steps were given up: it is no state after it.

    Raises:
        ValueError: If there is none before it.
    """
    files = sorted(
        _files(run, cfg), key=lambda found: (abs(found[0] - step), found[1].suffix != ".pt")
    )  # small ones first
    earlier = (_read(found, file) for found, file in files if found <= step)
    before = next((kept for kept in earlier if kept), None)
    if before is None:
        raise ValueError(
            f"{run}: holds no state of the data at or before step {step}; the callback DataTrail keeps them"
        )
    later = (_read(found, file) for found, file in files if found > step)
    return before, next((kept for kept in later if kept and kept.written >= before.written), None)


def _files(run: Path, cfg: DictConfig) -> Iterator[tuple[int, Path]]:
    trail = OmegaConf.select(cfg, "callbacks.data_trail.dirpath") or run / "data_trail"
    for folder in (Path(trail), run / CHECKPOINTS):
        for file in folder.glob("*") if folder.is_dir() else ():
            if not file.name.startswith(".") and (step := step_of(file)) >= 0:
                yield step, file


def _read(step: int, file: Path) -> Kept | None:
    """Return the complete state of the data in a file of the trail or a checkpoint; `None` if it has none."""
    try:
        if file.is_dir():
            content: Any = load_state(file) if is_committed(file) else {}
        elif re.fullmatch(r"step-\d+\.pt", file.name):
            content = {"data": torch.load(file, weights_only=True)}
        else:
            content = load_plain_file(file)
    except (CheckpointError, OSError, RuntimeError, EOFError, ValueError):
        return None
    for state in content.values():
        if isinstance(state, dict) and {"header", "streams", "rows"} <= set(state):
            whole = len(state["streams"]) == state["header"]["num_streams"]
            return Kept(step, file, state) if whole else None
    return None
