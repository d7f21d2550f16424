"""Options of train.py; conf/train.yaml lists every value with a remark."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from data.responses import ChatOptions
from data.tracking import TrackerName, WandbConfig

ONLINE = "online"


class AttentionBackend(StrEnum):
    """How draft blocks attend in training: dense products document by document, or FlexAttention (CUDA)."""

    auto = "auto"
    dense = "dense"
    flex = "flex"


@dataclass
class OptimConfig:
    """AdamW, linear warm-up, cosine decay to zero."""

    learning_rate: float
    warmup_ratio: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    max_grad_norm: float


@dataclass
class OnlineConfig:
    """store=online: which chats the target runs over in the training process, and how its outputs are rounded."""

    responses: str
    feature_dtype: str
    last_hidden_dtype: str
    tokens_per_batch: int


@dataclass
class ProbeConfig:
    """Acceptance on held-out prompts during training, by the real runtime."""

    every: int | None
    prompts: str | None
    num_prompts: int
    max_new_tokens: int
    temperature: float


@dataclass
class TrainConfig:
    name: str
    output_dir: str
    store: str
    online: OnlineConfig
    chats: ChatOptions
    target: Any
    model: Any
    seed: int
    num_steps: int | None
    num_epochs: float
    batch_size: int
    tokens_per_batch: int
    packing: bool
    num_anchors: int
    num_workers: int
    optim: OptimConfig
    warm_start: bool
    init: str | None
    allow_pickle: bool
    resume: str
    extend: bool
    log_every: int
    checkpoint_every: int
    keep_checkpoints: int
    probe: ProbeConfig
    mixed_precision: str | None
    attention: AttentionBackend
    compile: bool
    peak_tflops: float | None
    estimate: bool
    tracker: TrackerName | None
    wandb: WandbConfig


def check_ranges(config: TrainConfig) -> None:
    """Raises ValueError on numbers that no run can have; probes are taken of checkpoints, and so fall on them."""
    sizes = ("batch_size", "tokens_per_batch", "num_anchors")
    for name in (*sizes, "log_every", "checkpoint_every", "keep_checkpoints"):
        if (value := getattr(config, name)) < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if config.peak_tflops is not None and config.peak_tflops <= 0:
        raise ValueError(f"peak_tflops={config.peak_tflops} must be positive, or null")
    if config.num_workers < 0:
        raise ValueError(f"num_workers={config.num_workers} must be 0 (a thread reads ahead) or more")
    if config.probe.temperature < 0:
        raise ValueError(f"probe.temperature={config.probe.temperature} must be 0 (greedy) or more")
    every = config.probe.every
    if every is not None and (every < 1 or every % config.checkpoint_every):
        raise ValueError(
            f"probe.every={every} must be a multiple of checkpoint_every={config.checkpoint_every}, or null"
        )
