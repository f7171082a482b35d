"""The command `commlib`: one sub-command a tool, each imported only when it is asked for."""

import click

from commlib import flags
from commlib.errors import FlagError


@click.group()
@click.pass_context
def commands(ctx: click.Context) -> None:
    """One set of communicators for eager, compiled and captured PyTorch code."""
    if ctx.invoked_subcommand != "doctor":  # whose business it is to show what is wrong
        try:
            flags.rows()
        except FlagError as error:
            _refuse(ctx, str(error))


def _refuse(ctx: click.Context, text: str) -> None:
    click.echo(f"commlib: {text}", err=True)
    ctx.exit(2)


@commands.command()
@click.option("--nproc", default=2, show_default=True, help="Ranks to start on this machine.")
@click.option("--json", "json_path", type=click.Path(), help="Also write every result to a file.")
@click.pass_context
def demo(ctx: click.Context, nproc: int, json_path: str | None) -> None:
    """Run one legacy program on both engines, eager and compiled, and compare the bits."""
    from commlib.tools.demo.command import run_demo

    ctx.exit(run_demo(nproc, json_path))


@commands.command()
@click.pass_context
def doctor(ctx: click.Context) -> None:
    """Show versions, libraries, GPUs, flags and rendezvous; paste it into a bug report."""
    from commlib.tools.doctor import run_doctor

    ctx.exit(run_doctor())


@commands.command()
@click.argument("names", nargs=-1)
@click.option("--nproc", default=2, show_default=True, help="Ranks to start on this machine.")
@click.option("--rounds", type=int, help="Rounds of each benchmark.  [default: its own number]")
@click.option("--out", type=click.Path(), help="Folder for dated Markdown files.")
@click.option(
    "--tune",
    is_flag=True,
    help="Measure which all-reduce kernel is fastest here and write commlib's table anew.",
)
@click.option(
    "--rows",
    type=click.IntRange(1),
    help="Rows of cross-entropy and experts, labels of class-center.",
)
@click.option("--width", type=click.IntRange(1), help="Elements of a row of experts.")
@click.option("--experts", type=click.IntRange(1), help="Experts of all ranks together.")
@click.option("--classes", type=click.IntRange(1), help="Classes of all ranks together.")
@click.option(
    "--dtype",
    type=click.Choice(["float64", "float32", "float16", "bfloat16"]),
    help="Dtype of the logits of cross-entropy.",
)
@click.pass_context
def bench(
    ctx: click.Context,
    /,
    names: tuple[str, ...],
    nproc: int,
    rounds: int | None,
    out: str | None,
    tune: bool,
    **sizes: int | str | None,
) -> None:
    """Time the benchmarks NAMES against their named peers, or all of them.

    They are host, gloo, import, memory, cross-entropy, experts, class-center, allreduce, capture,
    llama and overlap.
    """
    from commlib.tools.bench.command import run_bench, run_tune

    if tune:
        options = {"rounds": rounds, "out": out, **sizes}
        unused = [*names, *(f"--{name}" for name, value in options.items() if value is not None)]
        if unused:
            _refuse(ctx, f"--tune takes only --nproc: given {', '.join(unused)}; leave it away")
        ctx.exit(run_tune(nproc))
    ctx.exit(run_bench(names, out, nproc=nproc, rounds=rounds, **sizes))
