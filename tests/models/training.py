"""Training loops of plain torch: optimizers, schedulers, averages, mixed precision, penalties.

Most capture their whole turn, from ``zero_grad`` to the optimizer's update.
"""

import copy
import functools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.models.program import Program, Session, Start, floats, integers, trained

Optimizer = torch.optim.Optimizer
Make = Callable[[list[nn.Parameter]], Optimizer]
FEATURES, CLASSES, ROWS = 8, 4, 6


def perceptron(device: torch.device) -> nn.Sequential:
    """Return a small classifier with dropout."""
    layers = (nn.Linear(FEATURES, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, CLASSES))
    return nn.Sequential(*layers).to(device)


def convolutions(device: torch.device) -> nn.Sequential:
    """Return a small convolutional classifier with batch norm."""
    layers = (
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(8, CLASSES)),
    )
    return nn.Sequential(*layers).to(device)


def rows(number: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one batch of features and classes."""
    x = floats(number, ROWS, FEATURES, device=device)
    return x, integers(number, 0, CLASSES, ROWS, device=device)


def images(number: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one batch of images and classes."""
    x = floats(number, ROWS, 3, 8, 8, device=device)
    return x, integers(number, 0, CLASSES, ROWS, device=device)


def turn_of(batches: Callable[[int, torch.device], Any], device: torch.device) -> Any:
    """Return the turn of a loop that gives a batch to the step and nothing else."""
    return lambda step, number: step(*batches(number, device))


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
    found: dict[str, Make] = {}

    def add(name: str, kind: Any, **how: Any) -> None:
        found[name] = lambda parameters: kind(parameters, **how)

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
    found["Muon"] = functools.partial(_matrices_apart, optim.Muon)
    found["AdamW lr tensor"] = lambda p: optim.AdamW(
        p, lr=torch.tensor(0.01, device=p[0].device), capturable=p[0].is_cuda
    )
    found["AdamW capturable"] = lambda p: optim.AdamW(p, lr=0.01, capturable=p[0].is_cuda)
    return found


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
        how = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=how)

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


# -- mixed precision -------------------------------------------------------------------------------


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


# -- penalties and games ---------------------------------------------------------------------------


def _critic(device: torch.device) -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)


def penalty(real: torch.Tensor, fake: torch.Tensor, critic: Any) -> torch.Tensor:
    """Return the gradient penalty of WGAN-GP."""
    share = torch.rand(real.shape[0], 1, device=real.device)
    mixed = (share * real + (1 - share) * fake).requires_grad_()
    (grad,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    return ((grad.norm(2, dim=1) - 1) ** 2).mean()


def penalized(device: torch.device, *, critic_alone: bool) -> Session:
    """Train a critic with a gradient penalty, as one function or through a captured critic."""
    critic = _critic(device)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.05)

    def train_step(real: torch.Tensor, fake: torch.Tensor, score: Any = critic) -> torch.Tensor:
        optimizer.zero_grad()
        loss = score(fake).mean() - score(real).mean() + 10 * penalty(real, fake, score)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def turn(step: Any, number: int) -> torch.Tensor:
        real, _ = rows(number, device)
        fake, _ = rows(number + 500, device)
        return train_step(real, fake, step) if critic_alone else step(real, fake)

    return Session(critic if critic_alone else train_step, turn, trained(critic, optimizer))


def adversarial(device: torch.device) -> Session:
    """Train a generator and a discriminator in one captured turn."""
    maker, critic = nn.Linear(4, FEATURES).to(device), _critic(device)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.5) for m in (maker, critic)]

    def train_step(real: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(ROWS, 4, device=device)
        optimizers[1].zero_grad()
        fake = maker(noise)
        loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        loss.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        fooled = F.softplus(-critic(fake)).mean()
        fooled.backward()
        optimizers[0].step()
        return torch.stack([loss, fooled]).detach()

    both = nn.ModuleList([maker, critic])
    return Session(train_step, turn_of(rows, device), trained(both, *optimizers))


# -- more loops ------------------------------------------------------------------------------------


def accumulated(device: torch.device) -> Session:
    """Accumulate the gradients of three captured backwards between two updates."""
    model = perceptron(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def accumulate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y) / 3
        loss.backward()
        return loss.detach()

    def turn(step: Any, number: int) -> torch.Tensor:
        loss = step(*rows(number, device)).clone()
        if number % 3 == 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return loss

    return Session(accumulate, turn, trained(model, optimizer))


def checkpointed(reentrant: bool, device: torch.device) -> Session:
    """Recompute a part in backward."""
    model = perceptron(device)
    model[2] = nn.Identity()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        hidden = checkpoint(model[:3], x.requires_grad_(), use_reentrant=reentrant)
        loss = F.cross_entropy(model[3](hidden), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Session(train_step, turn_of(rows, device), trained(model, optimizer))


def recurrent(kind: str, device: torch.device) -> Session:
    """Train a recurrent network with its state carried over from one batch to the next."""
    network: Any = getattr(nn, kind)(FEATURES, 16, num_layers=2, dropout=0.1, batch_first=True)
    head = nn.Linear(16, 1)
    model = nn.ModuleList([network, head]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    state: list[Any] = [None]

    def loss_of(x: torch.Tensor, before: Any) -> Any:
        out, after = network(x, before)
        return head(out).square().mean(), after

    def turn(step: Any, number: int) -> torch.Tensor:
        x = floats(number, 3, 5, FEATURES, device=device)
        optimizer.zero_grad()
        loss, after = step(x, state[0])
        loss.backward()
        parts = after if isinstance(after, tuple) else (after,)
        kept = tuple(part.detach().clone() for part in parts)
        state[0] = kept if isinstance(after, tuple) else kept[0]
        optimizer.step()
        return loss.detach()

    return Session(loss_of, turn, trained(model, optimizer))


def transformer_encoder(training: bool, device: torch.device) -> Session:
    """Run torch's own encoder over padded rows."""
    layer = nn.TransformerEncoderLayer(FEATURES, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device).train(training)

    def turn(step: Any, number: int) -> torch.Tensor:
        x = floats(number, 2, 5, FEATURES, device=device)
        padding = torch.zeros(2, 5, dtype=torch.bool, device=device)
        padding[1, 5 - number % 3 :] = True
        with torch.set_grad_enabled(training):
            out = step(x, src_key_padding_mask=padding)
            if training:
                out.square().mean().backward()
        return out.detach()

    return Session(model, turn, trained(model))


def variational(device: torch.device) -> Session:
    """Train a variational autoencoder, which draws noise in its forward."""
    encoder, decoder = nn.Linear(FEATURES, 8), nn.Linear(4, FEATURES)
    model = nn.ModuleList([encoder, decoder]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def train_step(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        mean, log_variance = encoder(x).chunk(2, 1)
        hidden = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
        loss = F.mse_loss(decoder(hidden), x) + 0.01 * divergence
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Session(train_step, turn_of(rows, device), trained(model, optimizer))


def momentum_contrast(device: torch.device) -> Session:
    """Train with a queue of keys, whose place is a number of Python or a tensor."""
    model = nn.Linear(FEATURES, 4).to(device)
    slow = copy.deepcopy(model).requires_grad_(False)
    queue = F.normalize(torch.randn(4, 4 * ROWS, device=device), dim=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    place = [0]

    def train_step(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        query = F.normalize(model(x), dim=1)
        with torch.no_grad():
            for mean, weight in zip(slow.parameters(), model.parameters(), strict=True):
                mean.mul_(0.9).add_(weight, alpha=0.1)
            key = F.normalize(slow(x.flip(0)), dim=1)
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ queue.clone()], 1)
        loss = F.cross_entropy(logits / 0.1, torch.zeros(ROWS, dtype=torch.long, device=device))
        loss.backward()
        optimizer.step()
        queue[:, place[0] : place[0] + ROWS] = key.T
        place[0] = (place[0] + ROWS) % queue.shape[1]
        return loss.detach()

    return Session(train_step, turn_of(rows, device), lambda: [trained(model)(), queue, place])


def q_learning(device: torch.device) -> Session:
    """Train a network of actions, with a target that is copied every third turn."""
    model = perceptron(device)
    target = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def train_step(x: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = 1 + 0.9 * target(x.flip(0)).max(1).values
        chosen = model(x).gather(1, action[:, None]).squeeze(1)
        loss = F.smooth_l1_loss(chosen, wanted)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    def turn(step: Any, number: int) -> torch.Tensor:
        loss = step(*rows(number, device)).clone()
        if number % 3 == 2:
            target.load_state_dict(model.state_dict())
        return loss

    return Session(train_step, turn, trained(model, target))


def mixed_up(source: str, device: torch.device) -> Session:
    """Mix the rows of a batch by a share that Python or NumPy draws."""
    model = perceptron(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        share = random.random() if source == "python" else float(np.random.beta(0.4, 0.4))
        optimizer.zero_grad()
        out = model(share * x + (1 - share) * x.flip(0))
        loss = share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y.flip(0))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Session(train_step, turn_of(rows, device), trained(model))


def skipping(device: torch.device) -> Session:
    """Skip a residual branch by chance, as a branch of Python (stochastic depth)."""
    model = perceptron(device)
    branch = nn.Linear(FEATURES, FEATURES).to(device)
    both = nn.ModuleList([model, branch])

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = x if random.random() < 0.5 else x + branch(x)
        return F.cross_entropy(model(hidden), y)

    def turn(step: Any, number: int) -> torch.Tensor:
        both.zero_grad()
        loss = step(*rows(number, device))
        loss.backward()
        return loss.detach()

    return Session(loss_of, turn, trained(both))


def late_loss(device: torch.device) -> Session:
    """Add a second loss from the sixth turn on, by a number of Python in the model."""
    model = perceptron(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    turns = [0]

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        out = model(x)
        loss = F.cross_entropy(out, y)
        if turns[0] >= 5:
            loss = loss + 0.1 * out.square().mean()
        loss.backward()
        optimizer.step()
        turns[0] += 1
        return loss.detach()

    return Session(train_step, turn_of(rows, device), lambda: [trained(model)(), turns])


def unfrozen(device: torch.device) -> Session:
    """Train the head first, and the whole model from the fifth turn on."""
    model = perceptron(device)
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def turn(step: Any, number: int) -> torch.Tensor:
        if number == 5:
            model[0].requires_grad_(True)
        return step(*rows(number, device))

    return Session(train_step, turn, trained(model))


def train_and_evaluate(device: torch.device) -> Session:
    """Capture a model and use it in training and, every third turn, in evaluation."""
    model = convolutions(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def turn(step: Any, number: int) -> Any:
        x, y = images(number, device)
        optimizer.zero_grad()
        loss = F.cross_entropy(step(x), y)
        loss.backward()
        optimizer.step()
        if number % 3 != 2:
            return loss.detach()
        model.eval()
        with torch.no_grad():
            shown = step(x).clone()
        model.train()
        return loss.detach(), shown

    return Session(model, turn, trained(model))


def restored(device: torch.device) -> Session:
    """Load a checkpoint of model and optimizer in the middle of the loop."""
    model = perceptron(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kept: list[Any] = []

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def turn(step: Any, number: int) -> torch.Tensor:
        if number == 3:
            kept.extend(copy.deepcopy([model.state_dict(), optimizer.state_dict()]))
        if number == 6:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
        return step(*rows(number, device)).clone()

    return Session(train_step, turn, trained(model, optimizer))


def normalized(kind: str, device: torch.device) -> Session:
    """Train layers whose weights are computed: spectral and weight norm."""
    wrap: Any = getattr(nn.utils.parametrizations, kind)
    model = nn.Sequential(wrap(nn.Linear(FEATURES, 16)), nn.ReLU(), wrap(nn.Linear(16, CLASSES)))
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Session(train_step, turn_of(rows, device), trained(model))


def per_sample(device: torch.device) -> Session:
    """Compute one gradient per row with torch.func, clip each, and sum them."""
    model = nn.Linear(FEATURES, CLASSES).to(device)
    parameters = {name: each.detach() for name, each in model.named_parameters()}

    def loss_of(given: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.func.functional_call(model, given, (x[None],))
        return F.cross_entropy(out, y[None])

    every = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        grads = every(parameters, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        share = (1 / (norms + 1e-6)).clamp(max=1)
        for name, grad in grads.items():
            parameters[name].sub_(0.1 * torch.einsum("i,i...->...", share, grad))
        return norms

    return Session(train_step, turn_of(rows, device), lambda: parameters)


# -- a trainer like nanoGPT's ----------------------------------------------------------------------


class Attention(nn.Module):
    """Causal attention over several heads."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> Any:
        """Return the attended values."""
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.c_attn(x).split(width, 2)
        )
        drop = self.dropout if self.training else 0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=drop, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(rows, length, width)))


class Block(nn.Module):
    """Attention and a perceptron, both with a residual."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, dropout)
        wide = (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.mlp = nn.Sequential(*wide, nn.Dropout(dropout))

    def forward(self, x: torch.Tensor) -> Any:
        """Return the block's output."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A small language model with tied weights."""

    def __init__(self, vocabulary: int = 50, length: int = 16, width: int = 16) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 2, 0.1) for _ in range(2))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> Any:
        """Return logits and loss."""
        place = torch.arange(idx.shape[1], device=idx.device)
        x = self.wte(idx) + self.wpe(place)
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def nano_gpt(part: str, device: torch.device) -> Session:
    """Train as nanoGPT does: micro steps, a cosine learning rate, clipping, AdamW.

    ``part``: what is captured: the model, the micro step, or the whole turn.
    """
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(_groups(model), lr=1e-3, betas=(0.9, 0.95))
    data = integers(1, 0, 50, 400, device=torch.device("cpu"))

    def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        starts = integers(number, 0, 380, 3, device=torch.device("cpu"))
        x = torch.stack([data[i : i + 16] for i in starts])
        y = torch.stack([data[i + 1 : i + 17] for i in starts])
        return x.to(device), y.to(device)

    def micro(x: torch.Tensor, y: torch.Tensor, call: Any = model) -> torch.Tensor:
        _, loss = call(x, y)
        loss = loss / 2
        loss.backward()
        return loss.detach()

    def whole(batches: list[Any], run: Any = micro) -> list[torch.Tensor]:
        losses = [run(x, y).clone() for x, y in batches]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return losses

    def turn(step: Any, number: int) -> Any:
        for group in optimizer.param_groups:
            group["lr"] = 1e-4 + 0.5 * (1 + math.cos(math.pi * number / 10)) * 1e-3
        batches = [batch(2 * number), batch(2 * number + 1)]
        if part == "whole turn":
            return step(batches)
        run = step if part == "micro step" else functools.partial(micro, call=step)
        return whole(batches, run)

    steps = {"model": model, "micro step": micro, "whole turn": whole}
    return Session(steps[part], turn, trained(model, optimizer))


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
    loops: dict[str, Start] = {
        "averages/AveragedModel": functools.partial(averaged, "AveragedModel"),
        "averages/by hand": functools.partial(averaged, "by hand"),
        "mixed precision/bfloat16": functools.partial(autocast_step, torch.bfloat16),
        "mixed precision/float16 GradScaler": functools.partial(
            autocast_step, torch.float16, scaled=True
        ),
        "mixed precision/model alone": autocast_forward,
        "penalties/whole step": functools.partial(penalized, critic_alone=False),
        "penalties/captured critic": functools.partial(penalized, critic_alone=True),
        "penalties/generator and critic": adversarial,
        "loops/gradient accumulation": accumulated,
        "loops/checkpoint": functools.partial(checkpointed, False),
        "loops/checkpoint reentrant": functools.partial(checkpointed, True),
        "loops/LSTM": functools.partial(recurrent, "LSTM"),
        "loops/GRU": functools.partial(recurrent, "GRU"),
        "loops/TransformerEncoder eval": functools.partial(transformer_encoder, False),
        "loops/TransformerEncoder train": functools.partial(transformer_encoder, True),
        "loops/variational autoencoder": variational,
        "loops/momentum contrast": momentum_contrast,
        "loops/Q learning": q_learning,
        "loops/mixup Python": functools.partial(mixed_up, "python"),
        "loops/mixup NumPy": functools.partial(mixed_up, "numpy"),
        "loops/stochastic depth": skipping,
        "loops/second loss later": late_loss,
        "loops/unfrozen later": unfrozen,
        "loops/train and evaluate": train_and_evaluate,
        "loops/checkpoint loaded": restored,
        "loops/spectral norm": functools.partial(normalized, "spectral_norm"),
        "loops/weight norm": functools.partial(normalized, "weight_norm"),
        "loops/gradients per sample": per_sample,
    }
    for name, loop in loops.items():
        yield Program(name, loop)
    for part in ("model", "micro step", "whole turn"):
        yield Program(f"nanoGPT/{part}", functools.partial(nano_gpt, part))


PROGRAMS = list(_programs())
