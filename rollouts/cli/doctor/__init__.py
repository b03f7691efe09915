"""`rollouts doctor`: checks of a live server of vLLM or SGLang, with a cure for each failure."""
