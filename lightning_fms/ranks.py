"""One decision for all processes of a run, before they can talk through a process group.

The run's folder and the checkpoint to resume from must be the same on every rank, and a clock or a directory listing
that each rank reads by itself is not. So the first rank decides and the others are told: through the environment where
Lightning starts them (they inherit it), through the launcher's key-value store where torchrun or Slurm does. Such a
store can outlive the processes that wrote to it, so the keys of a restart are not those of the attempt before.
"""

import itertools
import json
import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from lightning.fabric.plugins.environments import ClusterEnvironment, SLURMEnvironment, TorchElasticEnvironment
from torch.distributed import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from lightning_fms.config_check import ConfigError

# Long enough for the first rank to check a large checkpoint.
PATIENCE = timedelta(minutes=30)
# Processes of one job start within seconds of each other; after that somebody should be told.
SILENT_SECONDS = 10.0
_PREFIX = "LIGHTNING_FMS_"
# The first rank's end of the store serves the others, and the process group after them: it must outlive the decision.
_stores: list[Store] = []
# Every rank asks the same questions in the same order.
_decisions = itertools.count()


def launcher() -> ClusterEnvironment | None:
    """The environment of the external launcher that started this process, or `None` if nothing did."""
    for environment in (TorchElasticEnvironment, SLURMEnvironment):
        if environment.detect():
            return environment()
    return None


def is_child() -> bool:
    """Whether Lightning started this process as one of several, by running the command again."""
    return launcher() is None and int(os.environ.get("LOCAL_RANK", "0")) > 0


def agree(about: str, decide: Callable[[], Any]) -> Any:
    """What `decide()` returns on the first rank, on every rank; it must be JSON.

    Args:
        about: a name for the decision.
        decide: called on the first rank only. If it raises there, the other ranks exit with code 2.

    Raises:
        ConfigError: if `LOCAL_RANK` says that another process started this one, and none did.
    """
    environment = launcher()
    if environment is None:
        return _inherit(_PREFIX + about.upper(), decide)
    return _exchange(about, decide, environment)


def _inherit(name: str, decide: Callable[[], Any]) -> Any:
    if is_child():
        if name not in os.environ:
            raise ConfigError(
                f"LOCAL_RANK={os.environ['LOCAL_RANK']}: no other process of this run started this one; "
                "unset LOCAL_RANK, or start all processes with torchrun or srun"
            )
        return json.loads(os.environ[name])
    value = decide()
    os.environ[name] = json.dumps(value)
    return value


def _exchange(about: str, decide: Callable[[], Any], environment: ClusterEnvironment) -> Any:
    # Lightning sets the same two variables, later.
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = environment.main_address, str(environment.main_port)
    rank, world_size = environment.global_rank(), environment.world_size()
    if world_size == 1:
        return decide()
    base = _meet(rank, world_size)
    _stores.append(base)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"lightning_fms/{attempt}/{next(_decisions)}", base)
    if rank != 0:
        answer = json.loads(store.get(about))
        if "error" in answer:
            raise SystemExit(2)
        return answer["value"]
    try:
        value = decide()
    except BaseException:
        store.set(about, json.dumps({"error": True}))
        raise
    store.set(about, json.dumps({"value": value}))
    return value


def _meet(rank: int, world_size: int) -> Store:
    """The store of all processes; waits until all are there, and says so if that takes long."""
    notice = threading.Timer(SILENT_SECONDS, _say_that_we_wait, (rank, world_size))
    notice.daemon = True
    # Rank 1 speaks too, for the case that it is rank 0 who is missing.
    if rank < 2:
        notice.start()
    try:
        store, _, _ = next(rendezvous("env://", rank, world_size, timeout=PATIENCE))
    finally:
        notice.cancel()
    return store


def _say_that_we_wait(rank: int, world_size: int) -> None:
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    hint = "; in a Slurm job, start them with srun" if "SLURM_JOB_ID" in os.environ else ""
    print(f"fms-train: rank {rank}: waiting for {world_size} processes at {where}{hint}", file=sys.stderr, flush=True)
