"""FP8 training as a Lightning precision plugin."""

from lightning_fms.precision.plugin import FP8Precision

__all__ = ["FP8Precision"]
