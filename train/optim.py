"""AdamW and the learning-rate schedule as a pure function of the step."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from train.config import OptimConfig


def learning_rate(step: int, num_steps: int, config: OptimConfig) -> float:
    """Rate of update `step` (from 0): linear warm-up over warmup_ratio of the run, then cosine towards zero.

    The last update still has a rate above zero.
    """
    num_warmup = int(config.warmup_ratio * num_steps)
    if step < num_warmup:
        return config.learning_rate * (step + 1) / num_warmup
    progress = (step - num_warmup) / max(1, num_steps - num_warmup)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def build_optimizer(parameters: Iterable[nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
    )
