"""Tools of a server of the Model Context Protocol (MCP), in many episodes that share it.

    python examples/mcp_tools.py

The server is a process that this program starts: `python examples/mcp_tools.py --serve`. A script takes the place of a
model: it asks for a chart, looks at the image that comes back, and answers.
"""

import asyncio
import io
import json
import sys
import tempfile

from PIL import Image as PillowImage
from PIL import ImageDraw

from renderers import load_renderer
from rollouts import SamplingParams
from rollouts.environments import McpTools, StdioServer, ToolEnvironment
from rollouts.runner import Runner, Task
from rollouts.testing import ScriptedEngine, tiny_qwen3_vl

TASKS = [[3, 1, 2], [1, 5, 4], [2, 2, 9]]


def serve():
    """Run the server: one tool that draws a chart, over standard input and output."""
    from mcp.server.mcpserver import Image, MCPServer

    server = MCPServer("charts")

    @server.tool()
    def bar_chart(values: list[int]) -> Image:
        """Draw a bar chart of values from 0 to 10."""
        chart = PillowImage.new("RGB", (32 * len(values), 64), "white")
        for index, value in enumerate(values):
            ImageDraw.Draw(chart).rectangle((32 * index + 4, 60 - 5 * value, 32 * index + 28, 60), fill="blue")
        buffer = io.BytesIO()
        chart.save(buffer, "PNG")
        return Image(data=buffer.getvalue(), format="png")

    server.run()


def messages(values):
    """The first messages of a task."""
    return [{"role": "user", "content": f"Draw {values} and say which bar is the highest (0, 1 or 2)."}]


def score(conversation, values):
    return float(conversation[-1]["content"].strip() == str(values.index(max(values))))


def scripted_model(renderer):
    """An engine that calls the tool, then answers 1, which is right for the task [1, 5, 4] alone."""

    def completion(request):
        if request.media:
            return "1"
        text = renderer.tokenizer.decode(list(request.prompt_ids))
        values = json.loads(text.rsplit("Draw ", 1)[1].split(" and say", 1)[0])
        return f"<tool_call>\n{json.dumps({'name': 'bar_chart', 'arguments': {'values': values}})}\n</tool_call>"

    return ScriptedEngine(completion, renderer=renderer)


async def main(directory):
    renderer = load_renderer(directory)
    tasks = [Task(f"chart-{number}", data=values) for number, values in enumerate(TASKS)]
    server = StdioServer(sys.executable, [__file__, "--serve"])  # `env=` would be its whole environment
    groups = []
    async with McpTools({"charts": server}) as mcp:
        print("tools:", ", ".join(tool.name for tool in mcp.tools))

        def make_environment(task):
            return ToolEnvironment(task.data, tools=mcp.tools, messages=messages, score=score)

        sampling = SamplingParams(max_tokens=256)
        engine = scripted_model(renderer)
        async with Runner(make_environment, engine, renderer, sampling=sampling, group_size=2) as runner:
            async for group in runner.stream(tasks):
                groups.append(group)
                images = sum(len(list(episode.all_media())) for episode in group.episodes)
                print(f"{group.task.task_id} {group.task.data}: {images} images, rewards {group.rewards.tolist()}")
    return groups


if __name__ == "__main__":
    if "--serve" in sys.argv:
        serve()
    else:
        with tempfile.TemporaryDirectory() as directory:
            asyncio.run(main(tiny_qwen3_vl(directory, weights=False)))
