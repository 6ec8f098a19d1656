"""Settings for every test process: few threads, no network, no GPU (kernels and FP8 have their reference there)."""

import os
import sys
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", HYDRA_FULL_ERROR="1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Tests start some hundred processes. Without bytecode on the disk, each compiles all of Lightning before its first line.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Processes that tests start read `start/sitecustomize.py` first, which spares them what no test needs.
_START = str(Path(__file__).with_name("start"))
os.environ["PYTHONPATH"] = os.pathsep.join([_START, *filter(None, [os.environ.get("PYTHONPATH")])])
