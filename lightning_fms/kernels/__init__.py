"""Fused Triton kernels that are swapped into modules which know nothing of them."""
