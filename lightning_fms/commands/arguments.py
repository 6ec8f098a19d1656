"""Arguments that several subcommands take."""

import argparse
import re

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]?)(i?)B?", re.IGNORECASE)
_LEAST, _MOST = 1000, 2_000_000_000


def size(text: str) -> int:
    """Return the bytes that a size such as `64MB` or `64MiB` stands for."""
    found = _SIZE.fullmatch(text.strip())
    count = int(float(found[1]) * (1024 if found[3] else 1000) ** " KMG".index(found[2].upper() or " ")) if found else 0
    if not _LEAST <= count <= _MOST:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size from 1KB to 2GB; give a number of bytes, or such as 64MB"
        )
    return count


def count(text: str) -> int:
    """Return the number that a count such as `100000`, `1e9` or `2.5B` stands for."""
    factor = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
    plain = text.strip().replace("_", "").replace(",", "").lower()
    try:
        value = float(plain[:-1]) * factor[plain[-1]] if plain[-1:] in factor else float(plain)
    except ValueError:
        value = 0
    if not 1 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no count of at least 1; give such as 1e9, 250M or 1T")
    return round(value)


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """Add what says how documents are read."""
    parser.add_argument("--text-key", metavar="K", help="key or column of the text in a record (text)")
    parser.add_argument(
        "--tokenizer", metavar="T", help="bytes, a tokenizers JSON file, or a Hugging Face folder with tokenizer.json"
    )
