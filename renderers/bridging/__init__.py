"""Extending a sampled prefix to the next turn's prompt, and asking the template whether that is allowed."""
