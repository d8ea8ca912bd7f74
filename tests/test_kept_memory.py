"""Memory that a step frees is there for the next one."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from parallax.runtime.compute.kept_memory import keep_freed_memory

GLIBC = platform.libc_ver()[0] == "glibc"
STEPS = """
import resource
import torch
from parallax.runtime.compute.kept_memory import MAPPED_BYTES, keep_freed_memory

def step(size):
    values = [torch.ones(size // 4) for _ in range(6)]
    return sum(float(value[0]) for value in values)

def faults(size):
    for _ in range(3):
        step(size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        step(size)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 5

torch.set_num_threads(1)
usual = faults(MAPPED_BYTES // 2)
print(keep_freed_memory())
print(usual, faults(MAPPED_BYTES // 2), faults(2 * MAPPED_BYTES))
"""


@pytest.mark.skipif(not GLIBC, reason="the C library is not glibc")
def test_steps_find_the_memory_of_the_step_before() -> None:
    # What happens to lie behind the memory in a process can keep it there anyway.
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", STEPS],
            capture_output=True,
            text=True,
            timeout=100,
            env={"PYTHONPATH": ":".join(sys.path)},
        )
        assert done.returncode == 0, done.stderr
        told, numbers = done.stdout.splitlines()
        usual, kept, large = (float(number) for number in numbers.split())
        assert told == "True"
        assert kept < 100
        assert large > 100  # and tables are given back
        if usual > 1000:  # 16 MB are 4,096 pages, or few large ones
            return
    pytest.fail("freed memory is there for the next step without help")


@pytest.mark.parametrize(
    "environment",
    [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1"}],
    ids=str,
)
def test_settings_of_the_user_stay(environment: dict[str, str]) -> None:
    assert not keep_freed_memory(environment)
