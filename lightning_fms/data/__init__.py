"""Rescalable streaming data: the same global batches on any number of ranks, workers and micro-batches."""

from lightning_fms.data.cursor import State, merge_states
from lightning_fms.data.link import LoaderLink
from lightning_fms.data.loader import StreamLoader
from lightning_fms.data.module import RescalableDataModule

__all__ = ["LoaderLink", "RescalableDataModule", "State", "StreamLoader", "merge_states"]
