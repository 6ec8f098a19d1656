"""Rescalable streaming data: the same global batches on any number of ranks, workers and micro-batches.

`feed link module` tie it to Lightning and load on first use. All the rest needs nothing but torch, so that worker processes and
plain loops do not load Lightning.
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
