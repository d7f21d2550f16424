"""Packed batches against one chat a row, and how a training step's cost grows: rows of `make bench`.

The drafter is a small DSpark at a vocabulary of 4,096 (float32, two threads), with this project's code in both.
One chat a row is how the reference batches: rows padded to the longest chat, always 512 anchors, of which those beyond
a chat's candidates are computed like all others and then masked. Packed: the same chats and supervised slots, without
either.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from data.collate import collate
from data.dataset import TrainingRecord, sample_anchors
from data.inspect import histogram
from data.store import StoreRecord
from models import block
from models.attention import Mixer, cache_mixer
from models.base import DraftBatch
from models.dspark import DSpark
from models.spec import TargetSpec
from tests.bench_setting import LAYER_IDS, dspark_config, fastest

VOCAB_SIZE, HIDDEN_SIZE, NUM_DRAFTS, FIXED_ANCHORS, ROUNDS = 4096, 128, 7, 512, 5


def drafter_of(spec: TargetSpec) -> DSpark:
    torch.manual_seed(0)
    spec = replace(spec, vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE)
    drafter = dspark_config(64).build(spec, target_layer_ids=LAYER_IDS, mask_token_id=1)
    head = 0.05 * torch.randn(VOCAB_SIZE, HIDDEN_SIZE)
    drafter.bind(head, head)
    return drafter


def chat(length: int, num_supervised: int, num_anchors: int, seed: int) -> TrainingRecord:
    """A prompt, then an answer of `num_supervised` tokens; random tokens and states."""
    generator = torch.Generator().manual_seed(seed)
    record = StoreRecord(
        id=str(seed),
        input_ids=torch.randint(VOCAB_SIZE, (length,), generator=generator, dtype=torch.int32),
        loss_mask=torch.arange(length) >= length - num_supervised,
        features=torch.randn(length, len(LAYER_IDS) * HIDDEN_SIZE, generator=generator),
        last_hidden=20 * torch.randn(num_supervised, HIDDEN_SIZE, generator=generator),
    )
    return TrainingRecord(record, record.features, sample_anchors(record.loss_mask, num_anchors, generator))


def ragged_chats(count: int) -> list[TrainingRecord]:
    """Log-normal lengths with a median of 150 tokens, answers of 30 to 80 % of them."""
    rng, chats = random.Random(0), []
    for seed in range(count):
        length = min(2048, max(24, int(rng.lognormvariate(5.0, 0.8))))
        chats.append(chat(length, int(length * rng.uniform(0.3, 0.8)), FIXED_ANCHORS, seed))
    return chats


def one_chat_a_row(chats: Sequence[TrainingRecord]) -> DraftBatch:
    batch = collate(chats, packing=False)
    return replace(batch, anchors=F.pad(batch.anchors, (0, FIXED_ANCHORS - batch.anchors.shape[1]), value=-1))


def padded_mixer(anchors: Tensor, document_ids: Tensor, device: torch.device, **_options: Any) -> Mixer:
    """Every block over the whole padded row, masked; unused ones like the others."""
    positions = torch.arange(document_ids.shape[1])
    return cache_mixer((positions < anchors[..., None])[:, :, None].to(device))


def step_of_rows(drafter: DSpark, batches: Sequence[DraftBatch]) -> None:
    with mock.patch.object(block, "training_mixer", padded_mixer):
        for batch in batches:
            step(drafter, batch)


def step(drafter: DSpark, batch: DraftBatch) -> float:
    """Forward and backward as the trainer does; returns the loss per weighted slot."""
    denominators, loss = drafter.denominators(batch), drafter(batch)
    total = torch.stack([value / denominators[term] for term, value in loss.numerators.items()]).sum()
    total.backward()
    return float(total.detach())


def packing_row(spec: TargetSpec, count: int = 8) -> tuple[dict[str, Any], list[str]]:
    """The row of the bench, and the histogram of lengths with the slots a second as lines."""
    drafter, chats = drafter_of(spec), ragged_chats(count)
    packed = collate(chats, packing=True)
    rows = [one_chat_a_row(chats[i : i + 4]) for i in range(0, count, 4)]
    slots = len(drafter.supervised_slots(packed).labels)
    assert slots == sum(len(drafter.supervised_slots(batch).labels) for batch in rows)
    with torch.no_grad(), mock.patch.object(block, "training_mixer", padded_mixer):
        losses = [[drafter(batch).numerators["tokens"] for batch in rows]]
    with torch.no_grad():
        losses.append([drafter(packed).numerators["tokens"]])
    assert float(sum(losses[0])) == pytest.approx(float(sum(losses[1])), rel=1e-5), "not the same losses"
    seconds = fastest({"ours": lambda: step(drafter, packed), "rows": lambda: step_of_rows(drafter, rows)}, ROUNDS)
    lines = histogram([len(item.record.input_ids) for item in chats], "packing: tokens a chat")
    rates = {name: slots / value for name, value in seconds.items()}
    used = int((packed.anchors >= 0).sum())
    lines.append(
        f"supervised slots a second: {rates['ours']:.0f} packed ({used} anchors), {rates['rows']:.0f} one chat a row "
        f"({count * FIXED_ANCHORS} anchors): {rates['ours'] / rates['rows']:.1f} times"
    )
    row = {"name": "packing", "ours_s": seconds["ours"], "dense_s": seconds["rows"], "floor_s": None}
    return row | {"ours_peak_mb": None, "dense_peak_mb": None}, lines


def growth(spec: TargetSpec) -> list[dict[str, Any]]:
    """Seconds an anchor from 1x to 8x anchors of one packed row, and a token from 1x to 8x tokens in chats of 256."""
    drafter = drafter_of(spec)
    works: dict[tuple[str, int], tuple[DraftBatch, int]] = {}
    for factor in (1, 2, 4, 8):
        anchors = collate([chat(512, 450, 16 * factor, seed) for seed in range(4)], packing=True)
        works["anchor", factor] = anchors, int((anchors.anchors >= 0).sum())
        tokens = collate([chat(256, 200, 24, seed) for seed in range(4 * factor)], packing=True)
        works["token", factor] = tokens, tokens.input_ids.numel()
    seconds = fastest({key: lambda b=batch: step(drafter, b) for key, (batch, _) in works.items()}, ROUNDS)
    rows = []
    for (what, factor), (_, count) in works.items():
        value = seconds[what, factor]
        rows.append({"name": f"{factor}x {what}s", "count": count, "seconds": value, "ms_each": 1e3 * value / count})
    return sorted(rows, key=lambda row: row["name"][1:])
