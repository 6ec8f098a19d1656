"""The optimizer step as one pass: equal to PyTorch's, and nobody can tell the difference."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_the_kernel_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    file = Path(__file__).with_name("interpreted_one_pass.py")
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-x", "-p", "no:cacheprovider", str(file)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
