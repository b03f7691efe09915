"""`rollouts demo`: a project in which a tiny vision-language model learns to read digits, written and trained."""

import shlex
import shutil
from contextlib import ExitStack
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from renderers.installation import install_command
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
) -> None:
    """Watch a tiny vision-language model learn to read digits, from random weights, on this machine.

    Writes a project of two files and the model, and runs `rollouts train train.toml` in it.
    """
    from rollouts.run_config.config_file import read_config

    missing = [name for name in ("torch", "transformers", "sklearn") if find_spec(name) is None]
    if missing:
        print_line(f"the demo needs {', '.join(missing)}: {install_command('demo')}")
        raise typer.Exit(2)
    print_line("importing torch and making a model of random weights")
    _write(out, seed)
    config = out / "train.toml"
    config.write_text(config.read_text("utf-8").replace("seed = 0 ", f"seed = {seed} "), "utf-8")
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
