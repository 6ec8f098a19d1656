"""The batch scripts say what they mean: a stand-in for srun notes its command, and what fms-train would get composes."""

import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from lightning_fms.run_check import check

SLURM = Path(__file__).parents[2] / "examples" / "slurm"
OWN = ["experiment=llama_1b", "data.sources={web: /corpus/*.jsonl}", "data.tokenizer=bytes"]


def submitted(script: str, folder: Path, *words: str) -> list[str]:
    """What the script gives to srun."""
    stand_in = folder / "bin" / "srun"
    stand_in.parent.mkdir()
    stand_in.write_text('#!/bin/bash\nprintf "%s\\n" "$@" > command\n')
    stand_in.chmod(0o755)
    slurm = {"SLURM_JOB_ID": "12", "SLURM_NTASKS_PER_NODE": "8", "SLURM_JOB_NUM_NODES": "3"}
    environment = {**os.environ, **slurm, "PATH": f"{stand_in.parent}:{os.environ['PATH']}"}
    subprocess.run(["bash", str(SLURM / script), *words], cwd=folder, env=environment, check=True, timeout=60)
    return (folder / "command").read_text().splitlines()


def test_a_run_over_nodes_goes_on_in_the_folder_of_its_job(tmp_path: Path) -> None:
    command = submitted("train.sbatch", tmp_path, *OWN)
    start = command.index("lightning_fms.train") + 1
    with initialize_config_module("lightning_fms.conf", version_base="1.3"):
        cfg = compose("train", overrides=command[start:])
    assert (cfg.trainer.devices, cfg.trainer.num_nodes, cfg.resume) == (8, 3, "auto")
    assert cfg.paths.run == str(tmp_path / "runs/slurm/12")
    cfg.trainer.num_nodes = 1  # Nobody has started several here.
    check(cfg)


def test_a_supervised_run_passes_everything_on(tmp_path: Path) -> None:
    command = submitted("supervised.sbatch", tmp_path, *OWN)
    assert command == [
        "fms-supervise",
        "--nproc",
        "1:8",
        "--",
        *OWN,
        f"paths.run='{tmp_path}/runs/slurm/12'",
        "resume=auto",
    ]


@pytest.mark.parametrize("script", ["train.sbatch", "supervised.sbatch"])
def test_slurm_is_asked_for_the_signal_that_the_run_saves_on_and_to_requeue(script: str) -> None:
    asked = [line for line in (SLURM / script).read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --requeue", "#SBATCH --signal=USR1@180", "#SBATCH --open-mode=append"} <= set(asked)


@pytest.mark.skipif(find_spec("submitit") is None, reason="the extra slurm is not installed")
def test_a_sweep_over_slurm_jobs_composes() -> None:
    chosen = [f"hydra.searchpath=[file://{SLURM}]", "hydra/launcher=submitit_slurm", "+sweep=slurm"]
    with initialize_config_module("lightning_fms.conf", version_base="1.3"):
        cfg = compose("train", overrides=[*chosen, *OWN, "trainer.devices=4"], return_hydra_config=True)
    launcher = cfg.hydra.launcher
    assert launcher._target_.endswith("SlurmLauncher")
    assert (launcher.tasks_per_node, launcher.gpus_per_node, launcher.nodes) == (4, 4, 1)
    assert OmegaConf.to_container(cfg.paths, resolve=False)["run"] == "${hydra:sweep.dir}/${hydra:job.num}"
