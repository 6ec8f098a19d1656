"""The work that all variants of `gpu.py` do, ours and the peer's: shape, initial weights, text, learning rate, options.

What is fixed here is equal by construction, so rows of one table differ in how a step is computed and in nothing else.
"""

import argparse
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lightning_fms.data.sources import PythonSource
from lightning_fms.models.llama import Llama
from lightning_fms.models.schedule import WarmupCosine

OPTIONS = {
    "bf16": "nothing but FSDPCompileStrategy, over all devices",
    "fsdp": "sharded, and a process group, on one device, too",
    "kept": "with fsdp: gathered parameters are kept between forward and backward",
    "kernels": "TritonKernels",
    "rms_norm": "with kernels: that swap, too, which is off by default",
    "gated_product": "likewise",
    "rotary": "likewise",
    "fp8": "FP8Precision, tensorwise",
    "fused": "FP8Precision with that recipe",
    "exact": "with fused: exact_gradients",
    "rowwise": "FP8Precision with that recipe",
    "rowwise_gw_hp": "FP8Precision with that recipe",
    "small": "FP8 also where layers are small",
    "gather": "FP8 tensorwise gathers weights in FP8",
    "hsdp": "two copies of the model, each sharded over half of the devices",
    "tensor": "matrices split between two neighbours, the rest sharded",
    "cudnn": "attention by cuDNN",
}
PEER_OPTIONS = {
    "plain": "nothing but autocast",
    "compile": "torch.compile of each block, the last norm and the loss",
    "fsdp": "fully_shard over all ranks with bf16 parameters and fp32 gradients, instead of autocast",
    "gather": "with fsdp and fp8: weights are gathered in FP8, scales computed once a step",
    "stream": "residual stream in bf16; autocast alone leaves it in fp32",
    "cudnn": "attention by cuDNN",
    "fp8": "torchao tensorwise, all layers but the head",
    "rowwise": "torchao rowwise, all layers but the head",
    "lrms": "Liger's RMSNorm",
    "lce": "Liger's linear + cross-entropy; not with fsdp",
}
SEED = 0
BPE_VOCABULARY = 8192
EVERY_FILE = 6  # the tokenizer is trained on each sixth file: as good, and two seconds


@dataclass(frozen=True)
class Shape:
    """A Llama shape and the batch it is measured at; the vocabulary is the model's, the tokenizer uses a part of it."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int
    seq_len: int
    rows: int

    def model(self) -> Llama:
        """The model on `meta`; `materialize.Materializer` fills it by seed and names, the same on both sides."""
        with torch.device("meta"):
            return Llama(self.vocab_size, self.dim, self.n_layers, self.n_heads, self.n_kv_heads, self.ffn_dim)


SHAPES = {
    "8b": Shape(4096, 32, 32, 8, 14336, 128256, seq_len=8192, rows=2),
    "8b16": Shape(4096, 16, 32, 8, 14336, 128256, seq_len=8192, rows=1),
    "1b": Shape(2048, 16, 32, 8, 8192, 128256, seq_len=4096, rows=4),
    "8b16r2": Shape(4096, 16, 32, 8, 14336, 128256, seq_len=8192, rows=2),
    "300m": Shape(1024, 24, 16, 16, 2816, 8192, seq_len=1024, rows=4),
    "tiny": Shape(128, 2, 4, 2, 256, 512, seq_len=64, rows=2),
}

adamw = functools.partial(torch.optim.AdamW, lr=3e-4, betas=(0.9, 0.95), fused=True)
# Linear over 10 steps, then constant. Without it the loss of the first steps climbs to 26, and rows are hard to compare.
warm_up = functools.partial(WarmupCosine, warmup_steps=10, total_steps=11, final_fraction=1.0)
CLIP_NORM = 1.0
# Of a Trainer that does nothing but train.
ONLY_TRAIN: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}


def loader_arguments(shape: Shape, tokenizer: str, seed: int = SEED, readers: int = 1) -> dict[str, Any]:
    """For `StreamLoader` and `RescalableDataModule` alike: the same batches from both, with any number of workers.

    `readers`: data ranks, of which each gets the shape's rows.
    """
    return {
        "sources": {"prose": PythonSource("docstrings"), "code": PythonSource("code")},
        "mixture": {"prose": 1, "code": 3},
        "tokenizer": tokenizer,
        "seq_len": shape.seq_len,
        "global_batch_size": shape.rows * readers,
        "seed": seed,
    }


def settle(device: torch.device) -> None:
    """Settings of the process."""
    torch.set_float32_matmul_precision("high")
    if device.type == "cpu":
        torch.set_num_threads(1)


def tokenizer_for(shape: Shape, folder: Path) -> Path:
    """A byte-level BPE on a part of the text that the run trains on."""
    vocab_size = min(BPE_VOCABULARY, shape.vocab_size)
    path = folder / f"bpe-{vocab_size}.json"
    if path.exists():
        return path
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.save(str(path))
    return path


def _corpus() -> Iterator[str]:
    for source in (PythonSource("docstrings"), PythonSource("code")):
        for file in range(0, len(source.listing.sizes), EVERY_FILE):
            try:
                window = source.window(file, 0, int(source.listing.sizes[file]))
                for start, length in zip(window.starts, window.refs, strict=True):
                    yield str(source.read(file, int(start), int(length)))
            except ValueError:  # a file that is no Python on purpose, in somebody's standard library
                continue


def measure_parser(description: str | None) -> argparse.ArgumentParser:
    """What a script that measures one variant takes; `gpu.py` calls it so."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("options", help="joined by `+`")
    parser.add_argument("--tokenizer", required=True, help="JSON file of `tokenizers`")
    parser.add_argument("--seed", type=int, default=SEED, help="of weights and data")
    parser.add_argument("--row", type=Path, required=True, help="JSON file for the result")
    add_length(parser)
    return parser


def add_length(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps, warm-up included")
    parser.add_argument("--warmup", type=int, default=10, help="first steps that do not count")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--devices", type=int, default=1, help="processes, a GPU each; rows and tokens/s are those of one"
    )
    parser.add_argument("--profile", action="store_true", help="explain one more step: kernels, idle time, memory")
