"""The local engine samples with transformers in this process, in batches with a KV cache (extra `torch`)."""

from rollouts.engines.local.engine import LocalEngine

__all__ = ["LocalEngine"]
