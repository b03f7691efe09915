"""A real Ray cluster for the tests of this folder: a head without work, and two nodes, all on the loopback address."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

STORE_BYTES = 128 << 20
#: A node that is killed is known to be dead after about this many seconds, times three.
HEALTH_CHECK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.path).parent == Path(__file__).parent and "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ray)


class TestCluster:
    """The nodes of the cluster. Each has an object store of its own."""

    __test__ = False

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": HEALTH_CHECK}
        self._cluster = Cluster(initialize_head=True, head_node_args={**_node_options(), **head})
        self._nodes = [self._start_node(), self._start_node()]
        self._cluster.wait_for_nodes()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def kill_node(self, node_id: str) -> None:
        """End a node and its processes as a failure does, and add an empty one in its place."""
        [node] = [each for each in self._nodes if each.node_id == node_id]
        self._nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)
        self._nodes.append(self._start_node())

    def bytes_written(self) -> dict[str, int]:
        """The bytes of all objects that were ever written into the object store of each node, by node id."""
        import ray
        from ray._private.internal_api import node_stats

        written = {}
        for node in ray.nodes():
            if node["Alive"]:
                stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)
                written[node["NodeID"]] = stats.store_stats.cumulative_created_bytes
        return written

    def shutdown(self) -> None:
        self._cluster.shutdown()

    def _start_node(self) -> object:
        return self._cluster.add_node(num_cpus=2, **_node_options(), wait=False)


def _node_options() -> dict[str, object]:
    return {"node_ip_address": "127.0.0.1", "object_store_memory": STORE_BYTES}


@pytest.fixture(scope="session")
def cluster() -> Iterator[TestCluster]:
    import ray

    started = TestCluster()
    environment = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
    ray.init(address=started.address, runtime_env={"env_vars": environment}, log_to_driver=False, logging_level="ERROR")
    yield started
    ray.shutdown()
    started.shutdown()


@pytest.fixture(scope="session")
def make_renderer(tiny_model_dir: Path) -> partial[object]:
    from ray_world import make_renderer

    return partial(make_renderer, str(tiny_model_dir))
