"""Reads the logits of a training forward out of the call that turns them into a loss, so tests see what is trained, and
compares them with those of decoding."""

from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from models import block
from models.base import DraftBatch, DraftLoss
from models.block import BlockDrafter, BlockState
from models.dflash2 import DFlash2
from models.sampling import Sampler
from tests.draft_batches import mixed_batch


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
    slots, draft = drafter.supervised_slots(batch), dense_logits(hidden, options)
    if isinstance(drafter, DFlash2):
        draft = along_paths(drafter, hidden, slots.previous, draft)
    return TrainingLogits(
        mask=slots.mask,
        labels=options["labels"],
        draft=draft,
        target=dense_logits(teacher[options["teacher_ids"]], {**options, "bias_input": None, "draft_head": None}),
        confidence=confidences[0].detach() if confidences else None,
        loss=loss,
    )


@torch.no_grad()
def along_paths(drafter: DFlash2, hidden: Tensor, previous: Tensor, unary: Tensor) -> Tensor:
    """[R, V] scores of all tokens behind the true ones before them, by the definition of the path selector."""
    tensors = drafter.engine_tensors()
    before, behind = (tensors[f"candidate_selector.{side}_codebook"] for side in ("predecessor", "successor"))
    gate = hidden @ drafter.candidate_selector.hidden_projection.weight.T
    return unary + (before[previous] * gate) @ behind.T


def rows_by_total(call: Any) -> list[tuple[Tensor, Tensor]]:
    """(draft rows, their teacher rows) of each total of a recorded `vocab_loss` call; a total's rows lie together."""
    (hidden, teacher), options = call
    sizes = torch.bincount(options["group_ids"], minlength=options["num_groups"]).tolist()
    return list(zip(hidden.split(sizes), teacher[options["teacher_ids"]].split(sizes), strict=True))


@torch.no_grad()
def dense_logits(states: Tensor, options: dict[str, Any]) -> Tensor:
    """[R, D] -> [R, V] by the definition in `vocab_loss`: head (the draft's own where it has one), soft cap, bias."""
    own = options.get("draft_head")
    logits = states @ (options["head"] if own is None else own.weight).T
    if options["softcap"] is not None:
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    return logits if options["bias_input"] is None else logits + options["bias_input"] @ options["bias_head"].T


def used_anchors(batch: DraftBatch) -> list[tuple[int, int, int]]:
    """(row, index, position) of every used anchor."""
    triples = [(row, i, a) for row, anchors in enumerate(batch.anchors.tolist()) for i, a in enumerate(anchors)]
    return [triple for triple in triples if triple[2] >= 0]


@dataclass
class Forced:
    """A sampler that records the logits it is given and answers with known tokens."""

    tokens: list[int]
    first_position: int
    logits: list[Tensor] = field(default_factory=list)
    seen = None  # no penalties
    ranking = None
    draw_block = Sampler.draw_block
    ranked = Sampler.ranked

    def probs(self, logits: Tensor, *_drafted: Tensor, **_options: Any) -> Tensor:
        """logits [1, V] of one slot, or [1, K, V] of all."""
        self.logits.extend(logits.view(-1, logits.shape[-1]))
        return logits.softmax(-1)

    def draw(self, probs: Tensor, positions: Tensor, purpose: Any) -> Tensor:
        drawn = list(range(len(self.logits) - positions.numel(), len(self.logits)))
        assert positions.flatten().tolist() == [self.first_position + slot for slot in drawn]
        return torch.tensor([(self.tokens + [0] * len(self.logits))[slot] for slot in drawn]).view(positions.shape)


def decoding_state(drafter: BlockDrafter, tokens: Tensor, features: Tensor, num_seen: int) -> BlockState:
    """A prompt of half the tokens, then a verification that keeps the rest of `num_seen` and rejects what follows."""
    half = num_seen // 2 or num_seen
    state = drafter.start(tokens[:, :half], features[:, :half], torch.tensor([half]), 64)
    if half < num_seen:
        drafter.advance(state, tokens[:, half:], features[:, half:], torch.tensor([num_seen - half]))
    return state


@torch.no_grad()
def check_training_equals_decoding(drafter: BlockDrafter) -> None:
    batch = mixed_batch(drafter)
    training = training_logits(drafter, batch)
    num_rows = training.mask.long().sum(-1)
    first_rows = num_rows.flatten().cumsum(0).view_as(num_rows) - num_rows
    for row, index, anchor in used_anchors(batch):
        count, first = int(num_rows[row, index]), int(first_rows[row, index])
        begin = batch.document_ids[row].tolist().index(int(batch.document_ids[row, anchor]))
        rest = slice(begin, None)
        state = decoding_state(
            drafter, batch.input_ids[row : row + 1, rest], batch.features[row : row + 1, rest], anchor - begin
        )
        assert state.lengths.tolist() == [anchor - begin]
        labels = training.labels[first : first + count].tolist()
        forced = Forced(labels, anchor - begin + 1)
        proposal = drafter.propose(state, batch.input_ids[row, anchor : anchor + 1], forced, drafter.num_draft_tokens)  # type: ignore[arg-type]
        if count:
            # the largest logits are 1e1; training takes many blocks and longer rows in one product
            ours = torch.stack(forced.logits[:count])
            torch.testing.assert_close(ours, training.draft[first : first + count], rtol=1e-4, atol=1e-4)
        if training.confidence is not None and count:
            confidence = training.confidence[first : first + count].sigmoid()
            torch.testing.assert_close(proposal.confidence[0, :count], confidence, rtol=1e-4, atol=1e-5)
    assert training.draft.std() > 0.5
