"""Episodes as one HTML file that needs no other file and no network."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from renderers import TemplateRenderer
from rollouts.replaced_file import errors_name, replaced_file
from rollouts.trajectory.tree import Trajectory
from rollouts.view.episode_data import episode_payload, summary
from rollouts.view.errors import ComparedNamesError
from rollouts.view.media_frames import DEFAULT_IMAGE_SIDE, display_medium
from rollouts.view.page import PAGE_END, binary_block, json_block, page_start, script_block
from rollouts.view.trainer_logprobs import TrainerLogprobs, TrainerTokens

if TYPE_CHECKING:
    from rollouts.training.mismatch.compared import ComparedTokens


def write_html(
    trajectories: Iterable[Trajectory],
    path: str | os.PathLike[str],
    *,
    renderer: TemplateRenderer | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    compared: ComparedTokens | TrainerTokens | None = None,
    title: str = "",
    problems: Sequence[str] = (),
    image_side: int = DEFAULT_IMAGE_SIDE,
    allow_unused: bool = False,
) -> int:
    """Write the episodes to one HTML file, which replaces a file of that name; return how many there are.

    With the model's `renderer` the page has the text of each token, the status of each tool call, and the differences
    between each branch and a full render of its messages, with `tools` if the episodes had any. `compared` gives the
    trainer's log-probabilities (`rollouts.training.compare_tokens`); without it they are read from the extra
    `trainer_logprobs`. Images are reduced to `image_side` pixels on their longer side. `problems` are lines that the
    page shows about the whole file. Memory holds one episode at a time, as far as `trajectories` does.

    Raises `OSError`, and `ComparedNamesError` where `compared` has a sample that is no branch of these episodes, unless
    `allow_unused`.
    """
    path = Path(path)
    trainer = None if compared is None else TrainerLogprobs(compared)
    rows: list[dict[str, Any]] = []
    with _scratch_file(path) as data:
        written: set[str] = set()
        for number, trajectory in enumerate(trajectories):
            logprobs = None if trainer is None else trainer.of(trajectory)
            rows.append(summary(trajectory, number, logprobs))
            with errors_name(path):
                _write_media(trajectory, written, data, image_side)
            payload = episode_payload(trajectory, number, renderer=renderer, tools=tools, trainer_logprobs=logprobs)
            with errors_name(path):
                data.write(binary_block(f"episode-{number}", payload))
        if trainer is not None and trainer.unused and not allow_unused:
            raise ComparedNamesError(min(trainer.unused))
        title = title or (rows[0]["id"] if len(rows) == 1 else f"{len(rows)} episodes")
        index = {"title": title, "episodes": rows, "problems": list(problems), "live": False}
        with errors_name(path):
            data.seek(0)  # writes what is buffered
        with replaced_file(path) as out:
            out.write(page_start(title, connects=False))
            out.write(json_block("index", index))
            out.write(script_block())
            shutil.copyfileobj(data, out, 1 << 20)
            out.write(PAGE_END)
    return len(rows)


@contextmanager
def _scratch_file(path: Path) -> Iterator[IO[bytes]]:
    """A file without a name beside `path`: the directory of temporary files may be small, or memory."""
    with errors_name(path):
        data: IO[bytes] = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115  closed below
    try:
        yield data
    finally:
        with errors_name(path):  # what is buffered is written now
            data.close()


def _write_media(trajectory: Trajectory, written: set[str], data: IO[bytes], image_side: int) -> None:
    """Write the media that no earlier episode has, before the payload of the first episode that needs them."""
    for reference in trajectory.all_media():
        digest = reference.source.digest
        if digest not in written:
            written.add(digest)
            medium = display_medium(reference.source, reference.modality, image_side)
            data.write(json_block(f"media-{digest}", medium))
