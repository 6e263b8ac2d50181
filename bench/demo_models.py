"""The demo's own models: a small convolutional network for digits, and resnet18 written out.

resnet18 follows He et al., "Deep Residual Learning for Image Recognition" (2015), table 1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class DigitsNet(nn.Module):
    """[N, 1, 8, 8] float images to [N, 10] class scores."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(32)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(32 * 4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        return self.head(self.drop(x.flatten(1)))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions with a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = None
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nn.Module):
    """[N, 3, H, W] images to [N, classes] scores; four stages of basic blocks."""

    def __init__(self, blocks: tuple[int, ...], classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        layers, channels = [], 64
        for stage, count in enumerate(blocks):
            for i in range(count):
                layers.append(BasicBlock(channels, 64 << stage, 2 if stage and i == 0 else 1))
                channels = 64 << stage
        self.layers = nn.Sequential(*layers)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        return self.fc(self.layers(x).mean((2, 3)))


def resnet18() -> ResNet:
    """An 18-layer residual network, 11.7 million parameters."""
    return ResNet((2, 2, 2, 2))
