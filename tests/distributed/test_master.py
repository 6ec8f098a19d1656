"""fp32 masters and their bf16 copies, without a Trainer."""

import gc
import weakref

import torch
from torch import nn

from lightning_fms.distributed.master import MasterWeights


def test_after_a_release_nothing_keeps_masters_and_copies() -> None:
    """A hook on a copy holds its master, and Python's collector does not look through hooks."""
    module = nn.Linear(8, 8)
    masters = MasterWeights(module)
    with masters.active():
        module(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    kept = [weakref.ref(tensor) for pair in masters.copies.items() for tensor in pair]
    masters.release()
    del module, masters
    gc.collect()
    assert [ref() for ref in kept] == [None] * 4
