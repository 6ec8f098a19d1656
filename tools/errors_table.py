"""Write docs/errors.md: every error that a user can cause, as it stands in the code.

    python tools/errors_table.py [--check]

Reads the sources without running them: each `raise` of a kind that means a mistake from outside, with its message and `<names>`
where a value goes. What only we can break is an `assert`, and so is not in it. `--check` exits with 1 where the file is old.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

TREE = Path(__file__).parents[1]
PAGE = TREE / "docs" / "errors.md"
KINDS = {
    "ValueError", "ConfigError", "CheckpointError", "DocumentError", "NotImplementedError", "FileNotFoundError", "RuntimeError",
    "TooManyBadSteps", "WorkerDied", "Unsearchable", "StoreError",
}  # fmt: skip
PARTS = {
    "": (
        "Config and command line",
        "`fms-train`, `fms-plan`, `fms-supervise` and what they check before anything starts.",
    ),
    "data": ("Data", "Sources, tokenizers, mixtures, packing, and going on with them."),
    "distributed": ("Strategy and checkpoints", "Sharding, compiling, saving and loading."),
    "kernels": ("Kernels", "`TritonKernels`."),
    "precision": ("FP8", "`FP8Precision`."),
    "models": ("Models and schedules", ""),
    "callbacks": ("Callbacks", ""),
    "planner": ("Planner", ""),
    "planning": ("`fms-plan`", ""),
    "launch": ("Launching and sweeps", ""),
    "commands": ("`fms-data` and `fms-checkpoint`", ""),
}
HEAD = """# Errors

What a mistake is answered with, by part. `<name>` stands for a value. `fms-train` prints such an error in one line and exits
with 2; `debug=trace` shows where it was raised. Written by `python tools/errors_table.py` from the code.
"""


def shown(node: ast.expr) -> str:
    """An expression in a message, as a placeholder: what it is about, in a word or two."""
    match node:
        case ast.Name():
            word = node.id
        case ast.Attribute():
            word = node.attr
        case ast.Subscript(slice=ast.Constant(value=str(key))):
            word = key
        case ast.Subscript() | ast.Starred():
            return shown(node.value)
        case ast.BinOp():
            return shown(node.left)
        case ast.Call(args=[first, *_]):
            return shown(first)
        case ast.Call():
            return shown(node.func)
        case ast.GeneratorExp() | ast.ListComp():
            return shown(node.generators[0].iter)
        case ast.IfExp():
            return shown(node.body)
        case ast.Constant() if isinstance(node.value, str):
            return node.value
        case ast.JoinedStr():
            return message(node) or "<...>"
        case _:
            word = "..."
    return f"<{word.strip('_')}>"


def message(node: ast.expr | None) -> str | None:
    """The text of a message, `None` where it is not written in place."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(shown(v.value) if isinstance(v, ast.FormattedValue) else v.value for v in values)  # type: ignore[attr-defined]
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            parts = [message(part) or shown(part) for part in (left, right)]
            return "".join(parts)
    return None


_CONSTANT = re.compile("<([A-Z_]+)>")


def errors(tree: ast.Module) -> Iterator[str]:
    """The messages that a module raises, in order, each once."""
    texts = {
        name.id: text
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and (text := message(node.value))
        for name in node.targets
        if isinstance(name, ast.Name)
    }
    seen: set[str] = set()
    raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    for call in sorted(raised, key=lambda call: call.lineno):
        if not (isinstance(call.func, ast.Name) and call.func.id in KINDS and call.args):
            continue
        given = call.args[0]
        text = message(given) or (texts.get(given.id) if isinstance(given, ast.Name) else None)
        if text is not None and text not in seen:
            seen.add(text)
            yield _CONSTANT.sub(lambda found: texts.get(found[1], found[0]), text)


def page() -> str:
    """The whole file."""
    package = TREE / "lightning_fms"
    lines = [HEAD]
    for part, (title, about) in PARTS.items():
        folder = package / part
        rows = []
        for path in sorted(folder.rglob("*.py") if part else folder.glob("*.py")):
            # `|` would end a cell, and `<...>` would be HTML outside of code.
            for text in errors(ast.parse(path.read_text())):
                cell = " ".join(text.split()).replace("|", "\\|").replace("`", "'")
                rows.append(f"| `{cell}` | `{path.relative_to(folder).with_suffix('')}` |")
        if rows:
            lines += [f"## {title}\n", *([f"{about}\n"] if about else []), "| error | in |", "|---|---|", *rows, ""]
    return "\n".join(lines)


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text() == page() else f"{PAGE} is not current; run python tools/errors_table.py")
    PAGE.write_text(page())
