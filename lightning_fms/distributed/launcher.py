"""How processes are launched, and the one argument of `Trainer.fit` that Lightning loses on the way to a strategy.

`fit(ckpt_path=..., weights_only=...)` reaches `Strategy.load_checkpoint` only in strategies that restore before setup; in
those that restore afterwards, as sharded ones must, the flag is dropped (Lightning-AI/pytorch-lightning#20450). The
launcher sees every entry point with its arguments, so it keeps the flag for the strategy.
"""

import inspect
from collections.abc import Callable
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher


def asked_weights_only(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
    """The `weights_only` argument of a call, None where it has none."""
    try:
        return inspect.signature(function).bind(*args, **kwargs).arguments.get("weights_only")
    except (TypeError, ValueError):
        return None


class ProcessLauncher(_SubprocessScriptLauncher):
    """Lightning's own: runs the script once more for each further local rank."""

    weights_only: bool | None = None

    def __init__(self, cluster_environment: ClusterEnvironment, num_processes: int, num_nodes: int) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Launch the other processes, then call `function`."""
        self.weights_only = asked_weights_only(function, args, kwargs)
        return super().launch(function, *args, trainer=trainer, **kwargs)


class InProcessLauncher(_Launcher):
    """Nothing to launch: one device, or processes started by torchrun or a cluster."""

    weights_only: bool | None = None

    @property
    def is_interactive_compatible(self) -> bool:
        """Works in a notebook."""
        return True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Call `function`."""
        self.weights_only = asked_weights_only(function, args, kwargs)
        return function(*args, **kwargs)

    def kill(self, signum: Any) -> None:
        """Nothing to kill."""
