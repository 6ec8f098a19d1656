"""Does a way to compute change what a model learns? Loss curves of a 300M model on real text, and a verdict.

    python benchmarks/loss_curves.py --out curves.json --png docs/images/fp8_loss.png       # bf16 of two seeds, every FP8 recipe
    python benchmarks/loss_curves.py --shape tiny --device cpu --steps 20 --last 5 --at-once 1   # does it run?

Each variant (options of `gpu.py`, `@` and a seed) trains in a process of its own, several at once, because only losses are
looked at; --out is written when one is done. Except for the variant with another seed, weights, text and order are the
same. A variant passes if its mean loss of the last steps is not further from the first variant's than the other seed's is.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from workload import SEED, SHAPES, tokenizer_for

HERE = Path(__file__).parent
VARIANTS = [
    "bf16",
    "bf16@1",
    "bf16+kernels",
    "fp8+small",
    "rowwise+small",
    "rowwise_gw_hp+small",
    "fused+small",
    "fused+kernels+small",
]
WINDOW = 20  # steps that a point of the plot is the mean of


def losses_of(variant: str, tokenizer: Path, arguments: argparse.Namespace, folder: Path) -> list[float]:
    """The loss of each step."""
    options, _, seed = variant.partition("@")
    row = folder / f"{variant}.json"
    command = [sys.executable, str(HERE / "trainer_run.py"), arguments.shape, options, "--seed", seed or str(SEED)]
    command += ["--tokenizer", str(tokenizer), "--row", str(row), "--steps", str(arguments.steps)]
    command += ["--warmup", "0", "--device", arguments.device]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{variant}: {done.stderr[-2000:]}")
    return [float(loss) for loss in json.loads(row.read_text())["losses"]]


def table(curves: dict[str, list[float]], last: int) -> list[str]:
    """Mean loss of the last steps, its distance from the first variant's, and the verdict."""
    first = next(iter(curves))
    means = {variant: statistics.mean(losses[-last:]) for variant, losses in curves.items()}
    allowed = max((abs(means[v] - means[first]) for v in curves if "@" in v), default=float("nan"))
    lines = [f"{'variant':24} {'mean of last ' + str(last):>18} {'apart':>9}"]
    for variant, mean in means.items():
        apart = mean - means[first]
        verdict = "" if variant == first or "@" in variant else "  ok" if abs(apart) <= allowed else "  TOO FAR"
        lines.append(f"{variant:24} {mean:>18.4f} {apart:>+9.4f}{verdict}")
    return lines


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """Curves, and under them how far each is from the first."""
    import matplotlib  # noqa: PLC0415 (optional)

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, layout="constrained")
    smooth = {
        variant: [statistics.mean(losses[i : i + WINDOW]) for i in range(0, len(losses) - WINDOW + 1, WINDOW)]
        for variant, losses in curves.items()
    }
    base = next(iter(smooth.values()))
    for variant, means in smooth.items():
        steps = [(i + 0.5) * WINDOW for i in range(len(means))]
        style = "--" if "@" in variant else "-"
        above.plot(steps, means, style, label=variant, linewidth=1)
        below.plot(steps, [a - b for a, b in zip(means, base, strict=True)], style, linewidth=1)
    above.set_ylabel("loss")
    above.legend()
    below.set_ylabel(f"loss - loss of {next(iter(curves))}")
    below.set_xlabel("step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=VARIANTS)
    parser.add_argument("--shape", choices=SHAPES, default="300m")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--last", type=int, default=100, help="steps whose mean is compared")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--at-once", type=int, default=4, help="processes")
    parser.add_argument("--out", type=Path, help="JSON file for the losses")
    parser.add_argument("--png", type=Path, help="plot, of these runs or of those in --out with --only-draw")
    parser.add_argument("--only-draw", action="store_true", help="train nothing")
    arguments = parser.parse_args(words)
    if arguments.only_draw:
        curves = json.loads(arguments.out.read_text())
    else:
        with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(arguments.at_once) as pool:
            tokenizer = tokenizer_for(SHAPES[arguments.shape], Path(work))
            jobs = {pool.submit(losses_of, v, tokenizer, arguments, Path(work)): v for v in arguments.variants}
            done: dict[str, list[float]] = {}
            for job in as_completed(jobs):
                done[jobs[job]] = job.result()
                curves = {variant: done[variant] for variant in arguments.variants if variant in done}
                if arguments.out:
                    arguments.out.parent.mkdir(parents=True, exist_ok=True)
                    arguments.out.write_text(json.dumps(curves))
    print("\n".join(table(curves, arguments.last)))
    if arguments.png:
        draw(curves, arguments.png)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
