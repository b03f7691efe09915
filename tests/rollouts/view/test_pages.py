"""The page holds what the episodes hold, and nothing in it can act."""

import json

import numpy as np
import pytest
from viewer_episodes import (
    called,
    drifted,
    failed,
    media_episode,
    read_blocks,
    read_page,
    read_payload,
    two_turns,
    video,
)

from rollouts import MediaReference, TokenNode, Trajectory
from rollouts.errors import RolloutsError
from rollouts.training.mismatch import ComparedTokens
from rollouts.view import write_html
from rollouts.view.episode_data import episode_payload


def test_a_page_has_the_tokens_masks_and_log_probabilities_of_each_node(renderer, tmp_path):
    trajectory = two_turns(renderer)
    write_html([trajectory], tmp_path / "page.html")
    index, [(header, columns)] = read_page(tmp_path / "page.html")
    ids, sampled, logprobs = (
        np.concatenate([getattr(node, name) for node in trajectory.nodes])
        for name in ("token_ids", "sampled", "logprobs")
    )
    assert np.array_equal(columns["uniqueIds"][columns["index"]], ids)
    assert np.array_equal(columns["flags"] & 1, sampled)
    content = [np.zeros(len(node), bool) if node.content is None else node.content for node in trajectory.nodes]
    assert np.array_equal((columns["flags"] & 2) > 0, np.concatenate(content))
    assert np.array_equal(columns["logprobs"], logprobs)
    assert [node["parent"] for node in header["nodes"]] == [-1, 0, 1, 2, -1, 4]
    assert header["nodes"][3]["spans"] == [["1", 0, len(trajectory.nodes[3])]]
    (row,) = index["episodes"]
    assert (row["turns"], row["branches"], row["media"], row["reward"]) == (3, 2, 3, 1.5)


def node_with(count, **extras):
    return TokenNode(-1, np.arange(count, dtype=np.int32), np.ones(count, bool), np.zeros(count, np.float32),
                     extras=extras)  # fmt: skip


def likeliest(count, k):
    """Rows that no other place has; the page must not mix them up."""
    return np.arange(count * k, dtype=np.int32).reshape(count, k) + 100, -np.arange(count * k).reshape(count, k) / 7


def test_a_page_has_the_likeliest_tokens_of_the_nodes_that_have_them_up_to_20_a_place():
    (ids, logprobs), (taught, teacher) = likeliest(3, 2), likeliest(2, 24)
    first = node_with(3, top_ids=ids, top_logprobs=logprobs.astype(np.float32))
    second = node_with(2, teacher_top_ids=taught, teacher_top_logprobs=teacher.astype(np.float32))
    header, columns = read_payload(episode_payload(Trajectory("e", nodes=[node_with(4), first, second]), 0))
    assert header["likeliest"] == {"sampler": [0, 2, 0], "teacher": [0, 0, 20]}
    for of, wanted_ids, wanted in (("sampler", ids, logprobs), ("teacher", taught[:, :20], teacher[:, :20])):
        assert np.array_equal(columns["uniqueIds"][columns[f"likeliest:{of}"]], wanted_ids.ravel())
        assert np.array_equal(columns[f"likeliestLogprobs:{of}"], wanted.ravel().astype(np.float32))


@pytest.mark.parametrize(
    ("ids", "logprobs"),
    [
        (np.zeros(3, np.int32), np.zeros(3, np.float32)),
        (np.full((3, 2), 2**40), np.zeros((3, 2), np.float32)),
        (np.zeros((3, 2), np.int32), np.zeros((3, 2), "S1")),
        (np.zeros((3, 2), np.int32), None),
    ],
)
def test_extras_of_these_names_that_are_no_likeliest_tokens_are_left_out(ids, logprobs):
    extras = {"top_ids": ids} if logprobs is None else {"top_ids": ids, "top_logprobs": logprobs}
    header, columns = read_payload(episode_payload(Trajectory("e", nodes=[node_with(3, **extras)]), 0))
    assert "likeliest" not in header
    assert not [name for name in columns if name.startswith("likeliest")]


def compared(trajectory, leaf, position, logprob, name=None):
    return ComparedTokens(
        sampler=np.array([-0.5], np.float32),
        trainer=np.array([logprob], np.float32),
        position=np.array([position], np.int32),
        **{one: np.zeros(1, np.int32) for one in ("sample", "turn", "item", "version")},
        names=(name or f"{trajectory.episode_id}/{leaf}",),
    )


def test_compared_tokens_of_a_batch_give_the_mismatch_of_the_tokens_they_are_of(renderer, tmp_path):
    trajectory = two_turns(renderer)
    start = len(trajectory.nodes[4])  # the branch of node 5 is nodes 4 and 5
    write_html([trajectory], tmp_path / "page.html", compared=compared(trajectory, 5, start + 1, -2.5))
    index, [(_, columns)] = read_page(tmp_path / "page.html")
    assert index["episodes"][0]["mismatch"] == 2.0
    known = np.flatnonzero(~np.isnan(columns["extra:trainer_logprobs"]))
    assert known.tolist() == [sum(len(node) for node in trajectory.nodes[:5]) + 1]


def test_compared_tokens_of_other_episodes_are_refused_and_no_page_is_written(renderer, tmp_path):
    trajectory = two_turns(renderer)
    with pytest.raises(RolloutsError, match="'other/5'"):
        write_html([trajectory], tmp_path / "page.html", compared=compared(trajectory, 5, 40, -1.0, "other/5"))
    assert not list(tmp_path.iterdir())


def test_a_faithful_history_shows_no_drift_and_a_false_one_shows_its_place(renderer):
    header, _ = read_payload(episode_payload(two_turns(renderer), 0, renderer=renderer))
    assert [(one["leaf"], one["error"], one["differences"]) for one in header["drift"]] == [(3, "", []), (5, "", [])]
    trajectory = drifted(renderer)
    header, columns = read_payload(episode_payload(trajectory, 0, renderer=renderer))
    (drift,) = header["drift"]
    (difference,) = drift["differences"]
    completion_start = len(trajectory.nodes[0])
    assert completion_start <= difference["start"] <= completion_start + 3
    assert columns["owners"][completion_start:].tolist() == [-2] * len(trajectory.nodes[1])  # none is claimed
    replaced = trajectory.token_ids(1).tolist()
    replaced[difference["start"] : difference["end"]] = difference["ids"]
    assert "Reed." in renderer.tokenizer.decode(replaced)


def test_the_status_of_each_tool_call_is_shown(renderer):
    header, _ = read_payload(episode_payload(called(renderer), 0, renderer=renderer))
    assert [(call["name"], call["status"]) for call in header["turns"][0]["calls"]] == [
        ("look", "ok"),
        (None, "invalid_json"),
    ]


def test_grids_come_from_the_processor_and_other_pixels_are_named(renderer):
    trajectory = two_turns(renderer)
    header, _ = read_payload(episode_payload(trajectory, 0, renderer=renderer))
    processed = header["nodes"][0]["media"][0]["processed"]
    assert (processed["pixels"], len(processed["grid"])) == ("equal", 3)
    node = trajectory.nodes[0]
    reference = node.media[0]
    wrong = MediaReference("image", f"{reference.source.digest}-other", reference.source, reference.placeholder)
    changed = Trajectory("changed", nodes=[type(node)(-1, node.token_ids, node.sampled, node.logprobs, media=(wrong,))])
    header, _ = read_payload(episode_payload(changed, 0, renderer=renderer))
    assert header["nodes"][0]["media"][0]["processed"]["pixels"] == "different"


def test_each_medium_is_written_once_and_a_broken_one_says_why(tmp_path):
    image = two_frames = video(40)
    broken, svg = b"\x89PNG\r\n\x1a\nbroken", b'<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"/>'
    episodes = [
        media_episode(("video", two_frames), ("image", broken), ("image", svg)),
        media_episode(("video", image), episode_id="again"),
    ]
    write_html(episodes, tmp_path / "page.html")
    media = [
        json.loads(text)
        for name, text in read_blocks(tmp_path / "page.html").items()
        if name.startswith(("image-", "video-"))
    ]
    assert len(media) == 3
    shown, *unshown = media
    assert (shown["total"], shown["fps"], shown["width"], len(shown["frames"])) == (40, 10.0, 32, 16)
    assert [frame["frame"] for frame in shown["frames"]][::15] == [0, 39]
    assert all(frame["type"] == "image/png" for frame in shown["frames"])
    assert [(one["frames"], one["error"].partition(":")[0]) for one in unshown] == [([], "it cannot be decoded")] * 2


def test_the_program_of_the_page_is_small_and_uses_no_markup():
    from rollouts.view.page import page_start, script_block

    program = script_block().decode()
    assert len(program) + len(page_start("", connects=False)) < 300_000
    assert "</script" not in program[len("<script>") : -len("</script>\n")]
    for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert forbidden not in program


def test_a_page_that_cannot_be_written_leaves_the_earlier_page(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("earlier")

    def episodes():
        yield failed()
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        write_html(episodes(), path)
    assert path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]
