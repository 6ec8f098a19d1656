"""Puts the fused rotary embedding in the place of the function that a user's modules call, for the length of a run.

Problem: a rotation is no module with a `forward` but a function in the middle of somebody's attention.

Idea: as with attention (`sdpa`), the call finds its function by name, so the name is what changes: in the modules (files) that
define the classes of the network, every function whose name says rotation, and that takes (query, key, cos, sin) or (x, cos,
sin), is tried on random tables. One that agrees with ours to fp32's rounding is replaced; the compiler traces the replacement
like any Python function. Its own code runs where a call is not what was tried: other arguments, sharded tensors, tables that
want a gradient, or a dtype that it would not give back.

B batch, T tokens, H heads, E features.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fms.kernels.rotary import rotary

Function = Callable[..., Any]


@dataclass(frozen=True)
class Form:
    """What a user's function does.

    turned: how many of its first arguments it turns. interleaved, full: as in `rotary`. heads_at: dimensions that may be the
    heads', 1 in [B, H, T, E] and 2 in [B, T, H, E]. unsqueezed: the tables come with a dimension for the heads. keeps_dtype: the
    result has the dtype of what is turned even if the tables are wider.
    """

    turned: int
    interleaved: bool
    full: bool
    heads_at: tuple[int, ...]
    unsqueezed: bool
    keeps_dtype: bool


class ReplacedRotary:
    """Call `replace`, and `restore` at the end; both may come twice.

    Attributes:
        names: of the functions replaced, each with the module (file) it is in.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._places: list[tuple[dict[str, Any], str, Function]] = []

    def replace(self, module: nn.Module, backend: str = "auto") -> None:
        """Replace what the classes in `module` call."""
        done = {(id(place), name) for place, name, _ in self._places}
        for file, place, name, own in _candidates(module):
            if (id(place), name) in done:
                continue
            form = find_form(own)
            if form is not None:
                self._places.append((place, name, own))
                self.names.append(f"{file}.{name}")
                place[name] = _replacement(own, form, backend)

    def restore(self) -> None:
        """Put the functions back. The names stay."""
        while self._places:
            place, name, own = self._places.pop()
            place[name] = own


def _candidates(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, Function]]:
    """(file, its globals, name, function) for what may be a rotation where the network's classes are defined."""
    files = dict.fromkeys(kind.__module__ for child in module.modules() for kind in type(child).__mro__)
    for file in files:
        if file.split(".")[0] == "torch" or file not in sys.modules:
            continue
        place = vars(sys.modules[file])
        for name, value in list(place.items()):
            if "rot" in name.lower() and inspect.isfunction(value) and not hasattr(value, "replaced_rotary"):
                yield file, place, name, value


def find_form(function: Function) -> Form | None:
    """What `function` does, if it is a rotation that `rotary` can do; found by trying it on random tables in fp32."""
    names = tuple(inspect.signature(function).parameters)
    turned = next((count for count in (1, 2) if names[count : count + 2] == ("cos", "sin")), 0)
    for unsqueezed in (False, True) if turned else ():
        for width in (8, 4):
            tried = {at: _agreeing(function, turned, at, unsqueezed, width) for at in (1, 2)}
            agreed = {at: found for at, found in tried.items() if found is not None}
            if agreed:
                interleaved, full, keeps = next(iter(agreed.values()))
                return Form(turned, interleaved, full, tuple(agreed), unsqueezed, keeps)
    return None


@torch.no_grad()
def _agreeing(
    function: Function, turned: int, heads_at: int, unsqueezed: bool, width: int
) -> tuple[bool, bool, bool] | None:
    """(interleaved, full, keeps_dtype) of a function that does the same as `rotary` on such tensors."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(turned, 2, 3, 5, 8, generator=generator, device="cpu")  # B 2, T 3, H 5, E 8
    tables = torch.randn(2, 2, 3, width, generator=generator, device="cpu")
    heads = x.transpose(2, 3) if heads_at == 1 else x
    cos, sin = tables.unsqueeze(heads_at + 1) if unsqueezed else tables
    try:
        found = _stacked(function(*heads, cos, sin), turned)
        dtype = _stacked(function(*heads.bfloat16(), cos, sin), turned).dtype
    except Exception:  # whatever a foreign function raises at such shapes, it is not what is looked for
        return None
    found = found.transpose(2, 3) if heads_at == 1 and found.ndim == 5 else found
    for interleaved in (False, True):
        for full in (False, True):
            if 2 * width > 8 and not full:
                continue
            true = torch.stack([rotary(t, *tables, interleaved=interleaved, full=full, backend="reference") for t in x])
            if found.shape == true.shape and torch.allclose(found, true, rtol=1e-5, atol=1e-5):
                return interleaved, full, dtype == torch.bfloat16
    return None


def _stacked(result: Any, turned: int) -> Tensor:
    """The tensors that a function returned, as one."""
    parts = (result,) if turned == 1 else result
    if not isinstance(parts, tuple) or len(parts) != turned:
        raise TypeError(f"{type(parts).__name__} is no rotation's result")
    return torch.stack(parts)


def _replacement(own: Function, form: Form, backend: str) -> Function:
    """A function that does what `own` does, in one pass where the call is what was tried."""

    def turn(x: Tensor, cos: Tensor, sin: Tensor, heads_at: int) -> Tensor:
        if heads_at == 1:
            return turn(x.transpose(1, 2), cos, sin, 2).transpose(1, 2)
        return rotary(x, cos, sin, interleaved=form.interleaved, full=form.full, backend=backend)

    @functools.wraps(own)
    def rotated(*args: Any, unsqueeze_dim: int = 1, **kwargs: Any) -> Any:
        tensors, tables, rest = args[: form.turned], args[form.turned :][:2], args[form.turned + 2 :]
        usual = len(tables) == 2 and not rest and not any(value is not None for value in kwargs.values())
        cos, sin = tables if usual else (None, None)
        heads_at = _heads_at(tensors, cos, sin, form, unsqueeze_dim if takes_dimension else None) if usual else None
        if heads_at is None:
            given = {"unsqueeze_dim": unsqueeze_dim} if takes_dimension and not rest else {}
            return own(*args, **given, **kwargs)
        if form.unsqueezed:
            cos, sin = cos.squeeze(heads_at), sin.squeeze(heads_at)
        turned = tuple(turn(x, cos, sin, heads_at) for x in tensors)
        return turned[0] if form.turned == 1 else turned

    takes_dimension = "unsqueeze_dim" in inspect.signature(own).parameters
    rotated.replaced_rotary = True  # type: ignore[attr-defined]
    return rotated


def _heads_at(tensors: tuple[Any, ...], cos: Any, sin: Any, form: Form, dimension: int | None) -> int | None:
    """The dimension of the heads in `tensors`; `None` where the kernel does not give what the function would.

    dimension: transformers' argument, which says it.
    """
    if not all(type(t) is Tensor for t in (*tensors, cos, sin)) or cos.requires_grad or sin.requires_grad:
        return None
    if any(x.ndim != 4 for x in tensors) or cos.ndim != (4 if form.unsqueezed else 3) or cos.shape != sin.shape:
        return None
    if not (form.keeps_dtype or all(torch.promote_types(x.dtype, cos.dtype) == x.dtype for x in tensors)):
        return None
    if dimension is not None and not form.unsqueezed:
        return dimension if dimension in (1, 2) else None
    if not form.unsqueezed:
        return form.heads_at[0]
    ones = [
        at for at in form.heads_at if cos.shape[at] == 1 and all(x.shape[3 - at] == cos.shape[3 - at] for x in tensors)
    ]
    return ones[0] if len(ones) == 1 else None


__all__ = ["Form", "ReplacedRotary", "find_form"]
