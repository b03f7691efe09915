"""The messages of an episode as its prompts have them: what an environment changes afterwards has no effect on them."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from renderers import Message, ParsedToolCall, RenderedTokens
from renderers.messages import is_media_part, with_medium
from rollouts.trajectory.media_reference import MediaOfParts
from rollouts.trajectory.storable import copied_mapping, plain_copy


def own_messages(messages: Sequence[Message]) -> Sequence[Message]:
    """Copies of messages, which share media until `keep_media`; as they are if the renderer refuses."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        return messages
    return [_own_message(message) for message in messages]


def keep_media(messages: Sequence[Message], prompt: RenderedTokens) -> None:
    """Replace the media of `own_messages` by the sources in `prompt`, so that buffers may change."""
    contents: list[list[Any]] = [
        cast(list[Any], message["content"]) for message in messages if isinstance(message.get("content"), list)
    ]
    places = [(content, index) for content in contents for index, part in enumerate(content) if is_media_part(part)]
    if not places:
        return
    media = [] if prompt.multi_modal_data is None else prompt.multi_modal_data.items_with_ranges()
    items = MediaOfParts(item for item, _ in media[-len(places) :])
    for content, index in places:
        item = items.take(content[index])
        if item is None:
            return  # `Trajectory.add_turn` refuses messages with more media than the prompt
        part = {key: value for key, value in content[index].items() if key != "fps"}  # a source has its own
        content[index] = with_medium(part, item.source)


def own_tools(tools: Any) -> Any:
    """A copy of tools. What contains itself is returned as it is; the renderer refuses it."""
    try:
        return plain_copy(tools)
    except RecursionError:
        return tools


def _own_message(message: Message) -> Message:
    if not isinstance(message, Mapping):
        return message
    try:
        return cast(Message, {key: _own_value(key, value) for key, value in message.items()})
    except RecursionError:  # it contains itself; `Trajectory.add_turn` refuses it
        return message


def _own_value(key: str, value: Any) -> Any:
    if key == "content" and isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
        return [_own_part(part) for part in value]
    if key == "tool_calls" and isinstance(value, (list, tuple)):
        return [_own_call(call) for call in value]
    return plain_copy(value)


def _own_part(part: Any) -> Any:
    if not isinstance(part, Mapping):
        return part
    return dict(part) if is_media_part(part) else copied_mapping(part)


def _own_call(call: Any) -> Any:
    if isinstance(call, ParsedToolCall):
        call = {"id": call.id, "name": call.name, "arguments": call.arguments}
    return copied_mapping(call) if isinstance(call, Mapping) else call
