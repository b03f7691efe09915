"""Chat completions in OpenAI's format, in front of any `Engine`; each session is recorded as a trajectory."""
