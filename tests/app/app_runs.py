"""Runs of the app: in this process for speed, or as a user starts it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from lightning_fms.train import main

# PYTHONPATH of a process that also finds what tests of this folder define.
WITH_THIS = os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]])
# The quickstart, cut down to a few steps of a tiny model.
SHORT = (
    "experiment=quickstart",
    "trainer.max_steps=4",
    "trainer.log_every_n_steps=1",
    "scheduler.warmup_steps=1",
    "model.net.dim=32",
    "model.net.n_layers=2",
    "data.seq_len=32",
    "data.global_batch_size=4",
    "data.val_steps=1",
    "data.val_every_n_steps=2",
    "callbacks.checkpoint.every_n_steps=2",
    "callbacks.sample.generate.max_new_tokens=4",
)


class Interrupting(Callback):
    """A Ctrl-C in the terminal, which every process gets, at some step."""

    number = signal.SIGINT

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), self.number)


class Terminating(Interrupting):
    """A scheduler that takes the machine back."""

    number = signal.SIGTERM


def clean_environment() -> dict[str, str]:
    """The environment without what launchers and former runs left in it."""
    left = (
        "LIGHTNING_FMS_",
        "LOCAL_RANK",
        "RANK",
        "WORLD_SIZE",
        "MASTER_",
        "TORCHELASTIC",
        "NODE_RANK",
        "PL_",
        "HYDRA",
    )
    return {name: value for name, value in os.environ.items() if not name.startswith(left)}


def call(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> int:
    """`fms-train <overrides>` in this process; its exit code."""
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", ["fms-train", *overrides])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def start(cwd: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, as a user starts it."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=clean_environment() | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
