"""What a fleet costs beyond its engines, and where sessions are while members come and go.

    python benchmarks/fleet.py [--check]

Throughput: 6,144 episodes of 4 turns against 8 scripted servers in other processes, as one fleet and as 8 engines that
each get their part of the episodes, by turns in 24 short rounds, because single rounds are 15% apart. The figures are
requests per processor second of this process: the median of the rounds of each side, and the median of the ratios of
the rounds. Affinity: 4,096 episodes of 8 turns over engines in this process, while members are added, drained and
ejected. `--check` fails if a target is missed.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from engine_requests import PROMPT, TOKENS, server_elsewhere
from render import Report

from rollouts import GenerateRequest, SamplingParams
from rollouts.engines.fleet import EngineFleet, FleetLimits
from rollouts.engines.protocol import Engine
from rollouts.engines.vllm import VLLMEngine

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "rollouts" / "fleet"))

from fleet_engines import MemberEngine

SERVERS = 8
EPISODES_OF_ROUND = 256
TURNS = 4
ROUNDS = 24
EPISODES_AT_ONCE = 256  # with more, requests wait too long for a connection and are sent again
AFFINITY_EPISODES = 4096
AFFINITY_TURNS = 8
LEAST_THROUGHPUT = 0.9
LEAST_AFFINITY = 0.95

EngineOf = Callable[[int], Engine]


def compare_throughput(report: Report) -> None:
    rounds = asyncio.run(_rates())
    ratio = median(fleet / engines for fleet, engines in zip(rounds["one fleet"], rounds["8 engines"], strict=True))
    rates = {name: median(values) for name, values in rounds.items()}
    title = f"{ROUNDS * EPISODES_OF_ROUND:,} episodes of {TURNS} turns, {SERVERS} scripted servers"
    with report.table(title, "requests per processor second", "of 8 engines") as table:
        table.add_row("8 engines", f"{rates['8 engines']:,.0f}", "", "", "")
        target = report.check(-ratio, -LEAST_THROUGHPUT, f">= {LEAST_THROUGHPUT}x")
        table.add_row("one fleet", f"{rates['one fleet']:,.0f}", f"{ratio:.2f}x", *target)


async def _rates() -> dict[str, list[float]]:
    """The rate of each round, by side."""
    with ExitStack() as stack:
        urls = [stack.enter_context(server_elsewhere()) for _ in range(SERVERS)]
        engines: Sequence[Engine] = [VLLMEngine(url) for url in urls]
        fleet = EngineFleet.from_urls(urls)
        sides: dict[str, EngineOf] = {
            "8 engines": lambda episode: engines[episode % SERVERS],
            "one fleet": lambda _: fleet,
        }
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(ROUNDS):
            for name, engine_of in sides.items():
                rates[name].append(await _rate(engine_of, f"{number}-{name[0]}"))
        for engine in (*engines, fleet):
            await engine.close()
        return rates


async def _rate(engine_of: EngineOf, round_name: str) -> float:
    free = asyncio.Semaphore(EPISODES_AT_ONCE)

    async def run(episode: int) -> None:
        async with free:
            for turn in range(TURNS):
                # The scripted server repeats its response to ids of this form.
                request_id = f"request-0{round_name}-{episode}-{turn}"
                sampling = SamplingParams(max_tokens=TOKENS, seed=1)
                request = GenerateRequest(PROMPT, sampling, session_id=str(episode), request_id=request_id)
                await engine_of(episode).generate(request)

    started = time.process_time()
    await asyncio.gather(*map(run, range(EPISODES_OF_ROUND)))
    return EPISODES_OF_ROUND * TURNS / (time.process_time() - started)


def measure_affinity(report: Report) -> None:
    stayed, moved_away = asyncio.run(_affinity())
    runs = f"{AFFINITY_EPISODES:,} episodes of {AFFINITY_TURNS} turns"
    title = f"{runs} over {SERVERS} members, of which 2 leave and 3 are added"
    with report.table(title, "turns at the member of the turn before", "moved though it served") as table:
        target = report.check(-stayed, -LEAST_AFFINITY, f">= {LEAST_AFFINITY:.0%}")
        table.add_row("affinity", f"{stayed:.1%}", f"{moved_away:.1%}", *target)


async def _affinity() -> tuple[float, float]:
    # The label of the weights is the name of the member, so that a completion says where it was sampled.
    engines = {f"member {number}": MemberEngine(version=f"member {number}") for number in range(SERVERS)}
    places: list[list[str]] = [[] for _ in range(AFFINITY_EPISODES)]
    serving: list[set[str]] = []
    async with EngineFleet(dict(engines), limits=FleetLimits(eject_after=1)) as fleet:
        changes: list[Callable[[], Awaitable[object]]] = [
            lambda: _add(fleet, engines, "member 8"),
            lambda: fleet.drain("member 1"),
            lambda: _add(fleet, engines, "member 9"),
            lambda: _fail(fleet, engines["member 2"]),
            lambda: _add(fleet, engines, "member 10"),
            lambda: fleet.undrain("member 1"),
        ]
        for turn in range(AFFINITY_TURNS):
            await asyncio.gather(*(_turn(fleet, places, episode) for episode in range(AFFINITY_EPISODES)))
            serving.append({member.name for member in fleet.members if member.state == "ready"})
            if turn < len(changes):
                await changes[turn]()
    pairs = [(turn, path[turn - 1], path[turn]) for path in places for turn in range(1, AFFINITY_TURNS)]
    stayed = sum(before == now for _, before, now in pairs)
    moved = sum(before != now and before in serving[turn] for turn, before, now in pairs)
    return stayed / len(pairs), moved / len(pairs)


async def _turn(fleet: EngineFleet, places: list[list[str]], episode: int) -> None:
    request = GenerateRequest([1, 2, 3], SamplingParams(max_tokens=1), session_id=f"episode-{episode}")
    result = await fleet.generate(request)
    places[episode].append(result.completions[0].weight_spans[0].version)


async def _add(fleet: EngineFleet, engines: dict[str, MemberEngine], name: str) -> None:
    engines[name] = MemberEngine(version=name)
    await fleet.add(name, engines[name])


async def _fail(fleet: EngineFleet, engine: MemberEngine) -> None:
    engine.is_healthy = False
    await fleet.check()


def main() -> None:
    parser = argparse.ArgumentParser(description="What a fleet costs beyond its engines.")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    options = parser.parse_args()
    report = Report()
    compare_throughput(report)
    measure_affinity(report)
    report.console.print(f"{report.missed} targets missed" if report.missed else "every target kept")
    if options.check and report.missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
