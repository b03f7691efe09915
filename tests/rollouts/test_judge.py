"""`Judge`: what the judging model is shown, how its answers are read, and that its failures are no rewards."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scripted_chat import ScriptedChat

from renderers import MediaPolicy, MediaSource
from renderers.errors import MediaPolicyError
from rollouts import EpisodeError, FinishReason, Runner, SamplingParams, Task, run_episode
from rollouts.environments import ScoredPrompt
from rollouts.episodes.errors import error_kind, is_outage
from rollouts.errors import ArgumentError, ContextLengthError, RolloutsError, ServerError, ServerUnreachableError
from rollouts.rewards import Judge, JudgeUsage, Reward
from rollouts.runner import RetryPolicy
from rollouts.testing import ScriptedEngine

RED = np.full((8, 8, 3), (255, 0, 0), np.uint8)
BLUE = np.full((8, 8, 3), (0, 0, 255), np.uint8)
YES = {"yes": 1.0, "no": 0.0}


class Model(ScriptedChat):
    model = "judging-model"

    @property
    def asked(self):
        """The contents of the only message of each request."""
        return [message["content"] for call in self.calls for message in call["messages"]]

    @property
    def text(self):
        """The text of the only request, without images."""
        (parts,) = self.asked
        return "".join(part["text"] for part in parts if part["type"] == "text")


def seeds_of(model):
    return [call["seed"] for call in model.calls]


def assistant(content):
    return {"role": "assistant", "content": content}


def user(content):
    return {"role": "user", "content": content}


def image(pixels):
    return {"type": "image", "image": pixels}


def shown(parts):
    """Texts, and the colours of images, in order."""
    colours = {MediaSource.of(_raw(pixels)).digest: name for name, pixels in (("red", RED), ("blue", BLUE))}
    return [part["text"] if part["type"] == "text" else (colours[part["image"].digest],) for part in parts]


def _raw(pixels):
    from renderers.media.decoding import array_to_raw

    return array_to_raw(pixels)


def judge_of(*answers, prompt="{{ completion.content }}", parse=YES, **options):
    """A judge, and its model."""
    model = Model(*answers)
    return Judge(model, prompt, parse=parse, **options), model


# The prompt.

WHOLE = """\
{% for message in messages %}
{{ message.role }}: {{ message.content }}
{% endfor %}
Right answer: {{ task.data.answer }}. yes or no?"""


async def test_the_template_shows_messages_and_task_with_images_at_their_places():
    judge, model = judge_of("yes", prompt=WHOLE)
    conversation = [user([{"type": "text", "text": "Is "}, image(RED), image(BLUE), {"type": "text", "text": "red?"}])]
    assert await judge([*conversation, assistant("The first.")], Task("t", {"answer": "first"})) == 1.0
    (parts,) = model.asked
    assert shown(parts) == [
        "user: Is ",
        ("red",),
        ("blue",),
        "red?\nassistant: The first.\nRight answer: first. yes or no?",
    ]


async def test_images_of_a_task_are_shown_as_images():
    forms = [RED, Image.fromarray(RED), MediaSource.of(_raw(RED)), image(RED), _raw(RED)]
    judge, model = judge_of("yes", prompt="{% for one in task %}{{ one }}{% endfor %}")
    await judge(assistant("a"), forms)
    assert shown(model.asked[0]) == [("red",)] * len(forms)


async def test_a_path_is_an_image_with_a_filter_and_a_policy(tmp_path):
    path = tmp_path / "a.png"
    Image.fromarray(RED).save(path)
    judge, model = judge_of(
        "yes", prompt="Is it red? {{ task | image }}", media_policy=MediaPolicy(allowed_directories=(tmp_path,))
    )
    await judge(assistant("a"), str(path))
    assert [part["type"] for part in model.asked[0]] == ["text", "image"]
    judge, _ = judge_of("yes", prompt="{{ task | image }}")
    with pytest.raises(MediaPolicyError):
        await judge(assistant("a"), str(path))


@pytest.mark.slow
@given(st.text(st.characters(codec="utf-8"), min_size=1))
def test_the_text_of_a_conversation_reaches_the_model_unchanged(text):
    judge, model = judge_of("yes", prompt="<{{ completion.content }}>")
    asyncio.run(judge([user([image(RED)]), assistant(text)]))
    assert model.text == f"<{text}>"


async def test_the_prompt_may_be_a_file(tmp_path):
    (tmp_path / "judge.jinja").write_text("é {{ completion.content }}", "utf-8")
    judge, model = judge_of("yes", prompt=tmp_path / "judge.jinja")
    await judge(assistant("a"))
    assert model.text == "é a"


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("{{ anwser }}", "UndefinedError: 'anwser' is undefined"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
async def test_a_prompt_that_cannot_be_rendered_says_why(prompt, reason):
    judge, model = judge_of("yes", prompt=prompt, name="colour judge")
    with pytest.raises(RolloutsError, match=f"colour judge: its prompt cannot be rendered: .*{reason}"):
        await judge([assistant("a")], Task("t", {}))
    assert model.asked == []


# The answer.


def length(text):
    if text == "unreadable":
        raise ValueError("nothing to count")
    return len(text)


PATTERN = r"Score: (?P<score>-?\d+(?:\.\d+)?)"


@pytest.mark.parametrize(
    ("parse", "answer", "score"),
    [
        (YES, "Because it is red.\n\nyes\n", 1.0),
        (PATTERN, "Score: 3\nAll in all:\nScore: 7.5", 7.5),
        (PATTERN, "  Score: -1  ", -1.0),
        (length, "four", 4.0),
    ],
)
async def test_the_number_of_an_answer_is_read(parse, answer, score):
    judge, _ = judge_of(answer, parse=parse)
    verdict = await judge.verdict(assistant("a"))
    assert (verdict.score, verdict.text) == (score, answer)


@pytest.mark.parametrize(
    ("parse", "answer", "reason"),
    [
        (YES, "yes, it is", "none of 'yes', 'no'"),
        (YES, "yes\nor no", "none of"),
        (PATTERN, "Score: 7/10", "does not match"),
        (r"(Score: (?P<score>\d+)|none)", "none", "does not match"),
        (PATTERN, "Score: 11", "11 is not within 0 and 10"),
        (PATTERN, f"Score: {'9' * 400}", "inf is no finite number"),
        (length, "unreadable", "nothing to count"),
    ],
)
async def test_any_other_answer_is_an_error_that_quotes_it(parse, answer, reason):
    judge, model = judge_of(answer, parse=parse, bounds=(0, 10), attempts=2)
    with pytest.raises(RolloutsError, match=rf"judge: none of 2 answers has a number \((?s:.*){reason}") as raised:
        await judge(assistant("a"))
    assert answer[-20:].replace("\n", "\\n") in str(raised.value)
    assert len(model.asked) == 2
    assert judge.usage == JudgeUsage(requests=2, unreadable=2, prompt_tokens=20, completion_tokens=6)


async def test_an_answer_that_was_cut_off_is_not_read():
    model = Model("Score: 1", finish=FinishReason.LENGTH)
    judge = Judge(model, "{{ completion.content }}", parse=PATTERN, attempts=1)
    with pytest.raises(RolloutsError, match="cut off at 1024 tokens"):
        await judge(assistant("a"))


async def test_an_unreadable_answer_is_sampled_again_with_another_seed():
    judge, model = judge_of("perhaps", "maybe", "yes")
    assert await judge(assistant("a")) == 1.0
    assert len(set(seeds_of(model))) == 3
    assert all(0 <= seed < 2**63 for seed in seeds_of(model))
    assert judge.usage == JudgeUsage(
        verdicts=1, judged=1, requests=3, unreadable=2, prompt_tokens=30, completion_tokens=9
    )
    again, same = judge_of("perhaps", "maybe", "yes")
    await again(assistant("a"))
    assert seeds_of(same) == seeds_of(model)


# The cache.


async def test_equal_prompts_are_judged_once_and_others_again():
    judge, model = judge_of("yes")
    conversations = [[user([image(RED)])], [user([image(RED.copy())])], [user([image(BLUE)])], [user("red")]]
    for conversation in conversations * 2:
        await judge(conversation)
    assert len(model.asked) == 3
    assert (judge.usage.verdicts, judge.usage.judged) == (8, 3)


async def test_new_weights_of_the_judging_model_give_new_verdicts(renderer):
    engine = ScriptedEngine(["yes", "no"], renderer=renderer)
    judge = Judge(engine, "{{ completion.content }}", parse=YES, renderer=renderer)
    assert [await judge(assistant("a")), await judge(assistant("a"))] == [1.0, 1.0]
    await engine.update_weights(None, "1")
    assert await judge(assistant("a")) == 0.0


async def test_another_judging_model_gives_new_verdicts():
    judge, model = judge_of("yes", "no")
    assert [await judge(assistant("a")), await judge(assistant("a"))] == [1.0, 1.0]
    model.model = "another"
    assert await judge(assistant("a")) == 0.0


async def test_no_more_conversations_are_judged_at_a_time_than_allowed():
    judge, model = judge_of("yes", concurrency=3)
    await asyncio.gather(*(judge(assistant(str(number))) for number in range(20)))
    assert (len(model.asked), model.most_running) == (20, 3)


# In episodes.

QUESTION = [user([image(RED), {"type": "text", "text": "Which colour?"}])]


async def play(judge, renderer, **options):
    engine = ScriptedEngine(["Red."], renderer=renderer)
    environment = ScoredPrompt(None, lambda task: QUESTION, judge)
    return await run_episode(
        environment, engine=engine, renderer=renderer, sampling=SamplingParams(), max_turns=1, **options
    )


async def test_a_judge_rewards_a_completion(renderer):
    judge, _ = judge_of("yes", messages=lambda task: QUESTION)
    trajectory = await play([Reward("colour", 0.5, judge), Reward("short", 0.25, lambda *_: 1.0)], renderer)
    assert trajectory.reward == 0.75
    assert trajectory.turns[0].info["rewards"]["colour"] == {"score": 1.0, "weight": 0.5}


async def test_an_engine_with_its_renderer_judges(renderer):
    engine = ScriptedEngine(["It is.\nyes"], renderer=renderer)
    judge = Judge(engine, "Red? {{ task }}", parse=YES, renderer=renderer)
    assert await judge(assistant("a"), RED) == 1.0
    (request,) = engine.requests
    message = user([{"type": "text", "text": "Red? "}, image(RED)])
    expected = renderer.render([message], add_generation_prompt=True)
    assert list(request.prompt_ids) == expected.token_ids
    assert [item.mm_hash for item, _ in request.media] == expected.multi_modal_data.mm_hashes["image"]
    assert request.sampling.stop_token_ids == tuple(renderer.get_stop_token_ids())
    assert judge.usage.prompt_tokens == len(expected.token_ids)
    assert judge.usage.completion_tokens == len(renderer.tokenizer.encode_run("It is.\nyes").ids) + 1


async def test_a_judge_refuses_a_text_that_its_context_cannot_hold_before_it_encodes_it(renderer):
    class ShortEngine(ScriptedEngine):
        max_model_len = None

        async def capabilities(self):
            self.max_model_len = 100

    engine = ShortEngine(["yes"], renderer=renderer)
    judge = Judge(engine, "{{ completion.content }}", parse=YES, renderer=renderer)
    with pytest.raises(RolloutsError, match=r"does not fit .*the prompt length \(at least \d+\)"):
        await judge(assistant("word " * 100_000))
    assert (await judge(assistant("word")), len(engine.requests)) == (1.0, 1)


@pytest.mark.parametrize(
    "answer",
    [
        "perhaps",
        ServerError("r", "judging", status=400, body="no"),
        ContextLengthError("r", 9, 8),
        ZeroDivisionError(),
    ],
    ids=["unreadable", "refused", "overlong", "defect"],
)
async def test_a_judge_that_fails_fails_the_episode_and_rewards_nothing(renderer, answer):
    judge, _ = judge_of(answer, name="colour judge")
    with pytest.raises(EpisodeError) as raised:
        await play(Reward("colour", 1.0, judge), renderer)
    trajectory = raised.value.trajectory
    assert "reward 'colour'" in trajectory.error
    assert not trajectory.truncated
    assert not trajectory.done
    assert trajectory.num_turns == 1
    assert "rewards" not in trajectory.turns[0].info


@pytest.mark.parametrize(
    ("error", "outage"),
    [(ServerUnreachableError("r", "gone"), True), (ServerError("r", "judging", status=500, body="no"), False)],
)
async def test_a_runner_repeats_an_episode_whose_judge_was_not_there(renderer, error, outage):
    judge, _ = judge_of(error)
    with pytest.raises(EpisodeError) as raised:
        await play(judge, renderer)
    cause = raised.value.__cause__
    assert (error_kind(cause), is_outage(cause)) == ("engine", outage)
    judge, model = judge_of(error, "yes")
    async with Runner(
        lambda task: ScoredPrompt(task, lambda task: QUESTION, judge),
        ScriptedEngine(lambda request: "Red.", renderer=renderer),
        renderer,
        sampling=SamplingParams(),
        retry=RetryPolicy(first_delay=0, max_delay=0),
    ) as runner:
        (group,) = [group async for group in runner.stream([Task("t")])]
    assert (group.rewards.tolist(), len(model.asked)) == ([1.0], 2)


# Arguments.


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"engine": object()}, "engine"),
        ({"engine": ScriptedEngine(["a"])}, "renderer"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": Path("/nowhere/judge.jinja")}, "prompt .*cannot be read"),
        ({"prompt": "a\n{% for %}"}, "prompt .*line 2 of the template"),
        ({"parse": {}}, "parse"),
        ({"parse": {"yes ": 1.0}}, "parse .*white space"),
        ({"parse": {"yes": "1"}}, "parse .*finite number"),
        ({"parse": r"Score: (\d+)"}, r"parse .*\(\?P<score>"),
        ({"parse": play}, "not async"),
        ({"bounds": (1, 0)}, "bounds"),
        ({"sampling": SamplingParams(n=2)}, "sampling.n"),
        ({"cache_bytes": -1}, "cache_bytes"),
    ],
)
def test_wrong_arguments_are_named(arguments, named):
    with pytest.raises(ArgumentError, match=named):
        Judge(**{"engine": Model("yes"), "prompt": "a", "parse": YES, **arguments})


async def test_a_conversation_without_a_message_is_refused():
    with pytest.raises(ArgumentError, match="at least one message"):
        await judge_of("yes")[0]([])
