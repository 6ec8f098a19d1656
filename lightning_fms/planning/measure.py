"""Measuring configurations on this machine: short runs of `fms-train`, each in processes of its own.

A trial is the real thing: the user's data through the real loader, the strategy, the kernels, whole optimizer steps. Devices are
synchronised at each step, because a clock that does not wait reads how fast work is queued, not how fast it is done (71 ms
where a step took 372).
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from omegaconf import DictConfig

from lightning_fms.callbacks.cadence import StepClock
from lightning_fms.callbacks.throughput import synchronize
from lightning_fms.config_check import ConfigError
from lightning_fms.planner.candidates import Candidate, ranked
from lightning_fms.planner.measure import Trial, halve
from lightning_fms.planner.memory import Verdict
from lightning_fms.planning.experiment import write_experiment

_OUT_OF_MEMORY = ("OutOfMemoryError", "CUDA out of memory", "HIP out of memory")


class StepTimes(L.Callback):
    """Time optimizer steps, the slowest rank's; the metric `step_seconds` is what a trial scores (`planner.measure`).

    Args:
        path: of a file for the seconds of each step, a JSON list; None writes none.
    """

    only_watches = True

    def __init__(self, path: str | None = None) -> None:
        self.path = path
        self._clock, self._seconds, self._since = StepClock(), [], 0.0  # type: ignore[var-annotated]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self._clock.start(trainer)
        self._since = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """At the end of a step, wait for the device and note the time."""
        if self._clock.ended_step(trainer):
            synchronize(trainer.strategy.root_device)
            now = time.perf_counter()
            self._seconds.append(now - self._since)
            self._since = now

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Agree on the slowest and write."""
        mine = torch.tensor(self._seconds, device=trainer.strategy.root_device)
        slowest = trainer.strategy.reduce(mine, reduce_op="max")
        seconds = slowest.tolist()
        trainer.callback_metrics["step_seconds"] = torch.tensor(Trial(seconds).seconds)
        if trainer.is_global_zero and self.path is not None:
            Path(self.path).write_text(json.dumps(seconds))


def measured(
    candidates: Sequence[Candidate], cfg: DictConfig, choices: Mapping[str, Any], first: int, steps: Sequence[int]
) -> list[Candidate]:
    """The candidates, those that were run with their times; one that ran out of memory is a NO.

    Args:
        candidates: estimated.
        cfg: as given, unresolved.
        choices: options by group.
        first: how many to begin with, the fastest by estimate.
        steps: of each round.

    Raises:
        ConfigError: every run failed for another reason than memory.
    """
    tried = ranked(candidates)[:first]
    with tempfile.TemporaryDirectory() as folder:
        found = halve(tried, _runner(cfg, choices, Path(folder)), steps)
    errors = [trial.error for _, trial in found.trials if trial.error]
    if found.fastest is None and errors:
        raise ConfigError(f"plan.measure=true: no configuration could be run here: {errors[0]}")
    results = {id(candidate): trial for candidate, trial in found.trials}
    return [_with(candidate, results.get(id(candidate))) for candidate in candidates]


def _with(candidate: Candidate, trial: Trial | None) -> Candidate:
    if trial is None or trial.error:
        return candidate
    if trial.out_of_memory:
        return replace(candidate, verdict=Verdict.NO)
    return replace(candidate, verdict=Verdict.FIT, measured=trial.seconds)


def _runner(cfg: DictConfig, choices: Mapping[str, Any], folder: Path) -> Callable[[Candidate, int], Trial]:
    def run(candidate: Candidate, steps: int) -> Trial:
        times = folder / "times.json"
        times.unlink(missing_ok=True)
        options = {**choices, "callbacks": "none", "logger": "none"}
        bare = cfg.copy()
        bare.callbacks, bare.logger = {}, {}
        k = candidate.configuration
        write_experiment(
            folder / "experiment" / "trial.yaml", bare, options, k.overrides(), "fms-train experiment=trial", ""
        )
        command = [sys.executable, "-m"]
        if k.devices > 1:
            command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={k.devices}", "-m"]
        command += [
            "lightning_fms.train",
            "--config-dir",
            str(folder),
            "experiment=trial",
            f"trainer.max_steps={steps}",
        ]
        command += [f"paths.root={folder}/runs", "+callbacks.times._target_=lightning_fms.planning.measure.StepTimes"]
        command += [f"+callbacks.times.path={times}"]
        if "warmup_steps" in (cfg.get("scheduler") or {}):
            command.append("scheduler.warmup_steps=1")
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HYDRA_FULL_ERROR": "1"})
        print(
            f"  {k.micro_batch_size} x {k.micro_batches}, {k.sharding}, {k.activation_checkpointing}: {_said(done, times)}",
            flush=True,
        )
        return _trial(done, times)

    return run


def _trial(done: "subprocess.CompletedProcess[str]", times: Path) -> Trial:
    if done.returncode == 0 and times.exists():
        return Trial(json.loads(times.read_text()))
    said = done.stderr + done.stdout
    if any(name in said for name in _OUT_OF_MEMORY):
        return Trial(out_of_memory=True)
    return Trial(error=(done.stderr.strip().splitlines() or ["no message"])[-1])


def _said(done: "subprocess.CompletedProcess[str]", times: Path) -> str:
    trial = _trial(done, times)
    if trial.out_of_memory:
        return "out of memory"
    return trial.error or f"{trial.seconds:.4g} s a step, over {len(trial.step_seconds)} steps"
