"""The kinds of servers that there are engines for, and which kind a server is of."""

from typing import Any, Literal

from rollouts.engines.http.connection import ServerConnection
from rollouts.engines.http.engine import ServerEngine
from rollouts.engines.sglang.capabilities import model_info
from rollouts.engines.sglang.engine import SGLangEngine
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.errors import ApiKeyError, CapabilityError, MalformedResultError
from rollouts.values import check_choice

#: By the name of each: the program that serves.
ServerKind = Literal["vllm", "sglang"]

_ENGINES: dict[ServerKind, type[ServerEngine[Any]]] = {"vllm": VLLMEngine, "sglang": SGLangEngine}


def server_engine(kind: ServerKind, base_url: str, **options: Any) -> ServerEngine[Any]:
    """The engine of a server, with the options of `VLLMEngine` or `SGLangEngine`. Raises `ArgumentError`."""
    check_choice("kind", kind, ServerKind)
    return _ENGINES[kind](base_url, **options)


async def kind_of_server(connection: ServerConnection) -> ServerKind:
    """What a server is: SGLang where it has SGLang's report on its model, else vLLM, or what has vLLM's routes.

    Raises `ApiKeyError`, and the errors of a server that does not answer.
    """
    try:
        report = await model_info(connection)
    except ApiKeyError:
        raise
    except (CapabilityError, MalformedResultError):
        return "vllm"
    return "sglang" if "model_path" in report else "vllm"
