"""graph.capture on GPUs: what a function does on the host, before each launch."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from commlib import graph
from commlib.errors import GraphError
from commlib.graph.watching.host import HostPart, OtherValue
from commlib.graph.watching.recorder import Recorder
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.runs_on import runs_on

META = torch.device("meta")  # in place of a GPU: what is there is not on the host


class Seen:
    """The host's part of a function, and where it brings what a GPU would read."""

    def __init__(self, fn: Callable[[], object]) -> None:
        self.rooms: list[torch.Tensor] = []
        self.host = HostPart(self._room)
        recorder = Recorder(META, host=self.host)
        try:
            with recorder:
                fn()
            recorder.end_host()
        finally:
            recorder.restore()

    def _room(self, source: torch.Tensor) -> torch.Tensor:
        self.rooms.append(torch.full_like(source, -1))
        return self.rooms[-1]

    def brings(self) -> list[Any]:
        """Run the host's part, and return what it has brought."""
        self.host.run()
        return [buf.tolist() for buf in self.rooms]


def test_rooms_last_as_long_as_the_graph() -> None:
    """The graph reads them at each replay, also what was brought once."""
    rooms: list[weakref.ref[torch.Tensor]] = []

    def room(source: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(source)
        rooms.append(weakref.ref(made))
        return made

    host, inside = HostPart(room), torch.zeros(2)
    recorder = Recorder(META, host=host)
    with recorder:
        torch.tensor([1.0, 2.0], device=META)
        inside.to(META)
    recorder.end_host()
    recorder.restore()
    del recorder
    for _ in range(2):
        host.run()
        assert_equal([each() is None for each in rooms], [False, False], "released rooms")


@runs_on("gpu_ranks")
def test_constants_of_two_functions(comm: Any) -> None:
    """What the host has brought for one graph is never given to another one."""

    def scaled(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: x + (torch.arange(4096) * factor).to(comm.device)

    x = torch.ones(4096, device=comm.device)
    functions = [scaled(factor) for factor in (2.0, 3.0, 5.0)]
    captured = [graph.capture(fn, verify=False, inputs="copy", outputs="copy") for fn in functions]
    for g in captured:
        for _ in range(3):
            g(x)
        torch.cuda.empty_cache()
    for g, fn in zip(captured, functions, strict=True):
        assert_equal(len(g.eager), 0, "calls that stay eager")
        assert_bits_equal(g(x), fn(x), "a replay after the other captures")


def test_typed_values_are_brought_once() -> None:
    other = torch.zeros(4, 3, device="meta")

    def f() -> object:
        made = torch.tensor([1.0, 2.0], device=META), torch.as_tensor(3, device=META)
        buffer = torch.zeros(2)
        first = buffer.to(META)
        buffer += 1  # no part of what was brought
        return made, first, other.new_tensor(4), other[[0, 2]], buffer.to(META)

    seen = Seen(f)
    assert_equal([buf.tolist() for buf in seen.rooms[:2]], [[-1, -1], -1], "in the capture")
    for _ in range(2):
        assert_equal(seen.brings(), [[1.0, 2.0], 3, [0.0, 0.0], 4.0, [0, 2], [1.0, 1.0]], "brought")
    for buf in seen.rooms:
        buf.fill_(-1)
    assert_equal(seen.brings()[0], [-1.0, -1.0], "what stays as it is is not brought again")


def test_tensors_of_the_program_are_brought_each_time() -> None:
    source, total = torch.tensor([1.0, 2.0]), torch.zeros(2)

    def f() -> object:
        total.add_(source)
        fresh = torch.zeros(2)
        fresh[0] = total[1]  # depends on the program from here on
        return total.to(META), fresh.to(META), torch.empty(2, device=META).copy_(source * 2)

    seen = Seen(f)
    assert_equal(total.tolist(), [0.0, 0.0], "the capture does not count")
    assert_equal(seen.brings(), [[1.0, 2.0], [2.0, 0.0], [2.0, 4.0]], "first")
    source.fill_(10)
    assert_equal(seen.brings(), [[11.0, 12.0], [12.0, 0.0], [20.0, 20.0]], "second")
    assert_equal(total.tolist(), [11.0, 12.0], "each call counts")


def test_random_numbers_of_the_host() -> None:
    def f() -> object:
        return torch.rand(3).to(META), torch.ones(3).bernoulli_(0.5).to(META)

    torch.manual_seed(7)
    state = torch.get_rng_state()
    seen = Seen(f)
    assert_equal(bool((torch.get_rng_state() == state).all()), True, "the capture does not count")
    actual = [seen.brings() for _ in range(3)]
    torch.manual_seed(7)
    want = [[torch.rand(3).tolist(), torch.ones(3).bernoulli_(0.5).tolist()] for _ in range(3)]
    assert_equal(actual, want, "as eager code draws")


READS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x.item(),
    "bool": lambda x: 1 if x > 1 else 2,
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "shape": lambda x: (torch.arange(3) < x).nonzero(),
    "operand": lambda x: torch.ones(2, device=META) * x,
}


@pytest.mark.parametrize("how", READS)
def test_values_that_are_read(how: str) -> None:
    source, total = torch.tensor(2.0), torch.zeros(())

    def f() -> object:
        total.add_(1)
        torch.rand(3)
        READS[how](torch.tensor(5.0))  # the same at each call
        return READS[how](source * 1)

    seen = Seen(f)
    seen.host.run()
    source.fill_(0.0)
    state = torch.get_rng_state()
    with pytest.raises(OtherValue, match=r"test_graph_host\.py"):
        seen.host.run()
    assert_equal(total.item(), 1.0, "a call that is made eagerly counts there")
    assert_equal(bool((torch.get_rng_state() == state).all()), True, "its draws too")
    source.fill_(2.0)
    seen.host.run()
    assert_equal(total.item(), 2.0, "the graph fits again")


@pytest.mark.parametrize("index", [False, True])
def test_lists_of_tensors_are_refused(index: bool) -> None:
    x, n = torch.ones(2, device=META), torch.tensor(1)
    with pytest.raises(GraphError, match=r"a list of tensors .*test_graph_host\.py.*torch\.stack"):
        Seen(lambda: x[:, [n, 0]] if index else torch.tensor([1, n], device=META))


def test_values_that_the_function_changes_are_refused() -> None:
    count = torch.zeros(())

    def f() -> object:
        count.add_(1)
        return (count * 2).item()

    with pytest.raises(GraphError, match=r"test_graph_host\.py:\d+ that the function itself"):
        Seen(f)
    assert_equal(count.item(), 0.0, "the capture does not count")


# -- on GPUs -------------------------------------------------------------------------------------


@runs_on("gpu_ranks")
def test_steps(comm: Any) -> None:
    """Replays do on the host what eager calls do: the same bits, state and random numbers."""
    gpu = comm.device

    class Program:
        def __init__(self) -> None:
            self.given, self.total = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3)

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            self.total += self.given
            noise = torch.rand(3)
            y = x * torch.tensor(2.0, device=gpu) + x.new_tensor([1.0, 2.0, 3.0])
            y = y[[2, 0, 1]] + self.total.to(gpu) + noise.to(gpu) * torch.tensor(3.0)
            y[torch.tensor([0, 1])] += 1
            return comm.all_reduce(torch.empty_like(y), y)  # type: ignore[no-any-return]

    def run(calls: Callable[[Program], Callable[..., torch.Tensor]]) -> list[torch.Tensor]:
        torch.manual_seed(comm.rank)
        program, outputs = Program(), []
        call = calls(program)
        for turn in range(12):
            program.given.fill_(turn)
            outputs.append(call(torch.full((3,), turn + 1.0, device=gpu)).clone())
        return [*outputs, program.total, torch.get_rng_state()]

    graphs: list[Any] = []

    def captured(program: Program) -> Any:
        graphs.append(graph.capture(program))
        return graphs[0]

    for number, (one, want) in enumerate(zip(run(captured), run(lambda x: x), strict=True)):
        assert_bits_equal(one, want, f"number {number}")
    (row,) = graph.report(graphs[0])
    assert_equal(
        (row["replays"], len(graphs[0].eager)), (11, 0), "replays, and calls that stay eager"
    )


@runs_on("gpu_ranks")
def test_branches(comm: Any) -> None:
    """A call with another value on the host is made eagerly, and the graph stays."""
    gate = torch.ones(())
    ran: list[int] = []
    note = ran.append

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        note(1)
        if torch.rand(()) < gate.item() * 0.5:
            x = x * 2
        return comm.all_reduce(torch.empty_like(x), x) * w  # type: ignore[no-any-return]

    weight = torch.ones(3, device=comm.device, requires_grad=True)
    for grad in (False, True):
        g = graph.capture(f, outputs="copy")
        results: list[list[torch.Tensor]] = []
        for call in (g, f):
            torch.manual_seed(1)
            results.append([])
            for turn in range(40):
                gate.fill_(turn % 7 > 0)
                weight.grad = None
                with torch.set_grad_enabled(grad):
                    y = call(torch.full((3,), 1.0 + turn, device=comm.device), weight)
                results[-1].append(y.detach().clone())
                if grad:
                    y.sum().backward()
                    assert weight.grad is not None
                    results[-1].append(weight.grad)
            if call is g:
                assert_equal(len(ran) < 40, True, f"{len(ran)} runs of the function")
                assert_equal(len(g.entries), 1, "graphs")
            ran.clear()
        for turn, (one, want) in enumerate(zip(*results, strict=True)):
            assert_bits_equal(one, want, f"turn {turn}, {grad}")


@runs_on("gpu_ranks")
def test_refusals(comm: Any) -> None:
    """What no eager call could take over from is refused."""
    count = torch.zeros(())

    def counts(x: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return x * count.item()

    x = torch.ones(3, device=comm.device)
    with raises(GraphError, "reads a value at", "test_graph_host.py", "changes at each call"):
        graph.capture(counts)(x)
    assert_equal(count.item(), 0.0, "as before")

    @graph.eager
    def part() -> None:
        pass

    def after_a_part(x: torch.Tensor) -> torch.Tensor:
        part()
        return x * count.item()

    with raises(GraphError, "a function with eager parts"):
        graph.capture(after_a_part)(x)
