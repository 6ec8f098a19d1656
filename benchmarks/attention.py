"""Causal attention on one CUDA GPU, forward + backward in bf16, by each backend: which one `TritonKernels` should try first.

    python benchmarks/attention.py                                      # a minute with Flex's compilations
    python benchmarks/attention.py --shapes 1x32x8x8192x128 --backends cudnn flash

A shape is B x H x K x T x E: rows, query heads, key/value heads, tokens, head dimension. 'error' is the largest difference of a
gradient from the plain formula in fp32, over that gradient's largest value; only for T up to 4096, where the formula fits. The
last rows show attention with a mask of booleans: gradients of cuDNN that are no numbers would show there.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from triton.testing import do_bench

from lightning_fms.kernels.attention import BACKENDS, RECORDED, fastest_backend
from lightning_fms.kernels.flex_sdpa import flex_sdpa
from lightning_fms.kernels.sdpa import SDPA

SHAPES = ["1x32x8x8192x128", "4x32x8x4096x64", "8x16x16x1024x64", "1x32x8x32768x128"]
EXACT = 4096  # tokens up to which the plain formula is compared with


def attend(name: str) -> Callable[..., Tensor]:
    """Attention by that backend and no other."""
    if name == "flex":
        return flex_sdpa

    def run(*tensors: Tensor, **options: object) -> Tensor:
        with sdpa_kernel(BACKENDS[name]):
            return SDPA(*tensors, **options)

    return run


def gradients(name: str, tensors: list[Tensor], upstream: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    options = {"is_causal": True} if mask is None else {"attn_mask": mask}
    gqa = leaves[0].shape[1] != leaves[1].shape[1]
    out = attend(name)(*leaves, enable_gqa=gqa, **options)
    return torch.autograd.grad(out, leaves, upstream)


def inputs(shape: str, device: str) -> tuple[list[Tensor], Tensor]:
    rows, heads, kv_heads, tokens, width = map(int, shape.split("x"))
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, upstream = (
        torch.randn(rows, h, tokens, width, device=device, dtype=torch.bfloat16, generator=generator)
        for h in (heads, kv_heads, kv_heads, heads)
    )
    return [q, k, v], upstream


def error(name: str, tensors: list[Tensor], upstream: Tensor, mask: Tensor | None = None) -> float:
    true = gradients("math", [t.float() for t in tensors], upstream.float(), mask)
    found = gradients(name, tensors, upstream, mask)
    return max(float((f - t).abs().max() / t.abs().max()) for f, t in zip(found, true, strict=True))


def line(shape: str, name: str, device: str) -> str:
    """One row of the table."""
    tensors, upstream = inputs(shape, device)
    rows, heads, _, tokens, width = map(int, shape.split("x"))
    flops = 3.5 * 2 * 2 * rows * heads * tokens**2 * width / 2  # forward 1, backward 2.5; half of it is masked
    try:
        ms = do_bench(lambda: gradients(name, tensors, upstream), warmup=20, rep=60, return_mode="median")
        off = f"{error(name, tensors, upstream):8.1e}" if tokens <= EXACT else "       -"
    except (RuntimeError, ValueError) as failure:  # out of memory, or not for this shape
        torch.cuda.empty_cache()
        return f"{shape:22} {name:10} failed: {str(failure).splitlines()[0][:90]}"
    return f"{shape:22} {name:10} {ms:9.2f} ms {flops / ms / 1e9:8.0f} TFLOP/s   error {off}"


def masked(name: str, device: str) -> str:
    """Gradients with a mask, a part of it blind rows but for one key."""
    tensors, upstream = inputs("2x8x8x512x64", device)
    mask = torch.ones(512, 512, dtype=torch.bool, device=device).tril()
    mask[100:200, 1:] = False
    try:
        off = error(name, tensors, upstream, mask)
    except (RuntimeError, ValueError) as failure:
        return f"{'with a mask':22} {name:10} failed: {str(failure).splitlines()[0][:90]}"
    return f"{'with a mask':22} {name:10} error {off:8.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--backends", nargs="+", default=["cudnn", "flash", "efficient", "flex", "math"])
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    device = "cuda"
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    for shape in arguments.shapes:
        for name in arguments.backends:
            if name == "math" and int(shape.split("x")[3]) > EXACT:
                continue  # its scores alone are tens of GiB
            print(line(shape, name, device), flush=True)
    for name in arguments.backends:
        print(masked(name, device), flush=True)
    capability = torch.cuda.get_device_capability()
    first, why = fastest_backend(torch.device(device))
    RECORDED.pop(capability, None)
    print(f"TritonKernels tries {first} first ({why}); without the record: {fastest_backend(torch.device(device))}")


if __name__ == "__main__":
    main()
