"""Rendezvous environments: correct, incomplete and wrong ones."""

import os
import socket
from collections.abc import Iterator

import pytest
import torch.distributed as dist

import commlib
from commlib.errors import ArgumentError, BootstrapError, CommTimeout, DeviceError
from commlib.rendezvous import environment, program_store
from tests.support.ports import free_port
from tests.support.processes import LAUNCHERS, RENDEZVOUS, start
from tests.support.stores import loopback_store

LOOPBACK = {"MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "0"}


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)] + list(RENDEZVOUS):
        monkeypatch.delenv(name, raising=False)
    yield
    commlib.shutdown()
    commlib.CommContextManager.instance()._calls.clear()
    for table in (program_store._stores, program_store._run_stores, program_store._servers):
        table.clear()


def set_all(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_without_any_environment_the_ring_has_one_rank() -> None:
    ring = commlib.init("gloo")
    assert (ring.rank, ring.size, ring.ranks) == (0, 1, (0,))
    assert commlib.init("gloo") is ring


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set.*torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({"LOCAL_RANK": "1"}, "RANK is not set.*torchrun.*unset RANK, WORLD_SIZE and LOCAL_RANK"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x': expected a whole number"),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            "rank 2 with world size 2",
        ),
        ({"PADDLE_TRAINER_ID": "0", "PADDLE_TRAINERS_NUM": "2"}, "PADDLE_MASTER=None.*host:port"),
    ],
)
def test_half_an_environment(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, str], words: str
) -> None:
    set_all(monkeypatch, **values)
    with pytest.raises(BootstrapError, match=words):
        commlib.init("gloo")


def test_port_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        set_all(monkeypatch, RANK="0", WORLD_SIZE="2", MASTER_PORT=str(port), **LOOPBACK)
        with pytest.raises(BootstrapError, match=rf"serve the store at 127\.0\.0\.1:{port}.*taken"):
            commlib.init("gloo", timeout=20)


def test_nobody_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()  # outside of the range that the system gives to others meanwhile
    set_all(monkeypatch, RANK="1", WORLD_SIZE="2", MASTER_PORT=str(port), **LOOPBACK)
    with pytest.raises(BootstrapError, match=rf"rank 1 of 2 can't reach .*:{port} within 2 s"):
        commlib.init("gloo", timeout=2)


def test_one_rank_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    set_all(monkeypatch, RANK="0", WORLD_SIZE="3", MASTER_PORT=str(port), **LOOPBACK)
    with pytest.raises(CommTimeout, match=r"after 5 s waiting for ranks \[1, 2\] to join"):
        commlib.init("gloo", timeout=5)
    assert commlib.CommContextManager.instance().rings() == []


def test_silent_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        set_all(monkeypatch, RANK="1", WORLD_SIZE="2", MASTER_PORT=str(port), **LOOPBACK)
        with pytest.raises(
            BootstrapError, match=rf"127\.0\.0\.1:{port} did not answer.*within 3 s"
        ):
            commlib.init("gloo", timeout=3)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_unknown_host(monkeypatch: pytest.MonkeyPatch, rank: str) -> None:
    host = {"MASTER_ADDR": "no.such.host.invalid", "MASTER_PORT": "29500", "LOCAL_RANK": "0"}
    set_all(monkeypatch, RANK=rank, WORLD_SIZE="2", **host)
    with pytest.raises(BootstrapError, match=r"no\.such\.host\.invalid"):
        commlib.init("gloo", timeout=1)


def test_another_run_on_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store belongs to run a; a rank of run b gets an error that names both."""
    store = loopback_store()
    set_all(monkeypatch, RANK="1", WORLD_SIZE="2", MASTER_PORT=str(store.port), **LOOPBACK)
    missing = pytest.raises(CommTimeout, match=r"waiting for ranks \[0\] to join")
    with commlib.flags.override("FLAGS_comm_run_token", "a"), missing:
        commlib.init("gloo", timeout=5)
    assert all(key.startswith(("commlib/run/0/a/", "commlib/run")) for key in store.list_keys())
    commlib.CommContextManager.instance()._calls.clear()
    other = pytest.raises(BootstrapError, match="belongs to run 'a', this rank to run 'b'")
    with commlib.flags.override("FLAGS_comm_run_token", "b"), other:
        commlib.init("gloo", timeout=20)


@pytest.mark.parametrize(
    ("values", "here"),
    [
        ({"LOCAL_WORLD_SIZE": "2"}, True),
        ({"LOCAL_WORLD_SIZE": "1"}, False),
        ({}, False),
        ({"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}, False),
    ],
)
def test_ranks_on_one_host(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, str], here: bool
) -> None:
    set_all(monkeypatch, RANK="0", WORLD_SIZE="2", MASTER_PORT="1", **LOOPBACK, **values)
    assert environment._on_one_host(environment.world()) is here


def test_paddle_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(
        monkeypatch,
        PADDLE_TRAINER_ID="1",
        PADDLE_TRAINERS_NUM="4",
        PADDLE_TRAINER_ENDPOINTS="127.0.0.1:6170,127.0.0.1:6171",
    )
    world = environment.world()
    assert (world.rank, world.size, world.address) == (1, 4, ("127.0.0.1", 6170))
    assert (world.local_rank, world.local_size) == (1, 2)  # two endpoints of this rank's host
    monkeypatch.setenv("LOCAL_RANK", "0")  # of another launcher: Paddle's environment is complete
    assert environment.world() == world
    monkeypatch.setenv("PADDLE_LOCAL_SIZE", "4")
    assert environment.world().local_size == 4
    monkeypatch.setenv("PADDLE_MASTER", "127.0.0.2:99")
    assert environment.world().address == ("127.0.0.2", 99)


def test_an_unknown_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, RANK="9", WORLD_SIZE="16", MASTER_ADDR="h", MASTER_PORT="1")
    assert (environment.world().local_rank, environment.world().local_size) == (None, None)
    set_all(monkeypatch, SLURM_PROCID="9", SLURM_NTASKS="16", SLURM_LOCALID="1")
    assert environment.world().local_rank == 1  # a job script exported RANK=$SLURM_PROCID
    set_all(monkeypatch, SLURM_PROCID="0")
    assert environment.world().local_rank is None  # of another step


@pytest.mark.parametrize("names", [{}, {"RANK": "0", "WORLD_SIZE": "1"}], ids=["no", "half"])
def test_an_initialised_torch_distributed(
    monkeypatch: pytest.MonkeyPatch, names: dict[str, str]
) -> None:
    """Its store carries the rings, also where RANK is set without an address."""
    set_all(monkeypatch, **names)
    address = f"tcp://127.0.0.1:{free_port()}"
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    try:
        world = environment.world()
        assert (world.rank, world.size, world.address) == (0, 1, None)
        assert (world.local_rank, world.local_size) == (None, None)
        monkeypatch.setenv("LOCAL_RANK", "3")
        assert environment.world().local_rank == 3
        assert commlib.init("gloo").size == 1
    finally:
        commlib.shutdown()
        dist.destroy_process_group()


def run_all(program: str, size: int, **more: str) -> list[tuple[int, str, str]]:
    """Run ``size`` processes of ``program``; return their exit codes and what they wrote."""
    more = {"PORT": str(free_port()), **more}
    ranks = [start("-c", program, **{**more, "WHO": str(rank)}) for rank in range(size)]
    try:
        ends = [rank.communicate(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, *end) for rank, end in zip(ranks, ends, strict=True)]


def test_first_rings_from_several_threads() -> None:
    program = (
        "import os, threading\n"
        "port = os.environ['PORT']\n"
        "os.environ.update(RANK=os.environ['WHO'], WORLD_SIZE='2', MASTER_PORT=port)\n"
        "import commlib\n"
        "manager, start = commlib.CommContextManager.instance(), threading.Barrier(4)\n"
        "def create(ring):\n"
        "    start.wait()\n"
        "    manager.create(ring, [0, 1], device='cpu', timeout=20)\n"
        "threads = [threading.Thread(target=create, args=(ring,)) for ring in range(4)]\n"
        "for one in threads: one.start()\n"
        "for one in threads: one.join()\n"
        "print(sorted(manager.rings()))\n"
    )
    ends = run_all(program, 2, MASTER_ADDR="127.0.0.1", FLAGS_dynamic_static_unified_comm="1")
    assert ends == [(0, "[0, 1, 2, 3]\n", "")] * 2


def test_torch_distributed_with_other_ranks() -> None:
    """Process 0 has another rank, another peer and another store in its second group."""
    program = (
        "import os, commlib, torch.distributed as dist\n"
        "def group(rank, port):\n"
        "    store = dist.TCPStore('127.0.0.1', int(port), 2, rank == 0)\n"
        "    dist.init_process_group('gloo', store=store, rank=rank, world_size=2)\n"
        "    ring = commlib.init('gloo', timeout=10)\n"
        "    print(ring.rank, ring.ranks)\n"
        "    commlib.shutdown()\n"
        "    dist.destroy_process_group()\n"
        "    store.wait(['left']) if rank == 0 else store.set('left', '')\n"
        "me = int(os.environ['WHO'])\n"
        "if me < 2: group(me, os.environ['PORT'])\n"
        "if me != 1: group(int(me == 0), os.environ['OTHER_PORT'])\n"
    )
    ends = run_all(program, 3, OTHER_PORT=str(free_port()))
    out = ["0 (0, 1)\n1 (0, 1)\n", "1 (0, 1)\n", "0 (0, 1)\n"]
    assert ends == [(0, text, "") for text in out]


def test_the_world_stays_while_there_are_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    commlib.init("gloo")
    set_all(monkeypatch, RANK="0", WORLD_SIZE="2")
    assert commlib.new_ring(1, [0]) is not None
    commlib.shutdown()
    with pytest.raises(BootstrapError, match="MASTER_ADDR is not set"):
        commlib.new_ring(1, [0])


def test_wrong_arguments() -> None:
    with pytest.raises(ArgumentError, match=r"backend='mpi'.*nccl.*gloo"):
        commlib.init("mpi")
    with pytest.raises(DeviceError, match=r"backend='nccl' with device cpu"):
        commlib.init("nccl", device="cpu")
    with pytest.raises(DeviceError, match=r"device cuda:99.*this process sees"):
        commlib.init(device="cuda:99")
    with pytest.raises(DeviceError, match="device meta"):
        commlib.init(device="meta")
    for timeout in (0, -1, float("inf"), "x", [1]):
        with pytest.raises(ArgumentError, match="finite number of seconds"):
            commlib.init("gloo", timeout=timeout)
    assert commlib.CommContextManager.instance().rings() == []
