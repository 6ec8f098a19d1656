"""Foundation-model training as plugins for Lightning.

The public names load on first use: importing the package itself loads neither torch nor lightning, because Hydra
imports it only to find `lightning_fms.conf`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_fms.data import RescalableDataModule, StreamLoader, merge_states
    from lightning_fms.distributed import FSDPCompileStrategy
    from lightning_fms.kernels import TritonKernels
    from lightning_fms.precision import FP8Precision

__version__ = "0.1.0"

_HOMES = {
    "FP8Precision": "lightning_fms.precision",
    "FSDPCompileStrategy": "lightning_fms.distributed",
    "RescalableDataModule": "lightning_fms.data",
    "StreamLoader": "lightning_fms.data",
    "TritonKernels": "lightning_fms.kernels",
    "merge_states": "lightning_fms.data",
}

__all__ = [
    "FP8Precision",
    "FSDPCompileStrategy",
    "RescalableDataModule",
    "StreamLoader",
    "TritonKernels",
    "__version__",
    "merge_states",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lightning_fms' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
