"""One concern a callback: what a run shows, measures and keeps while it trains."""

from lightning_fms.callbacks.bad_steps import BadSteps
from lightning_fms.callbacks.checkpoint import StepCheckpoint
from lightning_fms.callbacks.data_mix import DataMix
from lightning_fms.callbacks.data_trail import DataTrail
from lightning_fms.callbacks.fp8_amax import FP8Amax
from lightning_fms.callbacks.goodput import GoodputLog
from lightning_fms.callbacks.grad_norm import GradNorm
from lightning_fms.callbacks.hang_watchdog import HangWatchdog
from lightning_fms.callbacks.initial_weights import InitialWeights
from lightning_fms.callbacks.memory import Memory
from lightning_fms.callbacks.memory_snapshot import MemorySnapshot
from lightning_fms.callbacks.overlap import Overlap
from lightning_fms.callbacks.profiler import Profiler
from lightning_fms.callbacks.progress import Progress
from lightning_fms.callbacks.resilience import Resilience
from lightning_fms.callbacks.sample import Sample
from lightning_fms.callbacks.straggler import Straggler
from lightning_fms.callbacks.straggler_map import StragglerMap
from lightning_fms.callbacks.summary import Summary
from lightning_fms.callbacks.tensorboard_layout import TensorBoardLayout
from lightning_fms.callbacks.throughput import Throughput

__all__ = [
    "BadSteps",
    "DataMix",
    "DataTrail",
    "FP8Amax",
    "GoodputLog",
    "GradNorm",
    "HangWatchdog",
    "InitialWeights",
    "Memory",
    "MemorySnapshot",
    "Overlap",
    "Profiler",
    "Progress",
    "Resilience",
    "Sample",
    "StepCheckpoint",
    "Straggler",
    "StragglerMap",
    "Summary",
    "TensorBoardLayout",
    "Throughput",
]
