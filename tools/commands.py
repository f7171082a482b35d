"""The command `commlib`: one sub-command per tool. A tool is imported when its command runs."""

import click

from commlib import flags
from commlib.errors import FlagError
from commlib.version import __version__


@click.group()
@click.version_option(__version__, message="%(prog)s %(version)s")
@click.pass_context
def commands(ctx: click.Context) -> None:
    """One set of communicators for eager, compiled and captured PyTorch code."""
    if ctx.invoked_subcommand != "doctor":  # the doctor shows unreadable flags itself
        try:
            flags.check()
        except FlagError as error:
            _reject(ctx, str(error))


def _reject(ctx: click.Context, text: str) -> None:
    click.echo(f"commlib: {text}", err=True)
    ctx.exit(2)


@commands.command()
@click.option("--nproc", default=2, show_default=True, help="Ranks to start on this machine.")
@click.option(
    "--json", "json_path", type=click.Path(), help="File to which every result is written as JSON."
)
@click.pass_context
def demo(ctx: click.Context, nproc: int, json_path: str | None) -> None:
    """Run one legacy program on both engines, eager and compiled, and compare the bits."""
    from commlib.tools.demo.command import run_demo

    ctx.exit(run_demo(nproc, json_path))


@commands.command()
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Show versions, libraries, GPUs, flags and rendezvous, for a bug report."""
    from commlib.tools.doctor import run_doctor

    ctx.exit(run_doctor(as_json=as_json))


@commands.command("flags")
def show_flags() -> None:
    """Show every flag with its type, default, value and source."""
    click.echo(flags.table())


class _Bench(click.Command):
    """The command `bench`. Its help lists the benchmarks, which are imported for that."""

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from commlib.tools.bench.command import BENCHMARKS

        super().format_help_text(ctx, formatter)
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(f"NAMES are: {', '.join(BENCHMARKS)}.")


@commands.command(cls=_Bench)
@click.argument("names", nargs=-1)
@click.option("--nproc", default=2, show_default=True, help="Ranks to start on this machine.")
@click.option(
    "--rounds", type=int, help="Rounds per benchmark.  [default: depends on the benchmark]"
)
@click.option("--out", type=click.Path(), help="Folder for one Markdown file per benchmark.")
@click.option(
    "--tune",
    is_flag=True,
    help="Measure which push kernels are fastest here and rewrite commlib's kernel table.",
)
@click.option(
    "--rows",
    type=click.IntRange(1),
    help="Rows of cross-entropy and experts, labels of class-center, tokens of attention.",
)
@click.option(
    "--width", type=click.IntRange(1), help="Row of experts and attention, hidden size of lamb."
)
@click.option("--experts", type=click.IntRange(1), help="Total experts of all ranks.")
@click.option("--classes", type=click.IntRange(1), help="Total classes of all ranks.")
@click.option(
    "--dtype",
    type=click.Choice(["float64", "float32", "float16", "bfloat16"]),
    help="Dtype of the logits of cross-entropy.",
)
@click.option(
    "--peers",
    metavar="FOLDER",
    help="Libraries of other projects' kernels for allreduce and dispatch; "
    "see docs/benchmark_peers.md.",
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
    **given: int | str | None,
) -> None:
    """Time the benchmarks NAMES, or all of them, against named peers."""
    from commlib.tools.bench.command import run_bench, run_tune

    if tune:
        options = {"rounds": rounds, "out": out, **given}
        unused = [*names, *(f"--{name}" for name, value in options.items() if value is not None)]
        if unused:
            _reject(ctx, f"--tune takes only --nproc: given {', '.join(unused)}; remove it")
        ctx.exit(run_tune(nproc))
    ctx.exit(run_bench(names, out, nproc=nproc, rounds=rounds, **given))
