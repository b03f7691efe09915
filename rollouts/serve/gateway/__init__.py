"""The gateway answers OpenAI's chat completions with any `Engine`, and records sessions as trajectories."""
