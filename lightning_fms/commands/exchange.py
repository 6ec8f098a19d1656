"""`fms-checkpoint export` and `import`: weights as safetensors, for others and from others."""

import argparse
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_fms.commands.stored import newest
from lightning_fms.distributed import export
from lightning_fms.run_folder import config_of, is_run


def add_parsers(commands: Any) -> None:
    """Add both to the command line."""
    out = commands.add_parser(
        "export", help="weights as safetensors under Hugging Face's names", description=(
            "Write the weights of a checkpoint as safetensors. The suite's Llama gets the names and the config.json of "
            "LlamaForCausalLM, so that transformers' from_pretrained opens the folder; other models keep their own names, "
            "without the attribute of the LightningModule that holds them."
        ),
    )  # fmt: skip
    out.add_argument("path", metavar="PATH", help="a checkpoint, a folder of checkpoints, or a run: its newest")
    out.add_argument("folder", type=Path, metavar="FOLDER", help="new folder")
    out.add_argument(
        "--dtype", choices=sorted(export.DTYPES), help="round the weights to this type; default: as trained"
    )
    out.add_argument("--names", choices=("auto", "own"), default="auto", help="own: the checkpoint's names, unchanged")
    out.add_argument("--heads", type=int, metavar="N", help="attention heads of a Llama, where no run's config tells")
    out.add_argument("--shard-gb", type=float, default=5.0, metavar="GB", help="largest file (default: 5)")
    into = commands.add_parser(
        "import", help="a checkpoint of weights alone from safetensors", description=(
            "Write safetensors as a checkpoint, checksummed. `fms-train weights=` begins with it, or with the safetensors directly."
        ),
    )  # fmt: skip
    into.add_argument("folder", type=Path, metavar="FOLDER", help="safetensors file or folder")
    into.add_argument("path", metavar="PATH", help="the checkpoint to write")
    into.set_defaults(run_command=_import)
    out.set_defaults(run_command=_export)


def _export(arguments: argparse.Namespace) -> int:
    path = newest(arguments.path)
    settings = {**settings_of(path), **({"n_heads": arguments.heads} if arguments.heads else {})}
    files = export.export(
        path, arguments.folder, arguments.dtype, arguments.names, settings, int(arguments.shard_gb * 10**9)
    )
    written = sorted(file.name for file in arguments.folder.iterdir())
    others = ", ".join(sorted(set(written) - set(files)))
    print(f"{path} -> {arguments.folder}: {len(files)} file(s) of weights{others and f', {others}'}")
    if arguments.names == "auto" and "config.json" not in written:
        print(
            "no config.json: the model is not the suite's Llama, or its number of heads is not known; --heads says it"
        )
    return 0


def _import(arguments: argparse.Namespace) -> int:
    count = export.import_weights(arguments.folder, arguments.path)
    print(
        f"{arguments.folder} -> {arguments.path}: {count} tensors; begin with them by fms-train weights={arguments.path} ..."
    )
    return 0


def settings_of(path: Path) -> dict[str, Any]:
    """What the config of a checkpoint's run says of its model; nothing where it lies in no run."""
    run = next((folder for folder in (path, *path.resolve().parents[:2]) if is_run(folder)), None)
    if run is None:
        return {}
    cfg = config_of(run)
    net, seq_len = OmegaConf.select(cfg, "model.net"), OmegaConf.select(cfg, "data.seq_len")
    if not isinstance(net, DictConfig):
        return {}
    wanted = {key: net.get(key) for key in ("n_heads", "rope_theta", "norm_eps")}
    return {key: value for key, value in {**wanted, "seq_len": seq_len}.items() if value is not None}
