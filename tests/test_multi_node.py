"""Two nodes under torchrun: gloo over TCP between two hosts, NCCL over its network transport."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests._exits import free_port
from tests._programs import ROOT, environment
from tests._two_hosts import two_hosts


def launch(host: object, node: int, port: int, **more: str) -> "subprocess.Popen[str]":
    prefix, address, interface = host.prefix, host.address, host.interface  # type: ignore[attr-defined]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
    torchrun.append(f"--nproc-per-node={more.pop('each', '2')}")
    meeting = [
        f"--node-rank={node}",
        f"--master-addr={more.pop('master')}",
        f"--master-port={port}",
    ]
    interfaces = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return subprocess.Popen(
        [*prefix, *torchrun, *meeting, f"--local-addr={address}", "-m", "tests._two_nodes"],
        env=environment(**interfaces, FLAGS_comm_timeout_s="60", **more),
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def check_two_nodes(out: Path, flag: str, each: int, nodes: "list[dict[str, str]]") -> None:
    """Run both nodes with ``each`` ranks to their end and compare what every rank wrote."""
    with two_hosts() as hosts:
        port = free_port()
        agents = [
            launch(
                host,
                node,
                port,
                master=hosts[0].address,
                TWO_NODES_OUT=f"{out}/rank",
                each=str(each),
                FLAGS_dynamic_static_unified_comm=flag,
                **nodes[node],
            )
            for node, host in enumerate(hosts)
        ]
        try:
            texts = [agent.communicate(timeout=120)[0] for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(texts)
    for rank in range(2 * each):
        said = (out / f"rank{rank}").read_text()
        where = f"rank {rank} of {2 * each} on node {rank // each}"
        assert said == f"{where}: ring 1 spans nodes [0, 1]"


@pytest.mark.parametrize("flag", ["0", "1"], ids=["legacy", "unified"])
def test_gloo_between_two_hosts(tmp_path: Path, flag: str) -> None:
    check_two_nodes(tmp_path, flag, 2, [{}, {}])


GPUS = torch.cuda.device_count()

if GPUS >= 2:

    @pytest.mark.gpu
    @pytest.mark.parametrize("flag", ["0", "1"], ids=["legacy", "unified"])
    def test_nccl_over_its_network_transport(tmp_path: Path, flag: str) -> None:
        """Different host ids keep NCCL off NVLink between the nodes."""
        each = min(2, GPUS // 2)
        nodes = [
            {
                "TWO_NODES_GPU": "1",
                "NCCL_HOSTID": f"host-{node}",
                "CUDA_VISIBLE_DEVICES": ",".join(str(node * each + i) for i in range(each)),
            }
            for node in range(2)
        ]
        check_two_nodes(tmp_path, flag, each, nodes)
