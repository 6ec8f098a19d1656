"""An app with the suite's config that does not train: it leaves a result, or fails in the way that its `name` says.

Every start is noted in `starts`, with its words and what it sees of its world.
"""

import os
import sys
import time
from pathlib import Path

import hydra
from omegaconf import DictConfig

from lightning_fms.launch.result import Result, write_result
from lightning_fms.train import run_app

EXIT = 3


@hydra.main(config_path="pkg://lightning_fms.conf", config_name="train", version_base="1.3")
def task(cfg: DictConfig) -> None:
    rank = os.environ.get("RANK", "0")
    with open("starts", "a") as notes:  # One write: several processes share the file.
        notes.write(f"{cfg.name}|{cfg.optimizer.lr}|{rank}|{os.getpid()}|{' '.join(sys.argv[1:])}\n")
    print(f"rank {rank} of {os.environ.get('WORLD_SIZE', '1')} trains {cfg.name} in {Path.cwd()}")
    if cfg.name == "memory":
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if cfg.name == "error":
        raise RuntimeError("some mistake")
    if cfg.name == "exit":
        sys.exit(EXIT)
    if cfg.name == "killed":
        os.kill(os.getpid(), 9)
    run = Path(cfg.paths.run)
    run.mkdir(parents=True, exist_ok=True)
    (run / "run.yaml").write_text("attempts: [{started: now, overrides: []}]")
    while cfg.name == "hangs" and not Path("go").exists():
        time.sleep(0.05)
    if rank == "0" and cfg.name != "nothing":
        loss = (cfg.optimizer.lr - 0.3) ** 2
        write_result(
            run,
            Result(cfg.trainer.max_steps, 1.0, {"loss": loss, "accuracy": 1 - loss, "tokens_per_second": 7}, "loss"),
        )


if __name__ == "__main__":
    run_app(task)
