"""A harness of verifiers that makes one call, in this process: verifiers' own start a program for each episode."""

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

CLIENT = httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_keepalive_connections=0))


class OneCallHarness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE, NEEDS_CONTAINER = False, False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        body = {"model": ctx.model, "messages": [message_to_wire(message) for message in data.prompt]}
        key = {"Authorization": f"Bearer {secret}"}
        answer = await CLIENT.post(f"{endpoint}/chat/completions", json=body, headers=key)
        return vf.ProgramResult(int(answer.is_error), "", answer.text)


__all__ = ["OneCallHarness"]
