"""The parser turns sampled ids into content, reasoning and tool calls."""

from renderers.errors import check_package_files

# Here because `import renderers` imports this package, and each family of PyPI's package imports its module of the same
# name: the error arises whichever of the two was installed last.
check_package_files()
