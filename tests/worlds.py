"""Several ranks on one machine, as torchrun would start them, from a fork server: imports happen once, a world costs a second.

Not forked from the test process: a test before may have started autograd's threads in it, and then no fork can run backward.
"""

import multiprocessing
import os
import pickle
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_PIECES = ("app", "callbacks", "data", "kernels", "models", "precision", "distributed.strategy")
# What torch loads at a first compilation, and tests of other people's models: else every rank does.
_COMPILER = ("torch._inductor.compile_fx", "torch._dynamo.backends.debugging")
_THEIRS = ("transformers.models.llama.modeling_llama", "transformers.modeling_utils", "safetensors.torch")
_OURS = tuple(f"lightning_fms.{piece}" for piece in _PIECES)
_CONTEXT.set_forkserver_preload(["pytest", "hypothesis", "lightning.pytorch", *_OURS, *_COMPILER, *_THEIRS])
_PEERS_S = 10  # for the other ranks to say what they saw of a failure
_EXIT_S = 5


def run_world(
    function: Callable[..., Any], world: int, *args: Any, timeout: float = 120, quiet: bool = False
) -> list[Any]:
    """Call `function(*args)` in `world` processes; return the results by rank.

    Args:
        function: Of a module's top level; finds its rank in the environment, which is else that of the test.
        world: Number of ranks.
        args: Its arguments; they are pickled, and so are the results.
        timeout: Seconds until the last rank must have its result.
        quiet: Ignore warnings in the ranks. Else they are treated as the test treats them now.

    Raises:
        RuntimeError: If ranks failed, with their tracebacks; the others are ended.
        TimeoutError: If a rank has no result in time.
    """
    port = free_port()
    filters = None if quiet else list(warnings.filters)
    ranks, processes = {}, []
    for rank in range(world):
        receive, send = _CONTEXT.Pipe(duplex=False)
        environment = {**os.environ, **_of_rank(rank, world, port)}
        process = _CONTEXT.Process(target=_rank, args=(send, environment, filters, function, args), daemon=False)
        process.start()
        send.close()
        ranks[receive] = rank
        processes.append(process)
    try:
        return _results(ranks, timeout)
    finally:
        for process in processes:
            process.join(_EXIT_S)
            if process.is_alive():
                process.kill()
                process.join()


def _of_rank(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"test-{port}",
    }


def _rank(
    send: Connection, environment: dict[str, str], filters: list | None, function: Callable[..., Any], args: tuple
) -> None:
    os.environ.clear()  # the fork server's, as it was when the first world started
    os.environ.update(environment)
    os.environ.pop("PL_GLOBAL_SEED", None)
    if filters is None:
        warnings.simplefilter("ignore")
    else:
        warnings.filters[:] = filters  # type: ignore[index]
    try:
        outcome = pickle.dumps((None, function(*args)))  # tensors as values, not as memory that ends with this process
    except BaseException:
        outcome = pickle.dumps((traceback.format_exc(), None))
    send.send_bytes(outcome)
    os._exit(0)  # no clean-up of torch's in a process that is done


def _results(ranks: dict[Connection, int], timeout: float) -> list[Any]:
    """Results by rank. After a first failure the others have a moment: they may know better why."""
    waiting, found, failures, end = dict(ranks), {}, [], time.monotonic() + timeout
    while waiting and (ready := wait(list(waiting), max(0.0, end - time.monotonic()))):
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                error, found[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                error = "ended without a result"
            if error is not None:
                failures.append(f"rank {rank} of {len(ranks)} failed:\n{error}")
                end = min(end, time.monotonic() + _PEERS_S)
    if failures:
        raise RuntimeError("\n".join(failures))
    if waiting:
        raise TimeoutError(f"ranks {sorted(waiting.values())} of {len(ranks)} gave no result within {timeout} s")
    return [found[rank] for rank in range(len(ranks))]


def free_port() -> int:
    """A port that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
