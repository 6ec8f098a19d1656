"""Where documents come from: one module a format, all behind the `Source` protocol."""

from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

from litdata import CombinedStreamingDataset, StreamingDataset

from lightning_fms.data.sources.arrow import Arrow, saved_dataset
from lightning_fms.data.sources.cache import Cache
from lightning_fms.data.sources.compressed import CompressedLines, open_lines, plain_suffix
from lightning_fms.data.sources.kept_listing import kept_file, list_or_recall
from lightning_fms.data.sources.lines import JsonLines, Text
from lightning_fms.data.sources.listing import Listing, list_files
from lightning_fms.data.sources.litdata_chunks import LitdataChunks
from lightning_fms.data.sources.litdata_datasets import folder_of, sources_of
from lightning_fms.data.sources.megatron import MegatronTokens
from lightning_fms.data.sources.parquet import Parquet
from lightning_fms.data.sources.python_source import PythonSource
from lightning_fms.data.sources.source import Document, DocumentError, Source, Window
from lightning_fms.data.sources.token_files import TokenFiles, open_token_files
from lightning_fms.data.sources.whole_files import WholeFiles

__all__ = [
    "Arrow", "Cache", "CompressedLines", "Document", "DocumentError", "JsonLines", "Listing", "LitdataChunks", "MegatronTokens",
    "Parquet", "PythonSource", "Source", "Text", "TokenFiles", "WholeFiles", "Window", "list_files", "open_source", "open_sources",
]  # fmt: skip

_JSONL = (".jsonl", ".json", ".ndjson")
_TEXT = (".txt", ".md", ".text", ".rst", ".py")
_TOKENS = (".bin", ".idx")
_PARQUET = (".parquet", ".pq")
_ARROW = (".arrow", ".feather", ".ipc")
_WHOLE = {"parquet": _PARQUET, "Arrow": _ARROW, "tokens": _TOKENS}
_FORMATS = (
    f"{', '.join(_JSONL)} (JSON lines), {', '.join(_TEXT)} (text), both also with .gz or .zst, {_PARQUET[0]}, "
    f"{', '.join(_ARROW)}, {_TOKENS[0]} (tokens), a folder of litdata chunks or of `datasets.save_to_disk`"
)


def open_sources(
    sources: Mapping[str, Any], listings: Path | None = None, records: bool = False
) -> tuple[dict[str, Source], dict[str, float]]:
    """Open every source of a `sources` argument.

    Args:
        sources: `{name: path, folder, glob, list of them, or Source}`, or `{name: {"path": ..., "weight": ..., ...}}` with the
            options of the format (`text_key`, `split`, `dtype`, ...); or a litdata `StreamingDataset` or
            `CombinedStreamingDataset`.
        listings: Folder where the listing of each source is kept with the run; `None` lists the files anew.
        records: Whether documents are whole records where a source does not say; see `open_source`.

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
        if unknown := sorted(set(options) - _OPTIONS):
            raise ValueError(
                f"source {name!r}: {unknown[0]!r} is no option of a source; they are weight, {', '.join(sorted(_OPTIONS))}"
            )
        try:
            kept = listings and kept_file(listings, name)
            opened[name] = open_source(**{"records": records, **options}, kept_listing=kept)
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
    storage_options: Mapping[str, Any] | None = None,
    kept_listing: Path | None = None,
) -> Source:
    """Open one source; the format follows from the file names.

    Args:
        path: File, folder, glob or list of them, all of one format, local or remote (`s3://bucket/folder`); a litdata
            `StreamingDataset`; or an object that implements `Source`.
        text_key: Key of the text in a JSON record or a litdata item, or its column; default `"text"`.
        split: How plain text is cut into documents; see `Text`.
        dtype, eos_id, bos_id: What bare token files hold; see `TokenFiles`.
        records: Whether a document is a whole record: a dictionary of all fields (JSON lines, parquet, Arrow), or the bytes of
            a file of any other format; text stays text, tokens and litdata's items what they are, and a `Source` decides itself.
        cache: Where remote blocks, and formats that cannot be read in place, are kept: a `Cache`, or its folder; default:
            `Cache()`.
        storage_options: For the client of a remote store: credentials, endpoint. Most find them in the environment.
        kept_listing: Where the listing is kept with the run; see `list_or_recall`.

    Raises:
        ValueError: If nothing is found, formats are mixed or unknown, or an option does not belong to the format.
    """
    options = {"text_key": text_key, "split": split, "dtype": dtype, "eos_id": eos_id, "bos_id": bos_id}
    given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    if isinstance(path, Source):
        return _without(given, path, "a Source object")
    if isinstance(path, CombinedStreamingDataset):
        raise ValueError("a CombinedStreamingDataset is several sources; give it as `sources` itself")
    if isinstance(path, StreamingDataset):
        path = folder_of(path)
    cache = cache if isinstance(cache, Cache) else Cache(cache)
    if kept_listing is None:
        listing = list_files(path, storage_options=storage_options, cache=cache)
    else:
        listing = list_or_recall(kept_listing, path, storage_options=storage_options, cache=cache)
    listing = saved_dataset(listing)
    if "index.json" in listing.names:
        return LitdataChunks(listing, **_only(given, "a litdata folder", "text_key"))
    return _open_listing(listing, given, records, cache)


_OPTIONS = set(signature(open_source).parameters) - {"kept_listing"}


def _open_listing(listing: Listing, given: dict[str, Any], records: bool, cache: Cache) -> Source:
    formats = {_format(name) for name in listing.names}
    suffixes = sorted({Path(name).suffix.lower() for name in listing.names})
    if len(formats) > 1:
        raise ValueError(f"{listing.root}: mixes formats {suffixes}; a source has one, so name the files by a glob")
    found = formats.pop()
    if found == "tokens":
        return open_token_files(listing, **_only(given, "token files", "dtype", "eos_id", "bos_id"))
    if found == "text":
        return open_lines(Text(listing, **_only(given, "plain text", "split")), cache)
    if found is None and records:
        return WholeFiles(listing, **_only(given, "whole files"))
    if found is None:
        raise ValueError(f"{listing.root}: unknown format {suffixes}; known are {_FORMATS}")
    key = {"text_key": None, **_only(given, "whole records")} if records else _only(given, str(found), "text_key")
    if found == "JSON lines":
        return open_lines(JsonLines(listing, **key), cache)
    return Parquet(listing, cache, **key) if found == "parquet" else Arrow(listing, cache, **key)


def _format(name: str) -> str | None:
    for found, suffixes in (("JSON lines", _JSONL), ("text", _TEXT)):
        if plain_suffix(name) in suffixes:
            return found
    suffix = Path(name).suffix.lower()
    return next((found for found, known in _WHOLE.items() if suffix in known), None)


def _without(given: dict[str, Any], source: Source, what: str) -> Source:
    _only(given, what)
    return source


def _only(given: dict[str, Any], what: str, *options: str) -> dict[str, Any]:
    wrong = sorted(set(given) - set(options))
    if wrong:
        raise ValueError(f"{wrong[0]}={given[wrong[0]]!r} does not apply to {what}; remove it")
    return given
