"""Objects made of a configuration: renderer, environment, rewards, sampling, modes, workers."""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from renderers import TemplateRenderer, load_renderer
from renderers.errors import MissingExtraError
from rollouts.engines.protocol import GenerateRequest, SamplingParams
from rollouts.episodes.environment import ThreadedEnvironment
from rollouts.errors import describe_exception, validation_errors
from rollouts.evaluation import Tally
from rollouts.rewards import GroupReward, Reward, check_names
from rollouts.run_config.config_file import ConfigFile, EngineFile
from rollouts.run_config.engines import local_directory, media_policy, server_kind
from rollouts.run_config.errors import KeyPath
from rollouts.run_config.import_paths import imported_factory, imported_function, imported_object, make_importable
from rollouts.run_config.sections import (
    AsynchronousSection,
    EndpointEngineSection,
    GymnasiumSection,
    ImportedEngine,
    ImportedEnvironment,
    LocalEngineSection,
    RewardSection,
    ScoredPromptSection,
    ScriptedEngineSection,
    SynchronousSection,
    ToolsSection,
    VerifiersSection,
)
from rollouts.run_config.tasks import TaskSource
from rollouts.runner.modes import Asynchronous, Mode, OneStepOffPolicy, Synchronous
from rollouts.task import MakeEnvironment, Task


def make_renderer(file: EngineFile, *, offline: bool) -> TemplateRenderer | None:
    """Load the renderer of a configuration; None for a chat endpoint, which renders messages itself.

    `renderer.model` is a directory if there is one of that name, else a repository of Hugging Face.
    `offline`: its files must be in the local cache, and no connection is opened. Raises `RunConfigError`.
    """
    section = file.config.renderer
    if section is None:
        return None
    template: Path | None = None
    if section.chat_template is not None:
        template = file.resolve(section.chat_template)
        if not template.is_file():
            raise file.error(("renderer", "chat_template"), f"there is no file {template}; write its path")
    with file.naming("renderer", "media"):
        policy = media_policy(file, section.media)
    engine = file.config.engine
    if isinstance(engine, LocalEngineSection) and engine.directory == section.model:
        local_directory(file, engine)  # the engine's error, which `ProblemList` has once, and no other
    model = _model(file, section.model, section.revision, offline=offline)
    with file.naming("renderer", "model"):
        return load_renderer(
            model,
            revision=None if isinstance(model, Path) else section.revision,
            chat_template=template,
            chat_template_kwargs=section.chat_template_kwargs,
            media_policy=policy,
        )


def _model(file: EngineFile, name: str, revision: str | None, *, offline: bool) -> str | Path:
    directory = file.resolve(name)
    key = ("renderer", "model")
    if directory.is_dir():
        if revision is not None:
            reason = f"{directory} is a directory, which has no revisions; remove the key"
            raise file.error(("renderer", "revision"), reason)
        return directory
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise file.error(key, f"there is no directory {directory}; write a model directory or the name of a repository")
    return _cached_repository(file, name, revision) if offline else name


def _cached_repository(file: EngineFile, name: str, revision: str | None) -> Path:
    # Imported here: the client takes 0.3 s to import, and a local directory does not need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = (
            f"there is no directory {file.resolve(name)}, and the repository {name!r} is not in the local cache, from "
            "which --dry-run reads it without a connection; correct the name, or download the repository first"
        )
        raise file.error(("renderer", "model"), reason) from error


def make_rewards(
    file: ConfigFile, key: KeyPath, sections: Sequence[RewardSection], arguments: Sequence[str]
) -> list[Reward]:
    """The rewards in the array of tables `key`, whose functions get `arguments`. Raises `RunConfigError`."""
    rewards: list[Reward] = []
    for index, section in enumerate(sections):
        function = imported_function(file, (*key, index, "function"), section.function, arguments)
        rewards.append(Reward(section.name, section.weight, function, section.threaded))
    with file.naming(*key):
        check_names("name", rewards)
    return rewards


def make_group_rewards(file: ConfigFile) -> list[GroupReward]:
    """The rewards of whole groups. Raises `RunConfigError`."""
    of_episodes = {"environment", *(section.name for section in getattr(file.config.environment, "rewards", ()))}
    for index, section in enumerate(file.config.group_rewards):
        if section.name in of_episodes:
            reason = f"the rewards of the episodes have the name {section.name!r}; give the group reward another one"
            raise file.error(("group_rewards", index, "name"), reason)
    rewards = make_rewards(file, ("group_rewards",), file.config.group_rewards, ["episodes"])
    return [GroupReward(reward.name, reward.weight, reward.function, reward.threaded) for reward in rewards]


def sampling_problems(file: ConfigFile) -> Iterator[tuple[KeyPath, str]]:
    """The options with which the engine would refuse every request of the run, each with the reason."""
    engine, sampling = file.config.engine, file.config.sampling
    if isinstance(engine, ScriptedEngineSection | ImportedEngine):  # what they refuse is not known before a request
        return
    if isinstance(engine, EndpointEngineSection):
        from rollouts.engines.endpoint import OWN_FIELDS

        if sampling.top_k:
            yield ("sampling", "top_k"), 'the API of OpenAI has no such option; a server may have it as "extra"'
        if sampling.top_logprobs:
            yield ("sampling", "top_logprobs"), "a chat endpoint gives messages without tokens; remove it"
        for name in OWN_FIELDS.intersection(sampling.extra):
            yield ("sampling", "extra", name), "the request has this field already; set it by its own key or option"
        return
    if isinstance(engine, LocalEngineSection):
        for name in sampling.extra:
            yield ("sampling", "extra", name), 'an engine of kind "local" has no further options; remove it'
        return
    from rollouts.engines.sglang.request_checks import sampling_violations as of_sglang
    from rollouts.engines.vllm.sampling_checks import sampling_violations as of_vllm

    sampling_violations = of_sglang if server_kind(engine) == "sglang" else of_vllm
    options: dict[KeyPath, dict[str, Any]] = {("sampling", "temperature"): {"temperature": sampling.temperature}}
    options |= {("sampling", "extra", name): {"extra": {name: value}} for name, value in sampling.extra.items()}
    for key, option in options.items():
        request = GenerateRequest([0], SamplingParams(max_tokens=sampling.max_tokens, **option))
        for reason in sampling_violations(request):
            yield key, reason


# The mode of a run: how old tokens may be where another process changes the weights of the server.


def make_mode(file: ConfigFile) -> Mode:
    """The mode of a configuration; one without a limit if it names none."""
    section = file.config.mode
    if section is None:
        return Asynchronous(sys.maxsize)
    if isinstance(section, AsynchronousSection):
        return Asynchronous(section.max_staleness, section.on_stale)
    return Synchronous() if isinstance(section, SynchronousSection) else OneStepOffPolicy()


def make_tally(file: ConfigFile, samples: int, *k: int) -> Tally:
    """What adds up the groups of an evaluation, with pass@k for the `k` beside those of the file.

    Raises `RunConfigError`.
    """
    section = file.config.evaluation
    with file.naming("evaluation", "k"):
        counted = None if section.k is None else [*k, *section.k]
        return Tally(samples=samples, threshold=section.threshold, failed=section.failed, k=counted)


# The environment of a run: the function that makes one for each episode, by the kind of the environment.


def environment_factory(file: ConfigFile) -> MakeEnvironment:
    """The `make_environment` of a configuration. Raises `RunConfigError`; no environment is made."""
    section = file.config.environment
    return _FACTORIES[type(section)](file, section)


def _imported(file: ConfigFile, section: ImportedEnvironment) -> MakeEnvironment:
    factory = imported_factory(file, "environment", section, ["task"])
    return (lambda task: ThreadedEnvironment(factory(task))) if section.threaded else factory


def _scored_prompt(file: ConfigFile, section: ScoredPromptSection) -> MakeEnvironment:
    from rollouts.environments import ScoredPrompt, messages_of_row

    messages = messages_of_row if section.messages is None else _messages(file, section.messages)
    rewards = make_rewards(file, ("environment", "rewards"), section.rewards, ["completion", "task"])
    return lambda task: ScoredPrompt(task, messages, rewards)


def _tools(file: ConfigFile, section: ToolsSection) -> MakeEnvironment:
    from rollouts.environments import Tool, ToolEnvironment

    tools: list[Tool] = []
    for index, import_path in enumerate(section.tools):
        key = ("environment", "tools", index)
        found = imported_object(file, key, import_path)
        if not isinstance(found, Tool) and not callable(found):
            raise file.error(key, f"{import_path} is a {type(found).__name__}; name a typed function or a Tool")
        with file.naming(*key):
            tools.append(found if isinstance(found, Tool) else Tool.from_function(found))
    messages = _messages(file, section.messages)
    rewards = make_rewards(file, ("environment", "rewards"), section.rewards, ["conversation", "task"])

    def make(task: Task) -> ToolEnvironment:
        return ToolEnvironment(task, tools=tools, messages=messages, score=rewards, call_seconds=section.call_seconds)

    with file.naming("environment", "tools"):
        make(Task("0"))  # refuses two tools of one name
    return make


def _gymnasium(file: ConfigFile, section: GymnasiumSection) -> MakeEnvironment:
    from rollouts.environments import GymnasiumEnvironment

    if find_spec("gymnasium") is None:
        raise MissingExtraError("an environment of Gymnasium", "gym", "gymnasium")
    import gymnasium

    try:
        gymnasium.spec(section.id)
    except Exception as error:
        # The module of an id may raise anything.
        reason = f"gymnasium does not know {section.id!r} ({describe_exception(error)}); correct the id"
        raise file.error(("environment", "id"), reason) from error
    parse_action = None
    if section.parse_action is not None:
        parse_action = imported_function(file, ("environment", "parse_action"), section.parse_action, ["text"])
    arguments = (
        section.arguments if section.observation == "text" else {"render_mode": "rgb_array", **section.arguments}
    )

    def make(task: Task) -> GymnasiumEnvironment:
        return GymnasiumEnvironment(
            lambda: gymnasium.make(section.id, **arguments),
            instructions=section.instructions,
            action_names=section.action_names,
            parse_action=parse_action,
            observation=section.observation,
            on_invalid_action=section.on_invalid_action,
            invalid_action_reward=section.invalid_action_reward,
        )

    return make


def _messages(file: ConfigFile, import_path: str) -> Callable[..., Any]:
    return imported_function(file, ("environment", "messages"), import_path, ["task"])


_FACTORIES: Mapping[type, Callable[[ConfigFile, Any], MakeEnvironment]] = {
    ImportedEnvironment: _imported,
    ScoredPromptSection: _scored_prompt,
    ToolsSection: _tools,
    GymnasiumSection: _gymnasium,
}


def load_verifiers(file: ConfigFile) -> tuple[Any, TaskSource]:
    """The environment and its tasks. Raises `RunConfigError`; `ImportError` without verifiers 0.4."""
    section = file.config.environment
    assert isinstance(section, VerifiersSection)
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    from rollouts.environments.verifiers import VerifiersTasks

    make_importable(file.directory)
    taskset = section.arguments.get("taskset", {})
    if not isinstance(taskset, dict) or "id" in taskset:
        reason = "write a table with options of the taskset; its id is that of [environment]"
        raise file.error(("environment", "arguments", "taskset"), reason)
    try:
        config = resolve_env_config({**section.arguments, "taskset": {**taskset, "id": section.id}})
        env = load_environment(config)
        tasks = VerifiersTasks(env)
        is_empty = next(iter(tasks), None) is None
    except ValidationError as error:
        # Without the values, which may be secrets.
        found = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in validation_errors(error)]
        raise file.error(("environment", "arguments"), f"verifiers refuses {'; '.join(found)}") from None
    except (Exception, SystemExit) as error:
        # A module of a user may raise anything, and call sys.exit.
        reason = f"verifiers cannot load {section.id!r}: {describe_exception(error)}"
        raise file.error(("environment", "id"), reason) from error
    if is_empty:
        raise file.error(("environment", "id"), f"the taskset {section.id!r} has no task")
    return env, tasks


def worker_configuration(file: ConfigFile) -> str:
    """A digest of the tables that worker and run must have alike: those of the environment and the renderer."""
    values = file.config.model_dump(include={"environment", "renderer"})
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:32]
