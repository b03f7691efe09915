"""vLLM as an engine: its wire, without vllm."""
