"""Can this device train in FP8, and does it compute the right numbers?

Two checks before a run starts. The first reads the device: FP8 tensor cores come with compute capability 8.9. The
second computes: one small layer in FP8, eager and compiled, against the same layer in bf16, output and both gradients.
It exists because a wrong kernel does not crash. A compiler once stored transposed FP8 tiles as zeros, so that the
gradient of every weight vanished and the loss just fell more slowly (https://github.com/triton-lang/triton/issues/11111).

Rounding to e4m3 costs a product of two random matrices 3.7 % (relative Frobenius norm), to e5m2 gradients 5.9 %; these
are properties of the formats, so one limit serves every device. The test draws from a generator of its own and leaves
the run's random state alone.
"""

import torch
from torch import Tensor, nn

from lightning_fms.precision.recipes import Recipe
from lightning_fms.precision.selection import Decision

MIN_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0, Blackwell 10.0
MAX_ERROR = 0.12  # twice what the coarsest format costs
TOKENS, IN_FEATURES, OUT_FEATURES = 128, 256, 512


def check_device(device: torch.device) -> None:
    """Refuse a device without FP8 GEMMs.

    Raises:
        ValueError: naming the device and what to do.
    """
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability >= MIN_CAPABILITY:
            return
        found = f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}"
    else:
        found = f"the run is on {device.type!r}"
    raise ValueError(
        f"FP8 needs a GPU of compute capability 8.9 or more (Ada, Hopper, Blackwell), but {found}: "
        "use precision='bf16-mixed', or emulate=True to compute FP8's rounding in fp32 (slow, for tests)"
    )


def self_test(recipe: Recipe, device: torch.device, *, compiled: bool) -> dict[str, float]:
    """Compare one FP8 layer with the same layer in bf16.

    Args:
        recipe: how the layer computes.
        device: where to compute.
        compiled: compute the FP8 layer through `torch.compile`.

    Returns:
        Relative error (Frobenius norm) of `output`, `grad_input` and `grad_weight`.

    Raises:
        RuntimeError: if one is above 0.12 or not a number, or if the layer cannot run at all.
    """
    random = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=device, dtype=torch.bfloat16)

    weight, input, grad_output = draw(OUT_FEATURES, IN_FEATURES), draw(TOKENS, IN_FEATURES), draw(TOKENS, OUT_FEATURES)
    layer = nn.Sequential(nn.Linear(IN_FEATURES, OUT_FEATURES, bias=False, device="meta"))
    layer[0].weight = nn.Parameter(weight)
    right = _products(layer, input, grad_output)
    recipe.convert(layer, [Decision("0", OUT_FEATURES, IN_FEATURES)])
    if compiled:
        layer.compile(fullgraph=True)
    where = f"{'compiled' if compiled else 'eager'} FP8 on {_name(device)}"
    try:
        got = _products(layer, input, grad_output)
    except Exception as error:
        raise RuntimeError(f"{where} does not run: {error}. Use precision='bf16-mixed' or another recipe") from error
    errors = {name: ((got[name] - right[name]).norm() / right[name].norm()).item() for name in right}
    if not all(error <= MAX_ERROR for error in errors.values()):
        found = ", ".join(f"{name} {error:.3g}" for name, error in errors.items())
        raise RuntimeError(
            f"{where} computes wrong numbers: relative error against bf16 {found}, at most {MAX_ERROR} is rounding. "
            "Use precision='bf16-mixed' or another recipe, and report torch, triton and torchao versions upstream"
        )
    return errors


def _products(layer: nn.Module, input: Tensor, grad_output: Tensor) -> dict[str, Tensor]:
    input = input.clone().requires_grad_()
    (weight,) = layer.parameters()
    with torch.enable_grad(), torch.autocast(input.device.type, enabled=False):
        output = layer(input)
        grads = torch.autograd.grad(output, (input, weight), grad_output)
    return {
        name: product.detach().float()
        for name, product in zip(("output", "grad_input", "grad_weight"), (output, *grads), strict=True)
    }


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
