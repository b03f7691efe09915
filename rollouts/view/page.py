"""Pages of the viewer, as files and as parts of other pages."""

import base64
import hashlib
import html
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import resources
from pathlib import Path
from typing import IO, Any

from renderers import TemplateRenderer
from rollouts.compared_tokens import ComparedTokens
from rollouts.errors import RolloutsError
from rollouts.files import errors_name, replaced_file
from rollouts.trajectory.tree import Trajectory
from rollouts.view.episode_data import encoded_json, episode_payload, summary
from rollouts.view.media_frames import display_medium
from rollouts.view.trainer_logprobs import TrainerLogprobs

# The HTML around the data: a document that runs its own script and style, and requests nothing else.


def page_start(title: str, *, connects: bool) -> bytes:
    """The document up to its data. Blocks of data and `PAGE_END` follow. `connects`: it may fetch from its own origin.

    The content security policy allows the script and the style of this page by their hashes, images and
    sounds from memory, and nothing else; texts cannot become markup, because the policy forbids to assign
    markup.
    """
    script, style = static_file("rollouts.view", "viewer.js"), static_file("rollouts.view", "viewer.css")
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src '{content_hash(script)}'",
            f"style-src '{content_hash(style)}'",
            "img-src blob: data:",
            "media-src blob:",
            "connect-src 'self'" if connects else "connect-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ]
    )
    return (
        document_head(html.escape(title), policy, style)
        + b"<noscript>This page shows trajectories with its own script. Allow scripts to read it.</noscript>\n"
    )


def document_head(escaped_title: str, policy: str, style: bytes) -> bytes:
    """A document up to the beginning of its body, with a content security policy."""
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n<meta name="color-scheme" content="light dark">\n'
        f"<title>{escaped_title}</title>\n<style>"
    )
    return head.encode("utf-8", "replace") + style + b"</style>\n</head>\n<body>\n"


def script_block() -> bytes:
    """The page's program. It reads the index from a block before it, and other blocks as they are parsed."""
    return b"".join([b"<script>", static_file("rollouts.view", "viewer.js"), b"</script>\n"])


PAGE_END = b"</body>\n</html>\n"


def json_block(name: str, value: Any) -> bytes:
    """A block of JSON. `name` is its id in the document."""
    text = encoded_json(value).replace(b"<", b"\\u003c").replace(b">", b"\\u003e").replace(b"&", b"\\u0026")
    return _block(name, "application/json", text)


def binary_block(name: str, data: bytes) -> bytes:
    """A block of bytes, in base64."""
    return _block(name, "text/plain", base64.b64encode(data))


def _block(name: str, media_type: str, text: bytes) -> bytes:
    return b"".join([f'<script type="{media_type}" id="{html.escape(name)}">'.encode(), text, b"</script>\n"])


def content_hash(content: bytes) -> str:
    """The hash of a script or style, as a content security policy names it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}"


@cache
def static_file(package: str, name: str) -> bytes:
    """A file of the folder `static` of a package; those of the viewer are built from `rollouts/view/frontend`."""
    return resources.files(package).joinpath("static", name).read_bytes().strip()


def write_html(
    trajectories: Iterable[Trajectory],
    path: str | os.PathLike[str],
    *,
    renderer: TemplateRenderer | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    compared: ComparedTokens | TrainerLogprobs | None = None,
    title: str = "",
    problems: Sequence[str] = (),
) -> int:
    """Write the episodes to one HTML file, which replaces a file of that name; return how many there are.

    With the model's `renderer` the page has the text of each token, the status of each tool call, and the
    differences between each branch and a full render of its messages, with `tools` if the episodes had any.
    `compared` gives the trainer's log-probabilities (`rollouts.training.mismatch.compared.compare_tokens`);
    without it they are read from the extra `trainer_logprobs`. `problems` are lines
    that the page shows about the whole file. Memory holds one episode at a time, as far as `trajectories`
    does.

    Raises `OSError`, and `RolloutsError` where the compared tokens of a batch are of a sample that is no
    branch of these episodes.
    """
    path = Path(path)
    if compared is None or isinstance(compared, TrainerLogprobs):
        trainer = compared
    else:
        trainer = TrainerLogprobs()
        trainer.add(compared)
    rows: list[dict[str, Any]] = []
    with _scratch_file(path) as data:
        written: set[str] = set()
        for number, trajectory in enumerate(trajectories):
            logprobs = None if trainer is None else trainer.of(trajectory)
            rows.append(summary(trajectory, number, logprobs))
            with errors_name(path):
                _write_media(trajectory, written, data)
            payload = episode_payload(trajectory, number, renderer=renderer, tools=tools, trainer_logprobs=logprobs)
            with errors_name(path):
                data.write(binary_block(f"episode-{number}", payload))
        if trainer is not None and trainer is not compared and trainer.unused:
            raise RolloutsError(
                f"the compared tokens are of the sample {min(trainer.unused)!r}, which is no branch of the "
                "given episodes; samples of `samples_from_trajectory` are named EPISODE/LEAF. Pass the "
                "episodes that the batch was made of."
            )
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


def _write_media(trajectory: Trajectory, written: set[str], data: IO[bytes]) -> None:
    """Write the media that no earlier episode has, before the payload of the first episode that needs them."""
    for reference in trajectory.all_media():
        name = f"{reference.modality}-{reference.source.digest}"  # a file may be used as a video and as a sound
        if name not in written:
            written.add(name)
            data.write(json_block(name, display_medium(reference.source, reference.modality)))
