"""Build optimizer and scheduler once for one small weight, so that a value which they refuse is named at the start.

Both are built by the module, when it is on its devices: minutes later for a large one, below twenty frames of other people's
code, with a message that names the value and not the key. One weight is enough for them to look at their arguments. Only those
of torch and this package are tried: another one may need the real weights.
"""

from collections.abc import Mapping
from typing import Any

import torch
from hydra.utils import get_object

from lightning_fms.config_check import HYDRA_KEYS, ConfigError, shown

_TRIED = ("torch.optim.", "lightning_fms.")


def try_optimizer(optimizer: Any, scheduler: Any) -> None:
    """Build both for one weight.

    Args:
        optimizer: its plain config; nothing is tried where it names no partial of torch or this package.
        scheduler: the same.

    Raises:
        ConfigError: with the key and its value, for an argument that is refused.
    """
    if not _is_tried(optimizer):
        return
    # A matrix: some optimizers take nothing else.
    built = _try("optimizer", optimizer, [torch.nn.Parameter(torch.zeros(1, 1))])
    endless = isinstance(scheduler, Mapping) and scheduler.get("total_steps") == -1  # a plan finds its length later
    if built is not None and _is_tried(scheduler) and not endless:
        _try("scheduler", scheduler, built)


def _is_tried(config: Any) -> bool:
    return isinstance(config, Mapping) and config.get("_partial_") is True and config["_target_"].startswith(_TRIED)


def _try(group: str, config: Mapping[str, Any], first: Any) -> Any:
    target, arguments = get_object(config["_target_"]), {k: v for k, v in config.items() if k not in HYDRA_KEYS}
    if any(isinstance(value, Mapping) for value in arguments.values()):  # becomes an object
        return None
    try:
        return target(first, **arguments)
    except ValueError as error:
        raise ConfigError(f"{_culprit(group, target, arguments, first)}: {error}") from None


def _culprit(group: str, target: Any, arguments: Mapping[str, Any], first: Any) -> str:
    """The argument without which there is no error, with its value."""
    for key, value in arguments.items():
        try:
            target(first, **{other: v for other, v in arguments.items() if other != key})
        except (TypeError, ValueError):
            continue
        return f"{group}.{key}={shown(value)}"
    return group
