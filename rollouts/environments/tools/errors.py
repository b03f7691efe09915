"""Errors of tools."""

from __future__ import annotations

from collections.abc import Sequence

from rollouts.errors import RolloutsError


class ToolDefinitionError(RolloutsError):
    """A function cannot be a tool. `tool` is its name.

    Cure: give each parameter of the function a name and a type, and each tool a name of its own.
    """

    def __init__(self, tool: str, reason: str) -> None:
        self.tool = tool
        self.reason = reason
        super().__init__(f"tool {tool!r}: {reason}")


class ToolArgumentsError(RolloutsError):
    """The arguments of a call do not fit the tool. The model gets the text. `problems`: one for each wrong argument.

    Cure: none is needed: the model receives the text, and may call the tool again.
    """

    def __init__(self, tool: str, problems: Sequence[str]) -> None:
        self.tool = tool
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

    Cure: start what the tool needs again; the episode can be repeated.
    """


class ToolResultError(RolloutsError):
    """A tool returned a value that cannot be part of a message. The episode fails: the tool has a defect.

    Cure: let the tool return texts, JSON values, images (uint8 arrays, PIL images), or lists of them.
    """

    def __init__(self, tool: str, reason: str) -> None:
        self.tool = tool
        self.reason = reason
        super().__init__(f"tool {tool!r} {reason}")
