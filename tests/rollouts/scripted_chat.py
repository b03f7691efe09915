"""A chat endpoint without a server."""

import asyncio
import copy
from typing import Any

from renderers import ParsedResponse
from rollouts.engines.protocol import ChatAnswer, ChatEngine, FinishReason


class ScriptedChat(ChatEngine):
    """Gives its answers in order, the last one for all further calls; an exception among them is raised.

    `calls` are the arguments of the calls, `most_running` is how many ran at once.
    """

    def __init__(self, *answers: str | ParsedResponse | Exception, finish: FinishReason = FinishReason.STOP) -> None:
        self.answers, self.finish = list(answers), finish
        self.calls: list[dict[str, Any]] = []
        self.running = self.most_running = 0

    async def chat(self, messages: Any, *, tools: Any = None, sampling: Any, seed: int | None = None) -> ChatAnswer:
        self.calls.append({"messages": copy.copy(messages), "tools": tools, "sampling": sampling, "seed": seed})
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        await asyncio.sleep(0)
        self.running -= 1
        if isinstance(answer, Exception):
            raise answer
        parsed = ParsedResponse(answer) if isinstance(answer, str) else answer
        return ChatAnswer(parsed.to_message(), parsed, self.finish, 10 * len(messages), 3, "scripted")

    async def close(self) -> None:
        pass
