"""Rendering by a vLLM server, for models that have no local processor."""
