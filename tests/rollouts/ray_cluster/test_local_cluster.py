"""The cluster that `rollouts.ray.connect` starts: other machines cannot reach it."""

import json
import os
import subprocess
import sys

import pytest

# A process of its own: whether Ray uses the loopback address is settled when ray is imported.
PROGRAM = """
import json, os
import psutil, ray
from rollouts.ray import connect

connect()
processes = psutil.Process().children(recursive=True)
session = ray._private.worker._global_node.get_session_dir_path()
of_ray = {
    process for process in psutil.process_iter(["cmdline"])
    if session in " ".join(process.info["cmdline"] or ()) or process in processes
}
listening = [
    (process.name(), connection.laddr.ip)
    for process in of_ray
    for connection in process.net_connections("inet")
    if connection.status == psutil.CONN_LISTEN
]
print(json.dumps({"nodes": [node["NodeManagerAddress"] for node in ray.nodes()], "listening": listening}))
ray.shutdown()
"""


@pytest.mark.ray
def test_a_cluster_of_this_machine_alone_listens_on_the_loopback_address():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=200, check=True
    )
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["nodes"] == ["127.0.0.1"]
    assert found["listening"]
    addresses = {address.removeprefix("::ffff:") for _, address in found["listening"]}  # of IPv4 at an IPv6 socket
    assert addresses <= {"127.0.0.1", "::1"}, found["listening"]
