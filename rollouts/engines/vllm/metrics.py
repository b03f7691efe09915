"""The counters and gauges of a vLLM server that this project reads."""

from rollouts.engines.http.metrics import Metrics


class ServerMetrics(Metrics):
    """Samples by the server's own names ("vllm:num_requests_running"), one sample for each set of labels.

    The properties sum over the engines of a server. They raise `CapabilityError` where the server does not
    report them.
    """

    @property
    def running(self) -> int:
        """Requests (samples of n) that are being generated."""
        return int(self.total("vllm:num_requests_running"))

    @property
    def waiting(self) -> int:
        """Requests in the queue: the KV cache has no room for them, or the server is paused."""
        return int(self.total("vllm:num_requests_waiting"))

    @property
    def preemptions(self) -> int:
        """How often a running request lost its blocks of the KV cache to others and was computed again later.

        On a vLLM that takes images, each of them may kill the server: see "A full KV cache" in docs/vllm.md.
        """
        return int(self.total("vllm:num_preemptions_total"))

    @property
    def process_start_time(self) -> float | None:
        """When the server's process began, in seconds since 1970; None where the server does not report it."""
        return next((sample.value for sample in self.get("process_start_time_seconds", ())), None)

    @property
    def sleep_level(self) -> int | None:
        """1: weights in the host's memory, 2: dropped, 0: neither; None: not reported."""
        if "vllm:engine_sleep_state" not in self:
            return None
        samples = self["vllm:engine_sleep_state"]
        states = {sample.labels.get("sleep_state", "") for sample in samples if sample.value}
        return max(({"weights_offloaded": 1, "discard_all": 2}.get(state, 0) for state in states), default=0)
