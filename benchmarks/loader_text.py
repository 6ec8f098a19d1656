"""The text part of `loader.py`: our loader beside the bare tokenizer on the same jsonl.

What is compared is tokens a second of processor time, so that other load on the machine matters little: of `encode`, of
`encode_batch_fast`, which leaves out offsets, on documents in a random order, and of whole rows, read at random, parsed, tokenized
and packed, in this process and in workers. Each takes a portion in turn.
"""

import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

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


def processor_seconds() -> float:
    """Of this process and its children so far."""
    children = multiprocessing.active_children()
    return time.process_time() + sum(_of_process(child.pid) for child in children if child.pid is not None)


def _of_process(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def first_and_rate(path: Path, tokenizer_path: Path, seconds: float, workers: int) -> tuple[float, float]:
    """Return seconds until our first batch, construction included, and from then on million tokens a processor second."""
    began = time.perf_counter()
    loader = StreamLoader({"code": path.parent}, 2048, ROWS, tokenizer=tokenizer_path, num_workers=workers)
    blocks = loader.blocks()
    next(blocks)
    first = time.perf_counter() - began
    for _ in range(40):  # messages grow to 64 rows, caches fill
        next(blocks)
    began, used, tokens = time.perf_counter(), processor_seconds(), 0
    for block in blocks:
        tokens += block.numel()
        if time.perf_counter() - began > seconds:
            break
    found = tokens / 1e6 / (processor_seconds() - used)
    loader.close()
    return first, found


def encoded(path: Path, tokenizer_path: Path, seconds: float) -> float:
    """Million tokens a processor second of the bare tokenizer, on documents in a random order."""
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    order, tokens = np.random.default_rng(0).permutation(len(texts)).tolist(), 0
    began = time.process_time()
    for number in order:
        tokens += len(tokenizer.encode(texts[number], add_special_tokens=False).ids)
        if time.process_time() - began > seconds:
            break
    return tokens / 1e6 / (time.process_time() - began)


def compare_text(folder: Path, seconds: float, rounds: int) -> None:
    """Take turns with the bare tokenizer, so that both see the same machine; medians of the rounds' ratios."""
    path, tokenizer_path = write_text(folder)
    in_this_process(path, tokenizer_path, 4 * rounds)
    for workers in (1, 2):
        ratios, firsts, rates = [], [], []
        for _ in range(rounds):
            bare = encoded(path, tokenizer_path, seconds / 2)
            first, ours = first_and_rate(path, tokenizer_path, seconds, workers)
            ratios.append(ours / bare)
            firsts.append(first)
            rates.append(ours)
        print(
            f"text    {workers} workers  ours, blocks {np.median(rates):24.2f} M tokens/s of processor time, workers' included "
            f"{np.median(ratios):6.2f} x encode; first batch after {np.median(firsts):.2f} s",
            flush=True,
        )
