"""Inference engines: the protocol, and what implements it."""
