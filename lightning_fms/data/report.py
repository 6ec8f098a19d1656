"""What a run says of its data: a few lines at the start, and the shares and epochs of all ranks."""

import math
from typing import Any

from lightning_fms.data.loader import StreamLoader
from lightning_fms.data.segments import IN_TURN, TURN_BYTES, WINDOW_BYTES
from lightning_fms.data.sources import Listing

_STEPS, _NEARLY = 16, 0.9  # steps in which files should mix, and the entropy, of that of a true shuffle, that is enough
_CHANGES = 5  # files told of that are not what they were; the others are counted


def describe(loader: StreamLoader) -> list[str]:
    """Return what is streamed, a line each."""
    slots, seq_len = loader.slots, loader.seq_len
    rows, unit = (f"rows of {seq_len:,} tokens", "tokens") if seq_len else ("items", "items")
    lines = [
        f"data: {slots.batch} {rows} a step, {slots.streams} streams, "
        f"{slots.world} data rank(s) x {slots.accumulate} micro-batch(es) of {slots.micro_rows} row(s)"
    ]
    for name, entry in loader.mix_report().items():
        listing = loader.listings.get(name)
        files = f"{len(listing.names):,} files, {listing.total_bytes / 1e6:,.1f} MB" if listing else "no longer there"
        epochs = f"epoch {entry['epoch']:.2f}"
        if entry["epoch_min"] < entry["epoch_max"]:
            epochs += f" (streams from {entry['epoch_min']:.0f} to {entry['epoch_max']:.0f})"
        lines.append(f"  source {name}: {files}, {entry['target']:.1%} of the {unit}, {epochs}")
        if listing and (streams := streams_to_mix(listing, slots.streams, slots.batch)) > slots.streams:
            lines.append(
                f"    {slots.streams} streams read few of the {len(listing.names):,} files at a time; if each is of one subject, "
                f"start with num_streams={streams}"
            )
        changes = listing.changes if listing else ()
        lines += [f"    since the run began: {change}" for change in changes[:_CHANGES]]
        if len(changes) > _CHANGES:
            lines.append(f"    and {len(changes) - _CHANGES:,} more files are gone or have another size")
    return lines + lost_documents(loader)


def streams_to_mix(listing: Listing, streams: int, batch: int) -> int:
    """Return how many streams make 16 steps see nearly as many files as a true shuffle would; `streams`, if these do.

    A stream reads one large file at a time, or several small ones in turn. *Nearly*: 0.9 of the entropy (see docs/scale.md).
    """
    filled = int((listing.sizes > 0).sum())
    mean = listing.total_bytes / filled
    in_turn = max(1.0, min(IN_TURN, TURN_BYTES / mean)) if mean <= WINDOW_BYTES else 1.0
    drawn = filled * -math.expm1(-_STEPS * batch / filled)  # files that so many random documents are of
    wanted = math.ceil(drawn**_NEARLY / in_turn)
    return streams if wanted <= streams else batch * math.ceil(wanted / batch)


def lost_documents(loader: StreamLoader) -> list[str]:
    """Return what a resume cost, in a line; nothing, if it cost nothing."""
    count = loader.skipped_documents
    lost = f"data: {count} document(s) that were begun lost their rest at the resume: tokenizer, packing or sources changed"
    return [lost] if count else []


def merged_mix(parts: list[tuple[int, dict[str, dict[str, float]]]]) -> dict[str, dict[str, Any]]:
    """Return the mix of all data ranks from each one's number of streams and mix."""
    streams = sum(count for count, _ in parts)
    everything = sum(entry["tokens"] for _, report in parts for entry in report.values())
    merged = {}
    for name, entry in parts[0][1].items():
        tokens = sum(report[name]["tokens"] for _, report in parts)
        epoch = sum(count * report[name]["epoch"] for count, report in parts) / streams
        merged[name] = {
            **entry, "share": tokens / max(1.0, everything), "epoch": epoch, "tokens": tokens,
            "epoch_min": min(report[name]["epoch_min"] for _, report in parts),
            "epoch_max": max(report[name]["epoch_max"] for _, report in parts),
        }  # fmt: skip
    return merged
