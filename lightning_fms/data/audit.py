"""Which documents were in a row: the first question after a loss spike.

Nothing is logged while training. A row is a function of its stream's state, so whoever has a state from before it makes the
row again and notes what it is made of. A state every N steps (`DataTrail` keeps them) bounds the work to N steps.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_fms.data.cursor import State
from lightning_fms.data.draws import Place
from lightning_fms.data.loader import StreamLoader

_OF_THE_TIME = ("seed", "num_streams", "seq_len", "packing", "shuffle_window", "eos", "bos", "max_document_tokens")


@dataclass(frozen=True)
class Reading:
    """A stretch of a document in a row.

    row: number of the row in the run. source: name. epoch: of the source, in the row's stream. file: its name in the listing.
    start, ref: where the document is in the file, for `Source.read`. first_token, tokens: which of the document's tokens are
    inputs of the row, in the order in which they stand there.
    """

    row: int
    source: str
    epoch: int
    file: str
    start: int
    ref: int
    first_token: int
    tokens: int


def readings(loader: StreamLoader, first_row: int, stop_row: int) -> Iterator[Reading]:
    """Yield what rows `[first_row, stop_row)` of a run are made of, row by row.

    Args:
        loader: A loader of all streams (`world_size=1`) at a state of the run before these rows, with the run's settings of
            that time: they decide what a row holds. It is not moved.
        first_row: Number of the first row: batch `t` of `B` rows begins at row `t * B`, as long as B never changed.
        stop_row: Number of the first row that is not wanted.

    Raises:
        ValueError: If the loader is behind these rows already, or has a part of the streams only.
    """
    at = loader.state_dict()["header"]["row"]
    if loader.slots.world != 1:
        raise ValueError(
            f"world_size={loader.slots.world}: an audit needs all streams; open the loader with world_size=1"
        )
    if first_row < at:
        raise ValueError(f"row {first_row} is before row {at}, where the state is; take an earlier state")
    streams = loader.streams()
    for number in range(at, stop_row):
        stream = streams[number % loader.slots.streams]
        trace: list[tuple[Place, int, int]] = []
        stream.draws.trace = trace
        stream.next_row(number)
        for place, first_token, tokens in trace if number >= first_row else ():
            name = loader.source_names[place.source]
            file = loader.listings[name].names[place.file]
            yield Reading(number, name, place.epoch, file, place.start, place.ref, first_token, tokens)


def loader_at(options: Mapping[str, Any], state: State | None = None) -> StreamLoader:
    """Open a loader of all streams in this process, with the settings that a state was written under.

    Args:
        options: Of a `StreamLoader`. What the state says of its time goes before them: a run may have been gone on with under
            others since.
        state: A merged state; `None` is the start, with the options as they are.

    Raises:
        ValueError: If the options lack a source that the state draws from, or name another tokenizer.
    """
    options = {**options, "micro_batch_size": None, "num_workers": 0, "multiprocessing_context": None}
    if options.get("on_error") == "quarantine":
        options["on_error"] = "skip"  # the run has written down what it left out
    if state is None:
        return StreamLoader(**options)
    header, sources = state["header"], options["sources"]
    if isinstance(sources, Mapping):  # the weights are those of the state
        sources = {name: _without_weight(spec) for name, spec in sources.items()}
    row, names = header["row"], set(sources) if isinstance(sources, Mapping) else set(header["sources"])
    current = max(i for i, (first, _) in enumerate(header["mixture"]) if first <= row)
    mixture = {0 if first <= row else first: weights for first, weights in header["mixture"][current:]}
    for weights in mixture.values():
        if gone := sorted(name for name, weight in weights.items() if weight > 0 and name not in names):
            raise ValueError(
                f"the state draws from source {gone[0]!r}, and there are {sorted(names)}; name its files again (fms-data: --source)"
            )
    then = {name: header[name] for name in _OF_THE_TIME}
    then["mixture"] = {first: {n: w for n, w in weights.items() if n in names} for first, weights in mixture.items()}
    then["max_epochs"] = {name: most for name, most in header["max_epochs"].items() if name in names}
    loader = StreamLoader(**{**options, **then, "sources": sources}, state=state)
    if header["tokenizer"] != loader.tokenizer.fingerprint:
        raise ValueError(
            f"the state was written with tokenizer {header['tokenizer']}, and this one is {loader.tokenizer.fingerprint}; give the "
            "tokenizer of that time, for documents have other lengths with this one"
        )
    return loader


def _without_weight(spec: Any) -> Any:
    return {key: value for key, value in spec.items() if key != "weight"} if isinstance(spec, Mapping) else spec
