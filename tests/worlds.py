"""Several ranks on one machine, as torchrun would start them, forked from the test so that nothing is imported again."""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

_EXIT_AFTER_S = 30


def run_world(
    function: Callable[..., Any], world: int, *args: Any, timeout: float = 120, start: str = "fork"
) -> list[Any]:
    """Call `function(*args)` in `world` processes; return the results by rank.

    `start="forkserver"` where backward runs in them: a test before may have started autograd's threads, which no fork survives.

    The function finds its rank in the environment. A failure in one rank ends all of them and shows its traceback.
    """
    context: Any = multiprocessing.get_context(start)
    port = free_port()
    pipes, processes = [], []
    for rank in range(world):
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(send, rank, world, port, function, args), daemon=False)
        process.start()
        send.close()
        pipes.append(receive)
        processes.append(process)
    try:
        return [_result(pipe, rank, timeout) for rank, pipe in enumerate(pipes)]
    finally:
        for process in processes:
            process.join(_EXIT_AFTER_S if process is processes[0] else 5)
            if process.is_alive():
                process.kill()
                process.join()


def _rank(send: Any, rank: int, world: int, port: int, function: Callable[..., Any], args: tuple) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID=f"test-{port}",
    )  # fmt: skip
    try:
        send.send((True, function(*args)))
    except BaseException:
        send.send((False, traceback.format_exc()))
    finally:
        send.close()
        os._exit(0)  # no pytest or torch clean-up of the parent's in a child


def _result(pipe: Any, rank: int, timeout: float) -> Any:
    if not pipe.poll(timeout):
        raise TimeoutError(f"rank {rank} gave no result within {timeout} s")
    try:
        good, value = pipe.recv()
    except EOFError:
        raise RuntimeError(f"rank {rank} ended without a result") from None
    if not good:
        raise RuntimeError(f"rank {rank} failed:\n{value}")
    return value


def free_port() -> int:
    """A port that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
