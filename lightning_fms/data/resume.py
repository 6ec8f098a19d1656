"""Where a run begins: at its start, or from a state, with what has changed since.

A run may go on with other sources, weights, rows a batch, packing or tokenizer. What that means for the positions in the
state is decided here, once, before the first row: columns are added for new sources, the weights in force now go behind
those of the past, and a document in flight that cannot be gone on with loses its rest.

Legend: S streams, K columns.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightning_fms.data.cursor import Columns, State, check_same_run, give_up_begun
from lightning_fms.data.mixture import History, resume


@dataclass(frozen=True)
class Beginning:
    """Where all streams are, and by which weights they go on.

    Args:
        row: Number of the run's next row.
        history: Weights of the sources over the rows.
        columns: Columns of the state rows.
        rows: int64 `[S, K]`, the state rows by stream.
        lost: Documents that were begun and lose their rest.
        listings: What the run knew of its sources' files, by name; empty at the start.
    """

    row: int
    history: History
    columns: Columns
    rows: np.ndarray
    lost: int = 0
    listings: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    """What the run is to go on with.

    Args:
        seed: Seed of all orders.
        num_streams: S.
        listings: What is known of the sources' files, by name.
        weights: Weights that are wanted from now on.
        tokenizer: Fingerprint of the tokenizer.
        bos: Whether a document begins with BOS.
        items: Whether rows are items, which have no rest.
        max_epochs: Epochs after which a source is no longer drawn, by name.
        shuffle_window: Documents permuted together, from a stream's next epoch on.
    """

    seed: int
    num_streams: int
    listings: dict[str, dict[str, Any]]
    weights: History
    tokenizer: str
    bos: bool
    items: bool
    max_epochs: dict[str, int]
    shuffle_window: int


def start(settings: Settings) -> Beginning:
    """Begin a run that has read nothing."""
    columns = Columns(sorted(settings.listings))  # ties are decided by column: not by the order of the config
    return Beginning(0, settings.weights, columns, columns.fresh(settings.num_streams, settings.shuffle_window))


def go_on(state: State, settings: Settings) -> Beginning:
    """Begin behind the last step of a merged state.

    Raises:
        ValueError: If the state is of another run, or lacks streams.
    """
    saved = state["header"]
    check_same_run(saved, {"seed": settings.seed, "num_streams": settings.num_streams, "listings": settings.listings})
    row, names = saved["row"], set(settings.listings)
    past: History = [(first, weights) for first, weights in saved["mixture"]]
    columns = Columns(saved["sources"] + sorted(names - set(saved["sources"])))
    rows = columns.adopt(_complete_rows(state), saved["sources"], settings.shuffle_window)
    absent = sorted(set(columns.sources) - names)
    lost = give_up_begun(rows, columns, absent, _changed(saved, settings, columns))
    if saved["max_epochs"] != settings.max_epochs:
        rows[:, columns.since] = 0  # a source that comes back does not catch up
    history = resume(past, settings.weights, row)
    return Beginning(row, history, columns, rows, lost, saved["listings"])


def _changed(saved: dict[str, Any], settings: Settings, columns: Columns) -> list[str]:
    """Return the sources whose documents make other tokens than before."""
    other_tokens = (saved["tokenizer"], saved["bos"]) != (settings.tokenizer, settings.bos)
    if other_tokens or settings.items:
        return columns.sources
    now, then = settings.listings, saved["listings"]
    return [name for name in now if name in then and now[name]["text_key"] != then[name]["text_key"]]


def _complete_rows(state: State) -> np.ndarray:
    """Return the rows of all streams, in order (int64 `[S, K]`)."""
    streams, expected = state["streams"].numpy(), state["header"]["num_streams"]
    if len(streams) != expected or not np.array_equal(np.sort(streams), np.arange(expected)):
        raise ValueError(
            f"the data state holds {len(streams)} of {expected} streams: it is one rank's part; merge all ranks' with merge_states"
        )
    return state["rows"].numpy()[np.argsort(streams)]
