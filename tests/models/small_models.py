"""Small classifiers of plain torch, and the batches that they are trained with."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.models.program import floats, integers

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
