"""`fms-checkpoint`: which checkpoints there are, what one holds, whether every byte of it is as it was written; weights in and out.

Nothing is executed that a checkpoint contains, and none is changed. Exit code 1 says that one is damaged, 2 that something was
asked for that is not there.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lightning_fms.commands import exchange
from lightning_fms.commands.command_line import Parser, fail, fail_of_system
from lightning_fms.commands.stored import found_in, newest
from lightning_fms.distributed import checkpoint, commit
from lightning_fms.distributed.commit import CheckpointError
from lightning_fms.remote_path import place
from lightning_fms.tables import table

PROGRAM = "fms-checkpoint"
_SCORES = "scores.json"  # written by the callback that saves


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = Parser(prog=PROGRAM, description="Look at checkpoints, without a run; weights in and out.")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
    where = "a checkpoint, a folder of checkpoints, or the folder of a run"
    for name, run, what in (
        ("list", _list, "all of a folder, newest first: step, time, size, score, and whether it is complete"),
        ("inspect", _inspect, "what one checkpoint holds; of a folder, its newest"),
        ("verify", _verify, "read every byte and compare it with its checksum"),
    ):
        command = commands.add_parser(name, help=what, description=what[0].upper() + what[1:] + ".")
        command.add_argument("path", metavar="PATH", help=where)
        command.add_argument("--json", action="store_true", help="JSON instead of text")
        command.set_defaults(run_command=run)
    exchange.add_parsers(commands)
    return top


def main(words: Sequence[str] | None = None) -> None:
    """The console script."""
    arguments = parser().parse_args(words)
    try:
        arguments.path = place(arguments.path)
        sys.exit(arguments.run_command(arguments))
    except BrokenPipeError:  # whoever reads us, `head` for one, has enough
        sys.stderr.close()
    except KeyboardInterrupt:
        fail(PROGRAM, "stopped", 130)
    except CheckpointError as error:
        fail(PROGRAM, str(error), 1)
    except ValueError as error:
        fail(PROGRAM, str(error), 2)
    except OSError as error:
        fail_of_system(PROGRAM, error)


def entry(path: Path) -> dict[str, Any]:
    """What can be said of a checkpoint without reading its content."""
    whole = commit.version_of(path)
    files = [file for file in whole.rglob("*") if file.is_file()] if path.is_dir() else [path]
    known: dict[str, Any] = {"name": path.name, "bytes": sum(file.stat().st_size for file in files)}
    known |= {"step": None, "time": None, "ranks": None, "score": _scores(path.parent).get(path.name)}
    if path.is_file():
        return {**known, "time": _time(path.stat().st_mtime), "state": "plain file"}
    try:
        header = commit.verify(path, ())
    except CheckpointError as error:
        return {**known, "state": str(error).removeprefix(f"{path}: ").removeprefix(f"{path} ")}
    writers = {name.split("_")[2] for name in commit.listed_files(path) if name.startswith("__")}
    known |= {"step": header["step"], "time": _time(header["time_ns"] / 1e9), "ranks": len(writers)}
    return {**known, "state": "complete"}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _scores(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / _SCORES).read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def _list(arguments: argparse.Namespace) -> int:
    entries = [entry(path) for path in found_in(arguments.path)]
    if arguments.json:
        print(json.dumps(entries, indent=1))
        return 0
    scored = any(one["score"] is not None for one in entries)
    heads = ["step", "name", "time (UTC)", "ranks", "size", *(["score"] if scored else []), "state"]
    lines = [
        [
            _or(one["step"]), one["name"], _or(one["time"]), _or(one["ranks"]), _size(one["bytes"]),
            *([_or(one["score"])] if scored else []), one["state"],
        ]
        for one in entries
    ]  # fmt: skip
    print("\n".join(table(heads, lines, right=("step", "ranks", "size", "score"))))
    return 0


def _or(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _size(count: int) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"


def contents(path: Path) -> dict[str, Any]:
    """What a checkpoint holds: its tensors in numbers, and what is known of the run.

    Raises:
        CheckpointError: it cannot be read.
    """
    if path.is_file():
        checkpoint.check_plain_file(path)
        state = checkpoint.load_plain_file(path)
        shapes = {
            f"model.{name}": (t.shape, t.dtype)
            for name, t in state.pop("state_dict", {}).items()
            if hasattr(t, "dtype")
        }
    else:
        state = checkpoint.load_state(path)
        shapes = {name: (e.size, e.properties.dtype) for name, e in checkpoint.read_metadata(path).items()}
    model = {name: shape for name, shape in shapes.items() if name.startswith("model.")}
    return {
        **entry(path),
        "model_tensors": len(model),
        "model_elements": sum(shape.numel() for shape, _ in model.values()),
        "dtypes": dict(Counter(str(dtype).removeprefix("torch.") for _, dtype in model.values())),
        "averaged": int(state["averaging_state"]["n_averaged"]) if "averaging_state" in state else None,
        "optimizer_tensors": sum(name.startswith("optimizer.") for name in shapes),
        "optimizers": [len(one.get("state", {})) for one in state.get("optimizer_states", [])],
        "global_step": state.get("global_step"),
        "epoch": state.get("epoch"),
        "row": next(_rows_of(state), None),
        "seed": state.get("run_seed"),
        "callbacks": sorted(state.get("callbacks", {})),
        "hyper_parameters": sorted(state.get("hyper_parameters", {})),
        "lightning": state.get("pytorch-lightning_version"),
    }


def _rows_of(state: dict[str, Any]) -> Iterator[int]:
    for value in state.values():
        if isinstance(value, dict) and {"header", "streams", "rows"} <= set(value):
            yield value["header"]["row"]


def _inspect(arguments: argparse.Namespace) -> int:
    found = contents(newest(arguments.path))
    if arguments.json:
        print(json.dumps(found, indent=1))
        return 0
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in found["dtypes"].items())
    lines = [
        ("", f"{found['name']}: {found['state']}"),
        ("saved", f"{_or(found['time'])} UTC" + (f", by {found['ranks']} ranks" if found["ranks"] else "")),
        ("steps", f"{found['global_step']}, epoch {found['epoch']}"),
        ("model", f"{found['model_elements']:,} elements in {found['model_tensors']} tensors ({dtypes})"),
        *(
            [("average", f"of {found['averaged']} updates; the weights of training are beside it")]
            if found["averaged"]
            else []
        ),
        ("optimizers", f"{len(found['optimizers'])}, {found['optimizer_tensors']} tensors"),
        ("data", f"{found['row']:,} rows read" if found["row"] is not None else "no position"),
        ("size", _size(found["bytes"])),
        ("callbacks", ", ".join(found["callbacks"]) or "none with state"),
        ("parameters", ", ".join(found["hyper_parameters"]) or "none"),
        ("lightning", _or(found["lightning"])),
    ]
    print("\n".join(f"  {name:<11}{text}" if name else text for name, text in lines))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    outcomes = {str(path): _damage(path) for path in found_in(arguments.path)}
    if arguments.json:
        print(json.dumps([{"path": path, "damage": damage} for path, damage in outcomes.items()], indent=1))
    else:
        print("\n".join(f"{path}: {damage or 'every byte is as it was written'}" for path, damage in outcomes.items()))
    return 1 if any(outcomes.values()) else 0


def _damage(path: Path) -> str | None:
    try:
        commit.verify(path) if path.is_dir() else checkpoint.check_plain_file(path)
    except CheckpointError as error:
        return str(error).removeprefix(f"{path}: ").removeprefix(f"{path} ")
    return None


if __name__ == "__main__":
    main()
