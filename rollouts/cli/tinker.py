"""`rollouts tinker`: the Tinker API over a model that is trained and sampled here."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rollouts.cli.options import api_key_from_environment, check_engine
from rollouts.terminal.text import exit_with_error, print_line


class _EngineKind(StrEnum):
    """Engines that take the trainer's adapters."""

    LOCAL = "local"
    VLLM = "vllm"


def tinker(
    model: Annotated[Path, typer.Option(metavar="DIR", help="The directory of the base model.")],
    run: Annotated[
        Path, typer.Option(metavar="DIR", help="Where checkpoints and metrics are kept, also from run to run.")
    ] = Path("tinker-runs"),
    name: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="The name of the model in requests, besides its directory; may be repeated."),
    ] = None,
    host: Annotated[str, typer.Option(metavar="HOST", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="PORT", help="The port; 0: any free one.")] = 8000,
    api_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A file with the keys that requests may carry, one a line and user."),
    ] = None,
    engine: Annotated[
        _EngineKind,
        typer.Option(help="What samples. local: the trained model itself; vllm: servers at --base-url."),
    ] = _EngineKind.LOCAL,
    base_url: Annotated[
        str | None,
        typer.Option(metavar="URL[,URL]", help="With --engine vllm: the URLs of the vLLM servers, with --enable-lora."),
    ] = None,
    upstream_api_key_env: Annotated[
        str | None, typer.Option(metavar="VARIABLE", help="The environment variable with the key of --base-url.")
    ] = None,
    sleep: Annotated[
        bool, typer.Option("--sleep", help="With --engine vllm: it sleeps while training steps run on its device.")
    ] = False,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="Of the trainer: cpu, cuda:1...; default: a GPU, if any.")
    ] = None,
    bfloat16: Annotated[
        bool, typer.Option("--bfloat16", help="The base model in bfloat16; adapters are float32 in any case.")
    ] = False,
    tokens_per_pass: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens of a forward pass, which bound its memory.")
    ] = 8192,
    patches_per_pass: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Patches of images and frames of sounds of a forward pass, which bound its memory."
        ),
    ] = 32768,
    max_rank: Annotated[int, typer.Option(min=1, max=512, metavar="N", help="The largest rank of adapters.")] = 128,
    max_models: Annotated[int, typer.Option(min=1, metavar="N", help="How many models may be trained at once.")] = 32,
    max_sessions: Annotated[int, typer.Option(min=1, metavar="N", help="How many sessions may be open.")] = 64,
    session_minutes: Annotated[
        float, typer.Option(min=0.1, metavar="MINUTES", help="A session that sends nothing for as long ends.")
    ] = 15.0,
    check_mismatch: Annotated[
        bool,
        typer.Option("--check-mismatch", help="Report how far sampled log-probabilities are from the trainer's own."),
    ] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Keep what is sampled as trajectories, in trajectories.mmr of --run.")
    ] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write the metrics for TensorBoard, too.")] = False,
    wandb: Annotated[
        str | None, typer.Option(metavar="PROJECT", help="Send the metrics to this project of Weights & Biases, too.")
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST", help="Fetch images that requests name by https URLs of this host; may be repeated."
        ),
    ] = None,
    max_body_mb: Annotated[int, typer.Option(min=1, metavar="MB", help="The largest body of a request.")] = 256,
) -> None:
    """Train and sample a model through the Tinker API: clients and recipes of `tinker` run against this machine.

    Prints one line once it answers requests, and runs until Ctrl-C. Other machines reach it only with --host,
    and then every request needs a key of --api-key-file.
    """
    if missing := [file for file in ("config.json", "tokenizer.json") if not (model / file).is_file()]:
        exit_with_error(f"--model: {model} has no {missing[0]}; pass the directory of a checkpoint of transformers")
    from rollouts.serve.server import base_url as address
    from rollouts.serve.server import bound_socket, check_protection, read_keys, run_server
    from rollouts.tinker.backend import Limits
    from rollouts.tinker.model_app import model_app

    check_engine(engine, base_url)
    if sleep and base_url is None:
        exit_with_error("--sleep is of --engine vllm; the model itself needs no place of its own")
    keys = () if api_key_file is None else read_keys(api_key_file, prefix="tml-")  # clients take no others
    check_protection(host, keys[0] if keys else None)
    with bound_socket(host, port) as listener:  # first: a port in use is an error before the model is loaded
        app = model_app(
            model,
            run,
            names=name or (),
            keys=keys,
            hosts=(host,),
            vllm_urls=() if base_url is None else base_url.split(","),
            vllm_api_key=api_key_from_environment(upstream_api_key_env, "--upstream-api-key-env"),
            sleep=sleep,
            device=device,
            dtype="bfloat16" if bfloat16 else "float32",
            tokens_per_pass=tokens_per_pass,
            patches_per_pass=patches_per_pass,
            limits=Limits(
                sessions=max_sessions, models=max_models, rank=max_rank, session_seconds=60 * session_minutes
            ),
            check_mismatch=check_mismatch,
            record=record,
            tensorboard=tensorboard,
            wandb=wandb,
            image_hosts=allow_host or (),
            max_body_bytes=max_body_mb * 2**20,
        )
        url = address(listener)

        def report_ready() -> None:
            print_line(f"serving the Tinker API for {', '.join([*(name or ()), str(model)])} at {url} (Ctrl-C ends it)")

        run_server(app, listener, on_ready=report_ready)
