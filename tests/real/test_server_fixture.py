"""The fixture `vllm_server` itself."""


def test_the_server_serves_the_checkpoint_that_the_fixture_names(vllm_server):
    (served,) = vllm_server.http.get("/v1/models").json()["data"]
    assert served["id"] == vllm_server.model_name
    assert (vllm_server.model_dir / "config.json").exists()
