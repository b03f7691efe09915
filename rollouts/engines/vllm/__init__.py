"""The engine and the renderer over HTTP for vLLM servers; neither imports vllm."""

from rollouts.engines.protocol import TokenDelta
from rollouts.engines.vllm.capabilities import ExpectedCapabilities, ServerCapabilities
from rollouts.engines.vllm.control.checkpoint_files import write_tied_head
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.engines.vllm.http.limits import HttpLimits
from rollouts.engines.vllm.rendering.blocking_renderer import BlockingServerRenderer
from rollouts.engines.vllm.rendering.server_renderer import ImageChunk, ImagePointer, ServerRenderer, TokenChunk
from rollouts.engines.vllm.resuming import ResumePolicy

__all__ = [
    "BlockingServerRenderer",
    "ExpectedCapabilities",
    "HttpLimits",
    "ImageChunk",
    "ImagePointer",
    "ResumePolicy",
    "ServerCapabilities",
    "ServerRenderer",
    "TokenChunk",
    "TokenDelta",
    "VLLMEngine",
    "write_tied_head",
]
