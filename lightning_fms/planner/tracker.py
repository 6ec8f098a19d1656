"""How many bytes of tensors are alive while code runs, and the most in each phase.

Works on fake tensors (shapes without memory), so a step of a model that would fill a GPU is followed on a laptop. Every
operation passes through `__torch_dispatch__`; a storage is counted when it first appears as an output and taken off when
Python drops it. FSDP frees and takes memory inside a storage (`resize_`), which is followed, too. Sizes are rounded to
the 512 bytes of the CUDA allocator.

Inside `fused()` operations count as a compiler runs them: what pointwise and reducing operations make stays in registers
until something that is no part of a fused kernel (a matrix product, attention, a custom operation) reads it, or it leaves
the graph. Without it a compiled block would seem to hold every fp32 intermediate of its norms.

PyTorch's own `FSDPMemTracker` follows the same idea for eager FSDP modules only; it knows no fused graphs, and no
parameters that are swapped in and out, which the suite does on one device.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ALLOCATION = 512  # bytes: the CUDA allocator rounds up to multiples of it
# Of ATen, what a compiler calls instead of fusing it; operations of other namespaces are opaque to it anyway.
_CALLED = (
    "mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "convolution", "convolution_backward", "embedding_dense_backward",
    "_scaled_dot_product", "_flash_attention", "_efficient_attention", "sort", "topk",
)  # fmt: skip


class MemoryTracker(TorchDispatchMode):
    """Counts live bytes while it is entered; `phase` says to what the next peak belongs.

    Attributes:
        current: bytes alive now.
        peaks: the most bytes alive, by phase.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = 0
        self.peaks: dict[str, int] = {}
        self._names: tuple[str, ...] = ()
        self._sizes: dict[int, int] = {}  # by address of the storage; 0 for one that is not counted (yet)
        self._alive: dict[int, weakref.finalize] = {}
        self._elsewhere: set[int] = set()
        self._read: dict[int, list[Tensor]] = {}  # what the kernel will read that writes an uncounted storage
        self._fused = 0
        self._resize = UntypedStorage.resize_

    # ---- phases

    def phase(self, *names: str) -> None:
        """From now on peaks belong to these names."""
        self._names = names
        self._record()

    def _record(self) -> None:
        for name in self._names:
            self.peaks[name] = max(self.peaks.get(name, 0), self.current)

    def spike(self, size: int) -> None:
        """Something takes so many bytes here and gives them back."""
        self.current += size
        self._record()
        self.current -= size

    # ---- what counts

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that existed before the tracker was entered."""
        for tensor in tensors:
            self._count(tensor, materialise=True)

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Stop counting tensors that would lie elsewhere, e.g. in the host's memory."""
        for tensor in tensors:
            for storage in _storages(tensor):
                if storage._cdata in self._sizes:
                    self._set(storage, 0)
                    self._elsewhere.add(storage._cdata)

    def bytes_of(self, tensors: Iterable[Tensor]) -> int:
        """Bytes that are counted for these tensors."""
        keys = {storage._cdata for tensor in tensors for storage in _storages(tensor)}
        return sum(self._sizes.get(key, 0) for key in keys)

    @contextmanager
    def fused(self) -> Iterator[None]:
        """Count what runs inside as a compiled graph."""
        self._fused += 1
        try:
            yield
        finally:
            self._fused -= 1

    def _count(self, tensor: Tensor, materialise: bool) -> None:
        for storage in _storages(tensor):
            key = storage._cdata
            if key not in self._alive:
                self._sizes[key] = 0
                self._alive[key] = weakref.finalize(storage, self._forget, key)
                if materialise:
                    self._set(storage, storage.nbytes())
            elif materialise and self._sizes[key] == 0 and key not in self._elsewhere:
                self._set(storage, storage.nbytes())

    def _set(self, storage: UntypedStorage, size: int) -> None:
        self._read.pop(storage._cdata, None)  # first: a kernel writes over an input that nothing else needs
        rounded = -(-size // ALLOCATION) * ALLOCATION
        self.current += rounded - self._sizes[storage._cdata]
        self._sizes[storage._cdata] = rounded
        self._record()

    def _forget(self, key: int) -> None:
        self.current -= self._sizes.pop(key)
        self._read.pop(key, None)
        self._elsewhere.discard(key)
        del self._alive[key]

    # ---- where operations pass

    def __enter__(self) -> Self:
        tracker, resize = self, self._resize

        def resize_(storage: UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in tracker._sizes and storage._cdata not in tracker._elsewhere:
                tracker._set(storage, storage.nbytes())
            return result

        UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *details: Any) -> None:
        UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*details)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count what it made."""
        result = func(*args, **(kwargs or {}))
        called = not self._fused or _is_called(func)
        if called and self._fused:
            self.hold(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for leaf in made:
            self._count(leaf, materialise=called)
        if not called:
            self._remember(made, (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)))
        return result

    def _remember(self, made: Sequence[Tensor], operands: Iterable[Tensor]) -> None:
        """Keep what a kernel reads until it runs, which is when something asks for what it writes."""
        read: dict[int, Tensor] = {}
        for operand in operands:
            for storage in _storages(operand):
                key = storage._cdata
                known = [operand] if self._sizes.get(key, 0) else self._read.get(key, [])
                read |= {id(tensor): tensor for tensor in known}
        for leaf in made:
            for storage in _storages(leaf):
                if self._sizes[storage._cdata] == 0:
                    self._read.setdefault(storage._cdata, list(read.values()))


def _is_called(func: Any) -> bool:
    namespace, _, name = func.name().partition("::")
    return namespace not in ("aten", "prims", "prim") or name.partition(".")[0].startswith(_CALLED)


def storage_key(tensor: Tensor) -> int | None:
    """What tensors have in common that are views of one memory; None for those without memory of their own."""
    storages = _storages(tensor)
    return storages[0]._cdata if storages else None


def _storages(tensor: Tensor) -> list[UntypedStorage]:
    """Storages of a tensor, or of the tensors that it wraps (DTensor, quantised weights).

    Tensors on `meta` and other wrappers own no memory, whatever their shape says (logits that are not computed yet).
    """
    if tensor.device.type == "meta":
        return []
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        inner = [getattr(tensor, name) for name in names]
        return [storage for value in inner if isinstance(value, Tensor) for storage in _storages(value)]
    plain = isinstance(tensor, FakeTensor | Parameter) or type(tensor) is Tensor
    return [tensor.untyped_storage()] if plain and tensor.layout is torch.strided else []
