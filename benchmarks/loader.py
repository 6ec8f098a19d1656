"""Our loader beside others on the same tokens, in turn in one call on one machine.

    pip install --target /tmp/peers grain mosaicml-streaming      # as far as wanted; what is missing is said and left out
    PYTHONPATH=/tmp/peers python benchmarks/loader.py --folder /tmp/loader --plot docs/loader.png     # 0.5 GB there, six minutes

*Blocks*: the same random tokens as blocks of 2,049, 8 a batch, shuffled, from each system's own storage: litdata's chunks
(which ours reads too), MDS shards, a memory-mapped array. Ours gives blocks by `StreamLoader.blocks()`, as the others do,
and, on a line of its own, whole batches of five tensors. Each measurement has a process of its own, forked before a peer is
imported (grain leaves threads behind that make later workers slow), and the systems take turns, round after round: other load on
the machine hits all of them. Rates are tokens a second after the first batch, the median of the rounds; ratios are medians of
the ratios within a round. *Text*: see `loader_text.py`.
"""

import argparse
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import litdata  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from loader_text import compare_text  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

from lightning_fms.data import StreamLoader  # noqa: E402

BLOCK, ROWS, BLOCKS, VOCABULARY = 2049, 8, 32_000, 50_000
WORKERS = (0, 1, 2)
PEER, OURS, BATCHES = "litdata", "ours, blocks", "ours, batches of five tensors"
PATIENCE = 60  # seconds that a system may take beyond what is measured


class Ids:
    """The vocabulary of tokens that are there already."""

    vocab_size, eos_id, bos_id, fingerprint = VOCABULARY, None, None, "ids"

    def encode(self, text: str) -> np.ndarray:
        raise NotImplementedError

    def decode(self, ids: Any) -> str:
        raise NotImplementedError


class Blocks(Dataset):
    """Rows of a memory-mapped array: what one writes first."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.array[index].astype(np.int64))


def rate(batches: Iterable, seconds: float) -> tuple[float, float]:
    """Return million tokens a second after the first batch, and the seconds until that."""
    began = time.perf_counter()
    iterator = iter(batches)
    next(iterator)
    first = time.perf_counter() - began
    began, tokens = time.perf_counter(), 0
    for batch in iterator:
        tokens += _tokens(batch)
        if time.perf_counter() - began > seconds:
            break
    return tokens / 1e6 / (time.perf_counter() - began), first


def _tokens(batch: Any) -> int:
    if isinstance(batch, dict):
        batch = batch["t"] if "t" in batch else batch["input_ids"]
    return batch.size if isinstance(batch, np.ndarray) else batch.numel()


def chunk_of(number: int) -> Iterable[torch.Tensor]:
    """Forty items of fifty blocks."""
    generator = np.random.default_rng(number)
    for _ in range(40):
        yield torch.from_numpy(generator.integers(0, VOCABULARY, size=BLOCK * 50).astype(np.int32))


def write_blocks(folder: Path) -> None:
    """Write the same tokens as litdata's chunks and as a flat file."""
    if not (folder / "litdata" / "index.json").exists():
        litdata.optimize(
            fn=chunk_of, inputs=list(range(BLOCKS // 2000)), output_dir=str(folder / "litdata"), chunk_size=BLOCK * 8000,
            item_loader=litdata.TokensLoader(BLOCK), num_workers=2, verbose=False,
        )  # fmt: skip
    if not (folder / "blocks.bin").exists():
        with (folder / "blocks.bin").open("wb") as out:
            for number in range(BLOCKS // 2000):
                for item in chunk_of(number):
                    out.write(item.numpy().tobytes())


def array_of(folder: Path) -> np.ndarray:
    return np.memmap(folder / "blocks.bin", dtype=np.int32).reshape(-1, BLOCK)


def litdata_batches(folder: Path, workers: int) -> Iterable:
    loader = litdata.TokensLoader(BLOCK)
    dataset = litdata.StreamingDataset(str(folder / "litdata"), item_loader=loader, shuffle=True, drop_last=True)
    return litdata.StreamingDataLoader(dataset, batch_size=ROWS, num_workers=workers)


def our_loader(folder: Path, workers: int) -> StreamLoader:
    return StreamLoader(
        {"blocks": folder / "litdata"}, BLOCK - 1, ROWS, num_streams=64, tokenizer=Ids(), eos=False, num_workers=workers
    )


def our_blocks(folder: Path, workers: int) -> Iterable:
    return our_loader(folder, workers).blocks()


def memmap_batches(folder: Path, workers: int) -> Iterable:
    return DataLoader(Blocks(array_of(folder)), batch_size=ROWS, shuffle=True, num_workers=workers)


def mosaic_batches(folder: Path, workers: int) -> Iterable:
    import streaming  # noqa: PLC0415 - only in the process that measures it

    if not (folder / "mds").exists():
        columns = {"t": f"ndarray:int32:{BLOCK}"}
        with streaming.MDSWriter(out=str(folder / "mds"), columns=columns, size_limit="64mb") as writer:
            for block in array_of(folder):
                writer.write({"t": block})
    shards = streaming.StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=ROWS)
    return DataLoader(shards, batch_size=ROWS, num_workers=workers)


def grain_batches(folder: Path, workers: int) -> Iterable:
    import grain  # noqa: PLC0415 - only in the process that measures it

    items = grain.MapDataset.source(array_of(folder)).shuffle(seed=0).batch(ROWS).to_iter_dataset()
    return items.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers)) if workers else items


SYSTEMS: dict[str, tuple[str, Callable[[Path, int], Iterable]]] = {
    PEER: ("litdata", litdata_batches),
    OURS: ("numpy", our_blocks),
    BATCHES: ("numpy", our_loader),
    "DataLoader on a memmap": ("torch", memmap_batches),
    "mosaicml-streaming": ("streaming", mosaic_batches),
    "grain": ("grain", grain_batches),
}
"""By name: the package that it needs, and what makes its batches."""


def measure(name: str, folder: Path, workers: int, seconds: float, sent: Any) -> None:
    """Send rate and seconds to the first batch, or what failed."""
    try:
        sent.put(rate(SYSTEMS[name][1](folder, workers), seconds))
    except Exception as error:
        sent.put(f"{type(error).__name__}: {str(error)[:100]}")


def in_own_process(name: str, folder: Path, workers: int, seconds: float) -> tuple[float, float] | str:
    context = multiprocessing.get_context("fork")
    sent = context.Queue()
    process = context.Process(target=measure, args=(name, folder, workers, seconds, sent))
    process.start()
    try:
        return sent.get(timeout=seconds + PATIENCE)
    except Exception as error:
        return f"no answer: {type(error).__name__}"
    finally:
        process.join(timeout=10)
        process.kill()


def compare_blocks(folder: Path, seconds: float, rounds: int) -> dict[tuple[str, int], float]:
    """Print the table; return the rates over litdata's by system and workers."""
    write_blocks(folder)
    ratios: dict[tuple[str, int], float] = {}
    systems = [name for name, (package, _) in SYSTEMS.items() if find_spec(package) is not None]
    print(f"not installed, and left out: {sorted(set(SYSTEMS) - set(systems)) or 'none'}")
    in_own_process(systems[-2], folder, 0, 0.1)  # MDS shards are written by whoever needs them first
    for workers in WORKERS:
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in systems}
        for _ in range(rounds):
            for name in systems:
                answer = in_own_process(name, folder, workers, seconds)
                if isinstance(answer, str):
                    print(f"blocks  {workers} workers  {name:30} failed: {answer}")
                found[name].append((np.nan, np.nan) if isinstance(answer, str) else answer)
        rates = {name: np.array(pairs)[:, 0] for name, pairs in found.items()}
        for name, pairs in found.items():
            ratios[name, workers] = ratio = float(np.median(rates[name] / rates[PEER]))
            spread = " ".join(f"{one:.1f}" for one in sorted(rates[name] / rates[PEER]))
            print(
                f"blocks  {workers} workers  {name:30} {np.median(rates[name]):8.1f} M tokens/s  "
                f"first {np.median(np.array(pairs)[:, 1]):5.2f} s  {ratio:6.2f} x litdata  ({spread})",
                flush=True,
            )
    return ratios


def draw(ratios: dict[tuple[str, int], float], path: Path) -> None:
    """Draw the rates over litdata's."""
    import matplotlib.pyplot as plt  # noqa: PLC0415

    names = [name for name in SYSTEMS if (name, 0) in ratios]
    figure, axis = plt.subplots(figsize=(9, 4))
    for i, workers in enumerate(WORKERS):
        places, heights = np.arange(len(names)) + (i - 1) * 0.27, [ratios[name, workers] for name in names]
        bars = axis.bar(places, heights, width=0.25, label=f"{workers} workers")
        axis.bar_label(bars, [f"{height:.2g}" for height in heights], fontsize=8)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set(yscale="log", ylabel="tokens a second, of litdata's\nwith as many workers")
    axis.set_xticks(
        range(len(names)), [name.replace(", ", ",\n").replace(" on ", "\non ") for name in names], fontsize=8
    )
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, required=True, help="where the data is written, and kept for another call"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5, help="of all systems")
    parser.add_argument("--only", choices=["blocks", "text"], nargs="+", default=["blocks", "text"])
    parser.add_argument("--plot", type=Path, help="where to draw the rates of blocks")
    arguments = parser.parse_args()
    if arguments.plot and "blocks" not in arguments.only:
        parser.error("--plot draws the rates of blocks; leave out --only text")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if "blocks" in arguments.only:
        ratios = compare_blocks(arguments.folder, arguments.seconds, arguments.rounds)
        if arguments.plot:
            draw(ratios, arguments.plot)
    if "text" in arguments.only:
        compare_text(arguments.folder, 5 * arguments.seconds, arguments.rounds)  # messages of text are seconds apart
    print(f"load average of the last minute: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
