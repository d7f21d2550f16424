"""What a drafter would draft after every prefix of a text, read out of one training forward over the whole text."""

import sys
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor

from models.base import DraftBatch, Drafter
from models.block import BlockDrafter
from models.target import Target
from tests.training_logits import dense_logits, rows_by_total, training_logits


@dataclass(frozen=True)
class Text:
    """A prompt and the target's continuation, with the target's states."""

    batch: DraftBatch  # one row, every answer token supervised, an anchor at each that has a successor
    num_prompt: int

    @property
    def tokens(self) -> list[int]:
        return self.batch.input_ids[0].tolist()


def text_of(target: Target, prompt: list[int], answer: list[int]) -> Text:
    tokens, first = torch.tensor([prompt + answer]), len(prompt)
    length = tokens.shape[1]
    output = target.forward_whole(tokens)
    loss_mask = torch.arange(length)[None] >= first
    batch = DraftBatch(
        input_ids=tokens,
        position_ids=torch.arange(length)[None],
        document_ids=torch.zeros_like(tokens),
        loss_mask=loss_mask,
        features=output.features.clone(),
        last_hidden=output.hidden[0].clone(),
        last_hidden_ids=torch.arange(length)[None],
        anchors=torch.arange(first, length - 1)[None],
    )
    return Text(batch, first)


@torch.no_grad()
def drafts_after(drafter: Drafter, text: Text) -> dict[int, Tensor]:
    """Logits [k, V] of the slots that follow each newest token of the answer, by its index, every slot with a label.

    Slot k after token a predicts token a + 1 + k given the true tokens before it: a block at a, a chain at a - 1.
    """
    batch = text.batch
    if isinstance(drafter, BlockDrafter):
        seen = training_logits(drafter, batch)
        starts, rows = batch.anchors[0].tolist(), seen.mask[0].sum(-1).tolist()
        return dict(zip(starts, seen.draft.split(rows), strict=True))
    module = sys.modules[type(drafter).__module__]
    with mock.patch.object(module, "vocab_loss", wraps=module.vocab_loss) as spy:
        drafter(batch)
    found: dict[int, list[Tensor]] = {}
    steps = [rows for call in spy.call_args_list for rows, _ in rows_by_total(call)]
    options = {"bias_input": None, **spy.call_args.kwargs}
    for step, rows in enumerate(dense_logits(hidden, options) for hidden in steps):
        # the chain at t has a supervised step s where t + 2 + s is an answer token that the text holds
        first = max(0, text.num_prompt - 2 - step)
        for place, row in enumerate(rows):
            found.setdefault(first + place + 1, []).append(row)
    # chains that begin in the prompt lack their first steps, and never occur in decoding
    return {start: torch.stack(rows) for start, rows in found.items() if start >= text.num_prompt}
