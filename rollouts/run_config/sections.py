"""The tables of a configuration file of `rollouts run`, `train`, `eval` and `serve`, as pydantic models.

What a value may be stands here, in the types of the keys and in the validators, and is checked here alone.
Types are strict: a number in quotes is no number. A path is relative to the directory of the configuration
file. `kind` chooses the model of a table, and so the keys that it may have.
"""

import re
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from rollouts.engines.http.address import parse_address
from rollouts.errors import short_repr


def _import_path(text: str) -> str:
    if not re.fullmatch(r"([^\s:]+|[^:]+\.py):[^\s:]+", text):
        raise ValueError(f'{text!r} is no import path; write "module:name" or "package.module:name"')
    return text


def _variable_name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text):
        # The value is not repeated: it may be the key itself.
        raise ValueError('this is no name of an environment variable; write one, such as "VLLM_API_KEY"')
    return text


def _address(url: str) -> str:
    """The URL of a server. Raises `ValueError`, whose text has no credentials, for one that names none or has some."""
    _, credentials = parse_address(url, api_key=None)
    if credentials is not None:
        raise ValueError("it has a user name or a password; remove them, and name the key's variable in api_key_env")
    return url


def _plain(value: Any) -> Any:
    """A value that can be recorded: TOML has no integers of more than 64 bits, and neither has the journal."""
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _plain(each)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{short_repr(value)} is out of range; write an integer from -(2**63) to below 2**63")
    return value


#: "package.module:name", where modules in the directory of the configuration file can be imported; or "file.py:name".
ImportPath: TypeAlias = Annotated[str, AfterValidator(_import_path)]
VariableName: TypeAlias = Annotated[str, AfterValidator(_variable_name)]
#: Of a server of vLLM or SGLang.
Address: TypeAlias = Annotated[str, AfterValidator(_address)]
#: Of a table whose keys are those of a function, a server or a template.
Plain: TypeAlias = Annotated[Any, AfterValidator(_plain)]
Text: TypeAlias = Annotated[str, Field(min_length=1)]
#: No name of a file has a null character.
PathText: TypeAlias = Annotated[str, Field(pattern=r"^[^\x00]+$")]
Count: TypeAlias = Annotated[int, Field(ge=1, lt=2**31)]
CountOrZero: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]
Finite: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
Seconds: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Section(BaseModel):
    """A table of the file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class FileTasks(Section):
    """Rows of a file. A row is the `data` of its task.

    The value of `id_key` in a row, a text or an integer, is the id of the task; without `id_key` it is the
    number of the row, from 0. The value of `seed_key`, an integer, is the seed of its environments.
    """

    path: PathText
    id_key: Text | None = None
    seed_key: Text | None = None


class JsonlTasks(FileTasks):
    """A JSON object a line."""

    kind: Literal["jsonl"]


class ParquetTasks(FileTasks):
    """A Parquet file (extra `parquet`)."""

    kind: Literal["parquet"]


class ImportedTasks(Section):
    """An iterable of `Task`, async or not, or a function that returns one when it is called with `arguments`."""

    kind: Literal["import"]
    source: ImportPath
    arguments: dict[str, Plain] = Field(default_factory=dict)


class TasksOfVerifiers(Section):
    """The tasks of the taskset of an environment of verifiers."""

    kind: Literal["verifiers"]


TasksSection: TypeAlias = Annotated[
    JsonlTasks | ParquetTasks | ImportedTasks | TasksOfVerifiers, Field(discriminator="kind")
]


class ImportedEnvironment(Section):
    """A class or function that is called with a `Task` and `arguments` for each episode, and returns an environment.

    `threaded`: the methods of the environment block, and run on threads.
    """

    kind: Literal["import"]
    factory: ImportPath
    arguments: dict[str, Plain] = Field(default_factory=dict)
    threaded: bool = False


class RewardSection(Section):
    """A function whose finite result, times `weight`, is added to the reward. `threaded`: it runs on a thread."""

    name: Text
    function: ImportPath
    weight: Finite = 1.0
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
    arguments: dict[str, Plain] = Field(default_factory=dict)
    instructions: str = ""
    action_names: list[Text] = Field(default_factory=list)
    parse_action: ImportPath | None = None
    observation: Literal["image", "text", "image and text"] = "image"
    on_invalid_action: Literal["ask again", "end"] = "ask again"
    invalid_action_reward: Finite = 0.0


class VerifiersSection(Section):
    """An environment of verifiers 0.4 (`VerifiersWorkers`), whose harnesses and scoring run in this process.

    `id` is that of the taskset, as for `vf-eval`: a package, or a module beside the file. `arguments` are the
    other values of verifiers' table `[env]`, such as `agent.runtime.type = "subprocess"`.
    """

    kind: Literal["verifiers"]
    id: Text
    arguments: dict[str, Plain] = Field(default_factory=dict)


EnvironmentSection: TypeAlias = Annotated[
    ImportedEnvironment | ScoredPromptSection | ToolsSection | GymnasiumSection | VerifiersSection,
    Field(discriminator="kind"),
]


class ServerSection(Section):
    """A server at `base_url`. With `start`, the command of the server, the run starts it and ends it.

    `environment` is added to the environment of that command, and `log` is the file for what it prints. It
    must be ready after `start_seconds`.
    """

    base_url: Address
    start: Annotated[list[Text], Field(min_length=1)] | None = None
    environment: dict[Text, str] = Field(default_factory=dict)
    log: PathText | None = None
    start_seconds: Seconds = 900.0

    @property
    def addresses(self) -> list[str]:
        return [self.base_url]


class AdapterOption(Section):
    """`adapter` is the directory of a LoRA adapter, with which all is sampled; a server must read it, too."""

    adapter: PathText | None = None


class VLLMOptions(AdapterOption):
    """Options of `VLLMEngine`. `api_key_env` is the name of the environment variable that holds the servers' key."""

    model: Text | None = None
    api_key_env: VariableName | None = None
    media: Literal["auto", "features", "content_parts"] = "auto"


class VLLMEngineSection(ServerSection, VLLMOptions):
    """A vLLM server."""

    kind: Literal["vllm"]


class SGLangEngineSection(ServerSection, AdapterOption):
    """An SGLang server (`SGLangEngine`). `api_key_env` is the name of the environment variable that holds its key."""

    kind: Literal["sglang"]
    api_key_env: VariableName | None = None


class FleetEngineSection(VLLMOptions):
    """Several servers of one kind (`EngineFleet`), named by one of two keys.

    `urls`: their addresses. `servers`: a table for each, which may have the command that starts it. Servers
    of SGLang take neither `model` nor `media`.
    """

    kind: Literal["fleet"]
    server_kind: Literal["vllm", "sglang"] = "vllm"
    urls: list[Address] = Field(default_factory=list)
    servers: list[ServerSection] = Field(default_factory=list)

    @property
    def addresses(self) -> list[str]:
        return self.urls or [server.base_url for server in self.servers]

    @model_validator(mode="after")
    def _names_each_server_once(self) -> Self:
        if bool(self.urls) == bool(self.servers):
            raise ValueError('name the servers by one of two keys: urls = ["http://..."], or [[engine.servers]]')
        known: set[str] = set()
        for url in self.addresses:
            if url.rstrip("/") in known:
                raise ValueError(f"{url} is named twice; name each server once")
            known.add(url.rstrip("/"))
        if self.server_kind == "sglang" and (given := self.model_fields_set & {"model", "media"}):
            raise ValueError(f"{min(given)} is an option for servers of vLLM; remove it")
        return self


#: What has the addresses of servers.
ServedSection: TypeAlias = VLLMEngineSection | SGLangEngineSection | FleetEngineSection


class MediaSection(Section):
    """Which media references may be followed (`renderers.MediaPolicy`). By default nothing is read but data URLs."""

    allowed_schemes: list[Literal["http", "https"]] = Field(default_factory=list)
    allowed_hosts: list[Text] = Field(default_factory=list)
    allowed_networks: list[Text] = Field(default_factory=list)
    allowed_directories: list[Text] = Field(default_factory=list)


class EndpointEngineSection(Section):
    """A server with OpenAI's chat completions (`ChatEndpoint`); such a run has no renderer.

    `api_key_env` is the name of the environment variable that holds the key; without it,
    https://api.openai.com gets that of OPENAI_API_KEY, and other addresses get none. `max_tokens_field`,
    `omit` and `tool_images` are for servers that do not know all fields of a request, or take images in
    messages of the user alone. `return_token_ids`: token ids and log-probabilities of conversations without
    media, which vLLM returns, so that episodes can be trained on.
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


class LocalEngineSection(AdapterOption):
    """A model directory, run by transformers in this process (extra `torch`)."""

    kind: Literal["local"]
    directory: PathText


class ScriptedEngineSection(Section):
    """Texts in place of a model, for trying a configuration. The first follows the last."""

    kind: Literal["scripted"]
    completions: list[str] = Field(min_length=1)


class ImportedEngine(Section):
    """A class or function that is called with `arguments`, and returns an `Engine`."""

    kind: Literal["import"]
    factory: ImportPath
    arguments: dict[str, Plain] = Field(default_factory=dict)


EngineSection: TypeAlias = Annotated[
    VLLMEngineSection
    | SGLangEngineSection
    | FleetEngineSection
    | EndpointEngineSection
    | LocalEngineSection
    | ScriptedEngineSection
    | ImportedEngine,
    Field(discriminator="kind"),
]


class RendererSection(Section):
    """`model` is a model directory, or the name of a Hugging Face repository, of which `revision` is a revision.

    `chat_template` is a path, and replaces the model's own template; `chat_template_kwargs` are template
    variables.
    """

    model: PathText
    revision: Text | None = None
    chat_template: PathText | None = None
    chat_template_kwargs: dict[str, Plain] = Field(default_factory=dict)
    media: MediaSection = MediaSection()

    @field_validator("chat_template_kwargs")
    @classmethod
    def _names_no_variable_of_the_renderer(cls, variables: dict[str, Any]) -> dict[str, Any]:
        if own := sorted(variables.keys() & {"messages", "tools", "add_generation_prompt"}):
            raise ValueError(f"the renderer passes {own[0]} to the chat template itself; remove the key")
        return variables


class TeacherSection(Section):
    """A model that scores every episode when it has ended (`rollouts.training.score`).

    `engine` and `renderer` are tables as those of the run. The renderer, by default that of a local
    directory, is compared with the run's: vocabulary, chat template, processors. `top_k` and `adapter` are
    those of `score`.
    """

    engine: Annotated[
        VLLMEngineSection | SGLangEngineSection | FleetEngineSection | LocalEngineSection,
        Field(discriminator="kind"),
    ]
    renderer: RendererSection | None = None
    top_k: CountOrZero = 0
    adapter: Text | None = None


class SamplingSection(Section):
    """Options of `SamplingParams`. `extra` holds options under the engine's own names."""

    max_tokens: Count
    temperature: NotNegative = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    top_logprobs: CountOrZero = 0
    extra: dict[str, Plain] = Field(default_factory=dict)


class LimitsSection(Section):
    """Limits of each episode; an episode that reaches one ends `truncated`."""

    max_turns: Count | None = None
    max_tokens: Count | None = None
    max_images: CountOrZero | None = None
    max_media_bytes: CountOrZero | None = None
    turn_seconds: Seconds | None = None
    episode_seconds: Seconds | None = None


class RetrySection(Section):
    """Which failed episodes are run again (`RetryPolicy`). Delays and the length of an outage are in seconds."""

    max_attempts: Count = 3
    kinds: list[Literal["engine", "media", "environment"]] = ["engine", "media"]
    first_delay: NotNegative = 1.0
    max_delay: NotNegative = 30.0
    outage_seconds: NotNegative = 600.0


class SynchronousSection(Section):
    """Groups with tokens of earlier weights than those in use are left out."""

    kind: Literal["synchronous"]


class OneStepOffPolicySection(Section):
    """Groups with tokens that are older than the weights in use by more than one update are left out."""

    kind: Literal["one_step_off_policy"]


class AsynchronousSection(Section):
    """Tokens may be older by `max_staleness` updates; staler groups are left out or have smaller sample weights."""

    kind: Literal["asynchronous"]
    max_staleness: CountOrZero
    on_stale: Literal["drop", "downweight"] = "drop"


ModeSection: TypeAlias = Annotated[
    SynchronousSection | OneStepOffPolicySection | AsynchronousSection, Field(discriminator="kind")
]


class RaySection(Section):
    """`rollouts run --ray`: the episodes run in `workers` actors of a Ray cluster (extra `ray`; `RayWorkers`).

    By default the workers together run as many episodes at a time as the file says. `cpus`, `gpus` and
    `resources` are what an actor reserves on its node. `address` is that of the cluster, by default the one
    of RAY_ADDRESS, which `ray job submit` sets; without either, a cluster of this machine alone is started.
    """

    workers: Count = 1
    episodes_per_worker: Count | None = None
    cpus: NotNegative = 1.0
    gpus: NotNegative = 0.0
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

    `report`: whether a report is written at the end. `tensorboard`: whether the metrics are also written into
    the directory's folder `tensorboard` (extra `tensorboard`); `wandb`: to where of Weights & Biases.
    """

    directory: PathText
    report: bool = True
    tensorboard: bool = False
    wandb: WandbSection | None = None


class EvaluationSection(Section):
    """How `rollouts eval` counts (`rollouts.evaluation.Tally`), and the held-out tasks of `rollouts train`.

    An episode succeeds if its total reward is at least `threshold`. `failed` says how failed episodes count;
    `k` are those of pass@k and pass^k, by default the powers of 2 up to `group_size`, and `group_size`.

    `rollouts train` plays `samples` episodes of each of the `tasks` before the first step, after every
    `every` steps and after the last.
    """

    threshold: Finite = 1.0
    failed: Literal["zero", "exclude"] = "zero"
    k: list[Count] | None = None
    tasks: TasksSection | None = None
    every: Count = 10
    samples: Count = 1


class SupervisedSection(Section):
    """Supervised steps before the first step of `rollouts train`, on the conversations of the `tasks`.

    The data of a task is `{"messages": [...]}`, with tools also `"tools"`. A step takes `batch`
    conversations, all where there are fewer; its loss is the mean over the tokens of the assistant's
    messages, or with `turns = "last"` of the last one.
    """

    tasks: TasksSection
    steps: Count
    batch: Count = 32
    learning_rate: Annotated[float, Field(ge=0, le=1e15)] = 1e-4  # AdamW computes in float32
    warmup_steps: CountOrZero = 0
    turns: Literal["all", "last"] = "all"


class TrainSection(Section):
    """How `rollouts train` learns: `steps` steps, each on the episodes of `groups` tasks.

    - `lora_rank`, `lora_alpha`, and the layers `train_attn`, `train_mlp`, `train_unembed`: those of the adapter
      (`LoraOptions`); a rank of 0 trains all parameters, in float32. `dtype` is that of the base model in the
      trainer.
    - `loss`, `loss_options`, `correction`: name and options as `Trainer.forward_backward` takes them; the sum
      of a minibatch is divided by its trained tokens or its episodes (`mean_over`), with those whose advantage
      is 0 and without what the correction rejects.
    - `baseline`, `scale`: of `group_advantages`. `kl`: the advantage of a token has less `kl` times the log
      of the ratio of its probabilities under sampler and base model (the adapter off).
    - `learning_rate` rises over `warmup_steps` and follows `schedule`, which would reach the share
      `final_rate` of it with one step more. `adam` are other fields of `AdamParams`, by default
      `grad_clip_norm` of 1.
    - Each step goes `epochs` times over its groups, in `minibatches` random parts with an optimizer step each.
      `tokens_per_pass` bounds the memory (`Trainer`).
    - `max_row_tokens`: rows are cut to so many tokens (`truncate_sample`).
    - `max_mismatch`, in nats: the run stops before a step in which the mean |difference| of what the current
      weights have sampled in a row, an episode or a branch of one, is larger; by default 1e-3 in float32 and
      0.05 in bfloat16.
    - `shuffle`: whether each pass over the tasks has an order of its own. `revisit_solved`: the share that a
      pass takes of the tasks of whose last group every episode succeeded (`evaluation.threshold`).
    - A checkpoint is written after every `checkpoint_every` steps; the last `keep` are kept, and the best.
    - `threads` of torch.
    """

    steps: Count
    groups: Count
    lora_rank: Annotated[int, Field(ge=0, le=512)] = 32
    lora_alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 32.0
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    dtype: Literal["float32", "bfloat16"] = "float32"
    loss: Text = "ppo"
    loss_options: dict[Text, Finite] = Field(default_factory=dict)
    correction: dict[Text, bool | Finite] = Field(default_factory=dict)
    mean_over: Literal["tokens", "episodes"] = "tokens"
    baseline: Literal["mean", "leave_one_out"] = "mean"
    scale: Literal["group", "batch", "none"] = "group"
    kl: NotNegative = 0.0
    learning_rate: NotNegative = 1e-4
    warmup_steps: CountOrZero = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    final_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    adam: dict[Text, Finite] = Field(default_factory=dict)
    epochs: Count = 1
    minibatches: Count = 1
    tokens_per_pass: Count = 8192
    max_row_tokens: Count | None = None
    max_mismatch: Annotated[float | None, Field(gt=0)] = None
    shuffle: bool = True
    revisit_solved: Annotated[float, Field(ge=0.01, le=1)] = 1.0  # a pass finds a task soon, also where all are solved
    checkpoint_every: Count = 1
    keep: Count = 2
    threads: Count | None = None

    @field_validator("kl")
    @classmethod
    def _has_an_adapter_to_turn_off(cls, kl: float, checked: ValidationInfo) -> float:
        if kl and not checked.data.get("lora_rank"):
            raise ValueError(
                "with lora_rank = 0 there is no base model to compare with; train an adapter, or remove kl"
            )
        return kl


class EngineConfig(Section):
    """A configuration file as `rollouts serve` needs it, which takes those of `rollouts run` too.

    Every engine but that of kind "openai" needs a renderer.
    """

    tasks: TasksSection | None = None
    environment: EnvironmentSection | None = None
    engine: EngineSection
    renderer: RendererSection | None = Field(default=None, validate_default=True)
    sampling: SamplingSection | None = None
    output: OutputSection | None = None
    limits: LimitsSection = LimitsSection()
    retry: RetrySection = RetrySection()
    mode: ModeSection | None = None
    ray: RaySection = RaySection()
    group_rewards: list[RewardSection] = Field(default_factory=list)
    skip_group: ImportPath | None = None
    teacher: TeacherSection | None = None
    evaluation: EvaluationSection = EvaluationSection()
    train: TrainSection | None = None
    supervised: SupervisedSection | None = None
    stop_after_failed_groups: CountOrZero = 8
    seed: CountOrZero = 0
    group_size: Count = 1
    concurrency: Count = 64

    @field_validator("renderer")
    @classmethod
    def _is_there_if_the_engine_needs_it(
        cls, renderer: RendererSection | None, checked: ValidationInfo
    ) -> RendererSection | None:
        engine = checked.data.get("engine")
        if isinstance(engine, EndpointEngineSection) and renderer is not None:
            raise ValueError('an engine of kind "openai" renders messages itself; remove the table')
        if engine is not None and not isinstance(engine, EndpointEngineSection) and renderer is None:
            raise ValueError("the table is missing; add [renderer]")
        return renderer


class RunConfig(EngineConfig):
    """A configuration file: `group_size` episodes for each task, at most `concurrency` at a time.

    `skip_group(group)` returns True, or a reason, to leave a group out. The run ends where the first
    `stop_after_failed_groups` groups have failed in one way; with 0 it goes on. Without a mode no group is
    left out for its age: the run does not change the weights, but another process may.
    """

    tasks: TasksSection
    environment: EnvironmentSection
    sampling: SamplingSection
    output: OutputSection

    @field_validator("environment")
    @classmethod
    def _has_the_tasks_of_its_kind(cls, environment: EnvironmentSection, checked: ValidationInfo) -> EnvironmentSection:
        is_of_verifiers = isinstance(environment, VerifiersSection)
        if "tasks" in checked.data and is_of_verifiers != isinstance(checked.data["tasks"], TasksOfVerifiers):
            raise ValueError('tasks and environment are both of kind "verifiers", or neither is')
        return environment
