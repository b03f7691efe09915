"""`rollouts serve`: chat completions in front of an engine, recorded."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from rollouts.cli.options import MODEL_OPTIONS, SET, changes_of, model_changes, takes
from rollouts.cli.run.command import exit_on_problems
from rollouts.terminal.text import exit_with_error, print_line

if TYPE_CHECKING:
    from renderers import TemplateRenderer
    from rollouts.engines.protocol import Engine
    from rollouts.run_config.config_file import EngineFile

_OPTIONS: Final = (*MODEL_OPTIONS, SET)


@takes(*_OPTIONS)
def serve(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help="A configuration file of `rollouts run`, whose engine is served."),
    ] = None,
    host: Annotated[str, typer.Option(metavar="HOST", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="PORT", help="The port; 0: any free one.")] = 8000,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The name of the model in requests; default: the directory's.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with the key that requests must carry.")
    ] = None,
    max_body_mb: Annotated[int, typer.Option(min=1, metavar="MB", help="The largest body of a request.")] = 256,
    record: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Append the trajectory of each chat session that ends to this record file."),
    ] = None,
    any_model: Annotated[bool, typer.Option("--any-model", help="Answer requests whatever model they name.")] = False,
    ignore_tool: Annotated[
        list[str] | None,
        typer.Option(metavar="TYPE", help="Leave tools of this type, as web_search, out of requests; may come twice."),
    ] = None,
    **values: Any,
) -> None:
    """Serve OpenAI's chat completions and Responses, and Anthropic's Messages, and record them as trajectories.

    Prints one line once it answers requests, and runs until Ctrl-C. Other machines reach it only with --host,
    and then every request needs the key of --api-key-file.
    """
    from rollouts.serve.app import create_app
    from rollouts.serve.errors import SessionNotDeliveredError
    from rollouts.serve.gateway.limits import GatewayLimits
    from rollouts.serve.gateway.routes import Gateway
    from rollouts.serve.server import base_url as address
    from rollouts.serve.server import bound_socket, check_protection, read_keys, run_server
    from transport import RecordWriter, TransportError

    api_key = None if api_key_file is None else read_keys(api_key_file, most=1)[0]
    check_protection(host, api_key)
    with exit_on_problems():
        file = _configuration(config, values)
    with bound_socket(host, port) as listener, ExitStack() as at_end:  # before the model is loaded
        try:
            writer = None if record is None else at_end.enter_context(RecordWriter(record))
        except TransportError as refusal:
            exit_with_error(f"{record}: {refusal}")
        with exit_on_problems():
            engine, renderer = _engine(file)
        name = name or _name(file)
        gateway = Gateway(
            engine,
            renderer,
            model=None if any_model else name,
            limits=GatewayLimits(max_body_bytes=max_body_mb * 2**20),
            ignored_tools=ignore_tool or (),
            on_session_end=None if writer is None else writer.append,
        )
        undelivered: list[SessionNotDeliveredError] = []

        async def close_gateway() -> None:
            try:
                await gateway.close()
            except SessionNotDeliveredError as error:
                undelivered.append(error)

        on_shutdown = [close_gateway, engine.close]
        app = create_app(gateway, api_key=api_key, hosts=(host,), on_shutdown=on_shutdown)
        url = address(listener)

        def report_ready() -> None:
            print_line(f"serving {name} ({_description(file)}) at {url} (Ctrl-C ends it)")

        try:
            run_server(app, listener, on_ready=report_ready)
        finally:  # also after Ctrl-C, which then must not look like an end with everything recorded
            for error in undelivered:
                exit_with_error(f"{record}: {', '.join(error.session_ids)} not recorded: {error.reason}")


def _configuration(path: Path | None, values: dict[str, Any]) -> EngineFile:
    """The configuration of the command. Raises `RunConfigError`."""
    from rollouts.run_config.config_file import checked_engine_config, engine_kind, read_values

    written = {} if path is None else read_values(path)
    model = model_changes(values, configured=None if path is None else engine_kind(written))
    return checked_engine_config(path or Path("options"), written, [*model, *changes_of(_OPTIONS, values)])


def _engine(file: EngineFile) -> tuple[Engine, TemplateRenderer]:
    """The engine, which is connected, and its renderer. Raises `RunConfigError`."""
    from rollouts.engines.protocol import Engine
    from rollouts.run_config.engines import connect, engine_factory
    from rollouts.run_config.parts import make_renderer

    renderer = make_renderer(file, offline=False)
    if renderer is None:
        raise file.error(("engine",), "a chat endpoint gives no tokens, which are what is recorded; name another kind")
    engine = engine_factory(file, renderer)()
    assert isinstance(engine, Engine)  # only a chat endpoint is another kind of engine
    asyncio.run(connect(file, engine))
    return engine, renderer


def _name(file: EngineFile) -> str:
    """The name of the model: that of its directory, or of its repository."""
    section = file.config.renderer
    assert section is not None
    directory = file.resolve(section.model)
    return directory.resolve().name if directory.is_dir() else section.model


def _description(file: EngineFile) -> str:
    from rollouts.run_config.sections import ServedSection

    engine = file.config.engine
    return f"{engine.kind} at {', '.join(engine.addresses)}" if isinstance(engine, ServedSection) else engine.kind
