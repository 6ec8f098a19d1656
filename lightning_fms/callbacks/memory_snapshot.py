"""What lay where when a GPU ran out of memory.

The error says how much was asked for, not who holds the rest. PyTorch's allocator knows, and its snapshot opens in
https://docs.pytorch.org/memory_viz as a picture of all blocks. With a history, each block also says which line asked for it; that
costs time at every allocation, so it is off by default.
"""

from pathlib import Path

import lightning as L
import torch

from lightning_fms.local_paths import local_path

_ENTRIES = 200_000


class MemorySnapshot(L.Callback):
    """Write `<dirpath>/out-of-memory.rank-<r>.pickle` when a fit runs out of GPU memory.

    Args:
        dirpath: folder of the snapshots. `fms-train` keeps `<run>/memory` also where no step was trained.
        history: note from the start of the fit which line allocates what; slower.

    Attributes:
        written: the file, `None` before.

    Raises:
        ValueError: for an address of an object store: a snapshot is written to a file system.
    """

    def __init__(self, dirpath: str | Path, history: bool = False) -> None:
        self.folder, self.history = local_path(dirpath, "MemorySnapshot"), history
        self.written: Path | None = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin the history."""
        if self.history and trainer.strategy.root_device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=_ENTRIES, stacks="python")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Only for want of memory."""
        if not isinstance(exception, torch.OutOfMemoryError) or trainer.strategy.root_device.type != "cuda":
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self.written = self.folder / f"out-of-memory.rank-{trainer.global_rank}.pickle"
        torch.cuda.memory._dump_snapshot(str(self.written))
        print(f"memory: what lay where is in {self.written} (open in https://docs.pytorch.org/memory_viz)", flush=True)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """End the history."""
        if self.history and stage == "fit" and trainer.strategy.root_device.type == "cuda":
            torch.cuda.memory._record_memory_history(enabled=None)
