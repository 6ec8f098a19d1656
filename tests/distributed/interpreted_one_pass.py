"""The one-pass kernel itself, in Triton's interpreter. Started by test_one_pass.py with TRITON_INTERPRET=1."""

import pytest
import torch
from torch import Tensor

from lightning_fms.distributed import one_pass
from lightning_fms.distributed.one_pass import Settings, Tables, Tensors, adam_step
from lightning_fms.triton_backend import INTERPRETED

LENGTHS = (1, 64, 0, 200)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert INTERPRETED
    monkeypatch.setattr(one_pass, "CHUNK", 128)
    monkeypatch.setattr(one_pass, "TILE", 64)


def off_by(ours: Tensor, theirs: Tensor, size: Tensor | None = None) -> float:
    """The largest difference in units of the last place of `size`, or of the values themselves."""
    size = theirs.abs() if size is None else torch.maximum(theirs.abs(), size)
    return float(((ours - theirs).abs() / (torch.finfo(torch.float32).eps * size.clamp(min=1e-30))).max())


def make(length: int, seed: int, unaligned: bool) -> Tensor:
    values = torch.randn(length + 1, generator=torch.Generator().manual_seed(seed))
    return values[1:] if unaligned else values[1:].clone()


@pytest.mark.parametrize(("kind", "dtype"), [(torch.optim.AdamW, torch.bfloat16), (torch.optim.Adam, torch.float32)])
@pytest.mark.parametrize("unaligned", [False, True])
def test_kernel_equals_torchs_fused_to_a_unit_in_the_last_place_a_step(
    kind: type[torch.optim.Adam], dtype: torch.dtype, unaligned: bool
) -> None:
    tables, ours = Tables(), Tensors()
    decoupled = kind is torch.optim.AdamW
    ours.params = [make(n, i, unaligned) for i, n in enumerate(LENGTHS)]
    theirs = [torch.nn.Parameter(p.clone()) for p in ours.params]
    ours.means, ours.squares = [torch.zeros_like(p) for p in theirs], [torch.zeros_like(p) for p in theirs]
    ours.copies = [torch.zeros_like(p, dtype=torch.bfloat16) for p in theirs] if dtype == torch.bfloat16 else []
    optimizer = kind(theirs, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    factor = torch.tensor(0.37)
    for step in range(1, 4):
        lr = 1e-2 / step
        ours.grads = [make(n, 100 * step + i, False).to(dtype) for i, n in enumerate(LENGTHS)]
        for parameter, gradient in zip(theirs, ours.grads, strict=True):
            parameter.grad = gradient.float() * factor
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        settings = Settings(torch.tensor(lr) if step == 2 else lr, (0.9, 0.95), 1e-8, 0.1, decoupled, step)
        adam_step(ours, settings, factor, tables, "triton")
    for i, parameter in enumerate(theirs):
        if LENGTHS[i]:
            state = optimizer.state[parameter]
            assert off_by(ours.means[i], state["exp_avg"], factor) <= 2  # a gradient's size
            assert off_by(ours.squares[i], state["exp_avg_sq"]) <= 4
            assert off_by(ours.params[i], parameter.detach(), torch.tensor(0.02)) <= 4
            for copy in ours.copies[i : i + 1]:  # the interpreter truncates to bf16 where a GPU rounds
                assert ((copy.float() - ours.params[i]).abs() <= ours.params[i].abs() / 128).all()
