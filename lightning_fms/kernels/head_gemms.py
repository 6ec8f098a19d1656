"""The GEMMs of the output head, by a library or by Triton, into buffers that are there.

The weight gradient is a sum over chunks of tokens. Its buffer may be wider than the operands, so that the sum is rounded once:
on CUDA the library then takes bf16 operands and adds in fp32 inside the GEMM, elsewhere the operands are widened.
"""

import torch
from torch import Tensor

from lightning_fms.kernels.matmul import matmul_into


def multiply(left: Tensor, right: Tensor, out: Tensor, by_triton: bool) -> None:
    """out = left [M, K] @ right [K, N], in one dtype."""
    if by_triton:
        matmul_into(left, right, out)
    else:
        torch.mm(left, right, out=out)


def project(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, by_triton: bool) -> None:
    """out [N, V] = hidden [N, D] @ weight^T [D, V] + bias [V]."""
    if bias is None:
        multiply(hidden, weight.t(), out, by_triton)
    elif by_triton:
        matmul_into(hidden, weight.t(), out)
        out += bias
    else:
        torch.addmm(bias, hidden, weight.t(), out=out)


def accumulate(total: Tensor, logits_grad: Tensor, hidden: Tensor, first: bool, by_triton: bool) -> None:
    """total [V, D] (+)= logits_grad^T [V, n] @ hidden [n, D], in `total`'s dtype."""
    left, wide = logits_grad.t(), total.dtype != hidden.dtype
    if by_triton:
        matmul_into(left, hidden, total, accumulate=not first)
    elif not wide:
        torch.mm(left, hidden, out=total) if first else total.addmm_(left, hidden)
    elif total.is_cuda:  # bf16 operands, fp32 sum inside the GEMM
        if first:
            torch.ops.aten.mm.dtype_out(left, hidden, total.dtype, out=total)
        else:
            torch.ops.aten.addmm.dtype_out(total, left, hidden, total.dtype, out=total)
    else:
        left, hidden = left.to(total.dtype), hidden.to(total.dtype)
        torch.mm(left, hidden, out=total) if first else total.addmm_(left, hidden)


__all__ = ["accumulate", "multiply", "project"]
