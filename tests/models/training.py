"""Training loops of plain torch: penalties, recurrent states, states that change between calls."""

import copy
import functools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.models.program import Program, Session, Start, floats, trained
from tests.models.small_models import (
    CLASSES,
    FEATURES,
    ROWS,
    convolutions,
    images,
    perceptron,
    rows,
    turn_of,
)

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
        detached = tuple(part.detach().clone() for part in parts)
        state[0] = detached if isinstance(after, tuple) else detached[0]
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
    queue_ptr = [0]

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
        queue[:, queue_ptr[0] : queue_ptr[0] + ROWS] = key.T
        queue_ptr[0] = (queue_ptr[0] + ROWS) % queue.shape[1]
        return loss.detach()

    return Session(train_step, turn_of(rows, device), lambda: [trained(model)(), queue, queue_ptr])


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
    saved: list[Any] = []

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def turn(step: Any, number: int) -> torch.Tensor:
        if number == 3:
            saved.extend(copy.deepcopy([model.state_dict(), optimizer.state_dict()]))
        if number == 6:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
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


def _programs() -> Iterator[Program]:
    loops: dict[str, Start] = {
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


PROGRAMS = list(_programs())
