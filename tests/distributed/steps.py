"""Checkpoints that are their own proof: every value of one is the step that it was saved at."""

from pathlib import Path

import torch

from lightning_fms.distributed import checkpoint


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {"model.a": torch.full((4, 3), float(step)), "model.b": torch.tensor(float(step))}


def save(path: Path, step: int) -> None:
    checkpoint.save(path, tensors(step), {"step": step, "nested": [1, {"x": torch.ones(2)}]}, step)


def load(path: Path) -> int:
    """The step of a checkpoint, all of which is verified and read."""
    checkpoint.verify(path)
    target = {name: torch.zeros_like(t) for name, t in tensors(0).items()}
    checkpoint.load_tensors(path, target)
    step = checkpoint.load_state(path)["step"]
    assert all(torch.equal(target[name], t) for name, t in tensors(step).items()), "torn: tensors of another step"
    return int(step)
