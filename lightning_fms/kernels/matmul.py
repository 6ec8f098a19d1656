"""Matrix product by Triton: persistent programs, tiles through tensor descriptors (TMA on Hopper), sums in fp32.

Problem: where no library may run, the output head's three GEMMs and the linear layers outside compiled blocks need a kernel
whose operands come as they are: plain, transposed, rows of a padded buffer.

Idea: one program a multiprocessor walks over the output's tiles, in groups of rows so that operands stay in L2 (the scheme of
Triton's tutorial on persistent matmul). A transposed operand is loaded as it lies in memory and transposed in the tile. The
output may be added to. Tile sizes are measured once for each problem size, on the operands of its first call.

Trade-offs: descriptors want rows that begin at multiples of 16 bytes, anything else is copied first. float64 is not taken.

M x K times K x N.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fms.triton_backend import HAS_TRITON, INTERPRETED, tl, triton

if HAS_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor


class Tiles(NamedTuple):
    """How the kernel is cut; `halves`: the output's tile is stored in two parts, which needs half the shared memory."""

    m: int
    n: int
    k: int
    stages: int
    warps: int
    halves: bool = False


# Each costs a compilation of seconds for each problem size, so they are few: the shapes that fit Hopper's tensor cores.
# The last is for fp32 output that is added to.
CANDIDATES = [
    Tiles(128, 256, 64, 3, 8, True),
    Tiles(256, 128, 64, 3, 8, True),
    Tiles(128, 128, 64, 4, 8),
    Tiles(128, 128, 64, 3, 8, True),
]
INTERPRETED_TILES = Tiles(32, 32, 16, 1, 1, True)
GROUP = 8  # rows of tiles that share the columns' operands in L2
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_REPEATS = 3
_chosen: dict[tuple[object, ...], Tiles] = {}


def matmul_reference(left: Tensor, right: Tensor, out: Tensor, accumulate: bool = False) -> None:
    """The same in plain PyTorch, summed in fp32."""
    product = left.float() @ right.float()
    out.copy_(out.float() + product if accumulate else product)


def matmul_into(left: Tensor, right: Tensor, out: Tensor, accumulate: bool = False) -> None:
    """out [M, N] = left [M, K] @ right [K, N], or +=, rounded once to `out`'s dtype.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    if left.ndim != 2 or right.ndim != 2 or out.shape != (left.shape[0], right.shape[1]) or left.shape[1] != len(right):
        raise ValueError(f"{tuple(left.shape)} @ {tuple(right.shape)} does not fit out {tuple(out.shape)}")
    if left.dtype != right.dtype or left.dtype not in DTYPES or out.dtype not in DTYPES:
        raise ValueError(
            f"{left.dtype} @ {right.dtype} -> {out.dtype}: the Triton GEMM takes {', '.join(map(str, DTYPES))}"
        )
    if not out.numel():
        return
    if not left.shape[1]:
        if not accumulate:
            out.zero_()
        return
    if not _aligned(out):
        buffer = _copied(out)
        matmul_into(left, right, buffer, accumulate)
        out.copy_(buffer)
        return
    a, a_turned = _operand(left)
    b, b_turned = _operand(right)
    size = (*out.shape, left.shape[1])
    key = (*size, a_turned, b_turned, left.dtype, out.dtype, left.device)
    if key not in _chosen:
        _chosen[key] = INTERPRETED_TILES if INTERPRETED else _fastest(a, b, out, size, a_turned, b_turned, accumulate)
    _launch(_chosen[key], a, b, out, size, a_turned, b_turned, accumulate)


def _aligned(x: Tensor) -> bool:
    """Whether a tensor descriptor can be made of `x`."""
    row, column = x.stride()
    return column == 1 and row >= x.shape[1] and row * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0


def _copied(x: Tensor) -> Tensor:
    columns = -(-x.shape[1] // 16) * 16
    return x.new_empty(len(x), columns)[:, : x.shape[1]].copy_(x)


def _operand(x: Tensor) -> tuple[Tensor, bool]:
    """The matrix as it lies in memory, and whether that is the transpose of `x`."""
    if _aligned(x):
        return x, False
    return (x.t(), True) if _aligned(x.t()) else (_copied(x), False)


# ---- the Triton kernel --------------------------------------------------------------------------------------------


@triton.jit
def _tile_of(tile, tiles_m, tiles_n, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    per_group = GROUP * tiles_n
    first = tile // per_group * GROUP
    rows = tl.minimum(tiles_m - first, GROUP)
    within = tile % per_group
    return first + within % rows, within // rows


@triton.jit
def _store(out, part, row, column, ACCUMULATE: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    if ACCUMULATE:
        part += out.load([row, column]).to(tl.float32)
    out.store([row, column], part.to(DTYPE))


@triton.jit
def _matmul_kernel(  # type: ignore[no-untyped-def]
    left,
    right,
    out,
    m,
    n,
    k,
    PROGRAMS: tl.constexpr,
    LEFT_TURNED: tl.constexpr,
    RIGHT_TURNED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    HALVES: tl.constexpr,
):
    tiles_m, tiles_n, steps = tl.cdiv(m, M), tl.cdiv(n, N), tl.cdiv(k, K)
    stored = tl.program_id(0) - PROGRAMS  # counted apart: the pipeline loads the next tile while this one is stored
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        row, column = _tile_of(tile, tiles_m, tiles_n, GROUP)
        total = tl.zeros((M, N), dtype=tl.float32)
        for step in range(steps):
            if LEFT_TURNED:
                a = left.load([step * K, row * M]).T
            else:
                a = left.load([row * M, step * K])
            if RIGHT_TURNED:
                b = right.load([column * N, step * K]).T
            else:
                b = right.load([step * K, column * N])
            if WIDEN:
                a, b = a.to(tl.float32), b.to(tl.float32)
            total = tl.dot(a, b, total, input_precision=PRECISION)
        stored += PROGRAMS
        row, column = _tile_of(stored, tiles_m, tiles_n, GROUP)
        if HALVES:
            first, second = tl.split(tl.permute(tl.reshape(total, (M, 2, N // 2)), (0, 2, 1)))
            _store(out, first, row * M, column * N, ACCUMULATE, DTYPE)
            _store(out, second, row * M, column * N + N // 2, ACCUMULATE, DTYPE)
        else:
            _store(out, total, row * M, column * N, ACCUMULATE, DTYPE)


def _launch(
    tiles: Tiles,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    size: tuple[int, ...],
    a_turned: bool,
    b_turned: bool,
    accumulate: bool,
) -> None:
    m, n, k = size
    count = triton.cdiv(m, tiles.m) * triton.cdiv(n, tiles.n)
    sms = torch.cuda.get_device_properties(out.device).multi_processor_count if out.is_cuda else 2
    programs = min(count, sms)
    precise = a.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    _matmul_kernel[(programs,)](
        TensorDescriptor.from_tensor(a, [tiles.k, tiles.m] if a_turned else [tiles.m, tiles.k]),
        TensorDescriptor.from_tensor(b, [tiles.n, tiles.k] if b_turned else [tiles.k, tiles.n]),
        TensorDescriptor.from_tensor(out, [tiles.m, tiles.n // 2 if tiles.halves else tiles.n]),
        m,
        n,
        k,
        PROGRAMS=programs,
        LEFT_TURNED=a_turned,
        RIGHT_TURNED=b_turned,
        ACCUMULATE=accumulate,
        DTYPE=_TRITON_DTYPES[out.dtype],
        PRECISION="ieee" if precise else "tf32",
        WIDEN=INTERPRETED and a.dtype == torch.bfloat16,  # the interpreter would multiply the bits
        GROUP=GROUP,
        M=tiles.m,
        N=tiles.n,
        K=tiles.k,
        HALVES=tiles.halves,
        num_stages=tiles.stages,
        num_warps=tiles.warps,
    )


_TRITON_DTYPES = (
    {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32} if HAS_TRITON else {}
)


def _fastest(
    a: Tensor, b: Tensor, out: Tensor, size: tuple[int, ...], a_turned: bool, b_turned: bool, accumulate: bool
) -> Tiles:
    """Measure the candidates that fit the device, once.

    They add to whatever is in `out`, which is about to be overwritten (or in a scratch): what fits then fits without.
    """
    target = torch.empty_like(out) if accumulate else out
    times: dict[Tiles, float] = {}
    failures = []
    for tiles in CANDIDATES:
        try:
            times[tiles] = _milliseconds(tiles, a, b, target, size, a_turned, b_turned)
        except Exception as error:  # Triton has several: out of shared memory, of registers, a compiler's assertion
            failures.append(f"{tiles}: {error}".splitlines()[0])
    if not times:
        raise RuntimeError(f"no tile of the Triton GEMM runs on {out.device}: {'; '.join(failures)}")
    return min(times, key=lambda tiles: times[tiles])


def _milliseconds(
    tiles: Tiles, a: Tensor, b: Tensor, out: Tensor, size: tuple[int, ...], a_turned: bool, b_turned: bool
) -> float:
    _launch(tiles, a, b, out, size, a_turned, b_turned, True)  # compiles
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(_REPEATS):
        _launch(tiles, a, b, out, size, a_turned, b_turned, True)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


__all__ = ["matmul_into", "matmul_reference"]
