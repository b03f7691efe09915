"""The code of docs/ray.md, on the cluster of these tests."""

from test_docs_pages import run_page


def test_the_page_on_ray(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_page("ray.md")
    assert [group.rewards.tolist() for group in names["groups"]] == [[1.0] * 4] * 3
    assert [episode.episode_id for episode in names["episodes"]] == [
        episode.episode_id for episode in names["groups"][0].episodes
    ]
