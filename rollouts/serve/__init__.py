"""`rollouts serve`: an engine behind vLLM's routes, as an ASGI application (extra `serve`)."""
