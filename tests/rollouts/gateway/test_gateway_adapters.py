"""LoRA adapters of the engine, by the name of the model in a request."""

import openai
import pytest
from gateway_server import served, user

from rollouts.errors import UnknownAdapterError
from rollouts.testing import ScriptedEngine


class AdapterEngine(ScriptedEngine):
    """Has adapters, as a vLLM server has."""

    def __init__(self, script, renderer, adapters):
        super().__init__(script, renderer=renderer)
        self.loaded = dict.fromkeys(adapters, "/adapters")
        self.num_listings = 0

    async def adapters(self):
        self.num_listings += 1
        return self.loaded

    async def generate(self, request, listen=None):
        if request.adapter is not None and request.adapter not in self.loaded:
            raise UnknownAdapterError(request.request_id, request.adapter, self.loaded)
        return await super().generate(request)


def complete(server, model, session_id="s"):
    return server.client(session_id).chat.completions.create(model=model, messages=[user("a")])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["policy", None])
def test_the_model_of_a_request_chooses_the_adapter(renderer, name):
    engine = AdapterEngine(["one"] * 9, renderer, ["poet@1"])
    with served(engine, renderer, model=name) as server:
        assert complete(server, "policy").model == "policy"
        assert [complete(server, "poet@1").model for _ in range(3)] == ["poet@1"] * 3
        engine.loaded["poet@2"] = "/adapters"
        complete(server, "poet@2")
        listed = {model.id: getattr(model, "parent", None) for model in server.client().models.list()}
    assert [request.adapter for request in engine.requests] == [None, *["poet@1"] * 3, "poet@2"]
    base = name or "model"
    assert listed == {base: None, "poet@1": base, "poet@2": base}


def test_a_name_that_is_neither_the_model_nor_an_adapter_is_not_found(renderer):
    engine = AdapterEngine(["one"] * 9, renderer, ["poet@1"])
    with served(engine, renderer, model="policy") as server:
        with pytest.raises(openai.NotFoundError, match=r"policy, poet@1") as raised:
            complete(server, "poet@2")
        assert raised.value.code == "model_not_found"
        complete(server, "poet@1")
        del engine.loaded["poet@1"]
        with pytest.raises(openai.NotFoundError, match="is not loaded") as raised:
            complete(server, "poet@1")
        assert raised.value.code == "model_not_found"
        assert server.trajectory("s").num_turns == 1
    assert len(engine.requests) == 1
