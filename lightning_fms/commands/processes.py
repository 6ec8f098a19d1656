"""Tasks spread over processes, with an answer when one of them dies.

`multiprocessing.Pool` waits forever for a worker that the kernel killed for its memory; here that is an error with a reason. A
worker whose parent is gone ends by itself.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


class WorkerDied(RuntimeError):
    """A process ended without an answer."""


def spread(task: Callable[[T], R], items: Iterable[T], workers: int) -> Iterator[R]:
    """Yield `task(item)` of every item as they become ready, made by so many processes; one worker is this process.

    Processes are forked before the first answer, so begin the iteration before starting threads.

    Raises:
        WorkerDied: If a process was killed.
        Exception: What the task raised. The other processes are ended.
    """
    if workers == 1:
        yield from map(task, items)
        return
    context, rest = get_context("fork"), iter(items)
    processes: dict[Connection, int] = {}
    running = []
    try:
        for item in _first(rest, workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(task, theirs, os.getpid()), daemon=True)
            process.start()
            theirs.close()
            running.append(process)
            processes[ours] = len(running) - 1
            ours.send(item)
        while processes:
            for pipe in wait(list(processes)):
                assert isinstance(pipe, Connection)
                try:
                    done, answer = pipe.recv()
                except (EOFError, ConnectionResetError):
                    process = running[processes[pipe]]
                    process.join()
                    raise WorkerDied(
                        f"a worker process was ended from outside (exit code {process.exitcode}), perhaps for want of memory"
                    ) from None
                if not done:
                    raise answer
                following = list(_first(rest, 1))
                if following:
                    pipe.send(following[0])
                else:
                    del processes[pipe]
                yield answer
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.join()


def _first(items: Iterator[T], count: int) -> Iterator[T]:
    for _ in range(count):
        try:
            yield next(items)
        except StopIteration:
            return


def _serve(task: Callable, pipe: Connection, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent has it too, and ends us
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    while True:
        try:
            answer = (True, task(pipe.recv()))
        except EOFError:
            return
        except Exception as error:
            answer = (False, error)
        pipe.send(answer)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
