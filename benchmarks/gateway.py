"""Overhead of the gateway per request, beyond the call of the engine, for histories of 1 to 80 turns in its dialects.

    python benchmarks/gateway.py
    python benchmarks/gateway.py --quick

A client plays conversations over one connection to a real server on loopback; the engine returns a fixed completion.
Columns: the round trip minus the time in the engine (median and 90th percentile); the same round trip to a route that
parses the JSON body and returns a fixed object; the difference of the two, which is what the gateway adds; that
difference in processor time, which other programs on the machine disturb less; and what rendering the whole
conversation would take instead of bridging.
"""

import argparse
import asyncio
import http.client
import json
import tempfile
import threading
import time

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from renderers import load_renderer
from rollouts.serve.gateway.routes import Gateway
from rollouts.testing import ScriptedEngine, tiny_qwen3_vl

TURNS = (1, 5, 20, 80)
# A token of the tiny model is a character: 60 tokens a message.
QUESTION = "Which of the fields has changed, and where has it moved to?"
ANSWER = "The field in the second row: it moved one step to the left."


class TimedEngine(ScriptedEngine):
    """Adds up the seconds in `generate`."""

    seconds = 0.0

    async def generate(self, request, listen=None):
        began = time.perf_counter()
        try:
            return await super().generate(request)
        finally:
            self.seconds += time.perf_counter() - began


async def fixed_answer(request):
    json.loads(await request.body())
    return JSONResponse({"choices": [{"message": {"role": "assistant", "content": ANSWER}}]})


class Client:
    """One connection."""

    def __init__(self, port):
        self.connection = http.client.HTTPConnection("127.0.0.1", port)

    def post(self, path, body):
        data = json.dumps(body)
        began, cpu_began = time.perf_counter(), time.process_time()
        self.connection.request("POST", path, data, {"Content-Type": "application/json"})
        response = self.connection.getresponse()
        received = response.read()
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        assert response.status == 200, received
        return json.loads(received), seconds, cpu_seconds


def serve(app):
    """A server on a thread, and its port."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    return server, server.servers[0].sockets[0].getsockname()[1]


SYSTEM = "You watch a board."
#: The path of a dialect, the body of a conversation, and what a client keeps of an answer.
DIALECTS = {
    "chat": (
        "chat/completions",
        lambda talk: {"messages": [{"role": "system", "content": SYSTEM}, *talk]},
        lambda answer: [answer["choices"][0]["message"]],
    ),
    "messages": (
        "messages",
        lambda talk: {"system": SYSTEM, "messages": talk},
        lambda answer: [{"role": "assistant", "content": answer["content"]}],
    ),
    "responses": (
        "responses",
        lambda talk: {"instructions": SYSTEM, "input": talk},
        lambda answer: answer["output"],
    ),
}


def play(client, engine, session, dialect, rows):
    """One conversation of 80 turns. Adds its figures, in seconds, to the rows of the measured turns."""
    path, body_of, kept_of = DIALECTS[dialect]
    path = f"/sessions/{session}/v1/{path}"
    talk = []
    for turn in range(1, max(TURNS) + 1):
        talk.append({"role": "user", "content": f"{turn}. {QUESTION}"})
        body = body_of(talk)
        engine.seconds = 0.0
        answer, seconds, cpu_seconds = client.post(path, body)
        if turn in TURNS:
            _, fixed, fixed_cpu = client.post("/fixed", body)
            rows[turn].append((seconds - engine.seconds, fixed, cpu_seconds - fixed_cpu))
        talk += kept_of(answer)
    return talk


def render_seconds(renderer, messages, turns, number):
    """How long it takes to render a conversation of so many turns, of which no cache has a text."""
    changed = [{**message, "content": f"{number} {message['content']}"} for message in messages[: 2 * turns]]
    began = time.perf_counter()
    renderer.render(changed, add_generation_prompt=True)
    return time.perf_counter() - began


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    conversations = 5 if parser.parse_args(arguments).quick else 40
    with tempfile.TemporaryDirectory() as directory:
        renderer = load_renderer(tiny_qwen3_vl(directory, weights=False))
        engine = TimedEngine(lambda request: ANSWER, renderer=renderer)
        gateway = Gateway(engine, renderer)
        server, port = serve(Starlette(routes=[*gateway.routes(), Route("/fixed", fixed_answer, methods=["POST"])]))
        client = Client(port)
        rows = {dialect: {turns: [] for turns in TURNS} for dialect in DIALECTS}
        for dialect in DIALECTS:  # fills caches
            play(client, engine, f"first-{dialect}", dialect, {turns: [] for turns in TURNS})
        # In turn, so that what else the machine does meets all dialects.
        for number in range(conversations):
            for dialect in reversed(DIALECTS):
                talk = play(client, engine, f"{number}-{dialect}", dialect, rows[dialect])
        tokens = {turns: len(engine.requests[turns - 1 - max(TURNS)].prompt_ids) for turns in TURNS}
        server.should_exit = True
    print("dialect    turns  tokens  overhead ms    p90  fixed answer ms  gateway ms  processor ms  render ms")
    for dialect, by_turns in rows.items():
        for turns, figures in by_turns.items():
            overhead, fixed, cpu = (1000 * np.median(column) for column in zip(*figures, strict=True))
            p90 = 1000 * np.percentile([row[0] for row in figures], 90)
            render = 1000 * np.median(
                [render_seconds(renderer, talk, turns, f"{dialect} {number}") for number in range(5)]
            )
            print(
                f"{dialect:9}  {turns:5}  {tokens[turns]:6}  {overhead:11.2f}  {p90:5.2f}  {fixed:15.2f}  "
                f"{overhead - fixed:10.2f}  {cpu:12.2f}  {render:9.2f}"
            )
    return rows


if __name__ == "__main__":
    main()
