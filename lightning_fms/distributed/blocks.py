"""Which submodules of a model are its repeated blocks.

Blocks are the unit of everything here: one all-gather, one compiled graph, one recomputed segment, one materialisation
from `meta`. Nobody should have to name them: a decoder keeps its layers in a `ModuleList` or `Sequential` of equal
children, so every *outermost* such container is taken (what lies inside a block belongs to that block). Where a model is
built differently, class names say it.
"""

from collections.abc import Sequence

from torch import nn


def find_blocks(module: nn.Module, class_names: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """Blocks of `module` by qualified name, in module order.

    Args:
        module: the whole model.
        class_names: names of the block classes (`type(m).__name__`); outermost matches are taken. None finds every
            outermost `ModuleList` or `Sequential` of two or more children of one class that own parameters.

    Raises:
        ValueError: a class name that occurs nowhere in the model.
    """
    found: dict[str, nn.Module] = {}
    _collect(module, "", None if class_names is None else set(class_names), found)
    if class_names is not None:
        missing = set(class_names) - {type(block).__name__ for block in found.values()}
        if missing:
            classes = sorted({type(m).__name__ for m in module.modules()})
            raise ValueError(f"blocks={sorted(missing)}: no such class in the model, which has {', '.join(classes)}")
    return found


def _collect(module: nn.Module, name: str, class_names: set[str] | None, found: dict[str, nn.Module]) -> None:
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        if class_names is not None and type(child).__name__ in class_names:
            found.setdefault(full, child)
        elif class_names is None and _is_stack(child):
            found.update({f"{full}.{i}": block for i, block in child.named_children()})
        else:
            _collect(child, full, class_names, found)


def _is_stack(module: nn.Module) -> bool:
    children = list(module.children())
    return (
        isinstance(module, nn.ModuleList | nn.Sequential)
        and len({id(child) for child in children}) >= 2
        and len({type(child) for child in children}) == 1
        and all(any(True for _ in child.parameters()) for child in children)
    )
