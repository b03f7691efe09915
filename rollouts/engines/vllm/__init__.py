"""vLLM as an engine: its wire, spoken without vllm."""

from rollouts.engines.vllm.capabilities import ExpectedCapabilities, ServerCapabilities
from rollouts.engines.vllm.control.checkpoint_files import write_tied_head
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.engines.vllm.http.connection import HttpLimits
from rollouts.engines.vllm.rendering.prompt_chunks import ImageChunk, ImagePointer, TokenChunk
from rollouts.engines.vllm.rendering.server_renderer import ServerRenderer
from rollouts.engines.vllm.resuming import ResumePolicy
from rollouts.engines.vllm.wire.response import TokenDelta

__all__ = [
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
