"""Command lines of Hydra apps as words: what they say for a key, and how to say it so that Hydra reads the same."""

import re
from collections.abc import Sequence

_PLAIN = re.compile(r"[\w./-]+")


def key_of(override: str) -> str:
    """`data.seq_len` of `+data.seq_len=3`, `data` of `data@here=text`."""
    return override.lstrip("+~").partition("=")[0].partition("@")[0]


def override_of(key: str, value: object) -> str:
    """An override that Hydra reads as this value, whatever is in it."""
    text = str(value)
    if _PLAIN.fullmatch(text):
        return f"{key}={text}"
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"{key}='{escaped}'"


def overrides_in(words: Sequence[str]) -> list[str]:
    """The words of a command line that are overrides."""
    return [word for word in words if not word.startswith("-") and ("=" in word or word.startswith("~"))]


def flags_in(words: Sequence[str]) -> list[str]:
    """The other words, which Hydra wants all on one side of the overrides."""
    overrides = overrides_in(words)
    return [word for word in words if word not in overrides]


def value_in(words: Sequence[str], key: str) -> str | None:
    """What a command line says for a key, as a word."""
    said = [o.partition("=")[2] for o in overrides_in(words) if key_of(o) == key]
    return said[-1].strip("'\"") if said else None
