"""`hydra/sweeper=plan`: choose how to train a config by measuring, with `lightning_fms.planning.search`.

`fms-train -m hydra/sweeper=plan experiment=llama_1b ...` takes no lists of values: the space is that of `fms-plan`.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from lightning_fms.config_check import ConfigError


@dataclass
class PlanSweeperConf:
    """What a user may set, as `hydra.sweeper.<name>`.

    `hardware`: an option of that group, for predictions. `steps`: of each round; each keeps the faster third. `first`: only so
    many in the first round, the fastest by estimate; null = all that may fit. The others as in `conf/plan.yaml`.
    """

    _target_: str = "hydra_plugins.lightning_fms.plan_sweeper.PlanSweeper"
    hardware: str = "h200"
    steps: list[int] = field(default_factory=lambda: [5, 15, 50])
    first: int | None = None
    checkpointing: list[str] = field(default_factory=lambda: ["none", "selective", "full"])
    offload: list[bool] = field(default_factory=lambda: [False, True])
    activation_offload: list[bool] = field(default_factory=lambda: [False])
    precisions: list[str] | None = None
    kernels: list[str] = field(default_factory=lambda: ["all"])
    largest_micro_batch: int | None = 64
    processes: int | None = None


ConfigStore.instance().store(group="hydra/sweeper", name="plan", node=PlanSweeperConf, provider="lightning_fms")


class PlanSweeper(Sweeper):
    """Hydra finds it by its name in the config."""

    def __init__(self, hardware: str, steps: list[int], first: int | None, **settings: Any) -> None:
        self.hardware, self.steps, self.first, self.settings = hardware, list(steps), first, settings

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Called by Hydra before the sweep."""
        self.config, self.hydra_context = config, hydra_context
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        """Predict, then measure in rounds; the overrides of the fastest.

        Raises:
            ConfigError: a list of values, or a config of which nothing can be run.
        """
        # Hydra imports every plugin at every start, and this takes Torch.
        from lightning_fms import app  # noqa: PLC0415
        from lightning_fms.planner.settings import PlanSettings  # noqa: PLC0415
        from lightning_fms.planning import search  # noqa: PLC0415

        assert self.hydra_context is not None
        for override in OverridesParser.create(self.hydra_context.config_loader).parse_overrides(arguments):
            if override.is_sweep_override():
                raise ConfigError(f"{override.input_line}: hydra/sweeper=plan chooses by itself; give one value")
        assert self.config is not None
        assert self.launcher is not None
        launcher, cfg = self.launcher, self.config.copy()
        choices: Any = OmegaConf.to_container(cfg.hydra.runtime.choices)
        with open_dict(cfg):
            del cfg["hydra"]
        hardware = app.plugin(compose("plan", overrides=[f"hardware={self.hardware}"]).hardware)
        plain: dict[str, Any] = {
            name: OmegaConf.to_container(v) if OmegaConf.is_config(v) else v for name, v in self.settings.items()
        }
        settings, folder = PlanSettings(**plain), Path(str(self.config.hydra.sweep.dir))
        started = 0

        def trials(jobs: Any) -> list[Any]:
            nonlocal started
            returned = launcher.launch(jobs, initial_job_idx=started)
            started += len(jobs)
            return [_trial(job) for job in returned]

        asked = {
            "command": sorted(arguments),
            "hardware": self.hardware,
            "first": self.first,
            "steps": self.steps,
            **plain,
        }
        asked.pop("processes", None)  # decides nothing but the time it takes
        find = partial(search.possible, cfg.copy(), choices, settings, hardware)
        left = search.remembered(folder, find, self.first, asked)
        found = search.search(left, cfg, arguments, trials, self.steps)
        search.publish(folder, found, cfg, choices)
        return found.overrides()


def _trial(job: Any) -> Any:
    from lightning_fms.planner.measure import Trial  # noqa: PLC0415

    try:
        return Trial([job.return_value] * 3)
    except Exception as error:  # a row of the table, not the end
        return Trial(error=str(error))
