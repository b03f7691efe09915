"""The HTML around the data: a document that runs its own script and style, and requests nothing else."""

from __future__ import annotations

import base64
import hashlib
import html
from functools import cache
from importlib import resources
from typing import Any

from rollouts.view.episode_data import encoded_json


def page_start(title: str, *, connects: bool) -> bytes:
    """The document up to its data. Blocks of data and `PAGE_END` follow. `connects`: it may fetch from its own origin.

    The content security policy allows the script and the style of this page by their hashes, images from memory, and
    nothing else; texts cannot become markup, because the policy forbids to assign markup.
    """
    script, style = _static("viewer.js"), _static("viewer.css")
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src '{_hash(script)}'",
            f"style-src '{_hash(style)}'",
            "img-src blob: data:",
            f"connect-src {_own_origin(connects)}",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ]
    )
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n<meta name="color-scheme" content="light dark">\n'
        f"<title>{html.escape(title)}</title>\n"
    )
    return b"".join(
        [
            head.encode("utf-8", "replace"),
            b"<style>",
            style,
            b"</style>\n</head>\n<body>\n",
            b"<noscript>This page shows trajectories with its own script. Allow scripts to read it.</noscript>\n",
        ]
    )


def script_block() -> bytes:
    """The page's program. It reads the index from a block before it, and other blocks as they are parsed."""
    return b"".join([b"<script>", _static("viewer.js"), b"</script>\n"])


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


def _own_origin(connects: bool) -> str:
    return "'self'" if connects else "'none'"


def _hash(content: bytes) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}"


@cache
def _static(name: str) -> bytes:
    """A built file of the front end (`rollouts/view/frontend`)."""
    return resources.files("rollouts.view").joinpath("static", name).read_bytes().strip()
