"""`F.linear` by the Triton GEMM of `matmul`, where no library may run.

Forward and both gradients are one registered product of two matrices, whose gradients are products again. It also stands in
compiled blocks, for half precision: as fast as cuBLAS where it was measured, it leaves Inductor nothing to try out, which takes
minutes. In fp32 the compiler keeps `F.linear`, because what autocast would make of it cannot be asked while it traces.
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
    plain = all(type(t) in (Tensor, nn.Parameter) for t in (x, weight))
    if torch.compiler.is_compiling():  # asked first: older compilers cannot trace a question about autocast
        half = plain and x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)
        ours = half and backend == "triton_only" and use_triton("auto", x.device, x.dtype)
        return _product_of(x, weight, bias) if ours else F.linear(x, weight, bias)
    dtype = gemm_dtype(x)
    if backend != "triton_only" or not plain or dtype == torch.float64:
        return F.linear(x, weight, bias)
    unfit = weight.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type)
    if unfit or not use_triton("auto", x.device, dtype):
        return F.linear(x, weight, bias)  # on a CPU; or dtypes that do not fit, whose error is F.linear's to give
    with torch.autocast(x.device.type, enabled=False):
        return _product_of(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def _product_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = torch.ops.lightning_fms.product(x.reshape(-1, x.shape[-1]), weight.t())
    return (y if bias is None else y + bias).reshape(*x.shape[:-1], len(weight))


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
