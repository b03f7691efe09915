"""A real vLLM for these tests: a server for each mode, checked to be alive after every test; meanwhile the next starts.

    tests/real/setup_vllm.sh            # once; 2.5 GB
    tests/real/setup_rust_frontend.sh   # once; downloads 500 MB, keeps 61 MB; without it its tests are skipped
    pytest -n 0 -m real

MMROLLOUTS_VLLM_VENV names another environment that holds vLLM. VLLM_BASE_URL and VLLM_MODEL_DIR (and VLLM_MODE, one of
`vllm_server.MODES`, float32 if not given) name a server that runs already; what would kill it is skipped.
"""

import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path

import httpx
import pytest
from make_checkpoint import make_checkpoint
from make_family_checkpoint import make_family_checkpoint
from vllm_server import MODES, VLLMServer, rust_frontend_path

from renderers import TemplateRenderer, load_renderer
from rollouts.engines.vllm import VLLMEngine

_HERE = Path(__file__).parent
_VERSION = "0.32.0"  # as in setup_vllm.sh


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the float32 server to a test that names no mode."""
    named = any("vllm_server" in str(mark.args[0]) for mark in metafunc.definition.iter_markers("parametrize"))
    if "vllm_server" in metafunc.fixturenames and not named:
        metafunc.parametrize("vllm_server", ["float32"], indirect=True, scope="session")


#: The contract of each real server, which `.ci/run` tests: of these modules the tests on these servers, or those named.
_CONTRACT_MODES = (None, "float32", "rust")
_CONTRACT: dict[str, tuple[str, ...]] = {
    "test_real_engine.py": (),
    "test_real_rust_frontend.py": (
        "test_log_probabilities_are_those_of_the_pixels_that_the_trainer_decodes",
        "test_the_planted_mistake_a_jpeg_that_this_frontend_decodes_gives_other_log_probabilities",
        "test_features_are_refused_and_expectations_do_not_change_that",
        "test_doctor_names_the_frontend_and_blames_no_flag_that_it_does_not_need",
    ),
    "test_real_gateway.py": (),
    "test_real_doctor.py": ("test_a_sound_server_passes_every_check",),
    "test_real_sglang.py": (
        "test_a_prompt_with_images_keeps_its_ids_and_its_log_probabilities",
        "test_another_image_gives_other_log_probabilities",
        "test_a_stop_token_ends_a_completion_and_is_part_of_it",
        "test_a_completion_that_a_pause_cuts_off_is_continued_with_the_new_weights",
        "test_aborted_and_cancelled_requests_end_on_the_server",
        "test_the_doctor_finds_no_failure",
    ),
}


def _is_of_the_contract(item: pytest.Item) -> bool:
    names = _CONTRACT.get(item.path.name)
    named = names is not None and (not names or item.name.partition("[")[0] in names)
    return named and _mode(item) in _CONTRACT_MODES


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Mark the tests of this folder, and sort them by mode after pytest has sorted them by other parameters."""
    for item in items:
        if _is_here(item):
            item.add_marker("real")
            if _is_of_the_contract(item):
                item.add_marker("contract")
    yield
    by_mode = iter(sorted(filter(_is_here, items), key=_order))
    items[:] = [next(by_mode) if _is_here(item) else item for item in items]


def _is_here(item: pytest.Item) -> bool:
    return str(item.path).startswith(f"{_HERE}{os.sep}")  # a tenth of the time of comparing paths, 12,000 times


def _order(item: pytest.Item) -> int:
    mode = _mode(item)
    return -1 if mode is None else list(MODES).index(mode)


def _mode(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("vllm_server")


@pytest.fixture(scope="session")
def vllm_venv() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    venv = Path(os.environ.get("MMROLLOUTS_VLLM_VENV") or cache / "mmrollouts" / f"vllm-{_VERSION}")
    if not (venv / "bin" / "vllm").exists():
        pytest.skip(f"no vLLM in {venv}: run tests/real/setup_vllm.sh, or set MMROLLOUTS_VLLM_VENV or VLLM_BASE_URL")
    return venv


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By dtype, a checkpoint to be served. Read only."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {dtype: make_checkpoint(root / dtype, dtype) for dtype in ("float32", "bfloat16")}


class Servers:
    """Starts one server after the other, each once; while tests use one, the next one starts.

    `modes`: those of the tests, in the order of the tests. `launch` starts a server and waits for nothing.
    """

    def __init__(self, modes: Iterable[str], launch: Callable[[str], VLLMServer]) -> None:
        self._modes = list(modes)
        self._launch = launch
        self._next: dict[str, VLLMServer] = {}

    def start(self, mode: str) -> VLLMServer:
        if mode not in self._modes:
            pytest.fail(f'a second start of {mode}: parametrize "vllm_server" and other values with scope="session"')
        self._modes.remove(mode)
        server = self._next.pop(mode, None) or self._launch(mode)
        server.until_healthy()
        if self._modes and not self._next:
            self._next[self._modes[0]] = self._launch(self._modes[0])
        return server

    def stop(self) -> None:
        for server in self._next.values():
            server.stop()


@pytest.fixture(scope="session")
def servers(
    request: pytest.FixtureRequest,
    vllm_venv: Path,
    checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Servers]:
    def launch(mode: str) -> VLLMServer:
        if (family := MODES[mode].family) is None:
            model_dir = checkpoints[MODES[mode].dtype]
        else:
            model_dir = make_family_checkpoint(family, tmp_path_factory.mktemp(family))
        return VLLMServer.launch(vllm_venv, model_dir, mode, tmp_path_factory.mktemp("vllm"))

    modes = dict.fromkeys(filter(None, map(_mode, request.session.items)))
    started = Servers([mode for mode in modes if _can_start(mode)], launch)
    yield started
    started.stop()


def _can_start(mode: str) -> bool:
    return rust_frontend_path().exists() or not MODES[mode].rust_frontend


@pytest.fixture(scope="session")
def vllm_server(request: pytest.FixtureRequest) -> Iterator[VLLMServer]:
    """A server in the mode of the test (`@pytest.mark.parametrize("vllm_server", ["bfloat16"], indirect=True)`)."""
    mode: str = request.param
    if os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") != "1":
        pytest.fail("these tests share one server at a time: run them with -n 0")
    if "VLLM_BASE_URL" in os.environ:
        yield _running_server(mode)
        return
    if not _can_start(mode):
        pytest.skip(f"no Rust frontend of vLLM at {rust_frontend_path()}: run tests/real/setup_rust_frontend.sh")
    server: VLLMServer = request.getfixturevalue("servers").start(mode)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def renderer(vllm_server: VLLMServer) -> TemplateRenderer:
    return load_renderer(vllm_server.model_dir)


@pytest.fixture
async def engine(vllm_server: VLLMServer) -> AsyncIterator[VLLMEngine]:
    async with VLLMEngine(vllm_server.base_url, api_key=vllm_server.api_key) as engine:
        await engine.capabilities()
        yield engine


@pytest.fixture
async def restored(engine: VLLMEngine, vllm_server: VLLMServer) -> AsyncIterator[None]:
    """Restore the weights and the label that the server was started with, also after a failed test."""
    yield
    await engine.control.update_weights(vllm_server.model_dir, "default")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A checkpoint with other weights."""
    return make_checkpoint(tmp_path / "other", "float32", seed=11)


def _running_server(mode: str) -> VLLMServer:
    running = os.environ.get("VLLM_MODE", "float32")
    if mode != running:
        pytest.skip(f"VLLM_BASE_URL names a {running} server (VLLM_MODE), this test needs {mode}")
    if "VLLM_MODEL_DIR" not in os.environ:
        pytest.fail("VLLM_BASE_URL is set, VLLM_MODEL_DIR (the checkpoint that it serves) is not")
    base_url = os.environ["VLLM_BASE_URL"].rstrip("/")
    headers = {"Authorization": f"Bearer {key}"} if (key := MODES[mode].api_key) else {}
    served = httpx.get(f"{base_url}/v1/models", headers=headers, timeout=10).raise_for_status().json()["data"]
    return VLLMServer(base_url, Path(os.environ["VLLM_MODEL_DIR"]), mode, model_name=served[0]["id"])


@pytest.fixture(autouse=True)
def _server_survives(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that kills its server by mistake or leaves it paused, and restore the server for the next test."""
    if "vllm_server" not in request.fixturenames:
        yield
        return
    server: VLLMServer = request.getfixturevalue("vllm_server")
    yield
    if server.killed:
        server.restart()
    elif not server.is_healthy():
        log = server.log_tail()
        if server.ours:
            server.restart()
        pytest.fail(f"this test took the server down; its log ended:\n{log}")
    elif MODES[server.mode].dev_routes and MODES[server.mode].subcommand == ("serve",):
        _check_awake(server)


def _check_awake(server: VLLMServer) -> None:
    paused = server.http.get("/is_paused").json()["is_paused"]
    asleep = server.http.get("/is_sleeping").json()["is_sleeping"]
    if asleep:
        server.http.post("/wake_up")
    if paused:
        server.http.post("/resume")
    if paused or asleep:
        pytest.fail(f"this test left the server {'asleep' if asleep else 'paused'}")
