"""The renderer class of `renderers.qwen3_vl` in PyPI's `renderers`; defined in `renderers.family_renderers`."""

from renderers.family_renderers import Qwen3VLRenderer

__all__ = ["Qwen3VLRenderer"]
