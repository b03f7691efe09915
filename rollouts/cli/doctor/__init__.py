"""`rollouts doctor`: what a person wants to know of a live vLLM server before trusting its numbers."""
