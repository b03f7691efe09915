"""Sounds in chat messages, as OpenAI's clients send them: matched to the conversation, rendered and recorded."""

import base64

import pytest
from gateway_server import served
from sounds import sound_file, tone

from rollouts.testing import ScriptedEngine


def wav(hertz):
    return sound_file(tone(frequency=hertz))


def input_audio(data):
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}


def user(*parts):
    return {"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}


@pytest.mark.slow
def test_a_conversation_with_sounds_is_one_branch_with_the_tokens_of_the_renderer(hearing):
    sounds = [wav(220), wav(330), wav(220)]
    prompts = []

    def answer(request):
        prompts.append(request)
        return f"answer {len(prompts)}"

    with served(ScriptedEngine(answer, renderer=hearing), hearing) as server:
        client, messages = server.client("one"), []
        for sound in sounds:
            messages.append(user(input_audio(sound)))
            reply = client.chat.completions.create(model="m", messages=messages).choices[0].message
            messages.append({"role": "assistant", "content": reply.content})
        trajectory = server.trajectory("one")
    assert len(trajectory.leaves()) == 1
    assert [bytes(one.source.data) for one in trajectory.all_media()] == sounds
    assert [len(request.media) for request in prompts] == [1, 2, 3]
    # The last turn has the tokens and the features of all three sounds, where the renderer puts them.
    given = [
        {**message, "content": [{"type": "audio", "audio": sounds[number // 2]}, {"type": "text", "text": "?"}]}
        if message["role"] == "user"
        else message
        for number, message in enumerate(messages[:-1])
    ]
    expected = hearing.render(given, add_generation_prompt=True)
    assert list(prompts[-1].prompt_ids) == expected.token_ids
    assert prompts[-1].multi_modal_data.mm_hashes == expected.multi_modal_data.mm_hashes
