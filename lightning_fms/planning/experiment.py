"""A plan as an experiment file: what a run's config has beyond the defaults of the options that it chooses.

Written from the composed config, not from the command line: the options of all groups as `override` lines, and below them every
value that differs from what these options give by themselves.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose
from omegaconf import DictConfig, OmegaConf

# Not part of a run's settings, or given on the command line that starts it.
_LEFT_OUT = ("plan", "hardware", "paths", "resume", "debug")
_NO_GROUPS = ("experiment", "debug", "paths", "hardware")


def write_experiment(
    path: Path, cfg: DictConfig, choices: Mapping[str, Any], overrides: Sequence[str], command: str, remark: str
) -> None:
    """Write an experiment.

    Args:
        path: of the file.
        cfg: the planned config, unresolved.
        choices: options by group, as Hydra has them.
        overrides: what the plan adds, as for `fms-train`.
        command: that starts it; the second line of the file.
        remark: the third.
    """
    groups = {str(g): str(o) for g, o in choices.items() if o is not None and "/" not in str(g) and g not in _NO_GROUPS}
    values = {key: value for key, value in _pairs(overrides) if "." in key}
    groups |= {key: value for key, value in _pairs(overrides) if "." not in key}
    defaults = compose("train", overrides=[f"{group}={option}" for group, option in groups.items()])
    planned = _with_groups(cfg, defaults, overrides)
    for key, value in values.items():
        OmegaConf.update(planned, key, OmegaConf.create(f"x: {value}").x)
    different = _difference(_plain(planned), _plain(defaults))
    body = {key: value for key, value in different.items() if key not in _LEFT_OUT}
    lines = ["# @package _global_", f"# {command}", f"# {remark}", "defaults:"]
    lines += [f"  - override /{group}: {option}" for group, option in sorted(groups.items())]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n\n" + OmegaConf.to_yaml(OmegaConf.create(body)))


def _pairs(overrides: Sequence[str]) -> list[tuple[str, str]]:
    return [(key, value) for key, _, value in (override.partition("=") for override in overrides)]


def _with_groups(cfg: DictConfig, defaults: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """The config with the options that the plan chose in place of its own, where those are others."""
    planned = cfg.copy()
    OmegaConf.set_struct(planned, False)
    old, new = _plain(cfg), _plain(defaults)
    for group in [key for key, _ in _pairs(overrides) if "." not in key]:
        if any(old[group].get(key) != new[group].get(key) for key in ("_target_", "name")):
            planned[group] = defaults[group]
    return planned


def _plain(cfg: DictConfig) -> dict[str, Any]:
    plain = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _difference(new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """What to lay over `old` to get `new`; a key that only `old` has becomes null, as Hydra cannot take it away."""
    different: dict[str, Any] = {}
    for key in [*new, *(key for key in old if key not in new)]:
        if key not in new:
            different[key] = None
        elif isinstance(new[key], Mapping) and isinstance(old.get(key), Mapping):
            inner = _difference(new[key], old[key])
            if inner:
                different[key] = inner
        elif key not in old or new[key] != old[key]:
            different[key] = new[key]
    return different
