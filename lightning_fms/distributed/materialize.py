"""Give real memory and initial values to modules that were built on the `meta` device.

A model larger than one device is built on `meta` (shapes, no memory), then filled group by group: a group gets memory,
is initialised by its modules' own `reset_parameters`, is sharded, and only then comes the next. So memory holds one
unsharded block at a time. Each module draws from a generator of its own, seeded by (seed, module name): the initial
weights are the same on any number of ranks, for any block size, in any order.
"""

import hashlib
from collections.abc import Iterable

import torch
from torch import nn


def on_meta(module: nn.Module, recurse: bool = True) -> bool:
    """Whether a parameter or buffer of the module has no memory yet."""
    return any(t.is_meta for t in [*module.parameters(recurse=recurse), *module.buffers(recurse=recurse)])


def check_materializable(module: nn.Module) -> None:
    """Refuse a model with `meta` tensors whose owner has no `reset_parameters` (ValueError), before memory is taken."""
    lacking = {
        f"{name or 'the module itself'} ({type(m).__name__})"
        for name, m in module.named_modules()
        if on_meta(m, recurse=False) and not callable(getattr(m, "reset_parameters", None))
    }
    if lacking:
        raise ValueError(
            f"built on the meta device, but without `reset_parameters` to give initial values: "
            f"{', '.join(sorted(lacking))}. Add that method (buffers included), or build the model on a real device"
        )


class Materializer:
    """Fills meta modules, one group after another, and remembers tied tensors across groups.

    Args:
        device: where the memory is taken.
        seed: base of every module's generator; the same on all ranks.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device = device
        self._seed = seed
        self._real: dict[torch.Tensor, torch.Tensor] = {}

    def fill(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Materialise the tensors that the given modules own themselves (children only if they are listed, too)."""
        for name, module in modules:
            if on_meta(module, recurse=False):
                real = [t for t in [*module.parameters(False), *module.buffers(False)] if not t.is_meta]
                fresh, known = self._allocate(module)
                if fresh:
                    self._initialise(name, module, [*real, *known])

    def _allocate(self, module: nn.Module) -> tuple[bool, list[torch.Tensor]]:
        """Whether a tensor is new, and those that have their values already (tied to a module filled before)."""
        fresh, known, before = False, [], set(self._real)
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if tensor in before:
                    known.append(self._real[tensor])
                elif tensor not in self._real:
                    fresh = True
                    empty = torch.empty_like(tensor, device=self._device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    self._real[tensor] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                table[key] = self._real[tensor]  # type: ignore[assignment]
        return fresh, known

    def _initialise(self, name: str, module: nn.Module, keep: list[torch.Tensor]) -> None:
        values = [tensor.detach().clone() for tensor in keep]
        digest = hashlib.blake2b(f"{self._seed}:{name}".encode(), digest_size=7).digest()
        devices = [self._device] if self._device.type != "cpu" else []
        with (
            torch.random.fork_rng(devices, device_type=self._device.type if devices else "cuda"),
            torch.device(self._device),
        ):
            torch.manual_seed(int.from_bytes(digest, "big"))
            module.reset_parameters()  # type: ignore[operator]
        with torch.no_grad():
            for tensor, value in zip(keep, values, strict=True):
                tensor.copy_(value)
