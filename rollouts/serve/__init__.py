"""`rollouts serve`: the gateway in front of an engine, as an ASGI application (extra `serve`)."""
