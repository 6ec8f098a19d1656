"""The device mesh `replicate x shard x tensor`, resolved from the number of processes.

Two numbers describe every data-parallel layout: `shard` ranks share one copy of the parameters (FSDP), `replicate` such
groups hold a copy each (HSDP). `replicate=1` is plain FSDP, `shard=1` is DDP in the clothes of FSDP. Data ranks are the
product of both. `tensor` ranks split the matrices of one data rank between them, and read the same rows; they are
neighbours, since they talk most.

A layout that cannot be is refused from the plain integers, before a process is launched or a group is created.
"""

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

REPLICATE, SHARD, TENSOR = "replicate", "shard", "tensor_parallel"
DATA_PARALLEL = "data_parallel"  # the flattened replicate x shard, by the name that Lightning's documentation uses


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the mesh dimensions; their product is the number of processes."""

    replicate: int
    shard: int
    tensor: int = 1

    @property
    def data_parallel(self) -> int:
        """Number of ranks that read different rows."""
        return self.replicate * self.shard

    def __str__(self) -> str:
        text = f"replicate {self.replicate} x shard {self.shard}"
        return f"{text} x tensor {self.tensor}" if self.tensor > 1 else text

    @property
    def processes(self) -> int:
        """Number of ranks."""
        return self.data_parallel * self.tensor


def check_mesh_arguments(replicate: int | str, shard: int | str, tensor: int = 1) -> None:
    """Refuse values that fit no number of processes (ValueError)."""
    if not isinstance(tensor, int) or isinstance(tensor, bool) or tensor < 1:
        raise ValueError(f"{tensor=}: give a number of ranks >= 1; 1 splits no matrices")
    for name, size in (("replicate", replicate), ("shard", shard)):
        if size != "auto" and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ValueError(f"{name}={size!r}: give a number of ranks >= 1 or 'auto'")
    if replicate == shard == "auto":
        raise ValueError("replicate='auto' and shard='auto': one of the two has to be a number, e.g. replicate=1")


def resolve_mesh(world_size: int, replicate: int | str = 1, shard: int | str = "auto", tensor: int = 1) -> MeshShape:
    """Sizes for `world_size` processes; 'auto' takes what the other numbers leave.

    Raises:
        ValueError: the numbers do not multiply to `world_size`.
    """
    check_mesh_arguments(replicate, shard, tensor)
    asked = f"replicate={replicate!r} x shard={shard!r}" + (f" x tensor={tensor}" if tensor > 1 else "")
    if replicate == "auto":
        replicate = _quotient(world_size, int(shard) * tensor, asked)
    elif shard == "auto":
        shard = _quotient(world_size, int(replicate) * tensor, asked)
    shape = MeshShape(int(replicate), int(shard), tensor)
    if shape.processes != world_size:
        raise ValueError(
            f"{asked} needs {shape.processes} processes, this run has {world_size}: "
            f"change the number of devices, or set shard='auto'"
        )
    return shape


def _quotient(world_size: int, size: int, asked: str) -> int:
    if world_size % size:
        raise ValueError(f"{asked}: {size} does not divide the {world_size} processes of this run")
    return world_size // size


def build_mesh(shape: MeshShape, device_type: str) -> DeviceMesh:
    """The mesh over all processes of the default group, which must exist. Dimensions by name, see the constants."""
    mesh = init_device_mesh(
        device_type, (shape.replicate, shape.shard, shape.tensor), mesh_dim_names=(REPLICATE, SHARD, TENSOR)
    )
    mesh[REPLICATE, SHARD]._flatten(DATA_PARALLEL)
    return mesh


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The part of the mesh that `fully_shard` takes: one dimension for FSDP, two for HSDP."""
    return mesh[SHARD] if mesh[REPLICATE].size() == 1 else mesh[REPLICATE, SHARD]
