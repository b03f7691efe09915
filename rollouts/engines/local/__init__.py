"""An engine in the same process: transformers, batched sampling with a KV cache (extra `torch`)."""

from rollouts.engines.local.engine import LocalEngine

__all__ = ["LocalEngine"]
