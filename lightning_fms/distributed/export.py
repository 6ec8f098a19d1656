"""Hand a checkpoint on: safetensors under Hugging Face's names, and back.

One process, no GPU: a checkpoint is read slice by slice, so an export holds one output file at a time in memory (an import holds
the whole model). Weights leave as they were
trained, in fp32, or rounded once to the dtype asked for. Where the model is this suite's Llama, names become those of
`LlamaForCausalLM`, and with the number of heads known, which no weight shows, a `config.json` is written too, so that
`from_pretrained` needs nothing else.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_fms.distributed import checkpoint, commit, safetensors_folder, state
from lightning_fms.distributed.weight_names import common_prefix, from_llama, is_llama, match

SHARD_BYTES = 5 * 10**9  # as `transformers` writes
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export(
    path: Path, folder: Path, dtype: str | None = None, names: str = "auto", settings: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> list[str]:  # fmt: skip
    """Write the weights of a committed checkpoint as safetensors.

    Args:
        path: the checkpoint.
        folder: new folder.
        dtype: 'float32', 'bfloat16' or 'float16' for floating point weights; None leaves them as they are.
        names: 'auto' drops the attribute that holds the model, and gives this suite's Llama the names of `transformers`;
            'own' keeps the checkpoint's.
        settings: of the Llama, as in its constructor: `n_heads`, and where it differs from the default `rope_theta`, `norm_eps`.
        shard_bytes: size from which another file is begun.

    Returns:
        The files with weights.

    Raises:
        CheckpointError: no checkpoint, or damaged.
        ValueError: the folder exists, or an unknown dtype.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: give one of {', '.join(DTYPES)}")
    path = commit.resolve(path)
    commit.verify(path)
    metadata = {n: e for n, e in checkpoint.read_metadata(path).items() if n.startswith("model.")}
    given = exported_names([n.removeprefix("model.") for n in metadata if not state.is_extra(n)], names)
    saved = {after: f"model.{before}" for before, after in given.items()}
    dtypes = {n: _dtype(metadata[saved[n]].properties.dtype, dtype) for n in saved}
    tied = _tied(path, metadata, saved)
    sizes = {n: metadata[key].size.numel() * dtypes[n].itemsize for n, key in saved.items() if n not in tied}

    def load(chosen: Sequence[str]) -> dict[str, Tensor]:
        tensors = _read(path, metadata, [saved[n] for n in chosen])
        return {n: tensors[saved[n]].to(dtypes[n]).contiguous() for n in chosen}

    shapes = {n: metadata[key].size for n, key in saved.items()}
    config = llama_config(shapes, settings, bool(tied), dtypes) if "lm_head.weight" in saved else None
    others = {"config.json": config} if config is not None else {}
    return safetensors_folder.write(folder, sizes, load, others, shard_bytes)


def import_weights(folder: Path, path: Path, like: Collection[str] | None = None) -> int:
    """Write safetensors as a committed checkpoint of weights alone, from which a run can begin; returns their number.

    Args:
        folder: safetensors file or folder.
        path: the checkpoint to write.
        like: names that the weights are to have; None keeps those of the folder, which `load_weights` matches by itself.

    Raises:
        CheckpointError: a file is missing or damaged.
        ValueError: names that do not match.
    """
    entries = safetensors_folder.entries(folder)
    own = {name: name for name in entries} if like is None else match(entries, like, {})
    if len(own) != len(entries):
        raise ValueError(f"{folder}: {sorted(entries.keys() - own.keys())[0]} has no match in the model")
    tensors = {f"model.{own[name]}": tensor for name, tensor in safetensors_folder.read(entries, list(entries))}
    checkpoint.save(path, tensors, {"global_step": 0}, step=0)
    return len(tensors)


def exported_names(names: Collection[str], style: str = "auto") -> dict[str, str]:
    """Names that a checkpoint's weights leave under."""
    if style not in ("auto", "own"):
        raise ValueError(f"names={style!r}: give 'auto' or 'own'")
    if style == "own":
        return {name: name for name in names}
    prefix = common_prefix(names)
    bare = {name: name.removeprefix(prefix) for name in names}
    return {name: from_llama(short) for name, short in bare.items()} if is_llama(list(bare.values())) else bare


def llama_config(
    shapes: Mapping[str, torch.Size], settings: Mapping[str, Any] | None, tied: bool, dtypes: Mapping[str, torch.dtype]
) -> dict[str, Any] | None:
    """`config.json` of a `LlamaForCausalLM` with such weights; None without the number of heads."""
    if not settings or not settings.get("n_heads"):
        return None
    vocab, width = shapes["model.embed_tokens.weight"]
    heads = int(settings["n_heads"])
    theta = float(settings.get("rope_theta") or 500_000.0)
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "vocab_size": vocab, "hidden_size": width, "num_attention_heads": heads, "head_dim": width // heads,
        "num_hidden_layers": len({n.split(".")[2] for n in shapes if n.startswith("model.layers.")}),
        "num_key_value_heads": shapes["model.layers.0.self_attn.k_proj.weight"][0] * heads // width,
        "intermediate_size": shapes["model.layers.0.mlp.gate_proj.weight"][0],
        "rms_norm_eps": float(settings.get("norm_eps") or 1e-5), "tie_word_embeddings": tied,
        "rope_theta": theta, "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "max_position_embeddings": int(settings.get("seq_len") or 8192),
        "torch_dtype": str(dtypes["model.embed_tokens.weight"]).removeprefix("torch."),
    }  # fmt: skip


def _dtype(own: torch.dtype, asked: str | None) -> torch.dtype:
    return DTYPES[asked] if asked is not None and own.is_floating_point else own


def _tied(path: Path, metadata: Mapping[str, Any], saved: Mapping[str, str]) -> set[str]:
    """A head that is the embedding, which readers of such folders expect to be left out."""
    head, embedding = saved.get("lm_head.weight"), saved.get("model.embed_tokens.weight")
    if head is None or embedding is None or metadata[head].size != metadata[embedding].size:
        return set()
    both = _read(path, metadata, [head, embedding])
    return {"lm_head.weight"} if torch.equal(both[head], both[embedding]) else set()


def _read(path: Path, metadata: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Tensor]:
    tensors = {key: torch.empty(metadata[key].size, dtype=metadata[key].properties.dtype) for key in keys}
    checkpoint.load_tensors(path, tensors)
    return tensors
