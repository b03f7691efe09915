"""The code of the guides in docs/how-to that migrate from another library, with that library."""

import pytest
from test_docs_pages import run_page

pytestmark = pytest.mark.usefixtures("empty_working_directory")


def rewards_of(groups):
    return {name: group.rewards.tolist() for name, group in groups.items()}


@pytest.mark.slow
def test_the_guide_for_users_of_trl(trl):
    names = run_page("how-to/migrate-from-trl.md")
    assert [group.rewards.tolist() for group in names["groups"]] == [[1.1, 1.0], [0.1, 1.0]]
    assert names["inputs"]["advantages"][2:, 0].sign().tolist() == [-1.0, 1.0]
    assert rewards_of(names["with_images"]) == {"0": [1.0, 1.0], "1": [0.0, 0.0]}
    assert [len(list(names["with_images"][name].episodes[0].all_media())) for name in ("0", "1")] == [2, 2]


def test_the_guide_for_users_of_skyrl(trainer_packages, load_without_init):
    parents = ("skyrl", "skyrl.train", "skyrl.train.generators")
    backends = ("skyrl.backends", "skyrl.backends.skyrl_train", "skyrl.backends.skyrl_train.inference_servers")
    interface = load_without_init("skyrl.train.generators.base", *parents, *backends)
    names = run_page("how-to/migrate-from-skyrl.md")
    assert [turn.reward for turn in names["trajectory"].turns] == [0.1, 1.0]
    output = names["output"]
    assert output.keys() <= interface.GeneratorOutput.__annotations__.keys()
    assert [len(column[0]) for column in (output["loss_masks"], output["rewards"], output["rollout_logprobs"])] == [
        len(output["response_ids"][0])
    ] * 3
    stop = names["renderer"].get_stop_token_ids()[0]
    at_rewards = [
        token for token, reward in zip(output["response_ids"][0], output["rewards"][0], strict=True) if reward
    ]
    assert at_rewards == [stop, stop]
    assert [reward for reward in output["rewards"][0] if reward] == [0.1, 1.0]


def test_the_guide_for_users_of_tinker_cookbook(trainer_packages):
    pytest.importorskip("tinker")
    names = run_page("how-to/migrate-from-tinker-cookbook.md")
    group = names["group"]
    assert (group.rewards.tolist(), [episode.num_turns for episode in group.episodes]) == ([1.0, 1.0], [2, 1])
    assert [turn.info for turn in group.episodes[0].turns] == [{}, {"right": 1.0}]
    assert len(group.episodes[0].leaves()) == 1
    assert sorted(names["datums"][0].loss_fn_inputs) == ["advantages", "logprobs", "mask", "target_tokens"]
    assert int(names["supervised"].loss_fn_inputs["weights"].to_numpy().sum()) == 7
