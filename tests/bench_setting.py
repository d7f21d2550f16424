"""What the benchmarks share: a target's sizes, the published DSpark with two layers, a stopwatch."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from models.base import SlotLayout
from models.dspark import DSparkConfig, MarkovHeadType
from models.layer_styles import LayerStyle
from models.losses import LossWeights
from tests.gpu_setting import QWEN3_4B

VOCAB_SIZE, HIDDEN_SIZE = QWEN3_4B.vocab_size, 256
LAYER_IDS = (1, 17, 33)
SPEC = replace(
    QWEN3_4B,
    hidden_size=HIDDEN_SIZE,
    intermediate_size=3 * HIDDEN_SIZE,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    tie_embeddings=False,
    max_position_embeddings=4096,
    eos_token_ids=(0,),
)


def dspark_config(markov_rank: int) -> DSparkConfig:
    return DSparkConfig(
        num_layers=2,
        layer_style=LayerStyle.qwen3,
        num_draft_tokens=7,
        slot_layout=SlotLayout.anchor_first,
        sliding_window=None,
        decay=4.0,
        dpace_smoothing=None,
        loss=LossWeights(cross_entropy=0.1, l1=0.9),
        sampled_vocabulary=None,
        markov_rank=markov_rank,
        markov_head=MarkovHeadType.vanilla,
        confidence=True,
        confidence_with_markov=True,
        confidence_weight=1.0,
    )


def fastest(works: dict[Any, Callable[[], Any]], rounds: int) -> dict[Any, float]:
    """Seconds of each in the fastest of so many rounds, taking turns, after one that warms up."""
    best = dict.fromkeys(works, float("inf"))
    for index in range(rounds + 1):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            if index:
                best[name] = min(best[name], time.perf_counter() - began)
    return best
