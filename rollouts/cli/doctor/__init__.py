"""`rollouts doctor`: checks of a live vLLM server, with a cure for each failure."""
