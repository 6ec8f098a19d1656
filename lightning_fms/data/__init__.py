"""Rescalable streaming data: the same global batches on any number of ranks, workers and micro-batches.

`order slots mixture segments cursor draws packing items stream workers loader audit` need nothing but torch, so that worker processes and plain
loops do not load Lightning; `feed link module` tie them to it and load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_fms.data.cursor import State, merge_states
from lightning_fms.data.loader import StreamLoader

if TYPE_CHECKING:
    from lightning_fms.data.link import LoaderLink
    from lightning_fms.data.module import RescalableDataModule

__all__ = ["LoaderLink", "RescalableDataModule", "State", "StreamLoader", "merge_states"]

_ON_FIRST_USE = {"LoaderLink": "link", "RescalableDataModule": "module"}


def __getattr__(name: str) -> Any:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_ON_FIRST_USE[name]}"), name)
