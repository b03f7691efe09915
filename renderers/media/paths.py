"""File paths and `file:` URLs -> bytes, only below allowed directories."""

import errno
import os
import stat
from urllib.parse import unquote_to_bytes, urlsplit

from renderers.errors import MediaError, MediaFetchError, MediaLimitError, MediaPolicyError
from renderers.media.policy import MediaPolicy, can_be_path


def read_path(path: str | os.PathLike[str], policy: MediaPolicy) -> bytes:
    """The bytes of a regular file below one of the policy's `allowed_directories`.

    Raises `MediaPolicyError` for other places, whether or not there is a file; `MediaFetchError` for a file
    that is missing, unreadable or not a regular one, `MediaLimitError` beyond `max_bytes`, `MediaError`
    for an empty one.
    """
    root, names = _split_at_allowed_directory(path, policy)
    try:
        descriptor = _open_below(root, names)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise MediaFetchError(f"{_quoted(path)}: not a regular file")
            with open(descriptor, "rb", closefd=False) as file:
                # One byte more shows a file over the limit; the size that `fstat` says may change while it
                # is read.
                data = file.read(policy.max_bytes + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise MediaPolicyError(
                f"{_quoted(path)}: a circular symbolic link, or one that was created while the path was checked"
            ) from None
        raise MediaFetchError(f"{_quoted(path)}: {error.strerror}") from None
    if len(data) > policy.max_bytes:
        raise MediaLimitError(f"{_quoted(path)}: more than max_bytes={policy.max_bytes} of the policy")
    if not data:
        raise MediaError(f"{_quoted(path)}: the file is empty")
    return data


def path_of_url(url: str) -> str:
    """The path in a `file:` URL. Raises `MediaPolicyError` for a URL of another machine."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise MediaError("a file URL that cannot be read") from None
    if parts.netloc not in ("", "localhost"):
        raise MediaPolicyError("a file URL of another machine is not followed; write file:///path, or pass the bytes")
    return os.fsdecode(unquote_to_bytes(parts.path))


def _split_at_allowed_directory(path: str | os.PathLike[str], policy: MediaPolicy) -> tuple[str, list[str]]:
    """The allowed directory above the path, and the names below; errors tell nothing of other files."""
    name = os.fspath(path)
    if not policy.allowed_directories:
        raise MediaPolicyError(
            "a file path or file URL is not followed under this media policy; name the directory in "
            "load_renderer(media_policy=MediaPolicy(allowed_directories=...)), in the table `media` of a "
            "configuration of `rollouts run`, or pass the bytes, a PIL image or a data URL instead"
        )
    if not name or len(name) > 4096 or not can_be_path(name):
        raise MediaError(f"a text of {len(name)} characters that is neither a URL nor a path")
    real = os.path.realpath(name)
    for directory in policy.allowed_directories:
        root = os.path.realpath(directory)
        # With the separator: `/data2` is not below `/data`.
        below = real.removeprefix(root.rstrip(os.sep) + os.sep)
        if below != real:
            return root, below.split(os.sep)
    raise MediaPolicyError(
        "a file path outside the allowed_directories of the media policy is not followed; name its "
        "directory there, or pass the bytes"
    )


def _open_below(root: str, names: list[str]) -> int:
    """Open the path name by name and follow no symbolic link: links were resolved before, so a link found now
    was created since then and may lead outside.
    """
    if os.open not in os.supports_dir_fd:
        raise MediaPolicyError("this operating system cannot open a path safely; pass the bytes")
    to_directory = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW
    to_file = (
        os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOCTTY | os.O_NONBLOCK
    )  # opening a FIFO would wait for a writer
    directory = os.open(root, to_directory)
    try:
        for name in names[:-1]:
            subdirectory = os.open(name, to_directory, dir_fd=directory)
            os.close(directory)
            directory = subdirectory
        return os.open(names[-1], to_file, dir_fd=directory)
    finally:
        os.close(directory)


def _quoted(path: str | os.PathLike[str]) -> str:
    return f"{os.fspath(path)!r:.200}"
