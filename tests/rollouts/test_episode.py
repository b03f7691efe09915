"""The multi-turn loop, against a scripted engine and the real renderer of the tiny model."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from rollouts import (
    Completion,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    SamplingParams,
    StepResult,
    ThreadedEnvironment,
    run_episode,
)
from rollouts.episodes.episode import EpisodeSpec, run_episodes
from rollouts.episodes.errors import EnvironmentProtocolError, EpisodeError
from rollouts.errors import MissingLogProbsError

IMAGE = np.arange(32 * 32 * 3, dtype=np.uint8).reshape(32, 32, 3)
OTHER_IMAGE = IMAGE[::-1].copy()


class ScriptedEngine:
    """Says the given texts, one a turn, and keeps the requests."""

    def __init__(self, renderer, texts, *, stop=True, finish=FinishReason.STOP, drop_logprobs=False):
        self.renderer, self.texts, self.stop = renderer, list(texts), stop
        self.finish, self.drop_logprobs = finish, drop_logprobs
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.requests.append(request)
        ids = list(self.renderer.tokenizer.encode_run(self.texts[len(self.requests) - 1]).ids)
        if self.stop:
            ids.append(self.renderer.get_stop_token_ids()[0])
        logprobs = np.full(0 if self.drop_logprobs else len(ids), -0.5, np.float32)
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


class AsyncGuessing(Guessing):
    async def reset(self, seed):
        await asyncio.sleep(0)
        return Guessing.reset(self, seed)

    async def step(self, assistant):
        await asyncio.sleep(0)
        return Guessing.step(self, assistant)


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


def test_the_environment_hears_the_parsed_answer_and_its_rewards_are_kept(renderer):
    environment = Guessing()
    trajectory = play(environment, ScriptedEngine(renderer, ["five", "six"]), renderer, seed=7, group_id="g")

    assert environment.heard == ["five", "six"]
    assert [turn.reward for turn in trajectory.turns] == [0.25, 1.0]
    assert (trajectory.done, trajectory.truncated, trajectory.group_id, trajectory.seed) == (True, False, "g", 7)


@pytest.mark.parametrize(
    "make", [AsyncGuessing, lambda: ThreadedEnvironment(Guessing()), lambda: ThreadedEnvironment(AsyncGuessing())]
)
def test_asynchronous_and_threaded_environments_play_the_same_episode(renderer, make):
    expected = play(Guessing(), ScriptedEngine(renderer, ["five", "six"]), renderer)
    trajectory = play(make(), ScriptedEngine(renderer, ["five", "six"]), renderer)

    assert [n.token_ids.tolist() for n in trajectory.nodes] == [n.token_ids.tolist() for n in expected.nodes]


def test_an_episode_that_is_not_done_in_time_is_truncated(renderer):
    trajectory = play(Guessing(turns=9), ScriptedEngine(renderer, ["a", "b"]), renderer, max_turns=2)
    assert (trajectory.done, trajectory.truncated, trajectory.num_turns) == (False, True, 2)


def test_a_completion_cut_by_length_gets_its_close_as_unsampled_scaffold(renderer):
    engine = ScriptedEngine(renderer, ["fi", "six"], stop=False, finish=FinishReason.LENGTH)
    trajectory = play(Guessing(), engine, renderer)

    first, second = engine.requests
    cut = len(first.prompt_ids) + len(renderer.tokenizer.encode_run("fi").ids)
    stop = renderer.get_stop_token_ids()[0]
    assert second.prompt_ids[cut] == stop
    assert not trajectory.nodes[2].sampled.any(), "the added stop token was not sampled"
    assert trajectory.nodes[2].token_ids[0] == stop


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


def test_an_engine_without_logprobs_fails_the_episode_and_says_so(renderer):
    engine = ScriptedEngine(renderer, ["five"], drop_logprobs=True)
    with pytest.raises(EpisodeError, match="log-probabilities") as caught:
        play(Guessing(), engine, renderer)
    assert isinstance(caught.value.__cause__, MissingLogProbsError)


def test_a_failure_half_way_keeps_the_turns_that_were_completed(renderer):
    class Breaking(Guessing):
        def step(self, assistant):
            if self.heard:
                return "nonsense"
            return super().step(assistant)

    with pytest.raises(EpisodeError, match="not a StepResult") as caught:
        play(Breaking(), ScriptedEngine(renderer, ["five", "six"]), renderer)
    assert caught.value.trajectory.num_turns == 2
    assert caught.value.trajectory.turns[0].message["content"] == "five"


@pytest.mark.parametrize("wrapped", [False, True], ids=["on the loop", "in a thread"])
def test_an_environment_that_raises_does_not_take_the_turns_with_it(renderer, wrapped):
    class Dividing(Guessing):
        def step(self, assistant):
            if self.heard:
                return 1 / 0
            return super().step(assistant)

    environment = ThreadedEnvironment(Dividing()) if wrapped else Dividing()
    with pytest.raises(EpisodeError, match="step raised ZeroDivisionError: division by zero") as caught:
        play(environment, ScriptedEngine(renderer, ["five", "six"]), renderer)
    assert caught.value.trajectory.num_turns == 2
    assert caught.value.trajectory.finished
    assert "ZeroDivisionError" in caught.value.trajectory.error
    assert isinstance(caught.value.__cause__.__cause__, ZeroDivisionError)


def test_a_reset_that_raises_is_named(renderer):
    class Refusing(Guessing):
        def reset(self, seed):
            raise KeyError("maze")

    with pytest.raises(EpisodeError, match=r"Refusing\.reset raised KeyError: 'maze'"):
        play(Refusing(), ScriptedEngine(renderer, ["a"]), renderer)


def test_a_reward_that_is_no_number_leaves_the_turn_that_it_was_for(renderer):
    class Generous(Guessing):
        def step(self, assistant):
            return replace(super().step(assistant), reward=float("nan"))

    with pytest.raises(EpisodeError, match="the reward of turn 0 is nan") as caught:
        play(Generous(), ScriptedEngine(renderer, ["five"]), renderer)
    assert caught.value.trajectory.num_turns == 1


def test_an_aborted_generation_is_not_taken_for_an_answer(renderer):
    engine = ScriptedEngine(renderer, ["five"], finish=FinishReason.ABORT)
    with pytest.raises(EpisodeError, match="abort"):
        play(Guessing(), engine, renderer)


@pytest.mark.parametrize("opening", ["text", {}, [], None])
def test_a_reset_that_returns_no_messages_is_named(renderer, opening):
    class Silent(Guessing):
        def reset(self, seed):
            return opening

    with pytest.raises(EpisodeError, match=r"Silent\.reset") as caught:
        play(Silent(), ScriptedEngine(renderer, ["a"]), renderer)
    assert isinstance(caught.value.__cause__, EnvironmentProtocolError)


def test_the_tuple_of_gymnasiums_reset_is_refused_with_what_to_return(renderer):
    class Gymnastic(Guessing):
        def reset(self, seed):
            return super().reset(seed), {}

    text = r"Gymnastic.reset returned a tuple \(list, dict\), not a list of messages; return the list of messages alone"
    with pytest.raises(EpisodeError, match=text):
        play(Gymnastic(), ScriptedEngine(renderer, ["a"]), renderer)


def test_a_step_without_messages_that_is_not_done_is_refused(renderer):
    class Mute(Guessing):
        def step(self, assistant):
            return StepResult()

    with pytest.raises(EpisodeError, match="returned no messages and is not done"):
        play(Mute(), ScriptedEngine(renderer, ["a"]), renderer)


def test_every_turn_samples_with_a_seed_of_its_own_derived_from_the_episodes(renderer):
    engines = [ScriptedEngine(renderer, ["a", "b"]) for _ in range(3)]
    for engine, seed in zip(engines, (1, 1, 2), strict=True):
        play(Guessing(), engine, renderer, sampling=SamplingParams(seed=seed))
    seeds = [[request.sampling.seed for request in engine.requests] for engine in engines]

    assert seeds[0] == seeds[1]
    assert len({*seeds[0], *seeds[2]}) == 4


def test_many_episodes_come_back_in_order_and_never_exceed_their_concurrency(renderer):
    playing, most = 0, 0

    class Counting(Guessing):
        async def reset(self, seed):
            nonlocal playing, most
            playing += 1
            most = max(most, playing)
            await asyncio.sleep(0)
            return Guessing.reset(self, seed)

        def step(self, assistant):
            nonlocal playing
            playing -= 1
            return StepResult(reward=1.0, done=True)

    specs = [EpisodeSpec(seed, sampling_seed=seed, episode_id=f"e{seed}") for seed in range(20)]
    trajectories = asyncio.run(
        run_episodes(
            Counting,
            specs,
            engine=ScriptedEngine(renderer, ["x"] * 20),
            renderer=renderer,
            sampling=SamplingParams(),
            max_turns=2,
            concurrency=4,
        )
    )
    assert [t.episode_id for t in trajectories] == [f"e{seed}" for seed in range(20)]
    assert most == 4
