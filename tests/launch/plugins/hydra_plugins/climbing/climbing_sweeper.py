"""A search that decides by what jobs return: it goes on from the better of two learning rates, three times."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class ClimbingConf:
    _target_: str = "hydra_plugins.climbing.climbing_sweeper.ClimbingSweeper"


ConfigStore.instance().store(group="hydra/sweeper", name="climbing", node=ClimbingConf)


class ClimbingSweeper(Sweeper):
    def __init__(self) -> None:
        self.best: tuple[float, float] = (float("inf"), 0.1)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        Path(self.config.hydra.sweep.dir).mkdir(parents=True, exist_ok=True)
        fixed = [argument for argument in arguments if not argument.startswith("optimizer.lr")]
        for batch in range(3):
            rates = [round(self.best[1] + 0.1, 3), round(self.best[1] - 0.05, 3)]
            jobs = [[*fixed, f"optimizer.lr={rate}"] for rate in rates]
            returns: Sequence[JobReturn] = self.launcher.launch(jobs, initial_job_idx=2 * batch)
            for rate, job in zip(rates, returns, strict=True):
                if job.status == JobStatus.COMPLETED:
                    self.best = min(self.best, (job.return_value, rate))
        return self.best
