"""A project of your own: its conf/ beside the suite's groups, its own module, callback and experiment.

    python train.py experiment=mine
    python train.py resume=auto trainer.max_steps=60 trainer.devices=2
    python train.py -m experiment=mine model.width=32,64

Everything that `fms-train` can do works here: checks before anything starts, run folders, resumes, sweeps.
"""

import hydra
from omegaconf import DictConfig

from lightning_fms.app import train
from lightning_fms.train import run_app


@hydra.main(config_path="conf", config_name="project", version_base="1.3")
def task(cfg: DictConfig) -> float | None:
    return train(cfg)


if __name__ == "__main__":
    run_app(task)
