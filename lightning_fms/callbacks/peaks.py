"""Dense bf16 peaks of accelerators, the denominator of MFU.

Vendors' headline figures often count 2:4 sparsity, which no dense training reaches; the numbers here are the dense
ones of the data sheets. A device that is not in the table has no MFU: none is better than a wrong one.
"""

import torch

# TFLOP/s, bf16, dense. The first name that occurs in the device's name counts, so longer names come first.
BF16_DENSE_TFLOPS = (
    ("GB300", 2500.0),  # NVIDIA GB300 NVL72 data sheet, per GPU: 5,000 with sparsity
    ("GB200", 2500.0),  # NVIDIA GB200 NVL72 data sheet, per GPU: 5,000 with sparsity
    ("B300", 2250.0),  # NVIDIA HGX B300 data sheet: 36 PFLOP/s with sparsity over 8 GPUs
    ("B200", 2250.0),  # NVIDIA HGX B200 data sheet: 36 PFLOP/s with sparsity over 8 GPUs
    ("GH200", 989.4),  # NVIDIA GH200 data sheet: the H100 SXM die
    ("H200 NVL", 835.5),  # NVIDIA H200 data sheet, NVL column: 1,671 with sparsity
    ("H200", 989.4),  # NVIDIA H200 data sheet, SXM column: 1,979 with sparsity
    ("H100 NVL", 835.5),  # NVIDIA H100 data sheet, NVL column: 1,671 with sparsity
    ("H100 PCIe", 756.5),  # NVIDIA H100 PCIe product brief: 1,513 with sparsity
    ("H100", 989.4),  # NVIDIA H100 data sheet, SXM column: 1,979 with sparsity
    ("H800", 989.4),  # same die as the H100 SXM
    ("A100", 312.0),  # NVIDIA A100 data sheet
    ("A800", 312.0),  # same die as the A100
    ("A40", 149.7),  # NVIDIA A40 data sheet; must stand behind A400-like names, of which there are none with bf16 peaks
    ("A30", 165.0),  # NVIDIA A30 data sheet
    ("A10G", 70.0),  # AWS G5: half of the A10's tensor rate
    ("A10", 125.0),  # NVIDIA A10 data sheet
    ("L40S", 362.0),  # NVIDIA L40S data sheet: 733 with sparsity
    ("L40", 181.0),  # NVIDIA L40 data sheet
    ("L4", 121.0),  # NVIDIA L4 data sheet: 242 with sparsity
    ("RTX 4090", 165.2),  # NVIDIA Ada architecture white paper, fp32 accumulation
    ("RTX 3090", 71.0),  # NVIDIA Ampere GA102 white paper, fp32 accumulation
    ("MI325X", 1307.4),  # AMD Instinct MI325X data sheet
    ("MI300X", 1307.4),  # AMD Instinct MI300X data sheet
    ("MI250X", 191.5),  # AMD Instinct MI250X data sheet, per graphics compute die
)


def peak_tflops(device_name: str) -> float | None:
    """Dense bf16 TFLOP/s of a device by the name that CUDA gives it, or `None` if the table does not know it."""
    words = device_name.replace("-", " ")
    for name, peak in BF16_DENSE_TFLOPS:
        if f" {name} " in f" {words} ":
            return peak
    return None


def peak_of(device: torch.device) -> float | None:
    """Dense bf16 TFLOP/s of a torch device, or `None` for CPUs and unknown accelerators."""
    return peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
