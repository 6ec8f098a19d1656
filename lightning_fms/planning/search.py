"""What `hydra/sweeper=plan` does: leave out what cannot fit, run the rest for a few steps each, and the better third for more.

The folder of the sweep has all that a killed one needs to go on: `space.json` says what was asked and which configurations were
left, in their order, and the launcher's record which of their jobs have ended.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict

from lightning_fms.config_check import ConfigError
from lightning_fms.launch.words import key_of
from lightning_fms.planner.candidates import Candidate, ranked
from lightning_fms.planner.hardware import Hardware
from lightning_fms.planner.measure import Trial, halve_together
from lightning_fms.planner.settings import PlanSettings
from lightning_fms.planner.space import Configuration
from lightning_fms.planning.experiment import write_experiment
from lightning_fms.planning.plan import predicted
from lightning_fms.planning.scope import check_plan, scope_of

SPACE = "space.json"
UNNEEDED = ("checkpoint", "resilience", "sample")  # callbacks that save, or need one that does
Trials = Callable[[Sequence[Sequence[str]]], Sequence[Trial]]


def possible(
    cfg: DictConfig, choices: Mapping[str, Any], settings: PlanSettings, hardware: Hardware
) -> tuple[list[Candidate], int]:
    """Configurations that may fit, the fastest by estimate first, and how many there are in all.

    Args:
        cfg: of the run; its vocabulary is filled in.
        choices: options by group.
        settings: what to try.
        hardware: of each device.

    Raises:
        ConfigError: a config that cannot be planned.
    """
    with open_dict(cfg):
        check_plan(cfg)
    scope = scope_of(cfg, choices, settings, hardware)
    found = predicted(scope)
    for line in found.failed:
        print(f"plan: not predicted: {line}", flush=True)
    return ranked(found.candidates), len(scope.configurations)


def remembered(
    folder: Path, find: Callable[[], tuple[list[Candidate], int]], first: int | None, asked: Mapping[str, Any]
) -> list[Configuration]:
    """The configurations of the first round: those on record in the sweep's folder, else found now and put on record.

    Args:
        folder: of the sweep.
        find: predicts: what may fit, and how many there are in all.
        first: only so many.
        asked: what decides about the search, as JSON holds it.

    Raises:
        ConfigError: the folder is that of a search for which something else was asked, or of which this version cannot read
            the record; or nothing fits.
    """
    path = folder / SPACE
    if path.exists():
        begun, left = _read_space(path)
        for name, value in asked.items():
            if begun.get(name) != value:
                raise ConfigError(
                    f"the search in {folder} was begun with {name}={begun.get(name)}, and this command has {value}; "
                    "give what it was begun with to go on, or another hydra.sweep.dir to begin anew"
                )
        return left
    candidates, every = find()
    if not candidates:
        raise ConfigError(f"nothing of {every} configurations fits; give more or larger devices")
    chosen = [candidate.configuration for candidate in candidates[:first]]
    print(f"plan: {every} configurations, {every - len(candidates)} cannot fit; {len(chosen)} are measured", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}")
    plain = [asdict(configuration) for configuration in chosen]
    aside.write_text(json.dumps({"asked": dict(asked), "left": plain}, indent=1))
    aside.replace(path)
    return chosen


def _read_space(path: Path) -> tuple[dict[str, Any], list[Configuration]]:
    """What was asked, and the configurations that were left."""
    text = path.read_text()
    try:
        record = json.loads(text)
        asked, left = record["asked"], [Configuration(**fields) for fields in record["left"]]
        if isinstance(asked, dict):
            return asked, left
    except (ValueError, KeyError, TypeError):
        pass
    shown = text if len(text) <= 60 else f"{text[:60]}..."
    raise ConfigError(
        f"{path}: {shown!r} is not a record of a search, which holds `asked` and `left` (earlier versions wrote a list); "
        "give another hydra.sweep.dir to begin anew"
    )


def overrides_of(configuration: Configuration, cfg: DictConfig, typed: Sequence[str], steps: int) -> list[str]:
    """The command of a trial: what was typed, the configuration, a short run that saves nothing and counts its steps' time."""
    ours = [*configuration.overrides(), f"trainer.max_steps={steps}", "objective=step_seconds", "objective_mode=min"]
    if "warmup_steps" in (cfg.get("scheduler") or {}):
        ours.append("scheduler.warmup_steps=1")
    taken = {key_of(override) for override in ours}
    left_out = [f"~callbacks.{name}" for name in UNNEEDED if name in (cfg.get("callbacks") or {})]
    gone = {override.removeprefix("~") for override in left_out}
    kept = [o for o in typed if key_of(o) not in taken and ".".join(key_of(o).split(".")[:2]) not in gone]
    return [*kept, *ours, *left_out, "+callbacks.times._target_=lightning_fms.planning.measure.StepTimes"]


def search(
    configurations: Sequence[Configuration], cfg: DictConfig, typed: Sequence[str], run: Trials, steps: Sequence[int]
) -> Configuration:
    """Halve the configurations in rounds; the fastest of the last one.

    Raises:
        ConfigError: none of them ran.
    """

    def round_(left: Sequence[Configuration], count: int) -> Sequence[Trial]:
        return run([overrides_of(configuration, cfg, typed, count) for configuration in left])

    found = halve_together(configurations, round_, steps)
    if found.fastest is None:
        raise ConfigError("no configuration could be run; the table says why")
    return found.fastest


def publish(folder: Path, configuration: Configuration, cfg: DictConfig, choices: Mapping[str, Any]) -> None:
    """Write the chosen configuration as an experiment, and say how to train it."""
    command = f"fms-train --config-dir {folder} experiment=planned"
    write_experiment(
        folder / "experiment" / "planned.yaml", cfg, choices, configuration.overrides(), command, "measured by a sweep"
    )
    print(f"plan: the fastest is {' '.join(configuration.overrides())}\nNext:\n  {command}", flush=True)
