"""vLLM as an engine: its wire, spoken without vllm."""

from rollouts.engines.vllm.capabilities import ExpectedCapabilities, ServerCapabilities
from rollouts.engines.vllm.checkpoint_files import write_tied_head
from rollouts.engines.vllm.connection import HttpLimits
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.engines.vllm.response import TokenDelta
from rollouts.engines.vllm.resuming import ResumePolicy
from rollouts.engines.vllm.server_chunks import ImageChunk, ImagePointer, TokenChunk
from rollouts.engines.vllm.server_renderer import ServerRenderer

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
