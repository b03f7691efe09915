"""The engine of an SGLang server sends its requests over HTTP; it does not import sglang."""

from rollouts.engines.http.connection import HttpLimits
from rollouts.engines.sglang.engine import SGLangEngine

__all__ = ["HttpLimits", "SGLangEngine"]
