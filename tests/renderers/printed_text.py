"""Reading the provenance of printed text in tests."""

from renderers.template.chat_template import Printed
from renderers.template.traced import Origin


def owned(printed: Printed, owner: int) -> str:
    """The text that belongs to message `owner`."""
    return "".join(printed.text[s.start : s.end] for s in printed.segments if s.owner == owner)


def copied(printed: Printed) -> dict[Origin, str]:
    """Origin -> all text that was copied from it."""
    found: dict[Origin, str] = {}
    for start, end, _, origin in printed.segments:
        if origin is not None:
            found[origin] = found.get(origin, "") + printed.text[start:end]
    return found
