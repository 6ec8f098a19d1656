"""`fms-data mix`: what a mixture will have consumed after so many tokens, before anything is trained.

Weights are shares of tokens, so what is consumed follows from arithmetic once the tokens of an epoch of each source are known; a
sample gives them. A source at its `max_epochs` drops out and the others share what follows, as in a run. (A run's streams reach
an end at somewhat different times; this is their mean.)
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_fms.commands.arguments import add_source_options, count
from lightning_fms.commands.sample import sample
from lightning_fms.data.loader import StreamLoader
from lightning_fms.data.sources import DocumentError
from lightning_fms.tables import table

_TOLD_EPOCHS = 3
_CURVE = 200  # points of a plot


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "mix",
        help="what a mixture consumes: tokens, shares, epochs",
        description="Show what a mixture will have consumed after some tokens, and where the epochs of its sources end. The "
        "tokens of an epoch are estimated from a sample.",
    )
    parser.add_argument(
        "--sources", nargs="+", metavar="NAME=PATH[:WEIGHT]", help="sources; without weights they share by bytes"
    )
    parser.add_argument(
        "--run", type=Path, metavar="RUN_FOLDER", help="the sources, mixture and schedule of a run's config instead"
    )
    parser.add_argument(
        "--tokens", type=count, required=True, metavar="N", help="tokens to train on, such as 1e12 or 250B"
    )
    parser.add_argument("--at", metavar="N,N", default="", help="show these numbers of tokens too")
    parser.add_argument(
        "--max-epochs", nargs="+", default=[], metavar="NAME=N", help="epochs after which a source drops out"
    )
    add_source_options(parser)
    parser.add_argument("--sample", type=count, default=1000, metavar="N", help="documents to sample a source (1000)")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw shares and epochs over tokens; needs matplotlib"
    )
    parser.set_defaults(run_command=run)


@dataclass(frozen=True)
class Mixture:
    """A mixture in tokens.

    schedule: shares by source from a number of tokens on, in order. epoch: tokens of an epoch by source. max_epochs: by source.
    """

    schedule: list[tuple[float, dict[str, float]]]
    epoch: dict[str, float]
    max_epochs: Mapping[str, int]

    def shares(self, at: float, consumed: Mapping[str, float]) -> dict[str, float]:
        """Return the shares in force (sum 1); none where every source with a weight has reached its end."""
        weights = next(weights for first, weights in reversed(self.schedule) if first <= at)
        left = {name: w for name, w in weights.items() if w > 0 and consumed[name] < self._cap(name)}
        return {name: weight / sum(left.values()) for name, weight in left.items()}

    def consumed(self, marks: Sequence[float]) -> tuple[list[dict[str, float]], dict[str, list[float]]]:
        """Return what is consumed at marks (ascending tokens), by source, and where each source's first epochs end.

        Raises:
            ValueError: If the data ends before the last mark.
        """
        at, consumed = 0.0, dict.fromkeys(self.epoch, 0.0)
        ends: dict[str, list[float]] = {name: [] for name in self.epoch}
        found = []
        for mark in marks:
            while at < mark:
                shares = self.shares(at, consumed)
                if not shares:
                    raise ValueError(
                        f"max_epochs={dict(self.max_epochs)} end the data after {at:,.0f} tokens; ask for fewer --tokens"
                    )
                changes = [first for first, _ in self.schedule if at < first < mark]
                stop = min([mark, *changes])
                following = {name: self._next_end(name, consumed[name], ends[name]) for name in shares}
                reached = {name: at + (following[name] - consumed[name]) / share for name, share in shares.items()}
                stop = min(stop, *reached.values())
                for name, share in shares.items():
                    consumed[name] = following[name] if reached[name] <= stop else consumed[name] + share * (stop - at)
                    if reached[name] <= stop and len(ends[name]) < _TOLD_EPOCHS:
                        ends[name].append(stop)
                at = stop
            found.append(dict(consumed))
        return found, ends

    def _cap(self, name: str) -> float:
        return self.epoch[name] * self.max_epochs.get(name, float("inf"))

    def _next_end(self, name: str, consumed: float, ends: list[float]) -> float:
        """Return the tokens of a source at which something changes: an epoch that is told of ends, or its last one."""
        following = self.epoch[name] * (len(ends) + 1) if len(ends) < _TOLD_EPOCHS else float("inf")
        return min(following, self._cap(name))


def run(arguments: argparse.Namespace) -> None:
    """Show a mixture."""
    if bool(arguments.sources) == (arguments.run is not None):
        raise ValueError("mix takes --sources, or --run RUN_FOLDER; give one of them")
    loader, batch = _loader(arguments)
    mixture = _mixture(loader, arguments.sample)
    marks = sorted({*_marks(arguments.at, arguments.tokens), arguments.tokens})
    found, ends = mixture.consumed(marks)
    for mark, consumed in zip(marks, found, strict=True):
        steps = f", {mark / batch:,.0f} steps" if batch else ""
        print(f"after {mark:,} tokens{steps}")
        print("\n".join(f"  {line}" for line in _table(mixture, mark, consumed)))
    print("epochs (~ from a sample)")
    print("\n".join(f"  {line}" for line in _epochs(mixture, ends)))
    if arguments.plot is not None:
        plot(mixture, arguments.tokens, arguments.plot)
        print(f"drawn in {arguments.plot}")


def _marks(at: str, tokens: int) -> Iterator[int]:
    for text in filter(None, at.split(",")):
        try:
            mark = count(text)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"--at {at}: {error}") from None
        if mark > tokens:
            raise ValueError(f"--at {text}: lies beyond --tokens {tokens:,}")
        yield mark


def _loader(arguments: argparse.Namespace) -> tuple[StreamLoader, int]:
    """Return a loader of the mixture, and the tokens of a step, where that is known."""
    if arguments.run is not None:
        if arguments.tokenizer or arguments.text_key or arguments.max_epochs:
            raise ValueError(
                "--run takes all settings from the run's config; leave out --tokenizer, --text-key and --max-epochs"
            )
        # Lightning and Hydra take seconds to import, which the other commands need not wait for.
        from lightning_fms.commands.runs import open_run  # noqa: PLC0415

        cfg, module = open_run(arguments.run)
        return module.loader_at(), int(cfg.data.global_batch_size) * int(cfg.data.get("seq_len") or 1)
    options = {"text_key": arguments.text_key} if arguments.text_key else {}
    sources = {name: {**spec, **options} for name, spec in map(_source, arguments.sources)}
    if len(sources) < len(arguments.sources):
        raise ValueError(f"--sources {' '.join(arguments.sources)}: two have the same name")
    caps = dict(map(_cap, arguments.max_epochs))
    tokenizer = arguments.tokenizer or "bytes"
    try:
        loader = StreamLoader(sources, seq_len=1, global_batch_size=1, tokenizer=tokenizer, max_epochs=caps)
    except ValueError as error:
        if "eos=true needs a tokenizer" not in str(error):
            raise
        loader = StreamLoader(sources, seq_len=1, global_batch_size=1, tokenizer=tokenizer, max_epochs=caps, eos=False)
    return loader, 0


def _source(text: str) -> tuple[str, dict[str, Any]]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ValueError(f"--sources {text}: give NAME=PATH or NAME=PATH:WEIGHT")
    before, colon, after = path.rpartition(":")
    try:
        return name, {"path": before, "weight": float(after)} if colon else {"path": path}
    except ValueError:  # the colon of an address
        return name, {"path": path}


def _cap(text: str) -> tuple[str, int]:
    name, _, epochs = text.partition("=")
    if not epochs.isdecimal():
        raise ValueError(f"--max-epochs {text}: give NAME=N, a whole number of epochs")
    return name, int(epochs)


def _mixture(loader: StreamLoader, wanted: int) -> Mixture:
    header = loader.state_dict()["header"]
    row = loader.seq_len or 1
    schedule = [
        (float(first * row), {name: weights.get(name, 0.0) for name in loader.sources})
        for first, weights in header["mixture"]
    ]
    epoch = {}
    for name, source in loader.sources.items():
        found = sample(source, wanted, loader.measure)
        tokens = found.documents * sum(found.lengths) / max(1, len(found.lengths))
        if tokens <= 0:
            first = next(iter(found.odd.values()), (0, "every document is empty"))[1]
            raise DocumentError(f"source {name!r}: its sample has no document with a token ({first})")
        epoch[name] = tokens
    return Mixture(schedule, epoch, header["max_epochs"])


def _table(mixture: Mixture, mark: float, consumed: Mapping[str, float]) -> list[str]:
    heads = ["source", "tokens", "share", "weight now", "epochs"]
    shares = mixture.shares(mark, consumed)
    lines = [
        [
            name,
            f"{tokens:,.0f}",
            f"{tokens / mark:.1%}",
            f"{shares.get(name, 0.0):.1%}",
            f"{tokens / mixture.epoch[name]:.2f}",
        ]
        for name, tokens in consumed.items()
    ]
    return table(heads, lines, right=heads[1:])


def _epochs(mixture: Mixture, ends: Mapping[str, list[float]]) -> list[str]:
    heads = [
        "source",
        "tokens of an epoch",
        *(f"epoch {n} ends after" for n in range(1, _TOLD_EPOCHS + 1)),
        "max_epochs",
    ]
    lines = []
    for name, tokens in mixture.epoch.items():
        told = [f"{end:,.0f}" for end in ends[name]] + ["-"] * (_TOLD_EPOCHS - len(ends[name]))
        lines.append([name, f"~{tokens:,.0f}", *told, str(mixture.max_epochs.get(name, "-"))])
    return table(heads, lines, right=heads[1:])


def plot(mixture: Mixture, tokens: int, file: Path) -> None:
    """Draw shares and epochs over the tokens consumed.

    Raises:
        ValueError: Without matplotlib.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  # not installed with the package
    except ImportError:
        raise ValueError(
            f"--plot {file}: needs matplotlib; pip install 'lightning_fms[plot]', or leave it out"
        ) from None
    marks = [tokens * point / _CURVE for point in range(1, _CURVE + 1)]
    found, _ = mixture.consumed(marks)
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    names = list(mixture.epoch)
    between = [
        {n: now[n] - before[n] for n in names}
        for before, now in zip([dict.fromkeys(names, 0.0), *found], found, strict=False)
    ]
    above.stackplot(marks, [[part[name] / sum(part.values()) for part in between] for name in names], labels=names)
    above.set(ylabel="share of tokens", ylim=(0, 1), xlim=(0, tokens))
    above.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    for name in names:
        below.plot(marks, [consumed[name] / mixture.epoch[name] for consumed in found], label=name)
    below.set(ylabel="epochs", xlabel="tokens")
    below.grid(alpha=0.3)
    try:
        figure.savefig(file)
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"--plot {file}: cannot be drawn ({error})") from None
