"""The multi-turn loop, against a scripted engine and the real renderer of the tiny model."""

import asyncio
from dataclasses import replace

import numpy as np

from rollouts import (
    Completion,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    SamplingParams,
    StepResult,
    run_episode,
)

IMAGE = np.arange(32 * 32 * 3, dtype=np.uint8).reshape(32, 32, 3)
OTHER_IMAGE = IMAGE[::-1].copy()


class ScriptedEngine:
    """Says the given texts, one a turn, and keeps the requests."""

    def __init__(self, renderer, texts, *, stop=True, finish=FinishReason.STOP):
        self.renderer, self.texts, self.stop, self.finish = renderer, list(texts), stop, finish
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.requests.append(request)
        ids = list(self.renderer.tokenizer.encode_run(self.texts[len(self.requests) - 1]).ids)
        if self.stop:
            ids.append(self.renderer.get_stop_token_ids()[0])
        logprobs = np.full(len(ids), -0.5, np.float32)
        return GenerateResult(request.request_id, [Completion(0, np.array(ids, np.int32), logprobs, self.finish)])

    async def close(self) -> None:
        pass


class Guessing:
    """Asks with an image, answers every guess with another image, and is done after `turns` of them."""

    def __init__(self, turns: int = 2):
        self.turns, self.heard = turns, []

    def reset(self, seed):
        return [{"role": "user", "content": [{"type": "image", "image": IMAGE}, {"type": "text", "text": f"{seed}?"}]}]

    def step(self, assistant):
        self.heard.append(assistant["content"])
        if len(self.heard) == self.turns:
            return StepResult(reward=1.0, done=True, info={"last": True})
        more = [{"type": "image", "image": OTHER_IMAGE}, {"type": "text", "text": "No."}]
        return StepResult([{"role": "user", "content": more}], reward=0.25)


def play(environment, engine, renderer, **options):
    options = {"sampling": SamplingParams(seed=1), "max_turns": 4, **options}
    return asyncio.run(run_episode(environment, engine=engine, renderer=renderer, **options))


class RoutingEngine(ScriptedEngine):
    """Reports experts: of each token that was read, its own id, so that a row tells which token it belongs to."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)
        (completion,) = result.completions
        read = np.array([*request.prompt_ids, *completion.token_ids][:-1], np.int32)
        return replace(result, completions=[replace(completion, routed_experts=read[:, None, None])])


def test_routed_experts_follow_the_tokens_into_the_trajectory(renderer):
    trajectory = play(Guessing(), RoutingEngine(renderer, ["five", "six"]), renderer)
    (leaf,) = trajectory.leaves()
    rows = trajectory.extra(leaf, "routed_experts")[:, 0, 0]
    assert rows[0] == 0
    assert rows[1:].tolist() == trajectory.token_ids(leaf)[:-1].tolist()


def test_the_second_prompt_is_the_first_plus_the_sampled_ids_plus_only_new_tokens(renderer):
    engine = ScriptedEngine(renderer, ["five", "six"])
    trajectory = play(Guessing(), engine, renderer, seed=7)

    first, second = engine.requests
    said = [*renderer.tokenizer.encode_run("five").ids, *renderer.get_stop_token_ids()[:1]]
    assert second.prompt_ids[: len(first.prompt_ids) + len(said)] == [*first.prompt_ids, *said]
    (leaf,) = trajectory.leaves()
    final = [*renderer.tokenizer.encode_run("six").ids, *renderer.get_stop_token_ids()[:1]]
    assert trajectory.token_ids(leaf).tolist() == [*second.prompt_ids, *final]
    assert trajectory.forks == 0


def test_earlier_images_are_carried_forward_at_unchanged_places(renderer):
    engine = ScriptedEngine(renderer, ["five", "six"])
    trajectory = play(Guessing(), engine, renderer)

    first, second = (request.multi_modal_data for request in engine.requests)
    assert second.mm_placeholders["image"][0] == first.mm_placeholders["image"][0]
    assert second.mm_hashes["image"][0] == first.mm_hashes["image"][0]
    assert len(second.media_items["image"]) == 2
    assert len(list(trajectory.all_media())) == 2, "each image once, on the node that introduced it"


def test_a_refused_bridge_renders_anew_and_forks(renderer, monkeypatch):
    monkeypatch.setattr(type(renderer), "bridge_to_next_turn", lambda *args, **kwargs: None)
    # A completion that its own text does not tokenise to: the re-rendered history differs from what was sampled.
    engine = ScriptedEngine(renderer, ["five\n", "six"])
    real_generate = engine.generate

    async def without_stop(request):
        result = await real_generate(request)
        if len(engine.requests) == 1:
            only = result.completions[0]
            cut = Completion(0, only.token_ids[:-1], only.logprobs[:-1], FinishReason.LENGTH)
            return GenerateResult(result.request_id, [cut])
        return result

    engine.generate = without_stop
    trajectory = play(Guessing(), engine, renderer)

    assert trajectory.done
    first_leaf = trajectory.turns[0].node
    assert (
        trajectory.token_ids(first_leaf).tolist()[: len(engine.requests[0].prompt_ids)] == engine.requests[0].prompt_ids
    )
    assert trajectory.token_ids(trajectory.turns[1].node).tolist()[: len(engine.requests[1].prompt_ids)] == (
        engine.requests[1].prompt_ids
    )
    assert [len(trajectory.media(turn.node)) for turn in trajectory.turns] == [1, 2]


def test_every_turn_samples_with_a_seed_of_its_own_derived_from_the_episodes(renderer):
    engines = [ScriptedEngine(renderer, ["a", "b"]) for _ in range(3)]
    for engine, seed in zip(engines, (1, 1, 2), strict=True):
        play(Guessing(), engine, renderer, sampling=SamplingParams(seed=seed))
    seeds = [[request.sampling.seed for request in engine.requests] for engine in engines]

    assert seeds[0] == seeds[1]
    assert len({*seeds[0], *seeds[2]}) == 4
