"""Our loader beside others on the same tokens, one after the other in one call on one machine.

    pip install grain mosaicml-streaming                 # as far as wanted; what is missing is said and left out
    python benchmarks/loader.py --folder /tmp/loader     # writes 0.5 GB there, takes about four minutes on 2 cores

*Blocks*: the same random tokens as blocks of 2,049, 8 a batch, shuffled, from each system's own storage: litdata's chunks
(which ours reads too), MDS shards, a memory-mapped array. Ours gives blocks by `StreamLoader.blocks()`, as the others do,
and, on a line of its own, whole batches of five tensors. *Text*: jsonl tokenized on the fly by a byte-level BPE, against the
bare tokenizer (`encode`, and `encode_batch_fast`, which leaves out offsets) in as many processes on the same documents in a
random order, in turns. Rates are tokens a second after the first batch.
"""

import argparse
import json
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import litdata  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

from lightning_fms.data import StreamLoader  # noqa: E402
from lightning_fms.data.sources import PythonSource  # noqa: E402

try:
    import streaming
except ImportError:
    streaming = None
try:
    import grain
except ImportError:
    grain = None

BLOCK, ROWS, BLOCKS, VOCABULARY = 2049, 8, 32_000, 50_000


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


def rate(batches: Iterable, seconds: float, count: Callable[[Any], int]) -> tuple[float, float]:
    """Return million tokens a second after the first batch, and the seconds until that."""
    began = time.perf_counter()
    iterator = iter(batches)
    next(iterator)
    first = time.perf_counter() - began
    began, tokens = time.perf_counter(), 0
    for batch in iterator:
        tokens += count(batch)
        if time.perf_counter() - began > seconds:
            break
    return tokens / 1e6 / (time.perf_counter() - began), first


def chunk_of(number: int) -> Iterable[torch.Tensor]:
    """Forty items of fifty blocks."""
    generator = np.random.default_rng(number)
    for _ in range(40):
        yield torch.from_numpy(generator.integers(0, VOCABULARY, size=BLOCK * 50).astype(np.int32))


def write_blocks(folder: Path) -> None:
    """Write the same tokens in every storage."""
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
    if streaming is not None and not (folder / "mds").exists():
        array = np.memmap(folder / "blocks.bin", dtype=np.int32).reshape(-1, BLOCK)
        with streaming.MDSWriter(
            out=str(folder / "mds"), columns={"t": f"ndarray:int32:{BLOCK}"}, size_limit="64mb"
        ) as writer:
            for block in array:
                writer.write({"t": block})


def our_loader(folder: Path, workers: int) -> StreamLoader:
    return StreamLoader(
        {"blocks": folder / "litdata"}, BLOCK - 1, ROWS, num_streams=64, tokenizer=Ids(), eos=False, num_workers=workers
    )


def block_systems(folder: Path, workers: int) -> dict[str, tuple[Iterable, Callable[[Any], int]]]:
    """Return what yields batches, and how many tokens are in one, by name."""
    array = np.memmap(folder / "blocks.bin", dtype=np.int32).reshape(-1, BLOCK)
    dataset = litdata.StreamingDataset(
        str(folder / "litdata"), item_loader=litdata.TokensLoader(BLOCK), shuffle=True, drop_last=True
    )
    systems: dict[str, tuple[Iterable, Callable[[Any], int]]] = {
        "litdata": (litdata.StreamingDataLoader(dataset, batch_size=ROWS, num_workers=workers), torch.numel),
        "ours, blocks": (our_loader(folder, workers).blocks(), torch.numel),
        "ours, batches of five tensors": (our_loader(folder, workers), lambda batch: batch["input_ids"].numel()),
        "DataLoader on a memmap": (
            DataLoader(Blocks(array), batch_size=ROWS, shuffle=True, num_workers=workers), torch.numel,
        ),
    }  # fmt: skip
    if streaming is not None:
        shards = streaming.StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=ROWS)
        systems["mosaicml-streaming"] = (
            DataLoader(shards, batch_size=ROWS, num_workers=workers), lambda batch: batch["t"].numel(),
        )  # fmt: skip
    if grain is not None:
        items = grain.MapDataset.source(array).shuffle(seed=0).batch(ROWS).to_iter_dataset()
        if workers:
            items = items.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
        systems["grain"] = (items, lambda batch: batch.size)
    return systems


def compare_blocks(folder: Path, seconds: float) -> None:
    write_blocks(folder)
    for workers in (0, 1, 2):
        found: dict[str, float] = {}
        for name, (batches, count) in block_systems(folder, workers).items():
            try:
                found[name], first = rate(batches, seconds, count)
                ratio = f"{found[name] / found['litdata']:6.2f} x litdata" if "litdata" in found else ""
                print(
                    f"blocks  {workers} workers  {name:30} {found[name]:8.1f} M tokens/s  first {first:5.2f} s  {ratio}"
                )
            except Exception as error:
                print(f"blocks  {workers} workers  {name:30} failed: {type(error).__name__}: {str(error)[:100]}")


def write_text(folder: Path, documents: int = 20_000) -> tuple[Path, Path]:
    """Write real text as jsonl, and a tokenizer trained on it."""
    path, tokenizer_path = folder / "text" / "code.jsonl", folder / "bpe.json"
    if not tokenizer_path.exists():
        path.parent.mkdir(exist_ok=True)
        source, texts = PythonSource("code"), []
        for file, size in enumerate(source.listing.sizes.tolist()):
            try:
                text = str(source.read(file, 0, int(size)))
            except ValueError:
                continue
            texts += [text[i : i + 3000] for i in range(0, len(text), 3000)]
        with path.open("w") as out:
            for number in range(documents):
                out.write(json.dumps({"text": texts[number % len(texts)]}) + "\n")
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=8192, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )  # fmt: skip
        tokenizer.train_from_iterator(texts[::5], trainer)
        tokenizer.save(str(tokenizer_path))
    return path, tokenizer_path


def in_this_process(path: Path, tokenizer_path: Path, rounds: int) -> None:
    """Compare in one process by its processor time, a portion of each in turn: other load on the machine matters little."""
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    order = np.random.default_rng(0).permutation(len(texts)).tolist()
    plain, fast = (Tokenizer.from_file(str(tokenizer_path)) for _ in range(2))
    blocks = iter(StreamLoader({"code": path.parent}, 2048, ROWS, tokenizer=tokenizer_path).blocks())
    for _ in range(15):  # portions grow to 64 rows
        next(blocks)

    def portion(number: int) -> list[str]:
        return [texts[i] for i in order[number * 40 : number * 40 + 40]]

    systems: dict[str, Callable[[int], int]] = {
        "encode": lambda n: sum(len(plain.encode(text, add_special_tokens=False).ids) for text in portion(n)),
        "encode_batch_fast": lambda n: sum(
            len(fast.encode_batch_fast([text], add_special_tokens=False)[0].ids) for text in portion(n)
        ),
        "ours, blocks": lambda n: sum(next(blocks).numel() for _ in range(64 // ROWS)),
    }
    rates: dict[str, list[float]] = {name: [] for name in systems}
    for number in range(rounds + 2):
        for name, system in systems.items():
            began = time.process_time()
            rates[name].append(system(number) / 1e6 / (time.process_time() - began))
    for name, found in rates.items():
        ratio = float(np.median(np.divide(found, rates["encode"])[2:]))  # the first two fill the tokenizers' caches
        print(
            f"text    in process {name:30} {np.median(found[2:]):8.2f} M tokens/s of processor time  {ratio:6.2f} x encode"
        )


def tokenize(path: Path, tokenizer_path: Path, seconds: float, fast: bool, sent: Any = None) -> float:
    """Return million tokens a second of the bare tokenizer, on documents in a random order."""
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    order, tokens = np.random.default_rng(0).permutation(len(texts)).tolist(), 0
    began = time.perf_counter()
    for number in order:
        if fast:
            tokens += len(tokenizer.encode_batch_fast([texts[number]], add_special_tokens=False)[0].ids)
        else:
            tokens += len(tokenizer.encode(texts[number], add_special_tokens=False).ids)
        if time.perf_counter() - began > seconds:
            break
    found = tokens / 1e6 / (time.perf_counter() - began)
    if sent is not None:
        sent.put(found)
    return found


def bare(path: Path, tokenizer_path: Path, seconds: float, threads: int, fast: bool) -> float:
    """Return the rate of as many bare tokenizers at once, a process each."""
    context = multiprocessing.get_context("fork")
    sent = context.Queue()
    processes = [
        context.Process(target=tokenize, args=(path, tokenizer_path, seconds, fast, sent)) for _ in range(threads)
    ]
    for process in processes:
        process.start()
    found = [sent.get() for _ in processes]
    for process in processes:
        process.join()
    return sum(found)


def compare_text(folder: Path, seconds: float, rounds: int = 3) -> None:
    """Take turns with the bare tokenizer, so that both see the same machine; medians of the rounds' ratios."""
    path, tokenizer_path = write_text(folder)
    in_this_process(path, tokenizer_path, 4 * rounds)
    for workers in (1, 2):
        rates: dict[str, list[float]] = {"encode": [], "encode_batch_fast": [], "ours, blocks": []}
        for _ in range(rounds):
            rates["encode"].append(bare(path, tokenizer_path, seconds, workers, fast=False))
            rates["encode_batch_fast"].append(bare(path, tokenizer_path, seconds, workers, fast=True))
            loader = StreamLoader({"code": path.parent}, 2048, ROWS, tokenizer=tokenizer_path, num_workers=workers)
            rates["ours, blocks"].append(rate(loader.blocks(), seconds, torch.numel)[0])
            loader.close()
        for name, found in rates.items():
            ratio = float(np.median(np.divide(found, rates["encode"])))
            print(f"text    {workers} workers  {name:30} {np.median(found):8.2f} M tokens/s  {ratio:6.2f} x encode")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, required=True, help="where the data is written, and kept for another call"
    )
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    parser.add_argument("--only", choices=["blocks", "text"], nargs="+", default=["blocks", "text"])
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if "blocks" in arguments.only:
        compare_blocks(arguments.folder, arguments.seconds)
    if "text" in arguments.only:
        compare_text(arguments.folder, arguments.seconds)


if __name__ == "__main__":
    main()
