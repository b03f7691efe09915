"""`rollouts traj ls|show|export|merge|repair`: the episodes of a trajectory file."""

from pathlib import Path
from typing import Annotated

import typer

from renderers.messages import Modality
from rollouts.cli.command_group import APP_SETTINGS, Command, CommandGroup
from rollouts.cli.traj.levels import Level, write_jsonl, write_parquet
from rollouts.cli.traj.media_files import FILE_COLUMNS
from rollouts.cli.traj.printing import describe_episode, media_text, print_episodes, tree_lines
from rollouts.files import made_directory, new_file
from rollouts.terminal.text import (
    counted,
    exit_with_error,
    print_error,
    print_json,
    print_line,
    print_note,
    printable_line,
)
from rollouts.trajectory_files import Episode, open_reader, read_episodes, trajectory_file
from rollouts.values import finite_number
from transport import RecordReader
from transport.records.rewriting import merge_record_files, repair_record_file

traj_commands = typer.Typer(cls=CommandGroup, **APP_SETTINGS)

File = Annotated[
    Path, typer.Argument(metavar="FILE", help="A trajectory file (.mmr), or the directory of a run or demo.")
]


@traj_commands.callback()
def commands() -> None:
    """List, show, export, merge and repair the episodes of trajectory files."""


@traj_commands.command(cls=Command)
def ls(
    file: File, as_json: Annotated[bool, typer.Option("--json", help="Print JSON: a list of objects.")] = False
) -> None:
    """List the episodes: id, group, turns, branches, tokens, sampled tokens, media, environment reward, ending.

    Exits with 1 if a record could not be read and was left out.
    """
    problems: list[str] = []
    with open_reader(file) as reader:
        described = [describe_episode(episode) for episode in read_episodes(reader, problems)]
    if as_json:
        finite = [{**one, "environment_reward": finite_number(one["environment_reward"])} for one in described]
        print_json(finite)  # JSON has no infinite numbers
    elif described:
        print_episodes(described)
    else:
        print_line(
            f"{file} holds no episodes; each is written when it ends, those of `rollouts serve` with their session"
        )
    for problem in problems:
        print_error(f"not listed: {problem}")
    if problems:
        raise typer.Exit(1)


@traj_commands.command(cls=Command)
def show(
    file: File,
    episode: Annotated[
        str, typer.Argument(metavar="EPISODE", help="Its id, or else its number in the list of `ls`.")
    ] = "0",
    ids: Annotated[bool, typer.Option("--ids", help="Show each node's token ids.")] = False,
    text: Annotated[bool, typer.Option("--text", help="Show the whole text of each message.")] = False,
) -> None:
    """Show one episode as a tree of nodes: role, tokens, weights, media, reward, text, tool calls."""
    problems: list[str] = []
    with open_reader(file) as reader:
        all_found = _find_episodes(reader, episode, problems)
        if not all_found:
            exit_with_error(
                "; ".join([f"{file} holds no episode {episode!r}; `rollouts traj ls` lists them", *problems[:1]])
            )
        if len(all_found) > 1:
            numbers = ", ".join(str(each.number) for each in all_found)
            print_note(f"the episodes {numbers} have this id; this is the first of them, name another by its number")
        found = all_found[0]
        described = describe_episode(found)
        name, group = printable_line(described["episode"]), printable_line(described["group"]) or "-"
        print_line(
            f"episode {name} of group {group}, seed {found.trajectory.seed}: "
            f"{counted(described['turns'], 'turn')}, {counted(described['branches'], 'branch', 'branches')}, "
            f"{counted(described['tokens'], 'token')}, {described['sampled']:,} sampled, "
            f"{media_text(described)}, environment reward {described['environment_reward']:.4g}, {described['status']}"
        )
        if found.trajectory.error:
            print_line(f"error: {printable_line(found.trajectory.error)}")
        for line in tree_lines(found.trajectory, ids=ids, text=text):
            print_line(line)


@traj_commands.command(cls=Command)
def export(
    file: File,
    jsonl: Annotated[
        Path | None, typer.Option(metavar="NEW_FILE", help="Write JSON to this new file, a row a line.")
    ] = None,
    parquet: Annotated[Path | None, typer.Option(metavar="NEW_FILE", help="Write a table to this new file.")] = None,
    level: Annotated[
        Level,
        typer.Option(help="What a row is."),
    ] = Level.EPISODE,
    images: Annotated[
        bool,
        typer.Option("--images", help=f"Add the images to the Parquet file, as the column {FILE_COLUMNS['image']}."),
    ] = False,
    sounds: Annotated[
        bool,
        typer.Option("--sounds", help=f"Add the sounds to the Parquet file, as the column {FILE_COLUMNS['audio']}."),
    ] = False,
) -> None:
    """Write a row for each episode, turn or node as JSON lines or Parquet; of a run's directory with its metrics.jsonl.

    Exits with 1 if a record could not be read or exported and was left out.
    """
    if jsonl is None and parquet is None:
        exit_with_error("no output file given: pass --jsonl NEW_FILE, --parquet NEW_FILE, or both")
    chosen: dict[Modality, bool] = {"image": images, "audio": sounds}
    modalities = [modality for modality, is_chosen in chosen.items() if is_chosen]
    if modalities and jsonl is not None:
        exit_with_error(f"{'--images' if images else '--sounds'} is for --parquet alone; leave out --jsonl")
    all_problems: list[str] = []
    for out in filter(None, (jsonl, parquet)):
        problems: list[str] = []
        notes: list[str] = []
        with made_directory(out.parent, of=out), new_file(out) as path:
            if out is jsonl:
                written = write_jsonl(file, level, path, problems)
            else:
                written = write_parquet(file, level, path, problems, notes, modalities=modalities)
        print_line(f"{counted(written, level.value)} in {out}")
        for note in notes:
            print_note(f"values of several types, written as JSON text: {note}")
        for problem in problems:
            print_error(f"not exported: {problem}")
        all_problems += problems
    if all_problems:
        raise typer.Exit(1)


@traj_commands.command(cls=Command)
def merge(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="Trajectory files, in the order of the new file.")
    ],
    out: Annotated[Path, typer.Option(metavar="NEW_FILE", help="The new file.")],
) -> None:
    """Write the records of several files into one, each medium once.

    Exits with 1 if a file ends with an incomplete record, which is left out.
    """
    print_line(f"{counted(merge_record_files([trajectory_file(file) for file in files], out), 'record')} in {out}")
    truncated = False
    for file in files:
        with open_reader(file) as reader:
            if reader.truncated_bytes:
                truncated = True
                print_error(f"not merged: the last {reader.truncated_bytes} bytes of {file} are an incomplete record")
    if truncated:
        raise typer.Exit(1)


@traj_commands.command(cls=Command)
def repair(file: File, out: Annotated[Path, typer.Option(metavar="NEW_FILE", help="The new file.")]) -> None:
    """Write the complete records, in order, to a new file; name the others. FILE is not changed."""
    with open_reader(file):  # another kind of file is an error of this command's
        pass
    report = repair_record_file(trajectory_file(file), out)
    for dropped in report.dropped:
        print_line(f"record {dropped.index}: {dropped.reason}")
    print_line(
        f"{counted(report.kept, 'record')} in {out}; {len(report.dropped)} dropped, "
        f"{report.truncated_bytes} unfinished bytes cut off"
    )


def _find_episodes(reader: RecordReader, name: str, problems: list[str]) -> list[Episode]:
    """The episodes with this id, else that with this number."""
    found = [
        episode
        for episode in read_episodes(reader, problems)
        if name in (episode.trajectory.episode_id, str(episode.number))
    ]
    return [episode for episode in found if episode.trajectory.episode_id == name] or found
