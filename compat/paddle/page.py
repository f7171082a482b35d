"""``docs/paddle.md``, from the tables and docstrings of the dialect."""

from types import ModuleType
from typing import Any

from commlib.compat.paddle import distributed
from commlib.compat.paddle.distributed import fleet, mp_ops, pp_utils, stream
from commlib.compat.paddle.distributed.fleet import meta_optimizers, meta_parallel
from commlib.compat.paddle.distributed.import_paths import PATHS
from commlib.compat.paddle.names import NEW_NAMES
from commlib.compat.paddle.unported import FAMILIES, REASONS

MODULES: dict[str, ModuleType] = {
    "": distributed,
    "fleet.": fleet,
    "fleet.meta_optimizers.": meta_optimizers,
    "fleet.meta_parallel.": meta_parallel,
    "mp_ops.": mp_ops,
    "pp_utils.": pp_utils,
    "stream.": stream,
}


def page() -> str:
    """Return ``docs/paddle.md``."""
    rows = [f"| `{old}` | `{new}` | {text} |" for old, (new, text) in sorted(NEW_NAMES.items())]
    of_groups = [f"| `{name}` | {text} |" for name, text in distributed_names().items()]
    paths = [
        f"| `{path}` | {', '.join(f'`{_short(one)}`' for one in modules) or 'the paths below it'} |"
        for path, modules in sorted(PATHS.items())
    ]
    missing = [f"| `{name}` | {why} |" for name, why in sorted(REASONS.items())]
    families = [f"| `{start}…` | {why} |" for start, why in sorted(FAMILIES.items())]
    parts = (_HEAD, *rows, _DISTRIBUTED, *of_groups, _PATHS, *paths, _MISSING, *missing, *families)
    return "\n".join((*parts, ""))


def distributed_names() -> dict[str, str]:
    """Return each name of ``paddle.distributed`` that is not a module, and what it is."""
    headlines = {}
    for prefix, module in MODULES.items():
        for name in sorted(module.__all__):
            value: Any = getattr(module, name)
            if not isinstance(value, ModuleType):
                headlines[f"{prefix}{name}"] = _headline(value)
    return headlines


def _headline(value: Any) -> str:
    return (value.__doc__ or "").strip().partition("\n")[0].replace("``", "`").rstrip(".")


def _short(module: ModuleType) -> str:
    return module.__name__.removeprefix("commlib.compat.")


_HEAD = """\
# Paddle programs

A program keeps its calls and changes its imports: `from commlib.compat import paddle`. The table
has each legacy operator, what a new program writes instead, and what differs between the two. In
what the legacy name differs from Paddle's operator: [Paddle differences](paddle_differences.md).

`import commlib.compat.paddle.distributed as dist` is `paddle.distributed`, with `fleet` and the
parallel layers. [examples/fleet_gpt.py](../examples/fleet_gpt.py) uses it.

Three styles of a call are understood:

| style | example |
| --- | --- |
| positional or by keyword, as `_C_ops` | `paddle._C_ops.c_identity(x, 0, True, True)` |
| pairs, as `_legacy_C_ops` | `paddle._legacy_C_ops.c_identity(x, "ring_id", 0)` |
| in place | `paddle.c_allreduce_sum_(x)` |

| old name | new name | difference |
| --- | --- | --- |"""

_DISTRIBUTED = """\

`paddle.distributed` has the names, argument orders and defaults of upstream. The new names are
those of `torch.distributed` and of rings.

| name in `paddle.distributed` | what it is |
| --- | --- |"""

_PATHS = """\

Upstream's deep import paths exist too, under `commlib.compat.paddle.distributed`:

| path | has the names of |
| --- | --- |"""

_MISSING = """\

Names that do not exist here raise `AttributeError` with the reason, or with the nearest name:

| name | reason |
| --- | --- |"""
