"""Command lines before Hydra reads them: what they say for a key, and that of a sweep that goes on.

Loads neither Torch nor Lightning, since every start of every command comes through here.
"""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from hydra import compose, initialize_config_module
from hydra._internal.utils import get_args_parser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from lightning_fms.config_check import ConfigError
from lightning_fms.launch.jobs import Record, newest_sweep, read_record
from lightning_fms.launch.words import flags_in, key_of, override_of, overrides_in, value_in

_MULTIRUN = {"-m", "--multirun"}
_SOURCE = re.compile(r"data\.sources\.([^.=+~]+)[.=]")
# A step of `data=text` has 2 M tokens, half an hour of a laptop; one of these has 2,048.
_OF_A_TINY_MODEL = ("data.seq_len=256", "data.global_batch_size=8", "data.micro_batch_size=null")


def program() -> str:
    """What the user types to start this program: `fms-train`, or the app of a project of their own."""
    if not sys.argv[0].endswith(".py"):
        return "fms-train"
    spec = sys.modules["__main__"].__spec__
    if spec is None:
        return f"python {quote(sys.argv[0])}"
    return "fms-train" if spec.name.startswith("lightning_fms.") else f"python -m {spec.name}"


def paths_of(words: Sequence[str]) -> DictConfig:
    """The `paths` of a command line, before the rest of it is known."""
    paths = _composed(
        words, [o for o in overrides_in(words) if key_of(o) in ("paths", "name") or key_of(o).startswith("paths.")]
    ).paths
    assert isinstance(paths, DictConfig)
    return paths


def _composed(words: Sequence[str], wanted: Sequence[str]) -> DictConfig:
    """The config of some overrides of a command line."""
    folder = get_args_parser().parse_known_args(list(words))[0].config_dir
    search = [f"hydra.searchpath=[{override_of('', f'file://{Path(folder).absolute()}')[1:]}]"] if folder else []
    with initialize_config_module("lightning_fms.conf", version_base="1.3"):
        return compose("train", overrides=[*search, *wanted])


def with_own_sources(words: Sequence[str]) -> list[str]:
    """The words of a command line in which `data.sources.<name>=<path>` is enough to train on files of one's own.

    Hydra refuses a name that the config does not have, and the default data has names of its own, which nobody wants mixed in.
    So a new name takes their place, by `data=text`, with the bytes of the text as tokens where no tokenizer is named.

    Args:
        words: without the program's name; returned as they are where no new source is named.
    """
    named = {word: found[1] for word in overrides_in(words) if (found := _SOURCE.match(word))}
    choices = [word for word in overrides_in(words) if key_of(word) in ("data", "experiment")]
    if not named or any("," in word for word in choices):
        return list(words)
    try:
        data = _composed(words, choices).data
    except HydraException:  # Said better when all is composed.
        return list(words)
    there = set() if OmegaConf.is_missing(data, "sources") else set(data.get("sources") or ())
    new = {word for word, name in named.items() if name not in there}
    if not new or (there and value_in(words, "data") is not None):
        return list(words)
    instead: list[str] = []
    if there:
        implied = ["data.tokenizer=bytes", *(_OF_A_TINY_MODEL if _is_tiny(words) else ())]
        instead = ["data=text", *(word for word in implied if value_in(words, key_of(word)) is None)]
        _say_once(
            f"trains on {', '.join(dict.fromkeys(named[w] for w in words if w in new))} alone: {' '.join(instead)}"
        )
    return [*flags_in(words), *instead, *(f"++{word}" if word in new else word for word in overrides_in(words))]


def _is_tiny(words: Sequence[str]) -> bool:
    """Whether a command line leaves it at the model for a laptop."""
    others = ("experiment", "depth", "size")
    return value_in(words, "model") in (None, "llama_tiny") and all(value_in(words, key) is None for key in others)


def with_size(words: Sequence[str]) -> list[str]:
    """The words of a command line in which `depth=12` is enough to choose a size: the model and the rules that follow it.

    Args:
        words: without the program's name; returned as they are where no depth is given.
    """
    depth = value_in(words, "depth")
    if depth is None or depth == "null":
        return list(words)
    implied = {"model": "model=llama", "size": "size=depth"}
    added = [word for group, word in implied.items() if value_in(words, group) is None]
    return [*flags_in(words), *added, *overrides_in(words)]


def _say_once(text: str) -> None:
    if os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0":
        print(text, flush=True)


def with_settings_of_sweep(words: Sequence[str]) -> list[str]:
    """The words of a command line with `resume=` behind those that the sweep which it means was started with.

    Args:
        words: without the program's name; returned as they are if they mean no sweep.

    Raises:
        ConfigError: if there is no such sweep, or it is one of something else.
    """
    sweep = _sweep_meant(words)
    if sweep is None:
        return list(words)
    wanted, started = value_in(words, "experiment"), value_in(sweep.words, "experiment")
    if sweep.words and wanted is not None and wanted != started:
        raise ConfigError(f"experiment={wanted}: the sweep in {sweep.folder} is one of experiment={started}")
    mine = [override for override in overrides_in(words) if key_of(override) not in ("resume", "hydra.sweep.dir")]
    given = {key_of(override) for override in mine}
    kept = [override for override in overrides_in(sweep.words) if key_of(override) not in given]
    flags = dict.fromkeys(["-m", *flags_in(sweep.words), *flags_in(words)])
    return [
        *(flag for flag in flags if flag != "--multirun"),
        *kept,
        *mine,
        override_of("hydra.sweep.dir", sweep.folder),
    ]


def _sweep_meant(words: Sequence[str]) -> Record | None:
    """The sweep that `resume=<folder of a sweep>` means, or `-m resume=auto`."""
    said = value_in(words, "resume")
    if said != "auto":
        return read_record(Path(said)) if said and Path(said).is_dir() else None
    if not set(words) & _MULTIRUN:
        return None
    given = value_in(words, "hydra.sweep.dir")
    root = paths_of(words).root
    folder = Path(given) if given else newest_sweep(Path(root))
    if folder is None:
        raise ConfigError(f"-m resume=auto: no sweep under {root}/; leave resume=auto out to start one")
    return read_record(folder) or Record(folder, [])
