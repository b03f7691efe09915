"""Loaded by every interpreter of a test's vLLM: where it polls its workers, it sleeps instead of yielding.

Its processes wait for each other in loops around `os.sched_yield`. On a machine of two cores some kernels (Linux 6.18)
then let nobody else run for seconds: a pause or an abort reaches the server when there is nothing left to stop.
"""

import os
import time


def sleep_a_little() -> None:
    time.sleep(1e-4)


os.sched_yield = sleep_a_little
