"""Reads the logits of a training forward out of the call that turns them into a loss, so tests see what is trained."""

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from models import block
from models.base import DraftBatch, DraftLoss
from models.block import BlockDrafter


@dataclass(frozen=True)
class TrainingLogits:
    """Rows are the supervised slots in the order of (row, anchor, slot)."""

    mask: Tensor  # [B, A, K] bool
    labels: Tensor  # [R]
    draft: Tensor  # [R, V] with bias and soft cap
    target: Tensor  # [R, V]
    confidence: Tensor | None  # [R]
    loss: DraftLoss


def training_logits(drafter: BlockDrafter, batch: DraftBatch) -> TrainingLogits:
    """Run `drafter(batch)` once and rebuild its logits densely from the arguments of `vocab_loss`."""
    confidences: list[Tensor] = []
    head = getattr(drafter, "confidence_head", None)
    handle = None if head is None else head.register_forward_hook(lambda _m, _i, output: confidences.append(output))
    with mock.patch.object(block, "vocab_loss", wraps=block.vocab_loss) as spy:
        loss = drafter(batch)
    if handle is not None:
        handle.remove()
    (hidden, teacher), options = spy.call_args
    return TrainingLogits(
        mask=drafter.supervised_slots(batch).mask,
        labels=options["labels"],
        draft=dense_logits(hidden, options),
        target=dense_logits(teacher, {**options, "bias_input": None, "draft_head": None}),
        confidence=confidences[0].detach() if confidences else None,
        loss=loss,
    )


@torch.no_grad()
def dense_logits(states: Tensor, options: dict[str, Any]) -> Tensor:
    """[R, D] -> [R, V] by the definition in `vocab_loss`: head (the draft's own where it has one), soft cap, bias."""
    own = options.get("draft_head")
    logits = states @ (options["head"] if own is None else own.weight).T
    if options["softcap"] is not None:
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    return logits if options["bias_input"] is None else logits + options["bias_input"] @ options["bias_head"].T
