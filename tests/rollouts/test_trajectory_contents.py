"""What a trajectory keeps beside tokens: messages, content, extras, pixels, provenance, and that it ends."""

import numpy as np
import pytest

from renderers import MediaItem, MediaSource, MultiModalData, PlaceholderRange, RenderedTokens
from rollouts import (
    Completion,
    FinishReason,
    SamplingParams,
    StepResult,
    TokenNode,
    Trajectory,
    WeightSpan,
    run_episode,
)
from rollouts.engines.local import LocalEngine
from rollouts.errors import ArgumentError, TrajectoryError, TrajectoryFinishedError
from transport import MalformedError, decode, encode


def picture(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)


def image(seed: int):
    return {"type": "image", "image": picture(seed)}


def completion(*ids: int) -> Completion:
    return Completion(0, np.array(ids, np.int32), -np.ones(len(ids), np.float32), FinishReason.STOP)


def say(text: str):
    return {"role": "assistant", "content": text}


class Gallery:
    """Shows one more image each turn."""

    def __init__(self, turns: int = 3) -> None:
        self.left = turns
        self.shown: list = []

    def reset(self, seed):
        self.shown = [
            {"role": "system", "content": "Look."},
            {"role": "user", "content": [image(0), {"type": "text", "text": "One?"}]},
        ]
        return self.shown

    def step(self, assistant):
        self.left -= 1
        new = [{"role": "user", "content": [{"type": "text", "text": "More:"}, image(self.left)]}]
        self.shown = [*self.shown, assistant, *new]
        return StepResult(reward=1.0, messages=new, done=not self.left)


@pytest.fixture(scope="module")
def engine(tiny_model_dir):
    return LocalEngine.from_pretrained(tiny_model_dir)


async def played(engine, renderer, environment) -> Trajectory:
    sampling = SamplingParams(max_tokens=6, seed=0)
    return await run_episode(environment, engine=engine, renderer=renderer, sampling=sampling, max_turns=5)


def texts(messages):
    """Messages without their images, each of which is named by its place."""
    return [
        (m["role"], m["content"])
        if isinstance(m["content"], str)
        else (m["role"], [part.get("text", "image") for part in m["content"]])
        for m in messages
    ]


async def test_pixels_are_made_again_with_absolute_ranges(engine, renderer):
    trajectory = await played(engine, renderer, Gallery())
    for leaf in trajectory.leaves():
        data = trajectory.multi_modal_data(leaf, renderer.processors)
        ids = trajectory.token_ids(leaf)
        markers = list(renderer.mm_token_type_id_map)
        for item, where in data.items_with_ranges():
            assert np.isin(ids[where.offset : where.end], markers).all()
            assert item.num_tokens == where.length


async def test_a_finished_episode_cannot_change(engine, renderer):
    trajectory = await played(engine, renderer, Gallery(1))
    for change in (
        lambda: trajectory.add_turn(RenderedTokens([1]), completion(2), {"role": "assistant", "content": ""}),
        lambda: trajectory.record_reward(1.0, {}),
        lambda: setattr(trajectory, "done", False),
        lambda: setattr(trajectory, "finished", False),
    ):
        with pytest.raises(TrajectoryFinishedError, match=trajectory.episode_id):
            change()
    for node in trajectory.nodes:
        for column in (node.token_ids, node.sampled, node.logprobs):
            assert not column.flags.writeable
    assert decode(encode(trajectory)).finished
    trajectory.finish()


def test_messages_that_are_not_the_prompts_are_refused(renderer):
    messages = [{"role": "user", "content": [image(1), {"type": "text", "text": "?"}]}]
    prompt = renderer.render(messages, add_generation_prompt=True)
    with pytest.raises(TrajectoryError, match="2 messages"):
        Trajectory("e").add_turn(prompt, completion(1), say(""), messages=[*messages, *messages])
    with pytest.raises(TrajectoryError, match="the messages from 0 on have 0 media, and the prompt has 1 there; pass"):
        Trajectory("e").add_turn(prompt, completion(1), say(""), messages=[{"role": "user", "content": "no image"}])
    two = [{"role": "user", "content": [image(1), image(2)]}]
    with pytest.raises(TrajectoryError, match="the messages from 0 on have 2 media, and the prompt has 1 there"):
        Trajectory("e").add_turn(prompt, completion(1), say(""), messages=two)
    endless = [{"role": "user", "content": [image(1), {"type": "text", "text": "?"}]}]
    endless[0]["name"] = endless
    with pytest.raises(TrajectoryError, match="message 0 contains itself"):
        Trajectory("e").add_turn(prompt, completion(1), say(""), messages=endless)


def asked(renderer, *conversation):
    messages = [{"role": role, "content": text} for role, text in conversation]
    return renderer.render(messages, add_generation_prompt=True), messages


OPENING = (("system", "S"), ("user", "hello"))
REWRITTEN = (*OPENING, ("assistant", "rewritten"), ("user", "more"))


@pytest.mark.parametrize("with_messages", [True, False], ids=["with the first prompt's messages", "without them"])
def test_an_answer_that_history_rewrote_stands_on_the_branch_that_shows_it(renderer, with_messages):
    """The template has asked for the assistant before the fork: its words are new, not its header."""
    trajectory = Trajectory("e")
    first, messages = asked(renderer, *OPENING)
    trajectory.add_turn(first, completion(5, 6), say("sampled"), messages=messages if with_messages else ())
    second, messages = asked(renderer, *REWRITTEN)
    assert second.token_ids[: len(first)] == first.token_ids
    trajectory.add_turn(second, completion(7), say("last"), messages=messages)
    assert trajectory.forks == 1
    if not with_messages:
        assert [texts(node.messages) for node in trajectory.nodes] == [[], [], list(REWRITTEN[2:]), []]
        for leaf in trajectory.leaves():
            with pytest.raises(TrajectoryError, match="node 0 was stored without its messages"):
                trajectory.to_messages(leaf)
        return
    assert [texts(trajectory.to_messages(leaf)) for leaf in trajectory.leaves()] == [
        [*OPENING, ("assistant", "sampled")],
        [*OPENING, *REWRITTEN[2:], ("assistant", "last")],
    ]


def test_what_a_caller_changes_afterwards_changes_nothing_here():
    ids, experts, info = np.array([3, 4], np.int32), np.zeros((2, 2), np.uint8), {"right": True}
    seen = ids[:]
    seen.setflags(write=False)  # a read-only view on an array that is not
    message, shown = say("a"), [{"role": "user", "content": "u"}]
    sampled = Completion(0, seen, np.zeros(2, np.float32), FinishReason.STOP)
    prompt = RenderedTokens([1], message_roles=["user"])
    trajectory = Trajectory("e")
    trajectory.add_turn(prompt, sampled, message, messages=shown, extras={"routed_experts": experts})
    trajectory.record_reward(1.0, info)
    ids[0], experts[:], info["right"], message["content"], shown[0]["content"] = 9, 9, False, "b", "v"
    prompt.token_ids[0] = 9
    asked_node, said_node = trajectory.nodes
    assert trajectory.token_ids(1).tolist() == [1, 3, 4]
    assert said_node.extras["routed_experts"].tolist() == [[0, 0], [0, 0]]
    assert not said_node.extras["routed_experts"].flags.writeable
    assert trajectory.turns[0].info == {"right": True}
    assert trajectory.turns[0].message == say("a")
    assert asked_node.messages == ({"role": "user", "content": "u"},)


def test_prompts_of_a_long_episode_are_not_held_once_a_turn():
    trajectory = Trajectory("e")
    ids: list[int] = []
    for _ in range(20):
        ids += [1] * 1000
        trajectory.add_turn(RenderedTokens(list(ids)), completion(2), say("a"))
        ids.append(2)
    held = sum(
        node.token_ids.nbytes if (base := node.token_ids.base) is None else memoryview(base).nbytes
        for node in trajectory.nodes
    )
    assert held == 4 * len(ids)


LOOP = {"role": "assistant"}
LOOP["self"] = LOOP


def no_turn(ids=(1, 2), sampled=(3,), logprobs=(0.0,), spans=(), extras=None, finish=FinishReason.STOP, message=None):
    trajectory = Trajectory("e")
    trajectory.add_turn(RenderedTokens([1]), completion(2), say("a"))
    one = Completion(0, np.array(sampled), np.array(logprobs), finish, None, spans)
    try:
        trajectory.add_turn(RenderedTokens(list(ids)), one, message or say("b"), extras=extras)
    finally:
        assert (len(trajectory.nodes), len(trajectory.turns), trajectory.forks) == (2, 1, 0)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"ids": (1, -5)}, "no token ids"),
        ({"ids": (1, 2**31)}, "no token ids"),
        ({"ids": (1, 2.5)}, "no token ids"),
        ({"sampled": (True,)}, "no token ids"),
        ({"sampled": ((3,),)}, "no token ids"),
        ({"logprobs": ()}, "1 tokens and 0 log-probabilities"),
        ({"logprobs": ((0.0,),)}, "log-probabilities"),
        ({"logprobs": (float("nan"),)}, "token 0 has log-probability nan"),
        ({"logprobs": (float("-inf"),)}, "token 0 has log-probability -inf"),
        ({"logprobs": (5.0,)}, "token 0 has log-probability 5"),
        ({"logprobs": (-9999.0,)}, "token 0 has log-probability -9999"),
        ({"logprobs": (None,)}, "log-probabilities are object"),
        ({"finish": None}, "finish_reason is None"),
        ({"finish": "weird"}, "finish_reason is 'weird'"),
        ({"message": "text"}, "the message of turn 1 is a str, not a dict"),
        ({"message": {"role": "assistant", "content": "\ud800"}}, r"turn 1\['message'\]\['content'\]"),
        ({"message": {"role": "assistant", "calls": {(1, 2): 3}}}, r"turn 1\['message'\]\['calls'\]"),
        ({"message": LOOP}, "contains itself"),
        ({"spans": (("0", 0, 1),)}, "weight_spans are"),
        ({"spans": (WeightSpan("\ud800", 0, 1),)}, "surrogates not allowed"),
        ({"spans": (WeightSpan("0", 0, 2),)}, "weight span"),
        ({"spans": (WeightSpan("0", 0, 1), WeightSpan("1", 0, 1))}, "weight span"),
        ({"extras": {"x": np.array(1)}}, "'x' is no array"),
        ({"extras": {"x": np.array([None])}}, "'x' is no array"),
        ({"extras": {"x": np.zeros(2)}}, "'x' has 2 rows for 1"),
    ],
)
def test_a_turn_that_contradicts_itself_is_refused_and_changes_nothing(wrong, words):
    with pytest.raises(TrajectoryError, match=words):
        no_turn(**wrong)


@pytest.mark.parametrize("where", [(2, 5), (3, 2), (-1, 2), (3, 0), (1, 0)])
def test_an_image_without_tokens_of_the_prompt_is_refused(where):
    source = MediaSource.of(b"a")
    item = MediaItem("image", "hash-a", source, {}, 2, None)
    data = MultiModalData.from_items([(item, PlaceholderRange(*where))])
    with pytest.raises(TrajectoryError, match="image hash-a has a placeholder"):
        Trajectory("e").add_turn(RenderedTokens([1, 0, 0], multi_modal_data=data), completion(3), say("a"))


@pytest.mark.parametrize("parents", [(0,), (1, 0), (7,), (-2,), ("0",), (None,)])
def test_a_node_whose_parent_is_not_before_it_is_refused(parents):
    column = np.zeros(1, np.int32)
    with pytest.raises(TrajectoryError, match="parent"):
        Trajectory("e", nodes=[TokenNode(parent, column, column == 1, np.empty(0, np.float32)) for parent in parents])


@pytest.mark.parametrize(
    ("ids", "logprobs", "reason"),
    [
        ([5, -3], [-1, -1], "token 1 has id -3"),
        ([5, 6], [-1, np.nan], "token 1 has log-probability nan"),
        ([5, 6], [-1, 0.5], "token 1 has log-probability 0.5"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_node_and_its_token(ids, logprobs, reason):
    def node(parent, ids, logprobs):
        return TokenNode(parent, np.array(ids, np.int32), np.ones(2, bool), np.array(logprobs, np.float32))

    nodes = [node(-1, [1, 2], [-1, -1]), node(0, ids, logprobs)]
    with pytest.raises(TrajectoryError, match=f"episode 'e': node 1: {reason}"):
        Trajectory("e", nodes=nodes)
    trajectory = Trajectory("e")
    trajectory.nodes += nodes
    with pytest.raises(MalformedError, match=f"episode 'e': node 1: {reason}"):
        decode(encode(trajectory))


def test_an_index_without_a_node_is_refused():
    trajectory = Trajectory("e")
    trajectory.add_turn(RenderedTokens([1]), completion(2), say("a"))
    for leaf in (-1, 2):
        with pytest.raises(ArgumentError, match="episode e has 2 nodes; pass one of leaves"):
            trajectory.path(leaf)


@pytest.mark.parametrize("dtypes", [("int32", "uint64"), ("uint64", "int64"), ("uint8", "int16"), ("int64", "int64")])
def test_nodes_of_different_integer_dtypes_have_one_row_of_int32(dtypes):
    nodes = [
        TokenNode(place - 1, np.array([1, 200 + place], dtype), np.zeros(2, bool), np.empty(0, np.float32))
        for place, dtype in enumerate(dtypes)
    ]
    for trajectory in (Trajectory("e", nodes=nodes), decode(encode(Trajectory("e", nodes=nodes)))):
        row = trajectory.token_ids(1)
        assert row.dtype == np.int32
        assert row.tolist() == [1, 200, 1, 201]
