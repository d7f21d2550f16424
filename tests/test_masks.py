"""Tests of models/masks.py: every form of the mask against one double loop."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask
from torch.nn.utils.rnn import pad_sequence

from models import masks
from models.masks import TILE, block_mask_mod, cache_mask, flex_block_mask
from tests.conftest import planted_fault
from tests.planted_faults import blind_to_documents

NUM_SLOTS = 3
# Row 0: two documents and padding. Row 1: one document that fills the row.
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, -1, -1], [0] * 10])
# Anchors 1 apart, at a document's first position, at the row's last one, and unused (-1).
ANCHORS = torch.tensor([[1, 2, 4, 5, 7, -1], [0, 3, 4, 8, 9, -1]])


def loop_context_mask(anchors: Tensor, documents: Tensor, num_slots: int = 1, window: int | None = None) -> Tensor:
    """[B, A, Q, S]: earlier positions of the anchor's own document, the last `window` before a slot and with it."""
    (batch, num_anchors), length = anchors.shape, documents.shape[1]
    mask = torch.zeros(batch, num_anchors, num_slots, length, dtype=torch.bool)
    for row in range(batch):
        for index, anchor in enumerate(anchors[row].tolist()):
            for slot in range(num_slots):
                oldest = 0 if window is None else anchor + slot - window + 1
                for position in range(max(0, oldest), anchor):
                    mask[row, index, slot, position] = documents[row, position] == documents[row, anchor]
    return mask


def loop_block_mask(anchors: Tensor, documents: Tensor, num_slots: int, window: int | None = None) -> Tensor:
    """[B, A*Q, S + A*Q]: the context, and the whole own block of a used anchor."""
    (batch, num_anchors), length = anchors.shape, documents.shape[1]
    context = loop_context_mask(anchors, documents, num_slots, window)
    mask = torch.zeros(batch, num_anchors * num_slots, length + num_anchors * num_slots, dtype=torch.bool)
    for row in range(batch):
        for query in range(num_anchors * num_slots):
            block = query // num_slots
            mask[row, query, :length] = context[row, block, query % num_slots]
            for key in range(num_anchors * num_slots):
                mask[row, query, length + key] = key // num_slots == block and anchors[row, block] >= 0
    return mask


def context_mask(anchors: Tensor, documents: Tensor, *, num_slots: int = 1, window: int | None = None) -> Tensor:
    """What the spans say, as one dense mask; each anchor is in at most one of them."""
    slots = 1 if window is None else num_slots
    mask = torch.zeros(*anchors.shape, slots, documents.shape[1], dtype=torch.bool)
    for span in masks.context_spans(anchors, documents, num_slots=num_slots, window=window):
        assert not mask[span.row, span.blocks].any()
        mask[span.row, span.blocks, :, span.context] = span.mask[0]
    return mask


def check_context_mask() -> None:
    assert torch.equal(context_mask(ANCHORS, DOCUMENTS), loop_context_mask(ANCHORS, DOCUMENTS))


def dense_block_mask(anchors: Tensor, documents: Tensor, num_slots: int, window: int | None = None) -> Tensor:
    (batch, num_anchors), length = anchors.shape, documents.shape[1]
    num_queries = num_anchors * num_slots
    mask_mod = block_mask_mod(anchors, documents, num_slots, num_slots, window)
    return create_mask(mask_mod, batch, 1, num_queries, length + num_queries, device="cpu")[:, 0]


def test_context_mask_equals_a_double_loop() -> None:
    check_context_mask()


def test_context_mask_equals_a_double_loop_on_random_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        places = [torch.randperm(10, generator=generator)[:count].sort().values for count in (6, 4)]
        anchors = pad_sequence(places, batch_first=True, padding_value=-1)
        assert torch.equal(context_mask(anchors, DOCUMENTS), loop_context_mask(anchors, DOCUMENTS))


@pytest.mark.parametrize("window", [1, 2, 4, 20])
def test_a_window_moves_with_the_slot(window: int) -> None:
    mask = context_mask(ANCHORS, DOCUMENTS, num_slots=NUM_SLOTS, window=window)
    assert torch.equal(mask, loop_context_mask(ANCHORS, DOCUMENTS, NUM_SLOTS, window))


@pytest.mark.parametrize("window", [None, 3])
def test_decoding_sees_what_training_sees(window: int | None) -> None:
    """A cache of n positions is the context of an anchor at n."""
    documents, lengths = torch.zeros(4, 10, dtype=torch.int64), torch.tensor([0, 1, 5, 9])
    in_training = context_mask(lengths[:, None], documents, num_slots=NUM_SLOTS, window=window)
    assert torch.equal(cache_mask(lengths, 10, num_slots=NUM_SLOTS, window=window), in_training)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("num_slots", [1, NUM_SLOTS])
def test_flex_mask_equals_a_double_loop(num_slots: int, window: int | None) -> None:
    mask = dense_block_mask(ANCHORS, DOCUMENTS, num_slots, window)
    assert torch.equal(mask, loop_block_mask(ANCHORS, DOCUMENTS, num_slots, window))


def test_dense_and_flex_masks_agree_on_the_context() -> None:
    of_queries = context_mask(ANCHORS, DOCUMENTS)[:, :, 0].repeat_interleave(NUM_SLOTS, dim=1)
    mask = dense_block_mask(ANCHORS, DOCUMENTS, NUM_SLOTS)
    assert torch.equal(mask[..., : DOCUMENTS.shape[1]], of_queries)


def test_an_unused_anchor_sees_nothing() -> None:
    unused = ANCHORS < 0
    assert not context_mask(ANCHORS, DOCUMENTS)[unused].any()
    mask = dense_block_mask(ANCHORS, DOCUMENTS, NUM_SLOTS)
    assert not mask[unused.repeat_interleave(NUM_SLOTS, dim=1)].any()


def test_no_block_sees_padding_or_another_document() -> None:
    mask = context_mask(ANCHORS, DOCUMENTS)[:, :, 0]
    assert not mask[0, :, 8:].any()
    assert not mask[0, 2:5, :4].any()
    assert mask[0, 4, 4:7].all()


def test_long_documents_are_cut_into_spans_that_see_no_more_than_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "SPAN_SCORES", 10 * NUM_SLOTS * 2)  # two blocks a span in the row of ten positions
    check_context_mask()
    spans = masks.context_spans(ANCHORS, DOCUMENTS, num_slots=NUM_SLOTS)
    assert [(s.blocks.start, s.blocks.stop, s.context.stop) for s in spans if s.row == 1] == [
        (0, 2, 3),
        (2, 4, 8),
        (4, 5, 9),
    ]


def test_an_off_by_one_rule_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def sees_the_anchor(position: Tensor, anchor: Tensor, slot: Tensor, window: int | None) -> Tensor:
        return position <= anchor

    with planted_fault(monkeypatch, masks, "sees_context", sees_the_anchor):
        check_context_mask()


def test_a_rule_blind_to_documents_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with planted_fault(monkeypatch, masks, "context_spans", blind_to_documents):
        check_context_mask()


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("num_slots", "num_keys"), [(8, 8), (1, 5), (1, 1)])
def test_every_tile_that_holds_anything_is_named_and_few_others_are(
    num_slots: int, num_keys: int, window: int | None
) -> None:
    """Ragged documents packed into rows of 2,000 positions, 200 anchors in one and 130 in the other."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 400, (2, 20), generator=generator)
    documents = torch.stack([torch.arange(20).repeat_interleave(row)[:2000] for row in lengths])
    places = [torch.randperm(2000, generator=generator)[:count].sort().values for count in (200, 130)]
    anchors = pad_sequence(places, batch_first=True, padding_value=-1)
    mask = flex_block_mask(anchors, documents, num_slots=num_slots, num_keys=num_keys, window=window)
    num_queries, width = 200 * num_slots, 2000 + 200 * num_keys
    dense = create_mask(mask.mask_mod, 2, 1, num_queries, width, device="cpu")[:, 0]
    rows, columns = -(-num_queries // TILE), -(-width // TILE)
    padded = torch.nn.functional.pad(dense, (0, columns * TILE - width, 0, rows * TILE - num_queries))
    needed = padded.view(2, rows, TILE, columns, TILE).any(-1).any(2)
    named = mask.to_dense()[:, 0].bool()
    assert named.shape == needed.shape and not (needed & ~named).any()
    assert named.sum() <= 1.5 * needed.sum() + 2 * rows
