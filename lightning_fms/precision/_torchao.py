"""The parts of torchao that are used here, imported without one log record.

On import, torchao registers an enum with pytree in a way that newer versions of PyTorch warn of in the log. Users can do
nothing about it, and it would be the first line of every run.
"""

import logging


def _is_not_about_the_enum(record: logging.LogRecord) -> bool:
    return "KernelPreference" not in record.getMessage()


_log = logging.getLogger("torch.utils._pytree")
_log.addFilter(_is_not_about_the_enum)
try:
    from torchao.float8 import (
        Float8LinearConfig,
        convert_to_float8_training,
        precompute_float8_dynamic_scale_for_fsdp,
    )
    from torchao.float8.config import ScalingType
    from torchao.float8.float8_linear import Float8Linear
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor
finally:
    _log.removeFilter(_is_not_about_the_enum)

__all__ = [
    "Float8Linear",
    "Float8LinearConfig",
    "ScalingType",
    "WeightWithDynamicFloat8CastTensor",
    "convert_to_float8_training",
    "precompute_float8_dynamic_scale_for_fsdp",
]
