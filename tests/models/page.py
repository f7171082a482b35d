"""The page docs/models.md: which programs are equal, which need a change, which are refused."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import metadata

import torch

from tests.models.catalog import programs
from tests.models.compare import Outcome

_PACKAGES = ("torch", "transformers", "accelerate", "diffusers", "schedulefree", "timm")
_INTRO = """# Programs of other libraries, captured

`make models` writes this page. Each program is run twice from the same seed, eagerly and with
`commlib.graph.capture` by its defaults, over at least {calls} calls with changing inputs. Outputs,
gradients, final parameters, buffers, optimizer states and random generators are compared bit for
bit. Sizes are tiny and weights random.

* **equal**: the same bits, without a change to the program.
* **eager part**: the same bits with the change that is named; refused without it.
* **close**: the program asks whether it is captured and takes another way then, as under torch's
  own graphs; at least half of the digits are the same.
* **refused**: a `GraphError`; the number leads to its text at the end.
* **not replayed**: the same bits, but every call was made eagerly or captured again.
* **unfit**: the program fails eagerly, too, with the libraries that are installed.
"""
_KINDS = {
    "equal": "equal",
    "remedied": "eager part",
    "close": "close",
    "refused": "refused",
    "idle": "not replayed",
    "different": "**different**",
    "crashed": "**error**",
    "unsteady": "two eager runs differ",
    "unfit": "unfit",
}


def page_of(outcomes: Sequence[Outcome], device: str) -> str:
    """Return the page as Markdown."""
    by_name = programs()
    calls = min(program.calls for program in by_name.values())
    reasons: dict[str, int] = {}
    for each in outcomes:
        if each.text:
            reasons.setdefault(reason(each.text), len(reasons) + 1)
    lines = [_INTRO.format(calls=calls), _versions(device), "", *_counts(outcomes)]
    for family in dict.fromkeys(by_name[each.name].family for each in outcomes):
        members = [each for each in outcomes if by_name[each.name].family == family]
        lines += ["", f"## {family}", "", *_rows(members, reasons)]
    lines += ["", "## Reasons", ""]
    lines += [f"{number}. {text}" for text, number in reasons.items()]
    return "\n".join(lines) + "\n"


def _versions(device: str) -> str:
    versions = []
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    name = torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"
    return f"{', '.join(versions)}; {name}."


def _counts(outcomes: Sequence[Outcome]) -> Iterator[str]:
    by_name = programs()
    kinds = [kind for kind in _KINDS if any(each.kind == kind for each in outcomes)]
    yield f"| family | programs | {' | '.join(_KINDS[kind] for kind in kinds)} |"
    yield f"|---|{'---|' * (len(kinds) + 1)}"
    families: dict[str, Counter[str]] = {}
    for each in outcomes:
        families.setdefault(by_name[each.name].family, Counter())[each.kind] += 1
    families["all"] = sum(families.values(), Counter())
    for family, counts in families.items():
        cells = [counts.total(), *(counts[kind] for kind in kinds)]
        yield f"| {family} | {' | '.join(map(str, cells))} |"


def _rows(outcomes: Sequence[Outcome], reasons: dict[str, int]) -> Iterator[str]:
    """Yield one row per program, its modes side by side."""
    grouped: dict[str, dict[str, Outcome]] = {}
    for each in outcomes:
        program, mode = _program_and_mode(each.name)
        grouped.setdefault(program, {})[mode] = each
    modes = list(dict.fromkeys(mode for by_mode in grouped.values() for mode in by_mode))
    yield f"| program | {' | '.join(mode or 'outcome' for mode in modes)} |"
    yield f"|---|{'---|' * len(modes)}"
    for program, by_mode in grouped.items():
        cells = [_cell(by_mode.get(mode), reasons) for mode in modes]
        yield f"| {program} | {' | '.join(cells)} |"


def _program_and_mode(name: str) -> tuple[str, str]:
    _, program, *mode = name.split("/", 2)
    return program, mode[0] if mode else ""


def _cell(outcome: Outcome | None, reasons: dict[str, int]) -> str:
    if outcome is None:
        return ""
    number = f" ({reasons[reason(outcome.text)]})" if outcome.text else ""
    change = f": {programs()[outcome.name].remedy}" if outcome.kind == "remedied" else ""
    return f"{_KINDS[outcome.kind]}{change}{number}"


def reason(text: str) -> str:
    """Return an error without what differs between machines and programs."""
    text = re.sub(r"(/\S*?/)(site-packages/|tests/models/)", r"\2", " ".join(text.split()))
    text = text.replace("site-packages/", "").replace("|", "/")
    text = re.sub(r"\bnumber \d+", "number N", text)
    text = re.sub(r"\d+ bytes", "N bytes", text)
    return re.sub(r"\d+\.\d{3,}(e-?\d+)?", "x", text)
