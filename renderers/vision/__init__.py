"""A processor makes pixels and counts of placeholders of media; each family of processors has a module."""
