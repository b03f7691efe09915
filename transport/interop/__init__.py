"""Inline tensors and step lists in the forms of other libraries."""
