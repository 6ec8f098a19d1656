"""A training step without cuBLAS, cuDNN, CUTLASS and FlashAttention: what ran in it, and how fast, beside the step with them.

    python benchmarks/triton_only.py                                    # 8b16 on one H200: 8 steps each
    python benchmarks/triton_only.py --shape tiny --device cpu --steps 3 --warmup 1      # does it run?

Each variant trains the suite's Llama on the same random tokens in a process of its own: `TritonKernels()` as it is, and
`TritonKernels(triton_only=True)`. One more step of each is profiled. It fails if the second one launched a kernel that is
neither Triton's nor one of PyTorch's own elementwise ones and reductions, or if its losses are others.
"""

import argparse
import json
import logging
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from kernel_families import family_of

from lightning_fms.kernels.library_kernels import cuda_libraries_used

VARIANTS = {"cuda": {}, "triton": {"triton_only": True}}
GOAL = 0.85
SAME_LOSS = 0.02  # relative: bf16 rounds differently in other tiles, and 9 steps let it grow

# First match decides: what the names of Triton's own templates say is more than `kernel_families` asks for.
TRITON = (
    ("attention, Triton", r"^triton_.*flex"),
    ("gemm, Triton by the compiler", r"^triton_tem|^triton_.*(_mm|_bmm|addmm)"),
    ("gemm, Triton of ours", r"^_matmul_kernel"),
)
OWN = re.compile(r"^triton_|^_\w+_kernel|at::native|at_cuda_detail|\bcub::|thrust|^(Memcpy|Memset)|^nccl|^aten::|^\[")


def measure(variant: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train one variant in this process."""
    import lightning as L  # noqa: PLC0415 (the parent needs none of this)
    import torch  # noqa: PLC0415
    from step_meter import StepMeter  # noqa: PLC0415
    from synthetic_run import RandomTokens  # noqa: PLC0415
    from torch.utils.data import DataLoader  # noqa: PLC0415
    from trainer_run import Metered  # noqa: PLC0415
    from workload import CLIP_NORM, ONLY_TRAIN, SEED, SHAPES, adamw, settle, warm_up  # noqa: PLC0415

    from lightning_fms.distributed import FSDPCompileStrategy  # noqa: PLC0415
    from lightning_fms.kernels import TritonKernels  # noqa: PLC0415
    from lightning_fms.models import CausalLM  # noqa: PLC0415

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    shape, device = SHAPES[arguments.shape], torch.device(arguments.device)
    L.seed_everything(SEED, verbose=False)
    settle(device)
    meter, kernels = StepMeter(device, arguments.warmup, arguments.steps, True), TritonKernels(**VARIANTS[variant])
    trainer = L.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        max_steps=arguments.steps + 1,
        strategy=FSDPCompileStrategy(),
        precision="bf16-mixed",
        callbacks=[kernels, Metered(meter)],
        gradient_clip_val=CLIP_NORM,
        **ONLY_TRAIN,
    )
    trainer.fit(CausalLM(shape.model(), adamw, warm_up), DataLoader(RandomTokens(shape, SEED), batch_size=None))
    return {**meter.row(shape.rows * shape.seq_len, 0.0), "report": kernels.report}


def in_process(variant: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Its row, from a process of its own: 72 GiB of weights and states do not fit twice."""
    with tempfile.TemporaryDirectory() as folder:
        row = Path(folder) / "row.json"
        command = [sys.executable, __file__, "--variant", variant, "--row", str(row), "--shape", arguments.shape]
        command += ["--device", arguments.device, "--steps", str(arguments.steps), "--warmup", str(arguments.warmup)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{variant} failed:\n" + "\n".join(done.stderr.strip().splitlines()[-25:]))
        return json.loads(row.read_text())


def family(kernel: str) -> str:
    """What the kernel does."""
    return next((name for name, pattern in TRITON if re.search(pattern, kernel)), family_of(kernel))


def show(variant: str, row: dict[str, Any]) -> None:
    """The row, and its kernels by family."""
    peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
    print(
        f"{variant:7} {row['tokens_per_second']:9,.0f} tokens/s, step {row['step_ms']:.1f} ms "
        f"[{row['fastest_ms']:.1f}, {row['slowest_ms']:.1f}], first {row['first_step_s']:.1f} s, peak {peak} GiB"
    )
    families: dict[str, tuple[float, int]] = {}
    for name, ms, launches in row["explained"]["kernels"]:
        sums = families.get(family(name), (0.0, 0))
        families[family(name)] = sums[0] + ms, sums[1] + launches
    total = sum(ms for ms, _ in families.values())
    for name, (ms, launches) in sorted(families.items(), key=lambda entry: -entry[1][0]):
        print(f"    {ms:9.2f} ms {ms / total:6.1%} {launches:6}x  {name}")
    for line in row["report"]:
        print(f"    {line}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b16")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps, warm-up included")
    parser.add_argument("--warmup", type=int, default=3, help="first steps that do not count")
    parser.add_argument("--kernels", action="store_true", help="name every kernel of the step without libraries")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--row", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.variant:
        arguments.row.write_text(json.dumps(measure(arguments.variant, arguments)))
        return 0
    rows = {}
    for variant in VARIANTS:
        rows[variant] = in_process(variant, arguments)
        show(variant, rows[variant])
        sys.stdout.flush()
    cuda, triton = rows["cuda"], rows["triton"]
    ratio = triton["tokens_per_second"] / cuda["tokens_per_second"]
    print(f"without libraries {ratio:.2f}x of the speed with them (goal {GOAL})")
    off = max(abs(a - b) / abs(b) for a, b in zip(triton["losses"], cuda["losses"], strict=True))
    print(f"losses {cuda['losses'][0]:.3f} .. {cuda['losses'][-1]:.3f}; differ by at most {off:.1e}")
    names = [name for name, *_ in triton["explained"]["kernels"]]
    if arguments.kernels:
        print("\n".join(f"    {ms:9.2f} ms {n:6}x  {name[:150]}" for name, ms, n in triton["explained"]["kernels"]))
    libraries = cuda_libraries_used(names) if arguments.device == "cuda" else []
    unknown = sorted(name for name in names if not OWN.search(name)) if arguments.device == "cuda" else []
    for line in libraries:
        print(f"a library ran: {line}")
    for name in unknown:
        print(f"neither Triton's nor PyTorch's own: {name}")
    if not libraries and not unknown and arguments.device == "cuda":
        print(f"{len(names)} different kernels, no library's")
    return int(bool(libraries or unknown) or off > SAME_LOSS)


if __name__ == "__main__":
    sys.exit(main())
