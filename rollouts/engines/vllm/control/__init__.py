"""Pausing, sleeping, emptying caches of, and updating the weights of a vLLM server."""
