"""Programs of accelerate, diffusers, schedulefree, timm, and of the trainers in transformers."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from tests.models.program import Program, Session, floats, integers, trained
from tests.models.small_models import convolutions, images, perceptron, rows, turn_of

# -- transformers' optimizers and schedules --------------------------------------------------------


def adafactor(relative: bool, device: torch.device) -> Session:
    """Train with the Adafactor of transformers."""
    from transformers.optimization import Adafactor

    model = perceptron(device)
    lr = None if relative else 1e-2
    kwargs = {"scale_parameter": relative, "relative_step": relative, "warmup_init": relative}
    optimizer = Adafactor(model.parameters(), lr=lr, **kwargs)
    return _train_step(model, optimizer, device)


def _train_step(model: Any, optimizer: Any, device: torch.device, after: Any = None) -> Session:
    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if after is not None:
            after()
        return loss.detach()

    return Session(train_step, turn_of(rows, device), trained(model, optimizer))


def warmed_up(name: str, device: torch.device) -> Session:
    """Step a schedule of transformers after each captured forward and backward."""
    from transformers import get_scheduler

    model = perceptron(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    kwargs = {"num_warmup_steps": 3, "num_training_steps": 10}
    schedule = get_scheduler(name, optimizer, **kwargs)

    def accumulate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    def turn(step: Any, number: int) -> Any:
        loss = step(*rows(number, device)).clone()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss, schedule.get_last_lr()

    return Session(accumulate, turn, trained(model, optimizer))


# -- schedulefree ----------------------------------------------------------------------------------


def schedule_free(kind: str, part: str, device: torch.device) -> Session:
    """Train with an optimizer of schedulefree; captured is the whole turn, or the loss alone."""
    import schedulefree

    model = perceptron(device)
    optimizer = getattr(schedulefree, kind)(model.parameters(), lr=0.01)
    optimizer.train()
    if part == "whole turn":
        return _train_step(model, optimizer, device)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    def turn(step: Any, number: int) -> Any:
        optimizer.zero_grad()
        loss = step(*rows(number, device))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Session(loss_of, turn, trained(model, optimizer))


# -- accelerate ------------------------------------------------------------------------------------


def accelerated(part: str, precision: str, device: torch.device) -> Session:
    """Train with accelerate; captured is the prepared model, or the whole turn."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=precision)
    model = perceptron(device)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule: Any = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)

    def train_step(x: torch.Tensor, y: torch.Tensor, call: Any = model) -> torch.Tensor:
        loss = F.cross_entropy(call(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss.detach()

    def turn(step: Any, number: int) -> torch.Tensor:
        x, y = rows(number, device)
        return train_step(x, y, step) if part == "model" else step(x, y)

    step = model if part == "model" else train_step
    return Session(step, turn, trained(model, optimizer))


def accumulating(device: torch.device) -> Session:
    """Accumulate gradients with ``accelerator.accumulate``; the model is captured."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=device.type == "cpu", gradient_accumulation_steps=2)
    model: Any = perceptron(device)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)

    def turn(step: Any, number: int) -> torch.Tensor:
        x, y = rows(number, device)
        with accelerator.accumulate(model):
            loss = F.cross_entropy(step(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return Session(model, turn, trained(model, optimizer))


# -- diffusers -------------------------------------------------------------------------------------

_BLOCKS = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}


def _unet() -> Any:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=8,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        **_BLOCKS,
    )


def _conditional() -> Any:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8,
        cross_attention_dim=8,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        **_BLOCKS,
    )


def _dit() -> Any:
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(
        sample_size=8, num_layers=2, num_attention_heads=2, attention_head_dim=8, in_channels=4,
        num_embeds_ada_norm=10, norm_num_groups=4,
    )  # fmt: skip


def _autoencoder(kind: str) -> Any:
    import diffusers

    if kind == "VQModel":
        return diffusers.VQModel(
            latent_channels=3,
            num_vq_embeddings=16,
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            **_BLOCKS,
        )
    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        **_BLOCKS,
    )


def _unet_inputs(kind: str, number: int, device: torch.device) -> dict[str, Any]:
    channels = 3 if kind == "UNet2DModel" else 4
    inputs: dict[str, Any] = {
        "timestep": integers(number, 0, 1000, 2, device=device),
    }
    if kind == "UNet2DConditionModel":
        inputs["encoder_hidden_states"] = floats(number + 500, 2, 5, 8, device=device)
    if kind == "DiTTransformer2DModel":
        inputs["class_labels"] = integers(number, 0, 10, 2, device=device)
        inputs["hidden_states"] = floats(number, 2, channels, 8, 8, device=device)
    else:
        inputs["sample"] = floats(number, 2, channels, 8, 8, device=device)
    return inputs


_DENOISERS: dict[str, Callable[[], Any]] = {
    "UNet2DModel": _unet,
    "UNet2DConditionModel": _conditional,
    "DiTTransformer2DModel": _dit,
}


def denoiser(kind: str, training: bool, device: torch.device) -> Session:
    """Capture a denoiser itself, in evaluation or in training."""
    model = _DENOISERS[kind]().to(device).train(training)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def turn(step: Any, number: int) -> Any:
        inputs = _unet_inputs(kind, number, device)
        if not training:
            with torch.no_grad():
                return step(**inputs).sample
        optimizer.zero_grad()
        sample = step(**inputs).sample
        loss = sample.square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Session(model, turn, trained(model))


def autoencoder(kind: str, training: bool, device: torch.device) -> Session:
    """Capture the reconstruction of images."""
    model = _autoencoder(kind).to(device).train(training)

    def reconstruct(x: torch.Tensor) -> Any:
        return model(x).sample

    def turn(step: Any, number: int) -> Any:
        x = floats(number, 2, 3, 8, 8, device=device)
        with torch.set_grad_enabled(training):
            output = step(x)
            if training:
                model.zero_grad()
                F.mse_loss(output, x).backward()
        return output.detach().clone()

    return Session(reconstruct, turn, trained(model))


def denoising_step(kind: str, device: torch.device) -> Session:
    """Capture one step of a sampling loop: the denoiser and the scheduler."""
    import diffusers

    model = _unet().to(device).eval()
    scheduler = getattr(diffusers, kind)(num_train_timesteps=100)

    @torch.no_grad()
    def step_of(sample: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        scaled = scheduler.scale_model_input(sample, t)
        noise = model(scaled, t).sample
        return scheduler.step(noise, t, sample).prev_sample

    def turn(step: Any, number: int) -> torch.Tensor:
        if number % 4 == 0:
            scheduler.set_timesteps(4, device=device)
            latents[0] = floats(number, 2, 3, 8, 8, device=device) * scheduler.init_noise_sigma
        latents[0] = step(latents[0], scheduler.timesteps[number % 4]).clone()
        return latents[0]

    latents: list[torch.Tensor] = [torch.zeros(0)]
    return Session(step_of, turn)


def sampling(kind: str, device: torch.device) -> Session:
    """Capture the denoiser alone; the scheduler's step stays in the loop."""
    import diffusers

    model = _unet().to(device).eval()
    scheduler = getattr(diffusers, kind)(num_train_timesteps=100)

    def turn(step: Any, number: int) -> torch.Tensor:
        scheduler.set_timesteps(4, device=device)
        sample = floats(number, 1, 3, 8, 8, device=device) * scheduler.init_noise_sigma
        with torch.no_grad():
            for t in scheduler.timesteps:
                noise = step(scheduler.scale_model_input(sample, t), t.to(device)).sample
                sample = scheduler.step(noise, t, sample).prev_sample
        return sample

    return Session(model, turn)


def noise_prediction(average: bool, device: torch.device) -> Session:
    """Train a denoiser on random noise at random times, with an average of its weights."""
    from diffusers import DDPMScheduler
    from diffusers.training_utils import EMAModel

    model = _unet().to(device).train()
    scheduler = DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    mean = EMAModel(model.parameters(), decay=0.9) if average else None

    def train_step(x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(x)
        t = torch.randint(0, 100, (x.shape[0],), device=x.device)
        noisy = scheduler.add_noise(x, noise, t)
        loss = F.mse_loss(model(noisy, t).sample, noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if mean is not None:
            mean.step(model.parameters())
        return loss.detach()

    def turn(step: Any, number: int) -> torch.Tensor:
        return step(floats(number, 2, 3, 8, 8, device=device))

    return Session(train_step, turn, trained(model, *([mean] if mean is not None else [])))


# -- timm ------------------------------------------------------------------------------------------

_TIMM = ("resnet10t", "vit_tiny_patch16_224", "convnext_atto", "mobilenetv3_small_050")
_TIMM_MORE = ("efficientnet_lite0", "mixer_s32_224", "test_vit", "test_resnet", "test_convnext")


def timm_model(name: str, training: bool, device: torch.device) -> Session:
    """Capture a model of timm."""
    import timm

    model = timm.create_model(name, num_classes=4).to(device).train(training)
    size = model.default_cfg["input_size"][-1] if "vit" in name or "mixer" in name else 64

    def turn(step: Any, number: int) -> Any:
        x = floats(number, 2, 3, size, size, device=device)
        with torch.set_grad_enabled(training):
            output = step(x)
            if training:
                model.zero_grad()
                output.square().mean().backward()
        return output.detach().clone()

    return Session(model, turn, trained(model))


def timm_optimizer(name: str, device: torch.device) -> Session:
    """Train with an optimizer of timm and its average of weights."""
    from timm.optim import create_optimizer_v2
    from timm.utils import ModelEmaV3

    model = convolutions(device)
    optimizer = create_optimizer_v2(model, opt=name, lr=0.01)
    mean = ModelEmaV3(model, decay=0.9)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        mean.update(model)
        return loss.detach()

    return Session(train_step, turn_of(images, device), trained(model, optimizer, mean))


def _programs() -> Iterator[Program]:
    of = functools.partial
    for relative in (False, True):
        name = f"optimizers/Adafactor of transformers{', relative steps' if relative else ''}"
        yield Program(f"{name}/whole step", of(adafactor, relative), needs=("transformers",))
    for name in ("linear", "cosine", "polynomial"):
        start = of(warmed_up, name)
        yield Program(f"schedulers/{name} of transformers/backward", start, needs=("transformers",))
    for kind in ("AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"):
        for part in ("whole turn", "loss"):
            start = of(schedule_free, kind, part)
            yield Program(f"schedulefree/{kind}/{part}", start, needs=("schedulefree",))
    for part in ("model", "whole turn"):
        for precision in ("no", "bf16"):
            start = of(accelerated, part, precision)
            yield Program(f"accelerate/{part}, mixed precision {precision}", start,
                          needs=("accelerate",))  # fmt: skip
    yield Program("accelerate/accumulate", accumulating, needs=("accelerate",))
    needs: tuple[str, ...] = ("diffusers",)
    for kind in _DENOISERS:
        for training in (False, True):
            mode = "train" if training else "eval"
            yield Program(f"diffusers/{kind}/{mode}", of(denoiser, kind, training), needs=needs)
    for kind in ("AutoencoderKL", "VQModel"):
        for training in (False, True):
            mode = "train" if training else "eval"
            yield Program(f"diffusers/{kind}/{mode}", of(autoencoder, kind, training), needs=needs)
    for kind in ("DDPMScheduler", "DDIMScheduler", "EulerDiscreteScheduler", "PNDMScheduler",
                 "DPMSolverMultistepScheduler", "EulerAncestralDiscreteScheduler"):  # fmt: skip
        yield Program(f"diffusers/{kind}/whole step", of(denoising_step, kind), needs=needs)
        yield Program(f"diffusers/{kind}/denoiser alone", of(sampling, kind), needs=needs)
    yield Program("diffusers/training", of(noise_prediction, False), needs=needs)
    yield Program("diffusers/training with EMAModel", of(noise_prediction, True), needs=needs)
    needs = ("timm", "torchvision")
    for name in (*_TIMM, *_TIMM_MORE):
        for training in (False, True):
            mode = "train" if training else "eval"
            yield Program(f"timm/{name}/{mode}", of(timm_model, name, training), needs=needs)
    for name in ("adamw", "lamb", "lion", "adabelief", "madgrad", "adopt", "nadamw"):
        yield Program(f"timm/{name}/whole step", of(timm_optimizer, name), needs=needs)


PROGRAMS = list(_programs())
