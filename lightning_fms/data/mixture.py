"""Mixing sources by tokens, from this row on.

Shares are shares of TOKENS, not of documents: each stream counts the tokens it has taken from every source since the
weights last changed, and draws its next document from the source that is furthest behind its share (the largest deficit).
The error stays within a document or two, whatever the lengths. Counting starts anew when the weights change, so a change
takes effect at once and never 'repairs' what was right under the old weights.

If all streams started with empty counts they would all draw the heaviest source first and the next one together: every
global batch would be lopsided in step. So each stream starts as if it had already drawn a number of unit documents of its
own (`phases`), which spreads the streams over the whole cycle of the rule, and the very first batch is mixed.

Weights are a history of `(first row, weights)` kept in the state: a schedule is a history known in advance, a change at
resume appends to it.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

Weights = dict[str, float]
History = list[tuple[int, Weights]]

_SAME = 1e-12  # weights that differ by less are rounded differently: 0.1, 0.2, 0.3 are 1, 2, 3


def normalise(weights: Mapping[str, float], sources: Sequence[str]) -> Weights:
    """Return weights that sum to 1, with an entry for every source; the same ones in any order, and if done again.

    Raises:
        ValueError: For an unknown source, a negative weight, or no positive weight at all.
    """
    if unknown := [name for name in weights if name not in sources]:
        raise ValueError(f"mixture names unknown source {unknown[0]!r}; the sources are {sorted(sources)}")
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < float("inf"):
            raise ValueError(f"mixture weight of {name!r} is {weight!r}; a weight is a number >= 0")
    total = math.fsum(weights.values())  # exact, so that the order of the config does not show in the last bit
    if total <= 0:
        raise ValueError(f"mixture={dict(weights)} has no positive weight: give at least one source a weight > 0")
    if math.isclose(total, 1, rel_tol=_SAME):
        total = 1.0
    return {name: weights.get(name, 0.0) / total for name in sources}


def parse(mixture: Mapping | None, sizes: Mapping[str, int]) -> History:
    """Return the history that a user's `mixture` stands for.

    Args:
        mixture: `None` (shares in proportion to the bytes, so that all sources end their epochs at about the same time),
            `{source: weight}`, or a schedule `{first row: {source: weight}}` that starts at row 0.
        sizes: Bytes of every source, by name.

    Raises:
        ValueError: If a weight, a source or a row number makes no sense.
    """
    sources = list(sizes)
    if mixture is None:
        return [(0, normalise(sizes, sources))]
    if not isinstance(mixture, Mapping):
        raise ValueError(
            f"mixture={mixture!r} must be a mapping {{source: weight}} or {{first row: {{source: weight}}}}"
        )
    if not any(isinstance(value, Mapping) for value in mixture.values()):
        return [(0, normalise(mixture, sources))]
    for row, weights in mixture.items():
        if isinstance(row, bool) or not isinstance(row, int) or row < 0:
            raise ValueError(f"a mixture schedule is keyed by row numbers >= 0, not {row!r}")
        if not isinstance(weights, Mapping):
            raise ValueError(f"a mixture schedule gives row {row} a mapping {{source: weight}}, not {weights!r}")
    if 0 not in mixture:
        raise ValueError(f"a mixture schedule must say what holds from row 0 on; it starts at row {min(mixture)}")
    return [(row, normalise(mixture[row], sources)) for row in sorted(mixture)]


def segment(history: History, row: int) -> int:
    """Return the index of the entry in force at a row."""
    return max(i for i, (first, _) in enumerate(history) if first <= row or i == 0)


def resume(past: History, wanted: History, row: int) -> History:
    """Return the history of a run that goes on at `row` with the weights that the user wants from now on."""
    if row == 0:
        return wanted
    history = [entry for entry in past if entry[0] < row]
    current = wanted[segment(wanted, row)][1]
    if not _equal(current, history[-1][1]):
        history.append((row, current))
    return history + [entry for entry in wanted if entry[0] > row]


def _equal(one: Weights, other: Weights) -> bool:
    return all(math.isclose(one.get(name, 0.0), other.get(name, 0.0), rel_tol=_SAME) for name in {*one, *other})


def phases(weights: np.ndarray, streams: int) -> np.ndarray:
    """Return the deficits, in documents, after 0, 1, 2, ... unit documents (float64 `[streams, sources]`, rows sum to 0)."""
    deficits = np.zeros((streams, len(weights)))
    drawn = np.zeros(len(weights))
    for draws in range(streams):
        deficits[draws] = weights * draws - drawn
        drawn[neediest(weights, drawn)] += 1
    return deficits


def neediest(weights: np.ndarray, drawn: np.ndarray) -> int:
    """Return the source with the largest deficit, among those with a positive weight.

    Args:
        weights: Shares, one a source, sum 1.
        drawn: Tokens drawn from each since the weights last changed; may be negative (see `phases`).
    """
    shares, counts = weights.tolist(), drawn.tolist()  # for a handful of sources, plain numbers are faster
    total = sum(counts)
    positive = [i for i, share in enumerate(shares) if share > 0]
    return max(positive, key=lambda i: shares[i] * total - counts[i])
