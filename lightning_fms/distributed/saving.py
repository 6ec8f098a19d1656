"""The half of `FSDPCompileStrategy` that saves and loads: from the live module to `restore` and back.

What is saved are the weights as the optimizer sees them, by parameter name; what is loaded is checked before a weight is
touched. How a checkpoint gets its name and when it is made is the business of callbacks.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from lightning_fms.distributed import checkpoint, commit, initial, restore, state
from lightning_fms.distributed.average import AverageOfShards
from lightning_fms.distributed.background import BackgroundSaver, Pending
from lightning_fms.distributed.commit import CheckpointError
from lightning_fms.remote_path import place

RUN_SEED = "run_seed"  # key in a checkpoint's plain state


class SavingStrategy(ModelParallelStrategy):
    """Saves committed checkpoints, and loads them on any number of ranks.

    Attributes:
        save_errors: What a failed save raises, on all ranks; nothing was overwritten, and it can be tried again.
    """

    save_errors: tuple[type[Exception], ...] = (CheckpointError,)
    _consolidate: bool
    _allow_pickle: bool = False
    _seed: int
    _background: BackgroundSaver | None = None
    _average: AverageOfShards | None = None  # of Lightning's `WeightAveraging`, see `averaging`

    def _stored_weights(self) -> AbstractContextManager[torch.nn.Module]:
        """The module with the weights that the optimizers step."""
        raise NotImplementedError

    def _weights_changed(self) -> None:
        """Notice that weights are others now."""
        raise NotImplementedError

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Weights under clean names, as shards (or whole, for 'consolidated'; rank 0 only)."""
        with self._stored_weights() as module:
            return self._for_format(state.module_state(module))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """State by parameter name, read without changing it."""
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        with self._stored_weights() as module:
            return self._for_format(state.optimizer_state(module, optimizer))

    def _for_format(self, value: dict[str, Any]) -> dict[str, Any]:
        return state.gather_whole(value, keep=self.is_global_zero) if self._consolidate else value

    def save_checkpoint(self, checkpoint_state: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a committed checkpoint folder, or one plain file. Called on all ranks.

        Raises:
            CheckpointError: a rank could not write; nothing was overwritten.
            ValueError: a path that cannot be a checkpoint.
        """
        self._refuse_options(storage_options)
        path = place(self.broadcast(str(filepath)))
        if self._average is not None and "current_model_state" in checkpoint_state:
            checkpoint_state["state_dict"] = self._for_format(checkpoint_state["state_dict"])
        save = restore.save_file if self._consolidate else restore.save_folder
        save(path, {**checkpoint_state, RUN_SEED: self._seed}, self._allow_pickle)

    def _refuse_options(self, storage_options: Any) -> None:
        if storage_options is not None:
            raise ValueError(
                f"storage_options={storage_options!r}: checkpoints take none; a store's credentials and settings are those of "
                "its package, or of fsspec's configuration"
            )

    @property
    def saves_in_background(self) -> bool:
        """Whether `save_in_background` can be used: for folders, not for one plain file."""
        return not self._consolidate

    def save_in_background(self, checkpoint_state: dict[str, Any], filepath: Any) -> Pending:
        """Begin to write a committed checkpoint folder, and return while it is written; see `background`. Called on all ranks.

        Raises:
            CheckpointError: a rank could not copy its part, or the save before it has not ended.
            ValueError: the state could not be read back.
        """
        assert self.model is not None
        self._background = self._background or BackgroundSaver(self._timeout)
        path = place(self.broadcast(str(filepath)))
        names = [state.clean_name(name) for name, _ in self.model.named_buffers()]
        buffers = {f"{part}.{name}" for name in names for part in (restore.MODEL, restore.CURRENT)}
        content = {**checkpoint_state, RUN_SEED: self._seed}
        return self._background.save(path, content, self._allow_pickle, buffers)

    def teardown(self) -> None:
        """End what is still being written."""
        background, self._background = self._background, None
        if background is not None:
            background.close()
        super().teardown()

    def check_state(self, checkpoint_state: dict[str, Any]) -> None:
        """Raise ValueError where a checkpoint would hold what could not be read back. Called on all ranks."""
        if not self._consolidate:
            restore.serialized(restore.split(dict(checkpoint_state))[1], self._allow_pickle)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Verify a checkpoint, load weights and optimizers in place on any number of ranks, return the rest.

        Raises:
            CheckpointError: damaged, incomplete, or of another model; no weight was touched.
        """
        path = place(self.broadcast(str(checkpoint_path)))
        weights_only = weights_only if weights_only is not None else getattr(self._launcher, "weights_only", None)
        with self._stored_weights() as module:
            strict = self.lightning_module.strict_loading  # type: ignore[union-attr]
            rest = restore.load(path, module, self.optimizers, strict, weights_only, self._average)
        self._weights_loaded()
        self._seed = int(rest.pop(RUN_SEED, self._seed))
        return rest

    def load_weights(self, path: Path, strict: bool = True) -> int:
        """Copy weights from elsewhere into the module, see `initial`; returns their number. Called on all ranks.

        Raises:
            CheckpointError: not found, damaged, or of another model; no weight was touched.
        """
        with self._stored_weights() as module:
            count = initial.load_weights(place(self.broadcast(str(path))), module, strict)
            if self._average is not None:
                self._average.begin_again(module)
        self._weights_loaded()
        return count

    def _weights_loaded(self) -> None:
        self._weights_changed()
        if hasattr(self.precision_plugin, "on_weights_loaded"):  # e.g. scales that are kept of them
            self.precision_plugin.on_weights_loaded(self.model)

    def is_complete(self, path: Path) -> bool:
        """Whether a checkpoint was committed; a plain file is there as a whole or not at all."""
        return checkpoint.is_committed(path) if path.is_dir() else path.is_file()

    def committed_at(self, path: Path) -> float:
        """When a checkpoint folder was committed, in seconds since the epoch; no store says so of a folder."""
        return commit.read_header(path)["time_ns"] / 1e9 if path.is_dir() else path.stat().st_mtime

    def sweep(self, folder: Path, of: Callable[[str], bool]) -> None:
        """Delete what killed attempts have left of checkpoints with such names; on one rank."""
        commit.sweep_folder(folder, of)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Delete a checkpoint, folder or file, on rank 0; a crash leaves no half of it under its name."""
        try:
            if self.is_global_zero:
                commit.remove(place(filepath))
        except OSError as error:  # on one rank, in the middle of training
            rank_zero_warn(f"cannot remove the checkpoint {filepath}: {error}")
