"""What an environment may do with the policy of its episode: further turns, and child episodes of sub-agents."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeAlias

from renderers import Message
from rollouts.engines.protocol import SamplingParams
from rollouts.episodes.environment import Environment
from rollouts.episodes.environment_calls import check_environment, close_environment
from rollouts.episodes.errors import EpisodeLimitError
from rollouts.episodes.limits import OVERLONG_ERRORS, overlong_limit
from rollouts.episodes.turns import EpisodeRecorder, SampledTurn, check_sampling, derived_seed
from rollouts.errors import ArgumentError, is_unicode
from rollouts.values import check_integer, whole_number


@dataclass(frozen=True, slots=True)
class GeneratedTurn:
    """A turn that an environment requested: the parsed `message`, and the index of the turn in `trajectory.turns`."""

    agent: str
    index: int
    message: Message
    sampled: SampledTurn = field(repr=False)
    recorder: EpisodeRecorder = field(repr=False, compare=False)  # that of the episode


@dataclass(frozen=True, slots=True)
class ChildEpisode:
    """A child episode: the indices of its own turns in `trajectory.turns`, the sum of their rewards, and how it ended.

    `turns` are those of the child's agent; the turns of its own children and those that its environment generated have
    agents of their own. `message` is its last turn's, None without a turn.
    """

    agent: str
    turns: tuple[int, ...]
    message: Message | None
    reward: float
    done: bool
    truncated: bool
    truncation_reason: str = ""


@dataclass(slots=True)
class PlayedTurns:
    """The turns that an environment has played so far."""

    indices: list[int] = field(default_factory=list)
    message: Message | None = None
    reward: float = 0.0


#: Plays an environment to its end, for at most so many turns. The `PlayedTurns` grow, also when the call fails.
PlayEnvironment: TypeAlias = (
    "Callable[[Environment, EpisodeContext, int | None, PlayedTurns], Awaitable[EpisodeLimitError | None]]"
)


class EpisodeContext:
    """Passed to `attach(context)` of an environment before `reset`: the episode that the environment plays in.

    The policy's further completions, `generate_turn` and `run_child`, are added to the trajectory of the episode, each
    marked with the name of its agent. They count in the limits of the episode; where a limit is reached they raise
    `EpisodeLimitError`, which ends the episode `truncated` unless the environment catches it. Calls may run at the
    same time. Those that still run when the episode ends are cancelled, together with the tasks that wait for them.

    `episode_id` is the episode's, `seed` the environment's, `agent` who plays the environment ("" if it is not a
    child), `engine` and `renderer` those of the policy, `sampling` the parameters of its turns. An episode on a chat
    endpoint has no renderer.
    """

    def __init__(
        self, recorder: EpisodeRecorder, play: PlayEnvironment, *, seed: int, agent: str, path: tuple[int, ...]
    ) -> None:
        self.recorder = recorder
        self.episode_id = recorder.trajectory.episode_id
        self.engine = recorder.engine
        self.renderer = recorder.renderer
        self.sampling = recorder.sampling
        self.seed = seed
        self.agent = agent
        self.path = path
        self._play = play
        self._calls = count()

    async def generate_turn(
        self,
        messages: Sequence[Message],
        *,
        agent: str,
        tools: Any = None,
        sampling: SamplingParams | None = None,
        after: GeneratedTurn | None = None,
    ) -> GeneratedTurn:
        """One completion of the policy for `messages`, recorded as a turn of `agent`.

        Without `after` the messages are a whole conversation, with `tools` (a list of `ToolSpec`). With `after` they
        are the new messages after that turn and its completion: the prompt is bridged, and the tools are those of that
        turn; where the bridge refuses, the conversation is rendered again and the trajectory forks. One turn may be
        continued several times. `sampling` defaults to the episode's; its seed, if any, is combined with the number
        of the call. The turn has the reward 0 until `record_reward`.

        Raises `ArgumentError`, `EpisodeLimitError`, and what engine and renderer raise.
        """
        if not messages:
            raise ArgumentError("messages", messages, "pass at least one message for the model to answer")
        _check_agent(agent)
        if sampling is not None:
            check_sampling(sampling)
        if after is not None:
            self._check_own("after", after)
            if tools is not None:
                raise ArgumentError("tools", tools, "leave it out with after=: the tools of that turn hold")
        path, origin = (*self.path, next(self._calls), 0), f"generate_turn of {agent!r}"
        with self._running():
            try:
                if after is None:
                    prompt = await self.recorder.first_prompt(messages, tools, origin)
                else:
                    prompt = await self.recorder.next_prompt(after.sampled, messages, origin)
                sampled = await self.recorder.sample(prompt, agent=agent, path=path, sampling=sampling)
            except OVERLONG_ERRORS as error:
                raise overlong_limit(error) from error
            self.recorder.finish_turn(sampled, environment_seconds=0.0)
        return GeneratedTurn(agent, sampled.index, sampled.message, sampled, self.recorder)

    async def run_child(
        self, environment: Environment, *, agent: str, max_turns: int, seed: int | None = None
    ) -> ChildEpisode:
        """Run `environment` with the policy as `agent`; its turns and their rewards are recorded in this trajectory.

        The child's first prompt is a branch of the tree if it begins with tokens that the tree has, else a root. The
        environment receives a context of its own, and is closed at the end of the child episode. `seed` defaults to one
        derived from this environment's seed and the number of the call. A child that reaches `max_turns` or a limit of
        the episode is `truncated`.

        Raises `ArgumentError`, and what the environment, the engine and the renderer raise; completed turns
        stay in the trajectory.
        """
        check_environment(environment)
        _check_agent(agent)
        turns = check_integer("max_turns", max_turns)
        call = next(self._calls)
        child_seed = derived_seed(self.seed, call) if seed is None else whole_number(seed)
        if child_seed is None:
            raise ArgumentError("seed", seed, "pass an integer, or None for a derived one")
        child = EpisodeContext(self.recorder, self._play, seed=child_seed, agent=agent, path=(*self.path, call))
        played = PlayedTurns()
        with self._running():
            try:
                reached = await self._play(environment, child, turns, played)
            finally:
                await close_environment(environment)
        indices, reason = tuple(played.indices), "" if reached is None else reached.reason
        return ChildEpisode(agent, indices, played.message, played.reward, not reason, bool(reason), reason)

    def record_reward(self, turn: GeneratedTurn | int, reward: float, info: Mapping[str, Any] | None = None) -> None:
        """Set the reward and the info of a turn, in place of earlier ones.

        Raises `ArgumentError` for a turn of another episode, and as `Trajectory.record_reward`.
        """
        if isinstance(turn, GeneratedTurn):
            self._check_own("turn", turn)
            turn = turn.index
        self.recorder.trajectory.record_reward(reward, info or {}, turn=turn)

    def _check_own(self, name: str, turn: GeneratedTurn) -> None:
        """Raises `ArgumentError` for a turn of another episode, or of another attempt of this one."""
        if turn.recorder is not self.recorder:
            other = turn.recorder.trajectory.episode_id
            rule = f"it belongs to another episode, {other!r}; pass a turn that generate_turn returned in this episode"
            raise ArgumentError(name, turn, rule)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Let the end of the episode cancel this task. Raises `TrajectoryFinishedError` after it."""
        self.recorder.check_open()
        task = asyncio.current_task()
        tasks, activity = self.recorder.tasks, self.recorder.activity
        is_outermost = task is not None and task not in tasks
        part, turn = activity.part, activity.turn
        if task is not None:
            tasks.add(task)
        try:
            yield
        finally:
            if is_outermost:
                tasks.discard(task)
        activity.waits_for(part, turn)  # the environment again; after an error, the part that was waited for is kept


def _check_agent(agent: object) -> None:
    if not isinstance(agent, str) or not agent or not is_unicode(agent):
        raise ArgumentError("agent", agent, "pass a name; the empty name is the one that plays the episode")
