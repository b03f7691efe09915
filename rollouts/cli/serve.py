"""`rollouts serve`: chat completions in front of an engine, recorded; and the API keys of servers."""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from rollouts.engines.http.address import redacted
from rollouts.terminal.text import exit_with_error, print_line

if TYPE_CHECKING:
    from rollouts.engines.protocol import Engine
    from rollouts.engines.server_kinds import ServerKind


def api_key_from_environment(variable: str | None, option: str = "--api-key-env") -> str | None:
    """Return the key; None without a variable. Exits with an error, which names the option, if it is not set."""
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        exit_with_error(f"{option} {variable}: this environment variable is not set; put the server's key in it")
    return key


def api_key_advice(url: str, variable: str | None) -> str:
    """Return what to do after a server has refused the key, or the request without a key."""
    if variable is None:
        return (
            f"{redacted(url)} requires an API key: put the key in an environment variable and pass the name of the "
            "variable, --api-key-env VLLM_API_KEY"
        )
    return f"{redacted(url)} refuses the API key in {variable}: set it to the key of `vllm serve --api-key`"


# `rollouts serve --model DIR`: the gateway in front of an engine.


class TrainedEngineKind(StrEnum):
    """Of a command that trains: engines that take the trainer's weights or adapters."""

    LOCAL = "local"
    VLLM = "vllm"


class EngineKind(StrEnum):
    LOCAL = "local"
    VLLM = "vllm"
    SGLANG = "sglang"


def check_engine(engine: str, base_url: str | None) -> None:
    """Exit with an error where an engine that is a server has no URL, and where the local one has one."""
    if (engine != "local") != bool(base_url):
        kind = "vllm" if engine == "local" else engine
        exit_with_error(f"--base-url URL and --engine {kind} belong together: the engine is the server at that URL")


def serve(
    model: Annotated[Path, typer.Option(metavar="DIR", help="The directory of the model.")],
    host: Annotated[str, typer.Option(metavar="HOST", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="PORT", help="The port; 0: any free one.")] = 8000,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The name of the model in requests; default: the directory's.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with the key that requests must carry.")
    ] = None,
    engine: Annotated[
        EngineKind,
        typer.Option(help="local: transformers in this process; vllm or sglang: the server of its kind at --base-url."),
    ] = EngineKind.LOCAL,
    base_url: Annotated[
        str | None, typer.Option(metavar="URL", help="With --engine vllm or sglang: the URL of the server.")
    ] = None,
    upstream_api_key_env: Annotated[
        str | None, typer.Option(metavar="VARIABLE", help="The environment variable with the key of --base-url.")
    ] = None,
    max_body_mb: Annotated[int, typer.Option(min=1, metavar="MB", help="The largest body of a request.")] = 256,
    record: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Append the trajectory of each chat session that ends to this record file."),
    ] = None,
    any_model: Annotated[
        bool, typer.Option("--any-model", help="Answer chat completions whatever model they name.")
    ] = False,
) -> None:
    """Serve OpenAI's chat completions in front of an engine, and record them as trajectories.

    Prints one line once it answers requests, and runs until Ctrl-C. Other machines reach it only with --host, and then
    every request needs the key of --api-key-file.
    """
    from renderers import load_renderer
    from rollouts.engines.server_kinds import server_engine
    from rollouts.serve.app import create_app
    from rollouts.serve.errors import SessionNotDeliveredError
    from rollouts.serve.gateway.limits import GatewayLimits
    from rollouts.serve.gateway.routes import Gateway
    from rollouts.serve.server import base_url as address
    from rollouts.serve.server import bound_socket, check_protection, read_api_key, run_server
    from transport import RecordWriter

    check_engine(engine, base_url)
    api_key = None if api_key_file is None else read_api_key(api_key_file)
    check_protection(host, api_key)
    with bound_socket(host, port) as listener:  # first: a port in use is an error before the model is loaded
        if not model.is_dir():
            exit_with_error(
                f"--model: there is no directory {model}; pass that of the model, with tokenizer.json and "
                "chat_template.jinja"
            )
        renderer = load_renderer(model)
        if engine is EngineKind.LOCAL or base_url is None:
            from rollouts.engines.local import LocalEngine

            served: Engine = LocalEngine.from_pretrained(model, weight_version="default")
            name, description = name or model.resolve().name, "transformers"
        else:
            upstream_key = api_key_from_environment(upstream_api_key_env, "--upstream-api-key-env")
            upstream = server_engine(cast("ServerKind", engine.value), base_url, api_key=upstream_key)
            name = name or asyncio.run(upstream.capabilities()).model
            served, description = upstream, f"{engine} at {redacted(base_url)}"
        with ExitStack() as at_end:
            on_session_end = None if record is None else at_end.enter_context(RecordWriter(record)).append
            gateway = Gateway(
                served,
                renderer,
                model=None if any_model else name,
                limits=GatewayLimits(max_body_bytes=max_body_mb * 2**20),
                on_session_end=on_session_end,
            )
            undelivered: list[SessionNotDeliveredError] = []

            async def close_gateway() -> None:
                try:
                    await gateway.close()
                except SessionNotDeliveredError as error:
                    undelivered.append(error)

            on_shutdown = [close_gateway, served.close]
            app = create_app(gateway, api_key=api_key, hosts=(host,), on_shutdown=on_shutdown)
            url = address(listener)

            def report_ready() -> None:
                print_line(f"serving {name} ({description}) at {url} (Ctrl-C ends it)")

            try:
                run_server(app, listener, on_ready=report_ready)
            finally:  # also after Ctrl-C, which then must not look like an end with everything recorded
                for error in undelivered:
                    exit_with_error(f"{record}: {', '.join(error.session_ids)} not recorded: {error.reason}")
