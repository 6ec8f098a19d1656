"""Which checkpoints a path means."""

from pathlib import Path

from lightning_fms.distributed import checkpoint, commit
from lightning_fms.distributed.commit import CheckpointError
from lightning_fms.run_folder import checkpoints_of, is_run


def found_in(path: Path) -> list[Path]:
    """The checkpoints that a path means: itself, or those in a folder or in the folder of a run, newest first.

    What never became complete is among them; what was on its way out is not.

    Raises:
        ValueError: there is none.
    """
    if not path.exists():
        raise ValueError(f"{path}: does not exist")
    if path.is_file() or checkpoint.is_committed(path) or (path / commit.MANIFEST).exists():
        return [path]
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    folder = checkpoints_of(path) if is_run(path) else folder
    sealed = commit.committed(folder)
    others = [p for p in sorted(folder.iterdir()) if p not in sealed and _may_be_one(p)]
    if not sealed + others:
        raise ValueError(f"{folder}: holds no checkpoint")
    return [*sealed, *others]


def _may_be_one(path: Path) -> bool:
    if path.is_dir():
        return path.suffix in (".ckpt", ".tmp") or (path / ".metadata").exists()
    return path.suffix == ".ckpt"


def newest(path: Path) -> Path:
    """The newest complete one of them.

    Raises:
        CheckpointError: none is complete.
        ValueError: there is none.
    """
    for one in found_in(path):
        if one.is_file() or checkpoint.is_committed(one):
            return one
    raise CheckpointError(f"{path}: none of its checkpoints is complete")
