"""The text part of `loader.py`: our loader beside the bare tokenizer on the same jsonl, in as many processes.

What is compared is tokens a second: of `encode`, of `encode_batch_fast`, which leaves out offsets, on documents in a random order,
and of whole rows, read at random, parsed, tokenized and packed. Each takes a portion in turn, so that all see the same machine.
"""

import json
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lightning_fms.data import StreamLoader
from lightning_fms.data.sources import PythonSource

ROWS = 8


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


def first_and_rate(path: Path, tokenizer_path: Path, seconds: float, workers: int) -> tuple[float, float]:
    """Return seconds until our first batch, construction included, and million tokens a second from then on."""
    began = time.perf_counter()
    loader = StreamLoader({"code": path.parent}, 2048, ROWS, tokenizer=tokenizer_path, num_workers=workers)
    blocks = loader.blocks()
    next(blocks)
    first, began, tokens = time.perf_counter() - began, time.perf_counter(), 0
    for block in blocks:
        tokens += block.numel()
        if time.perf_counter() - began > seconds:
            break
    found = tokens / 1e6 / (time.perf_counter() - began)
    loader.close()
    return first, found


def compare_text(folder: Path, seconds: float, rounds: int) -> None:
    """Take turns with the bare tokenizer, so that both see the same machine; medians of the rounds' ratios."""
    path, tokenizer_path = write_text(folder)
    in_this_process(path, tokenizer_path, 4 * rounds)
    for workers in (0, 1, 2):
        rates: dict[str, list[float]] = {"encode": [], "encode_batch_fast": [], "ours, blocks": []}
        firsts: list[float] = []
        for _ in range(rounds):
            rates["encode"].append(bare(path, tokenizer_path, seconds, max(1, workers), fast=False))
            rates["encode_batch_fast"].append(bare(path, tokenizer_path, seconds, max(1, workers), fast=True))
            first, ours = first_and_rate(path, tokenizer_path, seconds, workers)
            rates["ours, blocks"].append(ours)
            firsts.append(first)
        for name, found in rates.items():
            ratio = float(np.median(np.divide(found, rates["encode"])))
            print(f"text    {workers} workers  {name:30} {np.median(found):8.2f} M tokens/s  {ratio:6.2f} x encode")
        print(
            f"text    {workers} workers  first batch after {np.median(firsts):.2f} s, construction included", flush=True
        )
