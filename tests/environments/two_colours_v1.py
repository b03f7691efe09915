"""The taskset of colours, played by two agents one after the other, and described by a third."""

import verifiers.v1 as vf
from colours_v1 import ColoursHarness, ColoursTaskset, image_url


class TwoColoursConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig(runtime={"type": "subprocess"})
    second: vf.AgentConfig = vf.AgentConfig(runtime={"type": "subprocess"})
    judge: vf.AgentConfig = vf.AgentConfig(
        runtime={"type": "subprocess"}, client={"type": "eval", "base_url": "http://127.0.0.1:9/v1"}
    )


class TwoColoursEnv(vf.Env[TwoColoursConfig]):
    async def setup(self, agents):
        agents.second.trainable = False

    async def run(self, task, agents):
        for agent in (agents.first, agents.second, agents.judge):
            async with agent.interaction(task) as interaction:
                parts = [{"type": "image_url", "image_url": {"url": image_url("red")}}]
                await interaction.turn([{"role": "user", "content": parts}])


class TwoColoursTaskset(ColoursTaskset):
    pass


class TwoColoursHarness(ColoursHarness):
    pass


__all__ = ["TwoColoursEnv", "TwoColoursHarness", "TwoColoursTaskset"]
