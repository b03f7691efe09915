"""Files that are encrypted to recipients of age (https://age-encryption.org), as clients ask for with a download."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from renderers.installation import install_command
from rollouts.errors import short_repr
from rollouts.serve.errors import RequestError

MAX_RECIPIENTS: Final = 10


def read_recipients(keys: Sequence[str]) -> list[Any]:
    """The recipients of public keys: `age1...`, or those of SSH. Raises `RequestError` (400)."""
    if not keys:
        return []
    if len(keys) > MAX_RECIPIENTS:
        raise RequestError(400, f"age_encryption_recipients has {len(keys)} keys; pass at most {MAX_RECIPIENTS}")
    try:
        import pyrage  # type: ignore[import-untyped]
    except ImportError:
        text = f"age_encryption_recipients needs pyrage where this server runs: {install_command('tinker')}"
        raise RequestError(400, f"{text}; or leave it out") from None
    recipients = []
    for number, key in enumerate(keys):
        kind = pyrage.ssh if key.startswith("ssh-") else pyrage.x25519
        try:
            recipients.append(kind.Recipient.from_str(key))
        except pyrage.RecipientError as error:
            text = f"age_encryption_recipients[{number}] is {short_repr(key)}: {error}"
            raise RequestError(400, f"{text}; pass a public key, age1... or of SSH") from error
    return recipients


def encrypt_files(directory: Path, recipients: Sequence[Any]) -> None:
    """Let `NAME.age` take the place of each file, which the recipients can decrypt."""
    import pyrage

    for path in [each for each in directory.rglob("*") if each.is_file()]:
        pyrage.encrypt_file(str(path), str(path.with_name(f"{path.name}.age")), recipients)
        path.unlink()
