"""The fixture itself: the server that the other tests believe to have."""

import httpx


def test_the_server_serves_the_checkpoint_that_it_names(vllm_server):
    (served,) = httpx.get(f"{vllm_server.base_url}/v1/models").json()["data"]
    assert served["id"] == vllm_server.model_name
    assert (vllm_server.model_dir / "config.json").exists()
