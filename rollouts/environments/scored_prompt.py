"""An environment of one turn: the messages of a task, and scoring functions for the completion."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from renderers import Message
from renderers.messages import MEDIA_PART_TYPES, PLURALS, Modality
from rollouts.episodes.environment import StepResult, resolve
from rollouts.errors import ArgumentError
from rollouts.rewards import Reward, rewards_of, score_episode
from rollouts.task import Task

_PROMPT_KEYS: Final = ("messages", "prompt", "question")
#: A row may have media of these in columns of their own, and parts without a medium for them.
_MODALITIES: Final[tuple[Modality, ...]] = ("image", "audio")
#: A part with one of these has its medium.
_MEDIA_KEYS: Final = frozenset({*MEDIA_PART_TYPES, "url", "path", "base64"})


def messages_of_row(task: Task | Mapping[str, Any]) -> list[Message]:
    """The prompt that the row of a task has, with the images and sounds of the row; `task` may be the row itself.

        messages_of_row({"prompt": [{"role": "user", "content": "Which digit?"}], "image": image})

    `messages` or `prompt` is a list of messages, or the text of one of the user; so is `question`. The images
    are those of `images`, a list, or of `image`: files as bytes, PIL images, arrays, or files of `datasets`,
    `{"bytes": ..., "path": ...}`. As in TRL, they take the places of the parts `{"type": "image"}` in their
    order; without such parts they precede the text of the first message of the user. Sounds likewise: those
    of `audios` or `audio`, also as `{"array": ..., "sampling_rate": ...}`, at the parts `{"type": "audio"}`.
    Raises `ArgumentError` for a row without a prompt, and where it has another number of images or sounds
    than of parts.
    """
    row = task.data if isinstance(task, Task) else task
    name = f"the row of task {task.task_id!r:.80}" if isinstance(task, Task) else "the row"
    row = row if isinstance(row, Mapping) else {}
    for key in _PROMPT_KEYS:
        prompt = row.get(key)
        if isinstance(prompt, str):
            return _with_media([{"role": "user", "content": prompt}], row, name)
        if isinstance(prompt, Sequence) and prompt:
            return _with_media(prompt, row, name)
    rule = f"{name} has no prompt; add one of {', '.join(_PROMPT_KEYS)}, or pass a function"
    raise ArgumentError("messages", sorted(map(str, row)), rule)


def _with_media(prompt: Sequence[Any], row: Mapping[str, Any], name: str) -> list[Message]:
    """The messages of a row with its media. Other values than messages are left to the checks of a renderer."""
    messages: list[Any] = [_without_absent(one) for one in prompt]
    media = {modality: [_file(one) for one in _media(row, modality)] for modality in _MODALITIES}
    places = [
        part
        for message in messages
        if isinstance(message, dict) and message.get("role") != "tool" and isinstance(message.get("content"), list)
        for part in message["content"]
        if isinstance(part, dict) and part.get("type") in _MODALITIES and not part.keys() & _MEDIA_KEYS
    ]
    of_user = next((one for one in messages if isinstance(one, dict) and one.get("role") == "user"), None)
    if any(media.values()) and not places and of_user is not None and isinstance(of_user.get("content"), str):
        places = [{"type": modality} for modality in _MODALITIES for _ in media[modality]]
        of_user["content"] = [*places, {"type": "text", "text": of_user["content"]}]
    for modality, values in media.items():
        own = [part for part in places if part["type"] == modality]
        if len(own) != len(values):
            rule = f'{name} has {len(own)} parts {{"type": "{modality}"}} for them; write one for each'
            raise ArgumentError(f"{modality}s", f"{len(values)} {PLURALS[modality]}", rule)
        for part, value in zip(own, values, strict=True):
            part[modality] = value
    return messages


def _media(row: Mapping[str, Any], modality: Modality) -> list[Any]:
    """The media of a row, as TRL reads its images: `images`, or else the one of `image`."""
    if row.get(f"{modality}s") is not None:
        return list(row[f"{modality}s"])
    return [] if row.get(modality) is None else [row[modality]]


def _file(value: Any) -> Any:
    """The bytes, or else the path, of a file of `datasets`; another value as it is."""
    if isinstance(value, Mapping) and value.keys() == {"bytes", "path"}:
        return value["path"] if value["bytes"] is None else value["bytes"]
    return value


def _without_absent(message: Any) -> Any:
    """A copy of a message without keys whose value is None: a table gives each part the keys of all others."""
    if not isinstance(message, Mapping):
        return message
    copied = {key: value for key, value in message.items() if value is not None or key == "content"}
    if isinstance(parts := copied.get("content"), list):
        copied["content"] = [
            {key: value for key, value in part.items() if value is not None} if isinstance(part, Mapping) else part
            for part in parts
        ]
    return copied


class ScoredPrompt:
    """An environment of one turn: `messages(task)` is the prompt, `score(completion, task)` the reward.

        def messages(task):
            return [{"role": "user", "content": [{"type": "image", "image": task.data["image"]}]}]

        def score(completion, task):
            return float(completion["content"] == task.data["label"])

        Runner(lambda task: ScoredPrompt(task, messages, score), ...)

    `task` is any object; it is passed to both functions. `messages_of_row` is such a function for rows of a
    data set, those of TRL with images among them. `completion` is the assistant's message. `score` is a
    function that returns a finite number, or a `Reward` or a list of them, whose sum of weighted scores is
    the reward; the info of the turn has each under `rewards`. Both functions may be `async`; functions that
    are not run on the event loop, unless a `Reward` is `threaded`. Raises `ArgumentError`; an episode whose
    scoring function fails has the completion and an error (`RolloutsError`) that names the function.
    """

    def __init__(
        self,
        task: Any,
        messages: Callable[[Any], Sequence[Message] | Awaitable[Sequence[Message]]],
        score: Callable[[Message, Any], Any] | Reward | Sequence[Reward],
    ) -> None:
        self._task = task
        self._messages = messages
        self._rewards = rewards_of(score)

    async def reset(self, seed: int) -> Sequence[Message]:
        """The messages of the task; `seed` is not used."""
        messages: Sequence[Message] = await resolve(self._messages(self._task))
        return messages

    async def step(self, assistant: Message) -> StepResult:
        """Score the completion and end the episode. Raises `RolloutsError`."""
        scores = await score_episode(self._rewards, type(self).__name__, assistant, self._task)
        return StepResult(reward=scores.reward, done=True, info=scores.info)
