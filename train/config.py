"""Options of train.py; conf/train.yaml lists every value with a remark."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from data.responses import ChatOptions

ONLINE = "online"


class TrackerName(StrEnum):
    """Where metrics go besides the local JSONL, which is always written."""

    none = "none"
    wandb = "wandb"


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
class WandbConfig:
    project: str
    mode: str | None


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
