"""Lose processes on the way, and let the supervisor go on with those that are left: 4 -> 2 -> 3.

    python examples/supervised.py [FOLDER]

`fms-supervise` trains the quickstart on as many processes as the file FOLDER/devices says. `Fault` plays the failing machine:
at step 5 it kills a rank and leaves devices for 2, at step 9 for 3. The supervisor sees an attempt fail, looks how many
devices there are now, and goes on from the newest checkpoint. At the end, the losses beside those of a run that nothing has
happened to (default folder: runs/supervised-example).
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import lightning as L

FAULTS = {5: 2, 9: 3}  # step, devices that are left
STEPS = 12
SMALL = [
    "experiment=quickstart", "seed=1", f"trainer.max_steps={STEPS}", "trainer.log_every_n_steps=1", "scheduler.warmup_steps=2",
    "model.net.dim=64", "model.net.n_layers=2", "data.seq_len=64", "data.global_batch_size=12", "data.val_every_n_steps=100",
    "callbacks.checkpoint.every_n_steps=3", "~callbacks.sample",
]  # fmt: skip


class Fault(L.Callback):
    """Kill the last rank at a step, once, and take devices away."""

    def __init__(self, devices: str) -> None:
        self.devices = Path(devices)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        left = FAULTS.get(trainer.global_step)
        happened = self.devices.with_name(f"fault-{trainer.global_step}")
        if left is not None and trainer.global_rank == trainer.world_size - 1 and not happened.exists():
            happened.touch()
            self.devices.write_text(str(left))
            os.kill(os.getpid(), signal.SIGKILL)


def losses(run: Path) -> dict[int, float]:
    """Loss by step; a step that was trained again counts as it was the last time."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415  # ranks need none

    return {event.step: event.value for event in EventAccumulator(str(run / "tensorboard")).Reload().Scalars("loss")}


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/supervised-example").absolute()
    folder.mkdir(parents=True)
    devices = folder / "devices"
    devices.write_text("4")
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    fault = [f"+callbacks.fault._target_={Path(__file__).stem}.Fault", f"+callbacks.fault.devices='{devices}'"]
    supervise = [sys.executable, "-m", "lightning_fms.supervise", "--nproc", "1:4", "--devices", str(devices)]
    supervise += ["--logs", str(folder / "logs"), "--", *SMALL, f"paths.run='{folder}/supervised'", *fault]
    subprocess.run(supervise, env=environment, check=True)
    whole = [sys.executable, "-m", "lightning_fms.train", *SMALL, f"paths.run='{folder}/whole'", "trainer.devices=1"]
    subprocess.run(whole, env=environment, check=True, stdout=subprocess.DEVNULL)
    supervised, uninterrupted = losses(folder / "supervised"), losses(folder / "whole")
    print("\nstep   4 -> 2 -> 3 processes   uninterrupted")
    for step in range(0, STEPS, 3):
        print(f"{step:4d}   {supervised[step]:21.6f}   {uninterrupted[step]:13.6f}")
    apart = max(abs(supervised[step] - uninterrupted[step]) for step in range(STEPS))
    print(f"largest difference of a loss over all {STEPS} steps: {apart:.1e}")


if __name__ == "__main__":
    main()
