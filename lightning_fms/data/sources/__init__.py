"""Where documents come from: one module a format, all behind the `Source` protocol."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from litdata import CombinedStreamingDataset, StreamingDataset

from lightning_fms.data.sources.arrow import Arrow, saved_dataset
from lightning_fms.data.sources.cache import Cache
from lightning_fms.data.sources.compressed import CompressedLines, open_lines, plain_suffix
from lightning_fms.data.sources.lines import JsonLines, Text
from lightning_fms.data.sources.listing import Listing, list_files
from lightning_fms.data.sources.litdata_chunks import LitdataChunks
from lightning_fms.data.sources.litdata_datasets import folder_of, sources_of
from lightning_fms.data.sources.megatron import MegatronTokens
from lightning_fms.data.sources.parquet import Parquet
from lightning_fms.data.sources.python_source import PythonSource
from lightning_fms.data.sources.source import Document, DocumentError, Source, Window
from lightning_fms.data.sources.token_files import TokenFiles, open_token_files

__all__ = [
    "Arrow", "Cache", "CompressedLines", "Document", "DocumentError", "JsonLines", "Listing", "LitdataChunks", "MegatronTokens",
    "Parquet", "PythonSource", "Source", "Text", "TokenFiles", "Window", "list_files", "open_source", "open_sources",
]  # fmt: skip

_JSONL = (".jsonl", ".json", ".ndjson")
_TEXT = (".txt", ".md", ".text", ".rst", ".py")
_TOKENS = (".bin", ".idx")
_PARQUET = (".parquet", ".pq")
_ARROW = (".arrow", ".feather", ".ipc")
_FORMATS = (
    f"{', '.join(_JSONL)} (JSON lines), {', '.join(_TEXT)} (text), both also with .gz or .zst, {_PARQUET[0]}, "
    f"{', '.join(_ARROW)}, {_TOKENS[0]} (tokens), a folder of litdata chunks or of `datasets.save_to_disk`"
)


def open_sources(sources: Mapping[str, Any]) -> tuple[dict[str, Source], dict[str, float]]:
    """Open every source of a `sources` argument.

    Args:
        sources: `{name: path, folder, glob, list of them, or Source}`, or `{name: {"path": ..., "weight": ..., ...}}` with the
            options of the format (`text_key`, `split`, `dtype`, ...); or a litdata `StreamingDataset` or
            `CombinedStreamingDataset`.

    Returns:
        The sources by name, and the weights that were given.

    Raises:
        ValueError: If a source cannot be opened; the message names it.
    """
    if isinstance(sources, (StreamingDataset, CombinedStreamingDataset)):
        sources = sources_of(sources)
    if not isinstance(sources, Mapping) or not sources:
        raise ValueError(f"sources={sources!r} must be a mapping {{name: path}} with at least one source")
    opened, weights = {}, {}
    for name, spec in sources.items():
        options = dict(spec) if isinstance(spec, Mapping) else {"path": spec}
        if "weight" in options:
            weights[name] = options.pop("weight")
        if "path" not in options:
            raise ValueError(f"source {name!r} has no path; it has {sorted(options)}")
        try:
            opened[name] = open_source(**options)
        except (TypeError, ValueError) as error:
            raise ValueError(f"source {name!r}: {error}") from None
    if weights and set(weights) != set(opened):
        raise ValueError(
            f"sources {sorted(set(opened) - set(weights))} have no weight while others have: give all or none"
        )
    return opened, weights


def open_source(
    path: Any,
    text_key: str | None = None,
    split: str | None = None,
    dtype: str | None = None,
    eos_id: int | None = None,
    bos_id: int | None = None,
    records: bool = False,
    cache: Cache | str | Path | None = None,
) -> Source:
    """Open one source; the format follows from the file names.

    Args:
        path: File, folder, glob or list of them, all of one format; a litdata `StreamingDataset`; or an object that implements
            `Source`.
        text_key: Key of the text in a JSON record or a litdata item, or its column; default `"text"`.
        split: How plain text is cut into documents; see `Text`.
        dtype, eos_id, bos_id: What bare token files hold; see `TokenFiles`.
        records: Whether `read` returns whole records (a dictionary of all fields) instead of their text.
        cache: Where formats that cannot be read in place are decoded to: a `Cache`, or its folder; default: `Cache()`.

    Raises:
        ValueError: If nothing is found, formats are mixed or unknown, or an option does not belong to the format.
    """
    options = {"text_key": text_key, "split": split, "dtype": dtype, "eos_id": eos_id, "bos_id": bos_id}
    options["records"] = records or None
    given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    if isinstance(path, Source):
        return _without(given, path, "a Source object")
    if isinstance(path, CombinedStreamingDataset):
        raise ValueError("a CombinedStreamingDataset is several sources; give it as `sources` itself")
    if isinstance(path, StreamingDataset):
        path = folder_of(path)
    if isinstance(path, (str, Path)) and (Path(path).expanduser() / "index.json").is_file():
        return LitdataChunks(path, **_only(given, "a litdata folder", "text_key"))
    if isinstance(path, (str, Path)):
        path = saved_dataset(Path(path).expanduser()) or path
    listing = list_files(path)
    cache = cache if isinstance(cache, Cache) else Cache(cache)
    suffixes = {plain_suffix(name) for name in listing.names}
    if given.pop("records", False):
        _only(given, "whole records")
        given = {"text_key": None}
    if suffixes <= set(_JSONL):
        return open_lines(JsonLines(listing, **_only(given, "JSON lines", "text_key")), cache)
    if suffixes <= set(_TEXT):
        return open_lines(Text(listing, **_only(given, "plain text", "split")), cache)
    if suffixes <= set(_PARQUET):
        return Parquet(listing, cache, **_only(given, "parquet", "text_key"))
    if suffixes <= set(_ARROW):
        return Arrow(listing, cache, **_only(given, "Arrow", "text_key"))
    if suffixes <= set(_TOKENS):
        return open_token_files(listing, **_only(given, "token files", "dtype", "eos_id", "bos_id"))
    known = suffixes & {*_JSONL, *_TEXT, *_PARQUET, *_ARROW, *_TOKENS}
    if known:
        raise ValueError(f"{path}: mixes formats {sorted(suffixes)}; a source has one, so name the files by a glob")
    raise ValueError(f"{path}: unknown format {sorted(suffixes)}; known are {_FORMATS}")


def _without(given: dict[str, Any], source: Source, what: str) -> Source:
    _only(given, what)
    return source


def _only(given: dict[str, Any], what: str, *options: str) -> dict[str, Any]:
    wrong = sorted(set(given) - set(options))
    if wrong:
        raise ValueError(f"{wrong[0]}={given[wrong[0]]!r} does not apply to {what}; remove it")
    return given
