"""A plain loop over batches from worker processes that goes on until somebody ends it; `test_any_strategy` does.

Usage: python -m tests.data.interrupted_loop FOLDER CONTEXT WORKERS
"""

import sys
import time

from lightning_fms.data import StreamLoader


def main(folder: str, context: str, workers: str) -> None:
    options = {"num_workers": int(workers), "multiprocessing_context": context}
    for number, _ in enumerate(StreamLoader({"p": folder}, seq_len=24, global_batch_size=6, **options)):
        if number == 5:
            print("ready", flush=True)
        if number > 5:
            time.sleep(0.01)


if __name__ == "__main__":
    main(*sys.argv[1:])
