"""The bodies of vLLM's requests and responses."""
