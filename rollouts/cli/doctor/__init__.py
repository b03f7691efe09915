"""`rollouts doctor` checks a live server of vLLM or SGLang, and names a cure for each failure."""
