"""Two nodes under torchrun: gloo over TCP between two hosts, NCCL over its network transport."""

import os
import subprocess
import time
from pathlib import Path

import pytest
import torch

from tests.support.ports import free_port
from tests.support.processes import ROOT, environment, warm_ranks
from tests.support.two_hosts import Host, two_hosts

PROGRAM = ["-m", "tests.programs.two_nodes"]
SECONDS = 120


def launch(host: Host, node: int, out: Path, **more: str) -> "subprocess.Popen[str]":
    """Start torchrun on one node; its output and that of its ranks is written to a file."""
    warm = warm_ranks()
    torchrun = [warm["PYTHON_EXEC"], "-m", "torch.distributed.run", "--nnodes=2"]
    torchrun.append(f"--nproc-per-node={more.pop('each')}")
    meeting = [
        f"--node-rank={node}",
        f"--master-addr={more.pop('master')}",
        f"--master-port={more.pop('port')}",
    ]
    interfaces = {"GLOO_SOCKET_IFNAME": host.interface, "NCCL_SOCKET_IFNAME": host.interface}
    with output_of(out, node).open("w") as text:
        return subprocess.Popen(
            [*host.prefix, *torchrun, *meeting, f"--local-addr={host.address}", *PROGRAM],
            env=environment(**warm, **interfaces, FLAGS_comm_timeout_s="60", **more),
            cwd=ROOT,
            text=True,
            stdout=text,
            stderr=subprocess.STDOUT,
        )


def output_of(out: Path, node: int) -> Path:
    """Return the output file of a node."""
    return out / f"node{node}.txt"


def check_two_nodes(out: Path, flag: str, each: int, nodes: list[dict[str, str]]) -> None:
    """Run both nodes with ``each`` ranks to their end and compare what every rank wrote.

    If a node does not end in time, the error shows the output of both.
    """
    more = {"TWO_NODES_OUT": f"{out}/rank", "FLAGS_dynamic_static_unified_comm": flag}
    with two_hosts() as hosts:
        more |= {"each": str(each), "port": str(free_port()), "master": hosts[0].address}
        agents = [launch(host, node, out, **more, **nodes[node]) for node, host in enumerate(hosts)]
        end = time.monotonic() + SECONDS
        try:
            while None in [agent.poll() for agent in agents] and time.monotonic() < end:
                time.sleep(0.05)
        finally:
            ends = [agent.poll() for agent in agents]
            for agent in agents:
                agent.kill()
                agent.wait()
    texts = (f"node {node}: {output_of(out, node).read_text()}" for node in range(2))
    assert ends == [0, 0], "\n".join(texts)  # None: still running
    for rank in range(2 * each):
        line = (out / f"rank{rank}").read_text()
        prefix = f"rank {rank} of {2 * each} on node {rank // each}"
        assert line == f"{prefix}: ring 1 spans nodes [0, 1]"


@pytest.mark.parametrize("flag", ["0", "1"], ids=["legacy", "unified"])
def test_gloo_between_two_hosts(tmp_path: Path, flag: str) -> None:
    check_two_nodes(tmp_path, flag, 2, [{}, {}])


GPUS = torch.cuda.device_count()


@pytest.mark.gpu
@pytest.mark.two_gpus
@pytest.mark.parametrize("flag", ["0", "1"], ids=["legacy", "unified"])
def test_nccl_over_its_network_transport(tmp_path: Path, flag: str) -> None:
    """Different host ids keep NCCL off NVLink between the nodes."""
    each, visible = min(2, GPUS // 2), os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    nodes = [
        {
            "TWO_NODES_GPU": "1",
            "NCCL_HOSTID": f"host-{node}",
            "CUDA_VISIBLE_DEVICES": ",".join(visible[node * each :][:each]),
        }
        for node in range(2)
    ]
    check_two_nodes(tmp_path, flag, each, nodes)
