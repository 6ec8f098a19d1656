"""Saving beside the training: copy first, write while the next steps run.

What a step changes is copied to host memory, which on a GPU needs no waiting: the copies are queued on a stream of their own,
the next forward and backward passes only read the weights, and it is the next optimizer step that waits for them
(`Pending.copied`). From there on a thread makes the same save as always (`checkpoint.save`), with a gloo group of its own, so
that its collectives mix with no others, and one at a time. The host memory is kept from save to save: pinned, as large as this
rank's shards, each rounded up to a power of two.

What went wrong is kept until somebody asks: `Pending.result` raises it, on all ranks.
"""

import threading
import warnings
from collections.abc import Collection, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from lightning_fms.distributed import checkpoint, restore

# After an exception: other ranks may be gone, and then the save ends with an error, or hang, and then it does not.
_LEAVE_S = 30.0


class Staging:
    """Host memory for the tensors of a save, reused by the next one; it grows with what is saved and never shrinks."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None

    def copy(
        self, tensors: Mapping[str, torch.Tensor], volatile: Collection[str] = ()
    ) -> tuple[dict[str, torch.Tensor], torch.cuda.Event | None]:
        """Copies on the CPU, shards as shards; on a GPU also the event behind the last copy.

        Args:
            tensors: what to copy.
            volatile: names of tensors that a forward pass changes, for which it waits.
        """
        on_gpu = any(_local(tensor).is_cuda for tensor in tensors.values())
        if not on_gpu:
            return {name: self._copied(name, tensor) for name, tensor in tensors.items()}, None
        self._stream = self._stream or torch.cuda.Stream()
        early = {name: self._copied(name, tensor) for name, tensor in tensors.items() if name in volatile}
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            late = {name: self._copied(name, tensor) for name, tensor in tensors.items() if name not in volatile}
            event = torch.cuda.Event()
            event.record(self._stream)
        return {**early, **late}, event

    def _copied(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        local = _local(tensor).detach()
        kept = self._kept.get(name)
        if kept is None or kept.shape != local.shape or kept.dtype != local.dtype:
            kept = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
            self._kept[name] = kept
        kept.copy_(local, non_blocking=local.is_cuda)
        return DTensor(kept, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else kept


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Pending:
    """A save on its way."""

    def __init__(self, copied: torch.cuda.Event | None, sources: Any = None) -> None:
        self._copied = copied
        self._sources = sources  # what is copied from has to live until it is, also where a state dict made it for us
        self._device = torch.cuda.current_device() if copied is not None else None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def begin(self, task: Any) -> None:
        """Run the task in a thread."""

        def guarded() -> None:
            try:
                if self._copied is not None:
                    torch.cuda.set_device(self._device)  # a new thread begins on the first one
                    self._copied.synchronize()
                self._sources = None
                task()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=guarded, name="background-save", daemon=True)
        self._thread.start()

    def copied(self) -> None:
        """Make what is queued on the device from here on wait for the copies: to be called before weights change."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def done(self) -> bool:
        """Whether this rank is through, well or not."""
        return self._thread is not None and not self._thread.is_alive()

    def wait(self, seconds: float) -> bool:
        """Wait for the end of it, at most so long; whether it has ended."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self.done()

    def result(self) -> None:
        """Wait for the end of it.

        Raises:
            CheckpointError: what the save raised, on all ranks.
        """
        assert self._thread is not None
        self._thread.join()
        if self._error is not None:
            raise self._error


class BackgroundSaver:
    """Makes one save at a time. Making one is collective where there are several ranks, and so is `save`.

    Args:
        timeout: of its collectives; None is gloo's own.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        group = dist.new_group(backend="gloo", timeout=timeout) if dist.is_initialized() else None
        assert group is None or isinstance(group, dist.ProcessGroup)
        self._group, self._staging = group, Staging()
        self._pending: Pending | None = None

    def save(
        self, path: Path, checkpoint_state: dict[str, Any], foreign: bool = False, volatile: Collection[str] = ()
    ) -> Pending:
        """Copy Lightning's checkpoint dict, and begin to write it as a committed folder; see `restore.save_folder`.

        Raises:
            CheckpointError: a rank could not copy, or its save before this one has not ended; on all ranks.
            ValueError: the state could not be read back.
        """
        tensors, plain = restore.split(checkpoint_state)
        step = int(checkpoint_state["global_step"])
        content = restore.serialized(plain, foreign, self._group)
        if not dist.is_initialized():  # in this thread: a thread that changes filters changes everybody's
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        copies, event = checkpoint.read_everywhere(lambda: self._copies(tensors, volatile), self._group)
        self._pending = Pending(event, tensors)
        self._pending.begin(lambda: checkpoint.save(path, copies, content, step, self._group))
        return self._pending

    def _copies(
        self, tensors: Mapping[str, torch.Tensor], volatile: Collection[str]
    ) -> tuple[dict[str, torch.Tensor], torch.cuda.Event | None]:
        if self._pending is not None and not self._pending.done():
            raise RuntimeError("a save is still on its way; ask for its result first")
        return self._staging.copy(tensors, volatile)

    def close(self) -> None:
        """Wait a while for the save on its way, whatever comes of it, and give back group and memory."""
        through = self._pending is None or self._pending.wait(_LEAVE_S)
        if through and self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group, self._pending, self._staging = None, None, Staging()
