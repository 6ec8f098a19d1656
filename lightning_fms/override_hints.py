"""What to type instead of an override that Hydra refuses.

Hydra's own advice for a misspelled key is to append it, which makes a second key that nothing reads; for a value with a `=` in
it, a link to a grammar. Here the same mistakes get the key that was meant, or the quotes that are missing.
"""

import difflib
import inspect
import re
from collections.abc import Collection, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

_BARE = re.compile(r"Error parsing override '([^'=]+)' missing EQUAL")
_REFUSED = re.compile(r"Could not override '([^']+)'")
NO_OPTION = "group override must be a string"
# Arguments of the Trainer that have a group or a key of their own.
SUPPLIED = {
    "strategy": "strategy=<option>",
    "precision": "precision=<option>",
    "plugins": "precision=<option>",
    "callbacks": "callbacks=<option>, or +callbacks.<name>._target_=<class>",
    "logger": "logger=<option>",
    "default_root_dir": "paths.root=<folder>",
}
# Keys beside the groups.
_PLAIN_KEYS = ("name", "seed", "resume", "meta_init", "objective", "objective_mode")


def explain(message: str, overrides: Sequence[str], config: str = "train") -> str:
    """Return a message about the override at fault, or `message` where there is nothing better to say.

    Args:
        message: Hydra's, in one line.
        overrides: the words of the command line that are overrides.
        config: the one that they override.
    """
    if bare := _BARE.search(message):
        return f"{bare[1]}: no value; give <key>=<value>{_without_equals(bare[1])}"
    for override in map(_as_typed, overrides):
        try:
            OverridesParser.create().parse_overrides([override])
        except HydraException:
            key, _, value = override.partition("=")
            if any(value.count(one) != value.count(other) for one, other in ("{}", "[]", "()")):
                return f"{override}: a bracket is not closed; a list is written '[a, b]' and a mapping '{{name: value}}', in quotes"
            return f"{override}: the value is no plain word; put quotes around it: \"{key}='{value}'\""
    if NO_OPTION in message:
        groups = [override for override in overrides if override.endswith("=null") and "." not in override]
        said = groups[0] if groups else message
        return f"{said}: a group takes the name of an option; leave it out for the default, or take it out by ~<group>"
    refused = _REFUSED.search(message)
    if refused is None:
        return message
    key = refused[1]
    typed = next((override for override in overrides if override.partition("=")[0] == key), key)
    return f"{typed}: {_meant(key, overrides, config, typed)}"


def _as_typed(override: str) -> str:
    """A source of one's own is added with `++` by us."""
    return override.removeprefix("++") if override.startswith("++data.sources.") else override


def _without_equals(word: str) -> str:
    """What was meant by a word without `=`: the name of an experiment, a file of several, a key."""
    if Path(word).suffix in (".jsonl", ".json", ".txt", ".parquet", ".gz", ".zst", ".arrow") or Path(word).exists():
        return "; a shell has made several words of a star: put quotes around it, 'data.sources.mine=/corpus/*.jsonl'"
    names = {path.name.removesuffix(".yaml") for path in files("lightning_fms.conf").joinpath("experiment").iterdir()}
    return f", e.g. experiment={word}" if word in names else f", e.g. {word}=1" if "." in word else ""


def _meant(key: str, overrides: Sequence[str], name: str, typed: str) -> str:
    config = _composed([override for override in overrides if _chooses_group(override)], name)
    keys = list(_keys(OmegaConf.to_container(config, resolve=False)))
    if key.startswith("data.sources"):
        return (
            "this data config has sources of its own; for yours, type "
            "data=text 'data.sources={name: /path/*.jsonl}' data.tokenizer=bytes"
        )
    if key.startswith("data.mixture") and (unknown := _unknown_source(typed, config)):
        return unknown
    if key.startswith(("plan.", "hardware.")) and name == "train":
        return "is a setting of fms-plan"
    if f"~{key.partition('.')[0]}" in overrides:
        return f"~{key.partition('.')[0]} has taken this group out; leave one of the two out"
    if key in keys:
        return f"takes no other names than it has; add one by +{key}.<name>=<value>, remove one by ~{key}.<name>"
    group, _, argument = key.rpartition(".")
    if group == "trainer" and argument in SUPPLIED:
        return f"would have no effect: give {SUPPLIED[argument]}"
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.9)
    if not near and argument in _arguments(OmegaConf.select(config, group) if group else None):
        return f"the config leaves it at its default; +{key}=<value> sets it"
    near = near or difflib.get_close_matches(key, keys, n=1, cutoff=0.5)
    return f"no such key; did you mean {near[0]}?" if near else f"no such key; +{key}=<value> would add it"


def _unknown_source(override: str, config: DictConfig) -> str:
    """What a mixture names that is no source of its data config; empty where that leaves its sources open."""
    sources = OmegaConf.select(config, "data.sources")
    if not isinstance(sources, DictConfig):
        return ""
    key, _, _ = override.partition("=")
    value = OverridesParser.create().parse_override(override).value() if "=" in override else None
    named = list(value) if isinstance(value, dict) else [key.removeprefix("data.mixture.")]
    unknown = next((str(name) for name in named if name != "data.mixture" and name not in sources), "")
    return unknown and f"no source {unknown!r}; sources are {', '.join(sorted(map(str, sources)))}"


def _arguments(node: Any) -> Collection[str]:
    """What the target of a node takes; importing it can take seconds."""
    if not isinstance(node, DictConfig) or "_target_" not in node:
        return ()
    try:
        return inspect.signature(get_object(node["_target_"])).parameters
    except Exception:  # No hint is worth another error.
        return ()


def _chooses_group(override: str) -> bool:
    key = override.partition("=")[0]
    return "." not in key and not key.startswith(("+", "~")) and key not in _PLAIN_KEYS


def _composed(choices: list[str], name: str) -> DictConfig:
    GlobalHydra.instance().clear()
    with initialize_config_module("lightning_fms.conf", version_base="1.3"):
        try:
            return compose(name, overrides=choices)
        except HydraException:
            return compose(name)


def _keys(config: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(config, dict):
        for name, value in config.items():
            yield f"{prefix}{name}"
            yield from _keys(value, f"{prefix}{name}.")
