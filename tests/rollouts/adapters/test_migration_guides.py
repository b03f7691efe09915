"""The code of the guides in docs/how-to that migrate from another library, with that library."""

import pytest
from test_docs_pages import run_page

pytestmark = pytest.mark.usefixtures("empty_working_directory")


@pytest.mark.slow
def test_the_guide_for_users_of_trl(trl):
    run_page("how-to/migrate-from-trl.md")


def test_the_guide_for_users_of_skyrl(trainer_packages, load_without_init):
    parents = ("skyrl", "skyrl.train", "skyrl.train.generators")
    backends = ("skyrl.backends", "skyrl.backends.skyrl_train", "skyrl.backends.skyrl_train.inference_servers")
    interface = load_without_init("skyrl.train.generators.base", *parents, *backends)
    names = run_page("how-to/migrate-from-skyrl.md")
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
    episode = names["group"].episodes[0]
    assert [turn.info for turn in episode.turns] == [{}, {"right": 1.0}]
    assert len(episode.leaves()) == 1
