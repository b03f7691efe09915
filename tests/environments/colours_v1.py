"""A taskset of verifiers: a user shows an image of one colour in each turn. Its harness runs in this process."""

import asyncio
import base64
import io

import verifiers.v1 as vf
from openai import APIStatusError, AsyncOpenAI
from PIL import Image
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}


def image_url(colour: str) -> str:
    file = io.BytesIO()
    Image.new("RGB", (32, 32), COLOURS[colour]).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


LOOK = {
    "type": "function",
    "function": {"name": "look", "description": "Show a colour.", "parameters": {"type": "object", "properties": {}}},
}


class ColoursHarness(vf.Harness[vf.HarnessConfig]):
    """Calls the model for each turn of the user, and after each call of the tool, through verifiers' own server."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system_prompt, prompt = self.resolve_prompt(data)
        messages = [message_to_wire(message) for message in prompt]
        if data.forgets:
            messages = messages[-1:]
        if system_prompt:
            messages.insert(0, {"role": "system", "content": system_prompt})
        tools = {"tools": [LOOK]} if data.tool else {}
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=600) as client:
            try:
                while True:
                    request = {"model": ctx.model, "messages": messages, **tools}
                    calls = [client.chat.completions.create(**request) for _ in range(data.asks)]
                    answer = (await asyncio.gather(*calls))[0].choices[0].message
                    if not answer.tool_calls:
                        break
                    image = [{"type": "image_url", "image_url": {"url": image_url("blue")}}]
                    results = [
                        {"role": "tool", "tool_call_id": call.id, "content": image} for call in answer.tool_calls
                    ]
                    messages = [*messages, answer.model_dump(exclude_none=True), *results]
            except APIStatusError as error:
                return ProgramResult(1, "", str(error))
        return ProgramResult(0, "", "")


class ColoursData(vf.TaskData):
    colours: list[str]
    tool: bool = False
    """The harness gives the model a tool, whose result is an image."""
    forgets: bool = False
    """The harness sends only the last message of the user."""
    asks: int = 1
    """How often the harness makes each call, at the same time; it uses one of the answers."""
    censored: str | None = None
    """Answers with this text are rewritten before the harness and the trace receive them."""
    unscorable: bool = False
    """The reward raises an exception."""


class ColoursTask(vf.Task[ColoursData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def named(self, trace: vf.Trace) -> float:
        if self.data.unscorable:
            raise LookupError("there is no such colour")
        answers = [message.content or "" for message in trace.assistant_messages]
        right = [colour in answer for colour, answer in zip(self.data.colours, answers, strict=False)]
        return sum(right) / len(self.data.colours)

    @vf.intercept
    async def censor(self, response: vf.Response) -> vf.Response | None:
        if not self.data.censored or self.data.censored not in (response.message.content or ""):
            return None
        return response.model_copy(update={"message": vf.AssistantMessage(content="[removed]")})

    @vf.metric
    async def answers(self, trace: vf.Trace) -> float:
        return float(len(trace.assistant_messages))


class ColoursEnv(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            for colour in task.data.colours:
                parts = [
                    {"type": "text", "text": "Which colour?"},
                    {"type": "image_url", "image_url": {"url": image_url(colour)}},
                ]
                if (await interaction.turn([{"role": "user", "content": parts}])).terminated:
                    break


class ColoursConfig(vf.TasksetConfig):
    options: dict = {}  # noqa: RUF012  pydantic copies it
    """Further fields of each task's data."""


class ColoursTaskset(vf.Taskset[ColoursTask, ColoursConfig]):
    loads = 0
    """How often the tasks of all tasksets were loaded."""

    def load(self):
        ColoursTaskset.loads += 1
        for number in range(4):
            names = [*COLOURS, *COLOURS][number % 3 :][:3]
            yield ColoursTask(
                ColoursData(prompt=None, system_prompt="Name the colour.", colours=names, **self.config.options)
            )


__all__ = ["ColoursEnv", "ColoursHarness", "ColoursTaskset"]
