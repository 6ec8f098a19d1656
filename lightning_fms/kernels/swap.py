"""Finds the output head and the RMSNorms in a module that it has never seen, and swaps their `forward`.

Problem: users' modules come in every spelling. A swap by name breaks on the next model; a swap by type alone changes the
numbers of classes that only look alike (Gemma's RMSNorm multiplies with 1 + weight).

Idea: candidates by structure, proof by numbers. An RMSNorm is swapped only after its own forward agreed with the reference
on a probe input with random weights, in every dtype, and its output dtypes were recorded. The head is the one `nn.Linear`
whose output has the size of an embedding's vocabulary; a wrong guess would cost speed, never correctness, because deferred
logits become real ones wherever they are not used by a loss.

A swap sets `forward` on the instance: parameters, names, state_dict and class stay what they were, and taking the attribute
away restores the module, whatever wrapped it in between. Everything that is not swapped comes with its reason.
"""

import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_fms.kernels.deferred_logits import DeferredLogits
from lightning_fms.kernels.linear import linear
from lightning_fms.kernels.rms_norm import rms_norm, rms_norm_reference

DtypeKey = tuple[torch.dtype, torch.dtype | None, torch.dtype | None]
"""(input dtype, weight dtype, autocast dtype): what an RMSNorm's output dtype depends on."""

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")
_PROBE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ROUNDINGS = 4  # a probe's output may differ from the reference by this many units of its dtype's precision


@dataclass
class Swaps:
    """What was swapped, and what not and why. `restore()` undoes it."""

    heads: list[str] = field(default_factory=list)
    norms: list[str] = field(default_factory=list)
    gated: list[str] = field(default_factory=list)
    layer_norms: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    _modules: list[nn.Module] = field(default_factory=list)

    @property
    def active(self) -> bool:
        """Whether a module is swapped now."""
        return bool(self._modules)

    def add(self, module: nn.Module, forward: Any, state: Any = None) -> None:
        """Let `forward(module, ...)` run instead of the module's own; `state_of(module)` gives it the `state`."""
        if state is not None:
            module.__dict__[_STATE] = state
        module.forward = types.MethodType(forward, module)
        self._modules.append(module)

    def restore(self) -> None:
        """Give every module its own `forward` back."""
        for module in self._modules:
            module.__dict__.pop("forward", None)
            module.__dict__.pop(_STATE, None)
        self._modules.clear()


_STATE = "_lightning_fms_kernel"  # plain attribute of a swapped module: what its forward needs


def state_of(module: nn.Module) -> Any:
    """What a swapped module's forward needs."""
    return module.__dict__[_STATE]


def is_swapped(module: nn.Module) -> bool:
    """Whether the module's `forward` is one of ours."""
    return _STATE in module.__dict__


# ---- the output head ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Head:
    ancestors: tuple[nn.Module, ...]  # between the root and the head, the head included
    loss_options: dict[str, Any]


def _is_swapped_head(module: nn.Module) -> bool:
    return isinstance(module.__dict__.get(_STATE), _Head)


def find_head(module: nn.Module, name: str | None = None) -> tuple[str | None, str]:
    """(name of the output head or None, the reason).

    The head is the `nn.Linear` whose weight is an embedding's (tied), or else the only one outside repeated blocks whose
    `out_features` is the `num_embeddings` of an embedding of the same width. With a `name`, that module.

    Raises:
        ValueError: there is no module of that `name`, or it is no plain `nn.Linear`.
    """
    modules = dict(module.named_modules())
    if name is not None:
        if not _is_plain_linear(modules.get(name)):
            known = ", ".join(n for n, m in modules.items() if _is_plain_linear(m))
            raise ValueError(f"head={name!r} is no nn.Linear of this module; it has {known or 'none'}")
        return name, "named by the user"
    embeddings = [m for m in modules.values() if isinstance(m, nn.Embedding)]
    if not embeddings:
        return None, "the module has no nn.Embedding to tell the vocabulary by; name the head: head='...'"
    linears = {n: m for n, m in modules.items() if _is_plain_linear(m)}
    tied = [n for n, m in linears.items() if any(m.weight is e.weight for e in embeddings)]
    repeated = _names_in_repeated_blocks(module)
    sizes = {(e.num_embeddings, e.embedding_dim) for e in embeddings}
    alike = [n for n, m in linears.items() if (m.out_features, m.in_features) in sizes and not _inside(n, repeated)]
    for found, reason in ((tied, "tied to the embedding"), (alike, "as large as the vocabulary")):
        if len(found) == 1:
            return found[0], reason
        if found:
            return None, f"{', '.join(found)} could each be the head; name one: head={found[-1]!r}"
    vocabularies = ", ".join(str(e.num_embeddings) for e in embeddings)
    return None, f"no plain nn.Linear has the size of a vocabulary ({vocabularies}); name the head: head='...'"


def _is_plain_linear(module: nn.Module | None) -> bool:
    """A Linear, or a subclass that computes the same (it may initialise itself differently)."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _names_in_repeated_blocks(module: nn.Module) -> list[str]:
    containers = ((n, m) for n, m in module.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential))
    return [n for n, m in containers if len(m) > 1 and len({type(child) for child in m}) == 1]


def _inside(name: str, containers: list[str]) -> bool:
    return any(name.startswith(f"{container}.") for container in containers)


def swap_head(module: nn.Module, swaps: Swaps, name: str | None = None, **loss_options: Any) -> None:
    """Let the output head return `DeferredLogits`; `loss_options` go to `linear_cross_entropy`."""
    if any(_is_swapped_head(m) for m in module.modules()):
        return  # whatever became of the swapped head since: it may compute in FP8, and be no plain Linear any more
    found, reason = find_head(module, name)
    if found is None:
        swaps.skipped.append(f"output head: {reason}")
        return
    head = module.get_submodule(found)
    if "forward" in head.__dict__:
        swaps.skipped.append(f"output head {found}: its forward was already replaced by something else")
        return
    parts = found.split(".")
    ancestors = tuple(module.get_submodule(".".join(parts[: i + 1])) for i in range(len(parts)))
    head.__dict__[_STATE] = _Head(ancestors, loss_options)
    swaps.add(head, _head_forward)
    swaps.heads.append(f"{found} ({reason})")


def _head_forward(self: nn.Linear, input: Tensor) -> Tensor:
    state: _Head = self.__dict__[_STATE]
    if _needs_real_logits(self, input):
        return linear(input, self.weight, self.bias, state.loss_options.get("backend", "auto"))
    return DeferredLogits.wrap(input, self.weight, self.bias, **state.loss_options)


def _needs_real_logits(head: nn.Linear, input: Tensor) -> bool:
    """Where hidden and weight cannot be kept for later: traced, sharded, or gathered for this forward only."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active():
        return True
    # Stock FSDP shows a view that is no Parameter; FSDP2 and tensor parallel show a DTensor outside the forward.
    if type(head.weight) is not nn.Parameter or type(input) is not Tensor:
        return True
    if head.weight.is_meta or not input.is_floating_point() or input.device != head.weight.device:
        return True
    if input.dtype != head.weight.dtype and not torch.is_autocast_enabled(input.device.type):
        return True  # F.linear's own error is the right one
    # FSDP2 frees a group's weights after its forward, except the root's, and hangs the backward on the group's outputs.
    return any(isinstance(m, FSDPModule) for m in head.__dict__[_STATE].ancestors)


# ---- RMSNorm ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Norm:
    eps: float | None  # None: the input dtype's, as nn.RMSNorm has it
    out_dtypes: dict[DtypeKey, torch.dtype]
    backend: str
    own_forward: Any
    outside_compiler: bool  # inside, the compiler's own fusion takes the norm


def find_rms_norms(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module that calls itself an RMSNorm."""
    for name, child in module.named_modules():
        if type(child).__name__.lower().endswith("rmsnorm"):
            yield name, child


def swap_rms_norms(module: nn.Module, swaps: Swaps, backend: str = "auto", outside_compiler: bool = False) -> None:
    """Let every RMSNorm that agrees with the reference run the fused kernel, or only where no compiler traces it."""
    proofs: dict[Any, dict[DtypeKey, torch.dtype] | str] = {}
    refused: dict[str, list[str]] = {}
    device = training_device(module)
    for name, norm in find_rms_norms(module):
        if is_swapped(norm):
            continue
        reason = _odd_structure(norm)
        if reason is None:
            eps, weight = _eps(norm), getattr(norm, "weight", None)
            key = (type(norm), eps, weight is None, norm.training)
            if key not in proofs:
                proofs[key] = _prove(norm, eps, device)
            proof = proofs[key]
            if not isinstance(proof, str):
                own = type(norm).forward
                norm.__dict__[_STATE] = _Norm(eps, proof, backend, own, outside_compiler)
                swaps.add(norm, _norm_forward)
                swaps.norms.append(name)
                continue
            reason = proof
        refused.setdefault(f"{type(norm).__name__}: {reason}", []).append(name)
    swaps.skipped += [f"{shortened(names)} ({reason})" for reason, names in refused.items()]


def shortened(names: list[str]) -> str:
    """At most three of the names."""
    return ", ".join(names) if len(names) <= 3 else f"{names[0]}, {names[1]}, ... {names[-1]} ({len(names)} in all)"


def _odd_structure(norm: nn.Module) -> str | None:
    """Why this is no plain RMSNorm over the last dimension, or None."""
    if "forward" in norm.__dict__:
        return "its forward was already replaced by something else"
    if next(norm.children(), None) is not None or next(norm.buffers(), None) is not None:
        return "it holds modules or buffers"
    parameters = dict(norm.named_parameters(recurse=False))
    if set(parameters) - {"weight"} or any(p.ndim != 1 for p in parameters.values()):
        return f"its parameters are {', '.join(parameters)}, not one vector named weight"
    if not any(hasattr(norm, name) for name in _EPS_NAMES):
        return f"it has no epsilon among {', '.join(_EPS_NAMES)}"
    if not isinstance(_eps(norm), float | None):
        return "its epsilon is no number"
    if not parameters and len(getattr(norm, "normalized_shape", ())) != 1:
        return "without a weight its width is not known"
    return None


def _eps(norm: nn.Module) -> Any:
    return next(getattr(norm, name) for name in _EPS_NAMES if hasattr(norm, name))


def _width(norm: nn.Module) -> int:
    weight = getattr(norm, "weight", None)
    return int(norm.normalized_shape[0] if weight is None else weight.shape[0])  # type: ignore[index]


def training_device(module: nn.Module) -> torch.device:
    """Where the module will run: its device, or the GPU if it is not there yet (autocast's rules differ by device)."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    if device.type in ("cpu", "meta") and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "meta" else device


def _prove(norm: nn.Module, eps: float | None, device: torch.device) -> dict[DtypeKey, torch.dtype] | str:
    """Run the module's own forward against the reference; its output dtypes, or what is different about it.

    A combination of dtypes in which it fails or rounds differently is left out, and goes its own way later.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, _width(norm), generator=generator, dtype=torch.float64)
    x = (x * torch.tensor([1.0, 30.0, 1e-2, 1e-3])[:, None]).to(device)  # the small rows show what epsilon does
    w = None if getattr(norm, "weight", None) is None else torch.randn(x.shape[1:], generator=generator).to(device)
    dtypes: dict[DtypeKey, torch.dtype] = {}
    weight_dtypes = (None,) if w is None else _PROBE_DTYPES
    for x_dtype in _PROBE_DTYPES:
        for w_dtype in weight_dtypes:
            for cast in (None, torch.bfloat16, torch.float16):
                found = _agrees(norm, x.to(x_dtype), None if w is None else w.to(w_dtype), cast, eps)
                if isinstance(found, torch.dtype):
                    dtypes[x_dtype, w_dtype, cast] = found
                elif (x_dtype, w_dtype or x_dtype, cast) == (torch.float32, torch.float32, None):
                    return found
    return dtypes


def _agrees(
    norm: nn.Module, x: Tensor, weight: Tensor | None, cast: torch.dtype | None, eps: float | None
) -> torch.dtype | str:
    """The output dtype if the module's own forward is an RMSNorm on this input, else what it is instead."""
    try:
        y = _own_output(norm, x, weight, cast)
    except (RuntimeError, TypeError, AttributeError) as error:
        return f"its forward failed on a probe: {error}".splitlines()[0]
    if not isinstance(y, Tensor) or y.shape != x.shape:
        return "its output is no tensor of the input's shape"
    true = rms_norm_reference(x.double(), weight, _eps_or_default(eps, x.dtype), torch.float64)[0]
    unit = max(torch.finfo(d).eps for d in (x.dtype, x.dtype if weight is None else weight.dtype, y.dtype))
    if not torch.allclose(y.double(), true, rtol=_ROUNDINGS * unit, atol=_ROUNDINGS * unit):
        return f"its numbers are not an RMSNorm's: off by {float((y - true).abs().max()):.2g} on a probe"
    return y.dtype


@torch.no_grad()
def _own_output(norm: nn.Module, x: Tensor, weight: Tensor | None, cast: torch.dtype | None) -> Any:
    bare = object.__new__(type(norm))  # shares no hooks, which may count, log or shard
    bare.__dict__ = {**norm.__dict__, "_parameters": {"weight": weight}}
    with warnings.catch_warnings(), torch.autocast(x.device.type, dtype=cast, enabled=cast is not None):
        warnings.simplefilter("ignore")  # mixed dtypes are asked for on purpose
        return type(norm).forward(bare, x)


def _eps_or_default(eps: float | None, dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if eps is None else eps


def _norm_forward(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    state: _Norm = self.__dict__[_STATE]
    weight: Tensor | None = self.weight  # type: ignore[assignment]
    cast = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None
    out_dtype = state.out_dtypes.get((x.dtype, None if weight is None else weight.dtype, cast))
    # A DTensor (sharded activations or weights) or an unknown mixture: the module's own way.
    plain = type(x) is Tensor and (weight is None or type(weight) in (nn.Parameter, Tensor))
    traced = state.outside_compiler and torch.compiler.is_compiling()
    if out_dtype is None or not plain or traced or args or kwargs:
        return state.own_forward(self, x, *args, **kwargs)
    eps = _eps_or_default(state.eps, x.dtype)
    return rms_norm(x, weight, eps, out_dtype=out_dtype, backend=state.backend)
