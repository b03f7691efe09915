"""`rollouts demo`: a project in which a tiny vision-language model learns to read digits, written and trained."""

import json
import shlex
import shutil
from contextlib import ExitStack
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from renderers.installation import install_command
from rollouts.cli.options import TrainedEngineKind, check_engine
from rollouts.cli.run.command import exit_on_problems
from rollouts.cli.train import train_from
from rollouts.terminal.interrupts import defer_interrupts
from rollouts.terminal.text import print_line

_FILES = ("digits.py", "train.toml")


def demo(
    seed: Annotated[
        int, typer.Option(min=0, metavar="N", help="Decides the first weights, the digits, and how samples are drawn.")
    ] = 0,
    out: Annotated[Path, typer.Option(metavar="DIRECTORY", help="The directory of the project.")] = Path("demo-out"),
    engine: Annotated[
        TrainedEngineKind, typer.Option(help="Where completions are sampled: in this process, or by a vLLM server.")
    ] = TrainedEngineKind.LOCAL,
    base_url: Annotated[
        str,
        typer.Option(
            metavar="URL", help="The URL of the vLLM server, which must serve the directory `model` of --out."
        ),
    ] = "",
    api_key_env: Annotated[
        str | None, typer.Option(metavar="VARIABLE", help="The environment variable with the server's key.")
    ] = None,
) -> None:
    """Watch a tiny vision-language model learn to read digits, from random weights, on this machine.

    Writes a project of two files and the model, and runs `rollouts train train.toml` in it.
    """
    from rollouts.run_config.config_file import read_config

    missing = [name for name in ("torch", "transformers", "sklearn") if find_spec(name) is None]
    if missing:
        print_line(f"the demo needs {', '.join(missing)}: {install_command('demo')}")
        raise typer.Exit(2)
    check_engine(engine, base_url)
    print_line("importing torch and making a model of random weights")
    _write(out, seed)
    config = out / "train.toml"
    text = config.read_text("utf-8").replace("seed = 0 ", f"seed = {seed} ")
    if base_url:
        local = next(part for part in text.split("\n\n") if part.startswith("[engine]"))
        key = "" if api_key_env is None else f"api_key_env = {json.dumps(api_key_env)}\n"
        text = text.replace(local, f'[engine]\nkind = "vllm"\nbase_url = {json.dumps(base_url)}\n{key}')
    config.write_text(text, "utf-8")
    with exit_on_problems():
        train_from(read_config(config), shlex.join(["rollouts", "train", str(config), "--resume"]))
    print_line(f"the project is {out}: {', '.join(_FILES)}, model; change it, and train again with `rollouts train`")


def _write(out: Path, seed: int) -> None:
    """Write the project, in place of an earlier one. Raises `OSError`, and `CommandFileError` while it is trained."""
    from rollouts.run_config.output import OutputDirectory

    out.mkdir(parents=True, exist_ok=True)
    if (earlier := out / "out").exists():
        if (output := OutputDirectory(earlier)).training_lock.exists():
            with ExitStack() as held:
                output.lock_training(held)
        print_line(f"in {earlier} is an earlier run, which is replaced (--out names another directory)")
        shutil.rmtree(earlier)
    for name in _FILES:
        (out / name).write_text(files("rollouts.demo").joinpath(name).read_text("utf-8"), "utf-8")
    with defer_interrupts():
        from rollouts.testing import tiny_qwen3_vl
    tiny_qwen3_vl(out / "model", seed)
