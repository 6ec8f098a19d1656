"""What the arguments of a loader may be: one message with the value and the way out for everything that makes no sense."""

from typing import Any

from lightning_fms.data.items import Items, Reader
from lightning_fms.data.mixture import History
from lightning_fms.data.packing import BestFit, Concat, Packing
from lightning_fms.data.whole_numbers import check_positive

MAX_SHUFFLE_WINDOW = (1 << 31) - 1
"""Two of them share a number of the state; a window of 4 MiB holds at most 4,194,304 documents."""


def check_shuffle_window(documents: int) -> None:
    """Refuse what is no number of documents, or too large for the state."""
    check_positive(shuffle_window=documents)
    if documents > MAX_SHUFFLE_WINDOW:
        raise ValueError(
            f"shuffle_window={documents} is more than {MAX_SHUFFLE_WINDOW}; documents are permuted within 4 MiB, so 4194304 is "
            "as good as any larger number"
        )


def checked_caps(caps: dict[str, int], sources: list[str]) -> dict[str, int]:
    """Return `max_epochs`, if it names sources and whole numbers."""
    for name, epochs in caps.items():
        if name not in sources:
            raise ValueError(f"max_epochs names unknown source {name!r}; the sources are {sorted(sources)}")
        check_positive(**{f"max_epochs[{name!r}]": epochs})
    return caps


def check_supply(history: History, caps: dict[str, int]) -> None:
    """Refuse weights under which the data could end."""
    for row, weights in history:
        drawn = {name for name, weight in weights.items() if weight > 0}
        if drawn <= set(caps):
            raise ValueError(
                f"max_epochs={caps} limits every source with a weight from row {row} on, so the data would end; leave one "
                "source without a limit"
            )


def open_packing(packing: str, seq_len: int | None, reader: Reader | None, of_tokens: dict[str, Any]) -> Packing:
    """Return the packing of a name; `of_tokens` are options that only packings of tokens have."""
    if (packing == "none") != (reader is not None):
        raise ValueError(
            f"packing={packing!r} with reader={reader!r}: a reader makes rows of items where packing is 'none', and only there"
        )
    if reader is not None:
        for name, value in {"seq_len": seq_len, **of_tokens}.items():
            if value:
                raise ValueError(
                    f"{name}={value!r} is for rows of tokens, and packing='none' has items; leave it out (null)"
                )
        return Items(reader)
    if packing not in ("concat", "best_fit"):
        raise ValueError(f"packing={packing!r} must be 'concat', 'best_fit' or 'none'")
    if seq_len is None:
        raise ValueError(f"seq_len=None with packing={packing!r}: give the number of tokens of a row")
    return Concat(seq_len, of_tokens["mask_first"]) if packing == "concat" else BestFit(seq_len)
