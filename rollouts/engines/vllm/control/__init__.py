"""Control of a vLLM server: pausing, sleeping, emptying caches, updating weights, reading metrics."""
