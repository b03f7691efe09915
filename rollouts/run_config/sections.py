"""The tables of a configuration file of `rollouts run`, as pydantic models.

Types are strict: a number in quotes is no number. A path is relative to the directory of the configuration file.
`kind` chooses the model of a table, and so the keys that it may have.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

#: "package.module:name", where modules in the directory of the configuration file can be imported; or "file.py:name".
ImportPath: TypeAlias = Annotated[str, Field(pattern=r"^([^\s:]+|[^:]+\.py):[^\s:]+$")]
Text: TypeAlias = Annotated[str, Field(min_length=1)]
VariableName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Count: TypeAlias = Annotated[int, Field(ge=1)]
Seconds: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Section(BaseModel):
    """A table of the file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class FileTasks(Section):
    """Rows of a file. A row is the `data` of its task.

    The value of `id_key` in a row, a text or an integer, is the id of the task; without `id_key` it is the number of
    the row, from 0. The value of `seed_key`, an integer, is the seed of its environments.
    """

    path: Text
    id_key: Text | None = None
    seed_key: Text | None = None


class JsonlTasks(FileTasks):
    """A JSON object a line."""

    kind: Literal["jsonl"]


class TomlTasks(FileTasks):
    """A TOML file with an array of tables `[[tasks]]`."""

    kind: Literal["toml"]


class ParquetTasks(FileTasks):
    """A Parquet file (extra `parquet`)."""

    kind: Literal["parquet"]


class ImportedTasks(Section):
    """An iterable of `Task`, async or not, or a function that returns one when it is called with `arguments`."""

    kind: Literal["import"]
    source: ImportPath
    arguments: dict[str, Any] = Field(default_factory=dict)


class TasksOfVerifiers(Section):
    """The tasks of the taskset of an environment of verifiers."""

    kind: Literal["verifiers"]


TasksSection: TypeAlias = Annotated[
    JsonlTasks | TomlTasks | ParquetTasks | ImportedTasks | TasksOfVerifiers, Field(discriminator="kind")
]


class ImportedEnvironment(Section):
    """A class or function that is called with a `Task` and `arguments` for each episode, and returns an environment.

    `threaded`: the methods of the environment block, and run on threads.
    """

    kind: Literal["import"]
    factory: ImportPath
    arguments: dict[str, Any] = Field(default_factory=dict)
    threaded: bool = False


class RewardSection(Section):
    """A function whose finite result, times `weight`, is added to the reward. `threaded`: it runs on a thread."""

    name: Text
    function: ImportPath
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    threaded: bool = False


class ScoredPromptSection(Section):
    """One turn (`ScoredPrompt`): `messages(task)` is the prompt; the rewards get (completion, task).

    Without `messages`, the row of the task has the prompt (`messages_of_row`).
    """

    kind: Literal["scored_prompt"]
    messages: ImportPath | None = None
    rewards: list[RewardSection] = Field(min_length=1)


class ToolsSection(Section):
    """The model calls tools (`ToolEnvironment`): typed functions, or `Tool` objects.

    `messages(task)` are the first messages; the rewards get (conversation, task).
    """

    kind: Literal["tools"]
    tools: list[ImportPath] = Field(min_length=1)
    messages: ImportPath
    rewards: list[RewardSection] = Field(default_factory=list)
    call_seconds: Seconds = 60.0


class GymnasiumSection(Section):
    """An environment of Gymnasium (extra `gym`; `GymnasiumEnvironment`): `gymnasium.make(id, **arguments)`."""

    kind: Literal["gymnasium"]
    id: Text
    arguments: dict[str, Any] = Field(default_factory=dict)
    instructions: str = ""
    action_names: list[Text] = Field(default_factory=list)
    parse_action: ImportPath | None = None
    observation: Literal["image", "text", "image and text"] = "image"
    on_invalid_action: Literal["ask again", "end"] = "ask again"
    invalid_action_reward: Annotated[float, Field(allow_inf_nan=False)] = 0.0


class VerifiersSection(Section):
    """An environment of verifiers 0.4 (`VerifiersWorkers`), whose harnesses and scoring run in this process.

    `id` is that of the taskset, as for `vf-eval`: a package, or a module beside the file. `arguments` are the other
    values of verifiers' table `[env]`, such as `agent.runtime.type = "subprocess"`.
    """

    kind: Literal["verifiers"]
    id: Text
    arguments: dict[str, Any] = Field(default_factory=dict)


EnvironmentSection: TypeAlias = Annotated[
    ImportedEnvironment | ScoredPromptSection | ToolsSection | GymnasiumSection | VerifiersSection,
    Field(discriminator="kind"),
]


class ServerSection(Section):
    """A server at `base_url`. With `start`, the command of the server, the run starts it and ends it.

    `environment` is added to the environment of that command, and `log` is the file for what it prints. It must be
    ready after `start_seconds`.
    """

    base_url: Text
    start: Annotated[list[Text], Field(min_length=1)] | None = None
    environment: dict[Text, str] = Field(default_factory=dict)
    log: Text | None = None
    start_seconds: Seconds = 900.0


class VLLMOptions(Section):
    """Options of `VLLMEngine`. `api_key_env` is the name of the environment variable that holds the servers' key."""

    model: Text | None = None
    api_key_env: VariableName | None = None
    media: Literal["auto", "features", "content_parts"] = "auto"


class VLLMEngineSection(ServerSection, VLLMOptions):
    """A vLLM server."""

    kind: Literal["vllm"]


class SGLangEngineSection(ServerSection):
    """An SGLang server (`SGLangEngine`). `api_key_env` is the name of the environment variable that holds its key."""

    kind: Literal["sglang"]
    api_key_env: VariableName | None = None


class FleetEngineSection(VLLMOptions):
    """Several servers of one kind (`EngineFleet`), named by one of two keys.

    `urls`: their addresses. `servers`: a table for each, which may have the command that starts it. Servers of SGLang
    take neither `model` nor `media`.
    """

    kind: Literal["fleet"]
    server_kind: Literal["vllm", "sglang"] = "vllm"
    urls: list[Text] = Field(default_factory=list)
    servers: list[ServerSection] = Field(default_factory=list)


class MediaSection(Section):
    """Which media references may be followed (`renderers.MediaPolicy`). By default nothing is read but data URLs."""

    allowed_schemes: list[Literal["http", "https"]] = Field(default_factory=list)
    allowed_hosts: list[Text] = Field(default_factory=list)
    allowed_networks: list[Text] = Field(default_factory=list)
    allowed_directories: list[Text] = Field(default_factory=list)


class EndpointEngineSection(Section):
    """A server with OpenAI's chat completions (`ChatEndpoint`); such a run has no renderer.

    `api_key_env` is the name of the environment variable that holds the key; without it, https://api.openai.com gets
    that of OPENAI_API_KEY, and other addresses get none. `max_tokens_field`, `omit` and `tool_images` are for servers
    that do not know all fields of a request, or take images in messages of the user alone. `return_token_ids`: token
    ids and log-probabilities of conversations without media, which vLLM returns, so that episodes can be trained on.
    """

    kind: Literal["openai"]
    base_url: Text
    model: Text
    api_key_env: VariableName | None = None
    max_tokens_field: Literal["max_completion_tokens", "max_tokens"] = "max_completion_tokens"
    tool_images: Literal["tool", "user"] | None = None
    omit: list[Literal["temperature", "top_p", "seed"]] = Field(default_factory=list)
    return_token_ids: bool = False
    request_seconds: Seconds = 600.0
    media: MediaSection = MediaSection()


class LocalEngineSection(Section):
    """A model directory, run by transformers in this process (extra `torch`)."""

    kind: Literal["local"]
    directory: Text


class ScriptedEngineSection(Section):
    """Texts in place of a model, for trying a configuration. The first follows the last."""

    kind: Literal["scripted"]
    completions: list[str] = Field(min_length=1)


EngineSection: TypeAlias = Annotated[
    VLLMEngineSection
    | SGLangEngineSection
    | FleetEngineSection
    | EndpointEngineSection
    | LocalEngineSection
    | ScriptedEngineSection,
    Field(discriminator="kind"),
]


class RendererSection(Section):
    """`model` is a model directory, or the name of a Hugging Face repository, of which `revision` is a revision.

    `chat_template` is a path, and replaces the model's own template; `chat_template_kwargs` are template variables.
    """

    model: Text
    revision: Text | None = None
    chat_template: Text | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    media: MediaSection = MediaSection()


class TeacherSection(Section):
    """A model that scores every episode when it has ended (`rollouts.training.score`).

    `engine` and `renderer` are tables as those of the run. The renderer, by default that of a local directory, is
    compared with the run's: vocabulary, chat template, processors. `top_k` and `adapter` are those of `score`.
    """

    engine: Annotated[
        VLLMEngineSection | SGLangEngineSection | FleetEngineSection | LocalEngineSection,
        Field(discriminator="kind"),
    ]
    renderer: RendererSection | None = None
    top_k: Annotated[int, Field(ge=0)] = 0
    adapter: Text | None = None


class SamplingSection(Section):
    """Options of `SamplingParams`. `extra` holds options under the engine's own names."""

    max_tokens: Count
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_logprobs: Annotated[int, Field(ge=0)] = 0
    extra: dict[str, Any] = Field(default_factory=dict)


class LimitsSection(Section):
    """Limits of each episode; an episode that reaches one ends `truncated`."""

    max_turns: Count | None = None
    max_tokens: Count | None = None
    max_images: Annotated[int, Field(ge=0)] | None = None
    max_media_bytes: Annotated[int, Field(ge=0)] | None = None
    turn_seconds: Seconds | None = None
    episode_seconds: Seconds | None = None


class RetrySection(Section):
    """Which failed episodes are run again (`RetryPolicy`). Delays and the length of an outage are in seconds."""

    max_attempts: Count = 3
    kinds: list[Literal["engine", "media", "environment"]] = ["engine", "media"]
    first_delay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    max_delay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0
    outage_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 600.0


class SynchronousSection(Section):
    """Groups with tokens of earlier weights than those in use are left out."""

    kind: Literal["synchronous"]


class OneStepOffPolicySection(Section):
    """As `synchronous`, but tokens may be older by one update."""

    kind: Literal["one_step_off_policy"]


class AsynchronousSection(Section):
    """Tokens may be older by `max_staleness` updates; staler groups are left out or have smaller sample weights."""

    kind: Literal["asynchronous"]
    max_staleness: Annotated[int, Field(ge=0)]
    on_stale: Literal["drop", "downweight"] = "drop"


ModeSection: TypeAlias = Annotated[
    SynchronousSection | OneStepOffPolicySection | AsynchronousSection, Field(discriminator="kind")
]


class RaySection(Section):
    """`rollouts run --ray`: the episodes run in `workers` actors of a Ray cluster (extra `ray`; `RayWorkers`).

    By default the workers together run as many episodes at a time as the file says. `cpus`, `gpus` and `resources` are
    what an actor reserves on its node. `address` is that of the cluster, by default the one of RAY_ADDRESS, which
    `ray job submit` sets; without either, a cluster of this machine alone is started.
    """

    workers: Count = 1
    episodes_per_worker: Count | None = None
    cpus: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    gpus: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    resources: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(default_factory=dict)
    address: Text | None = None
    max_losses: Count = 3
    start_seconds: Seconds = 600.0


class WandbSection(Section):
    """The metrics are logged as a run of Weights & Biases (extra `wandb`; `WandbSink`).

    `mode` is "online" or "offline"; by default what WANDB_MODE says.
    """

    project: Text
    entity: Text | None = None
    name: Text | None = None
    mode: Literal["online", "offline"] | None = None


class OutputSection(Section):
    """The directory for the journal, the trajectories, the metrics, the summary and the report.

    `report`: whether a report is written at the end. `tensorboard`: whether the metrics are also written into the
    directory's folder `tensorboard` (extra `tensorboard`); `wandb`: to where of Weights & Biases.
    """

    directory: Text
    report: bool = True
    tensorboard: bool = False
    wandb: WandbSection | None = None


class EvaluationSection(Section):
    """How `rollouts eval` counts (`rollouts.evaluation.Tally`).

    An episode succeeds if its total reward is at least `threshold`. `failed` says how failed episodes count; `k` are
    those of pass@k and pass^k, by default the powers of 2 up to `group_size`, and `group_size`.
    """

    threshold: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    failed: Literal["zero", "exclude"] = "zero"
    k: list[Count] | None = None


class RunConfig(Section):
    """A configuration file: `group_size` episodes for each task, at most `concurrency` at a time.

    `skip_group(group)` returns True, or a reason, to leave a group out. The run ends where the first
    `stop_after_failed_groups` groups have failed in one way; with 0 it goes on. Without a mode no group is left out for
    its age: the run does not change the weights, but another process may. Every engine but that of kind "openai" needs
    a renderer.
    """

    tasks: TasksSection
    environment: EnvironmentSection
    engine: EngineSection
    renderer: RendererSection | None = None
    sampling: SamplingSection
    output: OutputSection
    limits: LimitsSection = LimitsSection()
    retry: RetrySection = RetrySection()
    mode: ModeSection | None = None
    ray: RaySection = RaySection()
    group_rewards: list[RewardSection] = Field(default_factory=list)
    skip_group: ImportPath | None = None
    teacher: TeacherSection | None = None
    evaluation: EvaluationSection = EvaluationSection()
    stop_after_failed_groups: Annotated[int, Field(ge=0)] = 8
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    group_size: Count = 1
    concurrency: Count = 64
