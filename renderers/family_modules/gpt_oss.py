"""The renderer class of `renderers.gpt_oss` in PyPI's `renderers`; defined in `renderers.family_renderers`."""

from renderers.family_renderers import GptOssRenderer

__all__ = ["GptOssRenderer"]
