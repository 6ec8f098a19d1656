"""`fms-data inspect`: what sources hold, without reading all of them."""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lightning_fms.commands.arguments import add_source_options, count
from lightning_fms.commands.sample import Sample, sample
from lightning_fms.data.sources import (
    Arrow,
    CompressedLines,
    Document,
    DocumentError,
    JsonLines,
    LitdataChunks,
    MegatronTokens,
    Parquet,
    PythonSource,
    Source,
    Text,
    TokenFiles,
    WholeFiles,
    open_source,
)
from lightning_fms.data.tokenizer import open_tokenizer

_NAMES: tuple[tuple[type, str], ...] = (
    (JsonLines, "JSON lines"), (Text, "text"), (CompressedLines, "lines, compressed"), (Parquet, "parquet"), (Arrow, "Arrow"),
    (LitdataChunks, "litdata chunks"), (MegatronTokens, "Megatron tokens"), (TokenFiles, "tokens"), (PythonSource, "Python"),
    (WholeFiles, "whole files"),
)  # fmt: skip


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "inspect",
        help="what sources hold: documents, tokens, lengths, odd data",
        description="Show what sources hold. Only a sample is read, so numbers marked ~ are estimates; those without are exact.",
    )
    parser.add_argument("paths", nargs="*", metavar="PATH", help="a source each: file, folder, glob or address")
    parser.add_argument(
        "--run", type=Path, metavar="RUN_FOLDER", help="the sources of a run's config instead, as it reads them"
    )
    add_source_options(parser)
    parser.add_argument("--sample", type=count, default=1000, metavar="N", help="documents to sample a source (1000)")
    parser.add_argument("--json", action="store_true", help="a list of JSON objects instead of text")
    parser.set_defaults(run_command=run)


def run(arguments: argparse.Namespace) -> None:
    """Inspect sources."""
    if bool(arguments.paths) == (arguments.run is not None):
        raise ValueError("inspect takes paths, or --run RUN_FOLDER; give one of them")
    if arguments.run is not None and (arguments.tokenizer or arguments.text_key):
        raise ValueError(
            "--run takes tokenizer and text_key from the run's config; leave out --tokenizer and --text-key"
        )
    reports = []
    for name, source, measure, tokenizer in _sources(arguments):
        found = report(name, source, sample(source, arguments.sample, measure), tokenizer)
        reports.append(found)
        if not arguments.json:
            print("\n".join(shown(found)), flush=True)
    if arguments.json:
        print(json.dumps(reports, indent=2))


def _sources(arguments: argparse.Namespace) -> Iterator[tuple[str, Source, Callable[[Document], int], str]]:
    if arguments.run is not None:
        # Lightning and Hydra take seconds to import, which the other commands need not wait for.
        from lightning_fms.commands.runs import open_run  # noqa: PLC0415

        cfg, module = open_run(arguments.run)
        loader = module.loader_at()
        for name, source in loader.sources.items():
            yield name, source, loader.measure, f"{cfg.data.get('tokenizer', 'bytes')}"
        return
    tokenizer = open_tokenizer(arguments.tokenizer or "bytes")

    def measure(document: Document) -> int:
        if isinstance(document, str):
            return len(tokenizer.encode(document))
        return len(document)

    for path in arguments.paths:
        yield path, open_source(path, text_key=arguments.text_key), measure, arguments.tokenizer or "bytes"


def report(name: str, source: Source, found: Sample, tokenizer: str) -> dict[str, Any]:
    """Return what is known of a source, as plain values."""
    if not found.lengths and not found.odd:
        raise DocumentError(f"{source.listing.root}: the sample holds no document; give a larger --sample")
    listing = source.listing
    empty = np.flatnonzero(listing.sizes == 0)
    return {
        "source": name, "format": next((n for kind, n in _NAMES if isinstance(source, kind)), type(source).__name__),
        "files": len(listing.names), "bytes": listing.total_bytes, "fragments": len(listing.fragments[0]),
        "empty_files": {"count": len(empty), "first": str(listing.path(int(empty[0]))) if len(empty) else None},
        "documents": found.documents, "documents_exact": found.exact,
        "tokens": found.tokens, "tokens_exact": found.exact_tokens, "tokenizer": tokenizer,
        "sampled_documents": len(found.lengths), "sampled_places": found.places,
        "tokens_of_a_document": found.percentiles(),
        "odd": {kind: {"count": count, "first": first} for kind, (count, first) in found.odd.items()},
    }  # fmt: skip


def shown(found: dict[str, Any]) -> list[str]:
    """Return the lines that show a report."""
    files, pieces = found["files"], found["fragments"]
    how = f"from {found['sampled_documents']:,} documents in {found['sampled_places']:,} random places"
    if found["tokens_exact"]:
        how = "counted"
    lengths = ", ".join(f"{name} {length:,}" for name, length in found["tokens_of_a_document"].items())
    lines = [
        found["source"],
        f"  format     {found['format']}",
        f"  files      {files:,} ({found['bytes'] / 1e6:,.1f} MB, {pieces:,} fragments)",
        f"  documents  {'' if found['documents_exact'] else '~'}{found['documents']:,}",
        f"  tokens     {'' if found['tokens_exact'] else '~'}{found['tokens']:,} (tokenizer {found['tokenizer']}; {how})",
        f"  lengths    {lengths} tokens",
    ]
    if (empty := found["empty_files"])["count"]:
        lines.insert(3, f"             {empty['count']:,} of them of 0 bytes; first: {empty['first']}")
    for kind, odd in found["odd"].items():
        lines.append(f"  {kind:<9}  {odd['count']:,} in the sample; first: {odd['first']}")
    return lines
