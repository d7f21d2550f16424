"""AdamW and the learning-rate schedule as a pure function of the step."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from train.config import OptimConfig


@dataclass(frozen=True)
class Schedule:
    """Updates first_step .. num_steps - 1; it begins at 0 but for a run that was extended."""

    first_step: int
    num_steps: int


def learning_rate(step: int, schedule: Schedule, config: OptimConfig) -> float:
    """Rate of update `step` (from 0): linear warm-up over warmup_ratio of the schedule, then cosine towards zero.

    The last update still has a rate above zero. Raises ValueError on a step outside of the schedule.
    """
    length, place = schedule.num_steps - schedule.first_step, step - schedule.first_step
    if not 0 <= place < length:
        raise ValueError(f"step {step} is outside of the schedule's {schedule.first_step}..{schedule.num_steps - 1}")
    num_warmup = int(config.warmup_ratio * length)
    if place < num_warmup:
        return config.learning_rate * (place + 1) / num_warmup
    progress = (place - num_warmup) / max(1, length - num_warmup)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def build_optimizer(parameters: Iterable[nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
    )
