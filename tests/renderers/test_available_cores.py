"""Threads are as many as the cores that the process may use, not as the machine has."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from renderers import RendererPool
from renderers.process.threads import available_cores
class Nothing:
    def __getattr__(self, name):
        return lambda *arguments: None
print(available_cores(), RendererPool(Nothing()).size)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity of processes")
def test_a_process_that_may_use_one_core_has_one_thread():
    run = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, check=True, text=True)
    assert run.stdout.split() == ["1", "1"]
