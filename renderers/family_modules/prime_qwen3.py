"""The renderer class of `renderers.prime_qwen3` in PyPI's `renderers`; defined in `renderers.family_renderers`."""

from renderers.family_renderers import PrimeQwen3Renderer

__all__ = ["PrimeQwen3Renderer"]
