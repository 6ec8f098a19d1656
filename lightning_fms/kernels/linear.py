"""`F.linear` by the Triton GEMM of `matmul`, for linear layers outside compiled blocks where no library may run.

Forward and both gradients are one registered product of two matrices, whose gradients are products again. What the compiler
traces keeps `F.linear`: Inductor has GEMM templates of its own, and fuses what follows into them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fms.kernels.gemm_dtype import gemm_dtype
from lightning_fms.kernels.matmul import matmul_into
from lightning_fms.triton_backend import use_triton


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, backend: str) -> Tensor:
    """[..., D] -> [..., V]: `F.linear` by Triton if `backend` is 'triton_only', by PyTorch otherwise and for float64."""
    if torch.compiler.is_compiling():  # first of all: what follows asks about autocast, which older compilers cannot trace
        return F.linear(x, weight, bias)
    plain = all(type(t) in (Tensor, nn.Parameter) for t in (x, weight))
    dtype = gemm_dtype(x)
    if backend != "triton_only" or not plain or dtype == torch.float64:
        return F.linear(x, weight, bias)
    unfit = weight.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type)
    if unfit or not use_triton("auto", x.device, dtype):
        return F.linear(x, weight, bias)  # on a CPU; or dtypes that do not fit, whose error is F.linear's to give
    with torch.autocast(x.device.type, enabled=False):
        y = torch.ops.lightning_fms.product(x.reshape(-1, x.shape[-1]).to(dtype), weight.to(dtype).t())
        y = y if bias is None else y + bias.to(dtype)
        return y.reshape(*x.shape[:-1], len(weight))


@torch.library.custom_op("lightning_fms::product", mutates_args=())
def _product(left: Tensor, right: Tensor) -> Tensor:
    out = left.new_empty(left.shape[0], right.shape[1])
    matmul_into(left, right, out)
    return out


@_product.register_fake
def _product_fake(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    left, right = ctx.saved_tensors
    product = torch.ops.lightning_fms.product
    return (
        product(grad, right.t()) if ctx.needs_input_grad[0] else None,
        # As the transpose of a product: the gradient of a weight that came in transposed is then laid out like the weight.
        product(grad.t(), left).t() if ctx.needs_input_grad[1] else None,
    )


_product.register_autograd(_backward, setup_context=_setup_context)

__all__ = ["linear"]
