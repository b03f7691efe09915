"""The code of the pages on concepts (`docs/concepts`), and the values that its comments state."""

import pytest
from test_docs_pages import DOCS, run_page


@pytest.fixture(autouse=True)
def empty_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_each_concept_has_a_test_here_and_a_drawing_that_its_page_shows():
    pages = {path.stem for path in (DOCS / "concepts").glob("*.md")}
    assert pages == {"token", "image", "bridging", "branches", "staleness", "mismatch"}
    for page in pages:
        assert f"]({page}.svg)" in (DOCS / "concepts" / f"{page}.md").read_text("utf-8")
        assert (DOCS / "concepts" / f"{page}.svg").is_file()


def test_the_life_of_a_token():
    names = run_page("concepts/token.md")
    completion = names["completion"]
    assert list(names["prompt"].token_ids) == list(names["engine"].requests[0].prompt_ids)
    assert completion.sampled.all()
    assert len(completion.logprobs) == len(completion.token_ids)


def test_the_life_of_an_image():
    names = run_page("concepts/image.md")
    assert names["first"].offset + names["first"].length <= names["second"].offset
    assert names["first_hash"] == names["second_hash"]


def test_bridging():
    names = run_page("concepts/bridging.md")
    prefix = names["prefix"]
    assert names["bridged"].token_ids[: len(prefix)] == prefix
    assert len(names["bridged"].token_ids) > len(prefix)


def test_branches():
    trajectory = run_page("concepts/branches.md")["trajectory"]
    assert [node.parent for node in trajectory.nodes] == [-1, 0, 0]
    assert trajectory.leaves() == [1, 2]


def test_staleness():
    assert run_page("concepts/staleness.md")["modes"][2].max_staleness == 2


def test_the_mismatch():
    report = run_page("concepts/mismatch.md")["report"]
    assert report.max_abs < 1e-4
    assert report.likely_causes == ()
