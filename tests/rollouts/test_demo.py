"""The demonstration itself, shortened: two processes, real training, real episodes."""

import io
import json
import multiprocessing
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from rich.console import Console

from rollouts.demo.process import TrainerProcess
from rollouts.demo.recipe import RECIPE
from rollouts.demo.run import Demo, Progress, print_results
from rollouts.demo.task import Learn
from rollouts.demo.trainer import Trainer
from rollouts.errors import RolloutsError
from transport import RecordReader, decode, encode, read_records

SHORT = replace(
    RECIPE,
    rl_steps=2,
    groups=6,
    group_size=4,
    evaluate_every=2,
    sft_max_steps=4,
    sft_first_check=2,
    sft_chunk=2,
    probe_digits=10,
    held_out_digits=20,
)


class TrainerOfThisProcess:
    """What `Demo` asks of a `TrainerProcess`, without the time that another process takes to import torch."""

    threads = 1

    def __init__(self, model_directory):
        self.model_directory, self.trainer = model_directory, None

    async def request(self, request):
        message = encode(request)
        self.trainer = self.trainer or Trainer(self.model_directory, SHORT, seed=0)
        return decode(encode(self.trainer.handle(decode(message)))), len(message)

    def stop(self):
        pass


def run(out, trainer):
    progress = Progress(Console(file=io.StringIO()), SHORT)
    return Demo(recipe=SHORT, seed=0, out=out, trainer=trainer, progress=progress).run()


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    with TrainerProcess(out / "model", SHORT, 0) as trainer:
        return out, run(out, trainer)


def episodes_of(out):
    return [
        (t.episode_id, [node.token_ids.tolist() for node in t.nodes], [node.logprobs.tolist() for node in t.nodes])
        for t in read_records(out / "trajectories.mmr")
    ]


@pytest.mark.slow
def test_sampler_and_trainer_agree_in_every_step(first_run):
    _, results = first_run
    assert [step.step for step in results.steps] == [1, 2]
    assert all(0 < step.max_mismatch < 1e-4 for step in results.steps)


@pytest.mark.slow
def test_every_episode_is_in_the_file_and_every_image_in_it_once(first_run):
    out, results = first_run
    trajectories = list(read_records(out / "trajectories.mmr"))
    assert len(trajectories) == results.episodes == 2 * 6 * 4
    assert sum(t.num_turns for t in trajectories) == results.turns
    assert len({r.source.digest for t in trajectories for r in t.all_media()}) == results.distinct_images
    content = (out / "trajectories.mmr").read_bytes()
    source = bytes(next(iter(trajectories[0].all_media())).source.data)
    assert content.count(source) == 1


@pytest.mark.slow
def test_the_same_seed_gives_the_same_trajectories_token_for_token(first_run, tmp_path):
    out, _ = first_run
    run(tmp_path, TrainerOfThisProcess(tmp_path / "model"))
    assert episodes_of(tmp_path) == episodes_of(out)


@pytest.mark.slow
def test_the_report_shows_what_was_measured(first_run, tmp_path):
    _, results = first_run
    console = Console(width=160, record=True, file=io.StringIO())
    print_results(results, console)
    text = console.export_text()
    assert f"{results.after.accuracy:.3f}" in text
    assert f"{results.max_mismatch:.2e}" in text
    results.save(tmp_path / "figures.json")
    saved = json.loads((tmp_path / "figures.json").read_text())
    assert saved["max_mismatch"] == results.max_mismatch
    assert saved["missed"], "two steps cannot have reached the targets"


def test_progress_is_a_line_for_every_fifth_step_with_the_time_that_is_left():
    output = io.StringIO()
    progress = Progress(Console(file=output, width=60), RECIPE)
    progress.update_warm_start(60, 0.123, 0.56)
    for step in range(1, 11):
        progress.update_rl(step, 0.5, 0.25, 2.1e-6, 2.0)
    progress.print_evaluation(10, 0.75)
    lines = output.getvalue().splitlines()
    assert [line.partition(": ")[0] for line in lines] == [
        "warm start 60/200",
        "step 1/60",
        "step 5/60",
        "step 10/60",
        "step 10/60",
    ]
    assert "1:50 left" in lines[2]  # 55 steps of 2 s
    assert "held-out first-try accuracy 0.750" in lines[-1]


@pytest.mark.slow
def test_a_training_process_that_dies_is_noticed(first_run):
    out, _ = first_run
    import asyncio

    with (
        TrainerProcess(out / "no-such-model", SHORT, 0) as trainer,
        pytest.raises(RolloutsError, match="no-such-model"),
    ):
        asyncio.run(trainer.request(Learn([], 0.0)))


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_ctrl_c_while_the_training_process_starts_comes_when_it_has_started(tmp_path, monkeypatch):
    started = []

    def interrupt():
        # As a thread of another library does, which takes the signal though the main thread has blocked it.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    def start(process):
        thread = threading.Thread(target=interrupt)
        thread.start()
        thread.join()
        started.append(process)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", start)
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            TrainerProcess(tmp_path / "model", SHORT, 0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(started) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
@pytest.mark.slow
def test_an_interrupted_demo_says_that_it_replaces_a_run_and_leaves_its_episodes_in_a_readable_file(tmp_path):
    shortened = (
        "import dataclasses, rollouts.demo.recipe as recipe\n"
        "recipe.RECIPE = dataclasses.replace(\n"
        "    recipe.RECIPE, labelled=4, sft_batch=4, sft_max_steps=1, sft_first_check=1, held_out_digits=2,\n"
        "    probe_digits=2, groups=4, group_size=2,\n"
        ")\n"
        "from rollouts.cli.main import main\n"
        "if __name__ == '__main__':\n"
        "    main()\n"
    )
    command = [sys.executable, "-c", shortened, "demo", "--out", str(tmp_path)]
    episodes = tmp_path / "trajectories.mmr"
    episodes.touch()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 180
    while (not episodes.exists() or episodes.stat().st_size < 5_000) and time.monotonic() < deadline:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert f"in {tmp_path} is an earlier run, which is replaced" in output
    assert "the episodes so far are in" in output
    with RecordReader(episodes) as reader:
        assert len(reader) > 0
        assert reader.truncated_bytes == 0
        assert reader[len(reader) - 1].done
