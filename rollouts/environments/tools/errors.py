"""Errors of tools: those that the model reads, and those that fail the episode."""

from collections.abc import Sequence

from rollouts.errors import RolloutsError


class ToolArgumentsError(RolloutsError):
    """The arguments of a call do not fit the tool. The model gets the text. `problems`: one for each wrong argument.

    Cure: none is needed: the model receives the text, and may call the tool again.
    """

    def __init__(self, tool: str, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__(f"invalid arguments for {tool}: {'; '.join(problems)}")


class ToolFailedError(RolloutsError):
    """A tool could not do what it was called for. A tool raises this error; the model gets `reason` alone.

    Cure: none is needed: the model receives the reason, and may do something else.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class ToolUnavailableError(RolloutsError):
    """A tool cannot be called at all, whatever the arguments: its server has ended, for example. The episode fails.

    Cure: start what the tool needs again (of an MCP server: check its command or URL, and read its log); the
    episode can be repeated.
    """


class ToolResultError(RolloutsError):
    """A tool returned a value that cannot be part of a message. The episode fails: the tool has a defect.

    Cure: let the tool return texts, JSON values, images (uint8 arrays, PIL images), sounds (`{"array":
    samples, "sampling_rate": 16000}`), or lists of them.
    """

    def __init__(self, tool: str, reason: str) -> None:
        super().__init__(f"tool {tool!r} {reason}")
