"""The API key of a server, read from an environment variable that a command option names."""

from __future__ import annotations

import os

from rollouts.engines.vllm.http.server_address import redacted
from rollouts.terminal.text import exit_with_error


def api_key_from_environment(variable: str | None) -> str | None:
    """Return the key; None without a variable. Exits with an error if the variable is not set."""
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        exit_with_error(f"--api-key-env {variable}: this environment variable is not set; put the server's key in it")
    return key


def api_key_advice(url: str, variable: str | None) -> str:
    """Return what to do after a server has refused the key, or the request without a key."""
    if variable is None:
        return (
            f"{redacted(url)} requires an API key: put the key in an environment variable and pass the name of the "
            "variable, --api-key-env VLLM_API_KEY"
        )
    return f"{redacted(url)} refuses the API key in {variable}: set it to the key of `vllm serve --api-key`"
