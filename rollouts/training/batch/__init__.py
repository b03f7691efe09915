"""Samples as tensors: padded or packed rows, and the tensors that differ from row to row."""
