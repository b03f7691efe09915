"""Inference engines: the protocol and its implementations."""
