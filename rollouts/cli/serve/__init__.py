"""`rollouts serve`: a model on this machine, or another engine, behind vLLM's routes."""
