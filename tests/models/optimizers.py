"""Optimizers, schedulers and averages of plain torch; most capture their whole turn."""

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.models.program import Program, Session, trained
from tests.models.small_models import (
    CLASSES,
    FEATURES,
    convolutions,
    images,
    perceptron,
    rows,
    turn_of,
)

Optimizer = torch.optim.Optimizer
Make = Callable[[list[nn.Parameter]], Optimizer]


# -- optimizers ------------------------------------------------------------------------------------


def whole_step(make: Make, device: torch.device, *, outside: bool = False) -> Session:
    """Capture a whole turn; ``outside`` leaves the optimizer's update in an eager part."""
    from commlib import graph

    model = perceptron(device)
    optimizer = make(list(model.parameters()))
    update = graph.eager(optimizer.step) if outside else optimizer.step

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        update()
        return loss.detach()

    return Session(train_step, turn_of(rows, device), trained(model, optimizer))


def update_alone(make: Make, device: torch.device) -> Session:
    """Capture the optimizer's update alone; ``zero_grad`` keeps its default."""
    model = perceptron(device)
    optimizer = make(list(model.parameters()))

    def turn(step: Any, number: int) -> torch.Tensor:
        x, y = rows(number, device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        step()
        return loss.detach()

    return Session(optimizer.step, turn, trained(model, optimizer))


def line_search(device: torch.device, *, outside: bool = False) -> Session:
    """Train with L-BFGS, which calls the loss itself."""
    from commlib import graph

    model = nn.Linear(FEATURES, CLASSES).to(device)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def learn(x: torch.Tensor, y: torch.Tensor) -> Any:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        update: Any = graph.eager(optimizer.step) if outside else optimizer.step
        return update(closure)

    return Session(learn, turn_of(rows, device), trained(model, optimizer))


def _matrices_apart(kind: Any, parameters: list[nn.Parameter]) -> Optimizer:
    return kind([p for p in parameters if p.ndim == 2], lr=0.01)


def _optimizers() -> dict[str, Make]:
    """Return the ways to make an optimizer, by name."""
    makers: dict[str, Make] = {}

    def add(name: str, kind: Any, **how: Any) -> None:
        makers[name] = lambda parameters: kind(parameters, **how)

    optim = torch.optim
    add("SGD", optim.SGD, lr=0.1)
    add("SGD momentum", optim.SGD, lr=0.1, momentum=0.9)
    add("SGD nesterov foreach", optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True)
    add("SGD fused", optim.SGD, lr=0.1, momentum=0.9, fused=True)
    for kind in (optim.Adam, optim.AdamW):
        add(kind.__name__, kind, lr=0.01)
        add(f"{kind.__name__} foreach", kind, lr=0.01, foreach=True)
        add(f"{kind.__name__} fused", kind, lr=0.01, fused=True)
        add(f"{kind.__name__} amsgrad", kind, lr=0.01, amsgrad=True)
    plain = (optim.Adagrad, optim.Adadelta, optim.Adamax, optim.NAdam, optim.RAdam)
    for other in (*plain, optim.RMSprop, optim.ASGD, optim.Rprop, optim.Adafactor):
        add(other.__name__, other, lr=0.01)
    add("RMSprop centered", optim.RMSprop, lr=0.01, momentum=0.9, centered=True)
    add("Adagrad fused", optim.Adagrad, lr=0.01, fused=True)
    makers["Muon"] = functools.partial(_matrices_apart, optim.Muon)
    makers["AdamW lr tensor"] = lambda p: optim.AdamW(
        p, lr=torch.tensor(0.01, device=p[0].device), capturable=p[0].is_cuda
    )
    makers["AdamW capturable"] = lambda p: optim.AdamW(p, lr=0.01, capturable=p[0].is_cuda)
    return makers


OPTIMIZERS = _optimizers()
UPDATE_OUTSIDE = "optimizer.step as an eager part"

# -- schedulers ------------------------------------------------------------------------------------

Schedule = Callable[[Optimizer], Any]
SCHEDULES: dict[str, Schedule] = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 5, 0.1),
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [6], 0.1),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "ExponentialLR": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "LambdaLR warm-up": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: min(1, n / 6)),
}


def scheduled(
    schedule: Schedule, device: torch.device, *, tensor_lr: bool = False, outside: bool = False
) -> Session:
    """Change the learning rate after each captured turn; some change it late."""
    from commlib import graph

    model = perceptron(device)
    lr: Any = torch.tensor(0.1, device=device) if tensor_lr else 0.1
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    scheduler = schedule(optimizer)
    update = graph.eager(optimizer.step) if outside else optimizer.step

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        update()
        return loss.detach()

    def turn(step: Any, number: int) -> Any:
        loss = step(*rows(number, device)).clone()
        scheduler.step()
        return loss, scheduler.get_last_lr()

    return Session(train_step, turn, trained(model, optimizer))


def plateau(device: torch.device) -> Session:
    """Lower the learning rate where the loss does not fall; forward and loss are captured."""
    model = perceptron(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    def turn(step: Any, number: int) -> Any:
        optimizer.zero_grad()
        loss = step(*rows(number, device))
        loss.backward()
        optimizer.step()
        scheduler.step(loss.item())
        return loss.detach(), scheduler.get_last_lr()

    return Session(loss_of, turn, trained(model, optimizer))


# -- averages --------------------------------------------------------------------------------------


def averaged(kind: str, device: torch.device) -> Session:
    """Keep an average of the weights, updated inside the captured turn."""
    model = convolutions(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    average: Any = copy.deepcopy(model).requires_grad_(False)
    if kind == "AveragedModel":
        avg_fn = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=avg_fn)

    def by_hand() -> None:
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(weight, 0.1)
            for mean, buffer in zip(average.buffers(), model.buffers(), strict=True):
                mean.copy_(buffer)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        if kind == "AveragedModel":
            average.update_parameters(model)
        else:
            by_hand()
        return loss.detach()

    return Session(train_step, turn_of(images, device), trained(model, optimizer, average))


# -- all of them -----------------------------------------------------------------------------------


def _programs() -> Iterator[Program]:
    for name, make in OPTIMIZERS.items():
        yield Program(
            f"optimizers/{name}/whole step",
            functools.partial(whole_step, make),
            remedy=UPDATE_OUTSIDE,
            remedied=functools.partial(whole_step, make, outside=True),
        )
    for name in ("SGD", "SGD momentum", "SGD fused", "AdamW", "AdamW foreach", "AdamW fused"):
        start = functools.partial(update_alone, OPTIMIZERS[name])
        yield Program(f"optimizers/{name}/update alone", start)
    yield Program("optimizers/LBFGS/whole step", line_search)
    for name, schedule in SCHEDULES.items():
        yield Program(
            f"schedulers/{name}/float",
            functools.partial(scheduled, schedule),
            remedy=UPDATE_OUTSIDE,
            remedied=functools.partial(scheduled, schedule, outside=True),
        )
        start = functools.partial(scheduled, schedule, tensor_lr=True)
        yield Program(f"schedulers/{name}/tensor", start)
    yield Program("schedulers/ReduceLROnPlateau/forward", plateau)
    for kind in ("AveragedModel", "by hand"):
        yield Program(f"averages/{kind}", functools.partial(averaged, kind))


PROGRAMS = list(_programs())
