"""Compare all programs and write docs/models.md: ``python -m tests.models``."""

import gc
import json
import sys
import time
from collections import Counter
from pathlib import Path

import click
import torch

from tests.models import runner
from tests.models.compare import Outcome
from tests.models.program import Program

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "models.md"

_LOADED = (  # what programs import in their runs, and what that imports
    "torch._dynamo",
    "commlib.graph",
    "transformers.models.llama.modeling_llama",
    "accelerate",
    "diffusers.models.unets.unet_2d_condition",
    "diffusers.models.autoencoders.autoencoder_kl",
)


def load() -> dict[str, Program]:
    """Load the libraries and return the programs; before any process is forked."""
    runner.quiet()
    import transformers.models.llama.modeling_llama  # noqa: F401  what most models import too

    from commlib import graph  # noqa: F401
    from tests.models.catalog import programs

    by_name = programs()
    gc.freeze()  # collections in forked processes would visit the libraries, and copy their pages
    return by_name


@click.group(invoke_without_command=True)
@click.option("--only", multiple=True, help="Programs whose name contains this.")
@click.option("--device", default="cuda" if torch.cuda.device_count() else "cpu")
@click.option("--page", type=click.Path(path_type=Path), default=PAGE, help="Where to write.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the outcomes as JSON here.")
@click.pass_context
def main(
    context: click.Context, only: tuple[str, ...], device: str, page: Path, out: Path | None
) -> None:
    """Compare every program and write the page; with --only, print the outcomes alone."""
    if context.invoked_subcommand is not None:
        return
    chosen = {name: p for name, p in load().items() if p.runs_here}
    if only:
        chosen = {name: p for name, p in chosen.items() if any(part in name for part in only)}
    outcomes = compared(chosen, device)
    if out is not None:
        out.write_text(json.dumps([vars(each) for each in outcomes], indent=1))
    if not only:
        from tests.models.page import page_of

        page.write_text(page_of(outcomes, device))
    if any(each.kind in ("different", "crashed") for each in outcomes):
        sys.exit(1)


def compared(chosen: dict[str, Program], device: str) -> list[Outcome]:
    """Run the programs and print a line for each."""
    run = runner.Runner(device, chosen)
    began = time.perf_counter()
    runs = []
    for name in chosen:
        runs.append(run.run(name))
        last = runs[-1]
        click.echo(f"{last.kind:10} {name} ({last.seconds:.1f} s) {last.text}")
    counts = ", ".join(f"{count} {kind}" for kind, count in Counter(x.kind for x in runs).items())
    click.echo(f"{len(runs)} programs in {time.perf_counter() - began:.0f} s: {counts}")
    return runs


@main.command()
@click.option("--device", default="cpu")
def serve(device: str) -> None:
    """Read names from standard input and answer each with its outcome, a line of JSON."""
    chosen = load()
    run = runner.Runner(device, chosen)
    for line in sys.stdin:
        print(json.dumps(vars(run.run(line.strip()))), flush=True)


if __name__ == "__main__":
    main(prog_name="python -m tests.models")
