"""APIs of OpenAI and Anthropic in front of any `Engine`; each session of an agent is recorded as a trajectory."""
