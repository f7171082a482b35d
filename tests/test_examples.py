"""The programs in examples/: what they can't do is one line, which names the rule."""

import pytest

from tests.support.processes import run

PROGRAMS = (
    *("face_classifier", "fsdp_tp", "legacy_tp_block", "llm_decode", "moe_layer"),
    *("optimizer_graph", "pipeline_gpt", "transformers_tp"),
)
ALONE = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_steps(program: str) -> None:
    environment = ALONE if program == "legacy_tp_block" else {}
    said = "--steps 0: expected 1 or more\n"
    assert run(f"examples/{program}.py", "--steps", "0", **environment) == (2, "", said)


@pytest.mark.parametrize("environment", [{}, ALONE | {"WORLD_SIZE": "3"}], ids=("alone", "3"))
def test_ranks_that_do_not_divide_the_heads(environment: dict[str, str]) -> None:
    ranks = environment.get("WORLD_SIZE", "1")
    said = f"{ranks} ranks for 8 heads: type torchrun --nproc-per-node 2, 4 or 8\n"
    assert run("examples/legacy_tp_block.py", **environment) == (2, "", said)


def test_ranks_that_do_not_divide_the_experts() -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1")
    code, out, err = run(*launcher, "--nproc-per-node", "3", "examples/moe_layer.py")
    assert (code, out) == (1, "")
    assert "3 ranks: expected a number that divides the 8 experts" in err.splitlines()


def test_parts_that_do_not_divide_the_ranks() -> None:
    said = "--tensor 2: expected 1, 2 or 4, a divisor of 1\n"
    assert run("examples/fsdp_tp.py", "--tensor", "2") == (2, "", said)
