"""Training loops of plain torch in mixed precision, with and without a scaler of gradients."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from commlib.errors import GraphError
from commlib.graph import capture
from commlib.graph.options import OnFail
from tests.models.program import Program, Session, Start, trained
from tests.models.small_models import convolutions, images, turn_of


def autocast_step(dtype: torch.dtype, device: torch.device, *, scaled: bool = False) -> Session:
    """Train under autocast, with a scaler of gradients where it is asked for."""
    model = convolutions(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, enabled=scaled)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return Session(train_step, turn_of(images, device), trained(model, optimizer))


def refused_scaler(on_fail: OnFail, device: torch.device) -> Session:
    """Go on training with the scaler after a step that may be refused."""
    session = autocast_step(torch.float16, device, scaled=True)

    def turn(step: Any, number: int) -> Any:
        if step is not session.step and on_fail == "eager":
            step = eagerly
        try:
            return step(*images(number, device))
        except GraphError:
            return session.step(*images(number, device))

    eagerly = capture(session.step, on_fail="eager")
    return Session(session.step, turn, session.state)


def autocast_forward(device: torch.device) -> Session:
    """Capture the model alone and call it under autocast; the scaler works outside."""
    model = convolutions(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)

    def turn(step: Any, number: int) -> Any:
        x, y = images(number, device)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(step(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return Session(model, turn, trained(model, optimizer))


def _programs() -> Iterator[Program]:
    loops: dict[str, Start] = {
        "mixed precision/bfloat16": functools.partial(autocast_step, torch.bfloat16),
        "mixed precision/float16 GradScaler": functools.partial(
            autocast_step, torch.float16, scaled=True
        ),
        "mixed precision/GradScaler, the error is caught": functools.partial(
            refused_scaler, "raise"
        ),
        "mixed precision/GradScaler, eager where it fails": functools.partial(
            refused_scaler, "eager"
        ),
        "mixed precision/model alone": autocast_forward,
    }
    for name, loop in loops.items():
        yield Program(name, loop)


PROGRAMS = list(_programs())
