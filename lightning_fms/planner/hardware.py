"""What a device can do and costs: the numbers of a data sheet, one file each in `conf/hardware`.

Peaks are dense; data sheets like to show them with 2:4 sparsity, twice as high. Rates of links are per direction and GPU.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """A kind of GPU in a machine.

    Args:
        name: as reports show it.
        bf16_tflops: dense peak with fp32 accumulation.
        memory_gib: what a process can use at most, GiB.
        bandwidth_gbps: of the GPU's memory, GB/s.
        link_gbps: to another GPU of the machine, GB/s per direction.
        host_gbps: to the host's memory, GB/s per direction.
        fp8_tflops: dense peak; None where there is no FP8.
        devices_per_node: GPUs in a machine.
        network_gbps: to another machine, GB/s per GPU and direction.
        matmul_efficiency: share of the peak that matrix products and attention of a training step reach. MFU is lower: it
            also pays for everything else.
        rent: US dollars per GPU and hour.
        price: US dollars to buy one, with its share of the machine; None where unknown.

    Raises:
        ValueError: a number that is not positive, or an efficiency above 1.
    """

    name: str
    bf16_tflops: float
    memory_gib: float
    bandwidth_gbps: float
    link_gbps: float
    host_gbps: float
    fp8_tflops: float | None = None
    devices_per_node: int = 8
    network_gbps: float = 12.5
    matmul_efficiency: float = 0.7
    rent: float | None = None
    price: float | None = None

    def __post_init__(self) -> None:
        for field, value in vars(self).items():
            if isinstance(value, int | float) and not value > 0:
                raise ValueError(f"hardware.{field}={value}: give a number above 0")
        if self.matmul_efficiency > 1:
            raise ValueError(f"hardware.matmul_efficiency={self.matmul_efficiency}: a share of the peak, at most 1")

    def link(self, devices: int) -> float:
        """GB/s between GPUs of a group of so many."""
        return self.link_gbps if devices <= self.devices_per_node else min(self.network_gbps, self.link_gbps)
