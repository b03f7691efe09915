"""Loaded by every interpreter of a test's vLLM: the engine is forked from the server where vLLM would spawn it.

A spawned engine imports vLLM again, which takes most of the time of a start. vLLM forks by default; on CPUs it spawns,
because a worker process then binds OpenMP threads to cores of its own. Here there is one thread and no worker process.
"""

from multiprocessing import context

context._concrete_contexts["spawn"] = context._concrete_contexts["fork"]
