"""`hydra/launcher=processes`: every job of a multirun in a fresh process group, with `lightning_fms.launch.sweep`.

Hydra's own launcher calls the task once a job, all in one process. Lightning then starts the other ranks of a job by running
the whole command again, so that each of them runs the whole sweep. Here a job is a command of its own.
"""

import atexit
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus, configure_log, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

import __main__
from lightning_fms.config_check import ConfigError
from lightning_fms.launch.devices import Pool, devices_of, visible_gpus
from lightning_fms.launch.jobs import Job, JobFailed, Record, read_record
from lightning_fms.launch.report import closing, open_records
from lightning_fms.launch.words import override_of

# Of the sweep, not of its jobs.
_OF_SWEEP = ("hydra.sweep.", "hydra/launcher", "hydra.launcher", "hydra/sweeper", "hydra.sweeper", "hydra.mode")


@dataclass
class ProcessLauncherConf:
    """What a user may set, as `hydra.launcher.<name>`.

    `jobs`: at once; null = as many as there are devices for, one on a CPU. `timeout_s`: for one job. `retry_failed`: when a sweep
    goes on. `grace_s`: for processes that are asked to end.
    """

    _target_: str = "hydra_plugins.lightning_fms.process_launcher.ProcessLauncher"
    jobs: int | None = None
    timeout_s: float | None = None
    retry_failed: bool = False
    grace_s: float = 30.0


ConfigStore.instance().store(
    group="hydra/launcher", name="processes", node=ProcessLauncherConf, provider="lightning_fms"
)


class ProcessLauncher(Launcher):
    """Hydra finds it by its name in the config."""

    def __init__(self, jobs: int | None, timeout_s: float | None, retry_failed: bool, grace_s: float) -> None:
        self.jobs, self.timeout_s, self.retry_failed, self.grace_s = jobs, timeout_s, retry_failed, grace_s

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Called by Hydra before the first launch."""
        self.context, self.task, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs; a job that fails is one with that status, whose `return_value` raises.

        Raises:
            ConfigError: for what cannot be swept like this.
            SystemExit: after a signal.
        """
        # Hydra imports every plugin at every start, and this takes TensorBoard.
        from lightning_fms.launch.sweep import Sweep, Task  # noqa: PLC0415

        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        configs = [self._composed(list(overrides), initial_job_idx + n) for n, overrides in enumerate(job_overrides)]
        self._refuse(configs)
        record = self._record(configs[0])
        gpus = visible_gpus() if any(cfg.trainer.accelerator != "cpu" for cfg in configs) else []
        tasks = []
        for overrides, cfg in zip(job_overrides, configs, strict=True):
            devices = devices_of(cfg.trainer.devices, len(gpus) if cfg.trainer.accelerator != "cpu" else 0)
            job = record.job(overrides)
            tasks.append(Task(job, self._command(overrides, record.run(job), devices), devices))
        sweep = Sweep(record, Pool(gpus, self.jobs), self.timeout_s, self.retry_failed, self.grace_s)
        if record not in open_records:  # Nothing is a mistake any more.
            open_records.append(record)
            atexit.register(closing)
        record.write()
        sweep.run(tasks)
        return [_returned(task.job, cfg) for task, cfg in zip(tasks, configs, strict=True)]

    def _composed(self, overrides: list[str], number: int) -> DictConfig:
        cfg = self.context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(cfg):
            cfg.hydra.job.id = cfg.hydra.job.num = number
        return cfg

    def _refuse(self, configs: Sequence[DictConfig]) -> None:
        # SLURM_NTASKS is there in a batch script too, which is one process.
        launched = "WORLD_SIZE" if "TORCHELASTIC_RUN_ID" in os.environ else "SLURM_STEP_NUM_TASKS"
        ranks = os.environ.get(launched)
        if ranks is not None and ranks != "1":
            raise ConfigError(
                f"-m in each of {ranks} processes: start it once, without torchrun or srun; it starts those of each job itself"
            )
        sweeper = self.config.hydra.sweeper
        if sweeper._target_.endswith("BasicSweeper") and sweeper.get("max_batch_size"):
            raise ConfigError(
                f"hydra.sweeper.max_batch_size={sweeper.max_batch_size}: a job that fails would end the sweep after its batch; "
                "leave it out, hydra.launcher.jobs says how many run at once"
            )
        for cfg in configs:
            if "trainer" not in cfg or "paths" not in cfg:
                raise ConfigError("hydra/launcher=processes: the app needs the suite's groups trainer and paths")
            if not OmegaConf.is_missing(cfg.paths, "run"):
                raise ConfigError(
                    f"paths.run={cfg.paths.run}: jobs would share a folder; give hydra.sweep.dir=<folder>"
                )
            if cfg.trainer.get("num_nodes", 1) != 1:
                raise ConfigError(
                    f"trainer.num_nodes={cfg.trainer.num_nodes}: this launcher has one machine; use hydra/launcher=submitit_slurm"
                )

    def _record(self, cfg: DictConfig) -> Record:
        folder = Path(str(self.config.hydra.sweep.dir))
        record = next((one for one in open_records if one.folder == folder), None)
        if record is None:
            record = read_record(folder) or Record(folder, [])
            record.words = [word for word in sys.argv[1:] if word not in ("-m", "--multirun")]
            record.words = [word for word in record.words if not word.startswith(("resume=auto", "hydra.sweep.dir="))]
            record.maximize = cfg.get("objective_mode") == "max"
        return record

    def _command(self, overrides: Sequence[str], run: Path, devices: int | list[int]) -> tuple[str, ...]:
        given = get_args_parser().parse_known_args(sys.argv[1:])[0]
        flags = {
            "--config-path": given.config_path,
            "--config-name": given.config_name,
            "--config-dir": given.config_dir,
        }
        # As typed: read one by one, those with `${...}` would be resolved.
        typed: Any = OmegaConf.to_container(self.config.hydra.overrides.hydra, resolve=False)
        of_job = [o for o in typed if not o.lstrip("+~").startswith(_OF_SWEEP)]
        where = [override_of("paths.run", run), "hydra.mode=RUN"]
        if isinstance(devices, list):  # Which ones, its environment says.
            where.append(f"trainer.devices={len(devices)}")
        flagged = [word for flag, value in flags.items() if value is not None for word in (flag, value)]
        return (*_program(self.task), *flagged, *overrides, *of_job, *where)


def _program(task: TaskFunction) -> list[str]:
    """What runs a task function: the script, or the module, that defines it."""
    if task.__module__ != "__main__":
        return [sys.executable, "-m", task.__module__]
    spec = getattr(__main__, "__spec__", None)
    return (
        [sys.executable, "-m", spec.name] if spec is not None else [sys.executable, str(Path(sys.argv[0]).absolute())]
    )


class _Returned(JobReturn):
    """Raises for a job that failed, without Hydra's line on standard error: the table has a better one."""

    @property
    def return_value(self) -> Any:
        """The objective."""
        if self.status == JobStatus.FAILED:
            raise self._return_value
        return self._return_value

    @return_value.setter
    def return_value(self, value: Any) -> None:
        self._return_value = value


def _returned(job: Job, cfg: DictConfig) -> JobReturn:
    own = cfg.copy()
    with open_dict(own):
        del own["hydra"]
    done = job.status == "done"
    return _Returned(
        overrides=list(job.overrides),
        cfg=own,
        hydra_cfg=OmegaConf.create({"hydra": cfg.hydra}),
        working_dir=str(Path.cwd()),
        task_name=cfg.hydra.job.name,
        status=JobStatus.COMPLETED if done else JobStatus.FAILED,
        _return_value=job.value if done else JobFailed(f"job {job.number:03}: {job.reason}"),
    )
