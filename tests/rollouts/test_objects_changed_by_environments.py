"""What an environment changes after it gave it to the episode changes no prompt, no message and no info.

The renderer refuses the bridge after `OPEN`, reasoning that never ends, so that the whole conversation is rendered.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest
from sub_agents import play, user

from renderers import ParsedToolCall, load_renderer
from rollouts import StepResult
from rollouts.testing import ScriptedEngine
from rollouts.testing.tiny_model import CHAT_TEMPLATE
from transport import wire_type

OPEN = "<think>open<|im_end|>"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def run(environment, renderer, completions):
    engine = ScriptedEngine(list(completions), renderer=renderer)
    return play(environment, engine, renderer), engine.requests


def levels(request):
    """The first byte of each picture of a prompt."""
    return [int(item.source.data[-1]) for item, _ in request.media]


class ThreeTurns:
    """Returns what `shown` returns, before each of three turns and after the last."""

    def __init__(self):
        self.taken = 0

    def reset(self, seed):
        return self.shown()

    def step(self, assistant):
        self.taken += 1
        return StepResult(self.shown(), done=self.taken == 3)


class Frames(ThreeTurns):
    """Shows one buffer of pixels, which it fills again for every turn."""

    def __init__(self):
        super().__init__()
        self.frame = np.zeros((32, 32, 3), np.uint8)

    def shown(self):
        self.frame[:] = 10 + 50 * self.taken
        return [{"role": "user", "content": [{"type": "image", "image": self.frame}]}]


def test_a_frame_buffer_that_is_filled_again_does_not_change_earlier_frames(renderer):
    trajectory, requests = run(Frames(), renderer, ["ok", OPEN, "ok"])
    assert trajectory.forks == 1, "the bridge was refused"
    assert [levels(request) for request in requests] == [[10], [10, 60], [10, 60, 110]]


@wire_type("tests.StateOfAnEnvironment")
@dataclass
class State:
    seen: list[int] = field(default_factory=list)


class OneInfo:
    def __init__(self):
        self.state = State()
        self.tools = [TOOL]

    def reset(self, seed):
        return [user("?")]

    def step(self, assistant):
        self.state.seen.append(len(self.state.seen))
        self.tools.append({"type": "function", "function": {"name": f"late-{len(self.tools)}"}})
        return StepResult([user("go on")], info={"state": self.state}, done=len(self.state.seen) == 3)


def test_infos_of_registered_classes_and_tools_are_copied(renderer):
    trajectory, requests = run(OneInfo(), renderer, ["a", OPEN, "c"])
    assert [turn.info["state"].seen for turn in trajectory.turns] == [[0], [0, 1], [0, 1, 2]]
    assert "late" not in renderer.tokenizer.decode(requests[-1].prompt_ids)


VIDEOS_LAST = CHAT_TEMPLATE.replace(
    CHAT_TEMPLATE[CHAT_TEMPLATE.index("{%- for part in content -%}") :].split("{%- endfor -%}")[0] + "{%- endfor -%}",
    "{%- for part in content if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- endfor -%}"
    "{%- for part in content if part.type == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>{%- endfor -%}",
)


class VideoBeforeImage(ThreeTurns):
    def shown(self):
        clip = np.full((4, 32, 32, 3), 100 + self.taken, np.uint8)
        image = np.full((32, 32, 3), self.taken, np.uint8)
        return [
            {"role": "user", "content": [{"type": "video", "video": clip, "fps": 2}, {"type": "image", "image": image}]}
        ]


def test_media_are_those_of_their_parts_where_a_template_prints_images_before_videos(tiny_model_dir):
    renderer = load_renderer(tiny_model_dir, chat_template=VIDEOS_LAST)
    trajectory, requests = run(VideoBeforeImage(), renderer, ["ok", OPEN, "ok"])
    assert trajectory.forks == 1
    assert levels(requests[-1]) == [0, 100, 1, 101, 2, 102]
    shown = [message["content"] for message in trajectory.to_messages(trajectory.leaves()[-1])[::2]]
    for number, parts in enumerate(shown):
        assert [part["type"] for part in parts] == ["video", "image"]
        assert [int(part[part["type"]].data[-1]) for part in parts] == [100 + number, number]


USUAL_CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {}}}
RESULT = {"role": "tool", "content": "red", "tool_call_id": "c"}


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"text": "hello"}]}],
        [{"role": "user", "content": [{"type": None, "text": "hello"}]}],
        [{"role": "user", "content": [{"image": np.zeros((32, 32, 3), np.uint8)}, {"text": "hello"}]}],
        [
            user("hello"),
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "so"}, {"type": "text", "text": "yes"}]},
            user("?"),
        ],
        [
            user("hello"),
            {"role": "assistant", "content": "", "tool_calls": [ParsedToolCall("", "look", {}, id="c")]},
            RESULT,
        ],
        [user("hello"), {"role": "assistant", "content": "", "tool_calls": (USUAL_CALL,)}, RESULT],
    ],
    ids=["no type", "type None", "image without type", "thinking", "parsed call", "tuple of calls"],
)
def test_messages_in_every_form_that_the_renderer_reads_are_recorded(renderer, messages):
    class Says:
        def reset(self, seed):
            return messages

        def step(self, assistant):
            return StepResult(done=True)

    trajectory, requests = run(Says(), renderer, ["ok"])
    assert trajectory.done
    recorded = trajectory.to_messages(trajectory.leaves()[0])[:-1]
    rendered = renderer.render(recorded, add_generation_prompt=True)
    assert rendered.token_ids == list(requests[0].prompt_ids)
