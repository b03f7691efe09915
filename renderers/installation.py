"""The command that installs an extra of mmrollouts beside the installed one."""

from __future__ import annotations

import json
import re


def install_command(extra: str) -> str:
    """The `pip install` command of an extra, or of several with commas between them, for a shell.

    It names the checkout of an editable installation: `pip install -e "/path/of/checkout[audio]"`. For every
    other one it is `pip install "mmrollouts[audio]"`: pip finds mmrollouts installed, and adds what the extra
    needs.
    """
    checkout = _checkout()
    if checkout is None:
        return f'pip install "mmrollouts[{extra}]"'
    escaped = re.sub(r'(["$`\\])', r"\\\1", checkout)
    return f'pip install -e "{escaped}[{extra}]"'


def _checkout() -> str | None:
    """The directory of an editable installation (PEP 610), None for every other one."""
    # Slow to import, and for errors alone.
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:
        text = distribution("mmrollouts").read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    origin = json.loads(text or "{}")
    if not origin.get("dir_info", {}).get("editable"):
        return None
    return url2pathname(urlsplit(origin["url"]).path)
