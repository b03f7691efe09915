"""`rollouts view` on files, directories and wrong arguments."""

from pathlib import Path

from typer.testing import CliRunner
from viewer_episodes import drifted, failed, read_page

from rollouts.cli.main import app
from rollouts.view.growing_file import GrowingFile
from transport import RecordWriter


def file_of(path: Path, *records):
    with RecordWriter(path) as out:
        for record in records:
            out.append(record)
    return path


def run(*arguments):
    return CliRunner().invoke(app, ["view", *map(str, arguments)])


def test_with_the_model_the_page_has_texts_and_drift(renderer, tiny_model_dir, tmp_path):
    file = file_of(tmp_path / "trajectories.mmr", drifted(renderer))
    result = run(tmp_path, "--model", tiny_model_dir, "--out", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    assert file.exists()
    _, [(header, columns)] = read_page(tmp_path / "page.html")
    assert len(header["drift"][0]["differences"]) == 1
    assert "textBytes" in columns


def test_an_adapter_in_place_of_a_model_is_refused_with_the_name_of_its_base_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "models/base"}')
    result = run(file_of(tmp_path / "trajectories.mmr", failed()), "--model", tmp_path)
    assert result.exit_code == 2
    assert "it is an adapter: pass the directory of its base model, models/base" in result.stderr


def test_a_page_has_the_name_of_the_run_or_of_another_file(tmp_path, monkeypatch):
    (tmp_path / "my-run").mkdir()
    monkeypatch.chdir(tmp_path / "my-run")
    for name, title in (("trajectories.mmr", "my-run"), ("episodes.mmr", "episodes.mmr")):
        file = file_of(Path(name), failed())
        assert run(file).exit_code == 0
        index, _ = read_page(Path(f"{name}.html"))
        growing = GrowingFile(file)
        growing.close()
        assert index["title"] == growing.title == title


def test_a_record_without_an_episode_is_named_on_the_page_and_in_the_terminal(tmp_path):
    file = file_of(tmp_path / "episodes.mmr", {"no": "episode"}, failed())
    result = run(file)
    assert result.exit_code == 0, result.output
    index, _ = read_page(tmp_path / "episodes.mmr.html")
    assert index["problems"] == ["record 0: it holds a dict and no episode"]
    assert "not shown: record 0" in result.stderr


def test_a_directory_in_place_of_the_page_is_an_error_with_its_name(tmp_path):
    directory = tmp_path / "page"
    directory.mkdir()
    result = run(file_of(tmp_path / "episodes.mmr", failed()), "--out", directory)
    assert (result.exit_code, result.stderr) == (2, f"error: {directory}: Is a directory; name a file\n")


def test_tools_without_a_model_are_refused(tmp_path):
    result = run(tmp_path / "x.mmr", "--tools", tmp_path / "tools.json")
    assert result.exit_code == 2
    assert "pass --model, too" in result.stderr


def test_a_file_without_episodes_gives_an_empty_page_and_a_note_that_is_no_error(tmp_path):
    result = run(file_of(tmp_path / "episodes.mmr"))
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("note: ")
    assert "holds no episodes yet" in result.stderr
    index, _ = read_page(tmp_path / "episodes.mmr.html")
    assert index["episodes"] == []
