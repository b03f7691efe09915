"""Pixels and placeholder counts, one module a processor family."""
