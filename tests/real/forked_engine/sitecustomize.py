"""Loaded by every interpreter of a test's vLLM: the engine is forked from the server, and pauses after every step.

A spawned engine imports vLLM again, which takes most of the time of a start. vLLM forks by default; on CPUs it spawns,
because a worker process then binds OpenMP threads to cores of its own. Here there is one thread and no worker process.

The engine of a tiny model never waits for anything. On a busy machine with two cores neither its thread that receives
calls nor the server then runs for seconds, and a pause or an abort arrives after the last token.
"""

import os
import sys
import time
from multiprocessing import context

context._concrete_contexts["spawn"] = context._concrete_contexts["fork"]


def pause_after_steps():
    engine = getattr(sys.modules.get("vllm.v1.engine.core"), "EngineCoreProc", None)
    if engine is None:
        return
    step = engine._process_engine_step
    if step.__name__ == "step_and_pause":  # forked from a process that was forked
        return

    def step_and_pause(self):
        executed = step(self)
        time.sleep(5e-4)
        return executed

    engine._process_engine_step = step_and_pause


os.register_at_fork(after_in_child=pause_after_steps)
