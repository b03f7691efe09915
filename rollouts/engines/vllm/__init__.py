"""The engine and the renderer of a vLLM server send requests over HTTP; neither imports vllm."""

from rollouts.engines.http.connection import HttpLimits
from rollouts.engines.vllm.capabilities import ServerCapabilities
from rollouts.engines.vllm.checkpoint_files import write_tied_head
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.engines.vllm.server_renderer import ServerRenderer

__all__ = [
    "HttpLimits",
    "ServerCapabilities",
    "ServerRenderer",
    "VLLMEngine",
    "write_tied_head",
]
