"""What holds for any drafter in training, whatever is in a batch: supervision, labels, packing, vocabulary, basis."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import models.block as block_module
import models.eagle3 as eagle3_module
import train.setup as training_setup
from data.collate import collate
from data.dataset import TrainingData, TrainingRecord
from data.store import FeatureStore, StoreRecord
from models.base import DraftBatch, Drafter
from models.block import BlockDrafter
from models.eagle3 import Eagle3
from models.target import Target, TargetConfig
from tests.chains import lively_eagle3
from tests.conftest import eagle3_config
from tests.draft_batches import lively_dspark, mixed_batch
from tests.training_logits import rows_by_total
from train import trainer


@pytest.fixture(params=["dspark", "eagle3"])
def lively(request: pytest.FixtureRequest, tiny_target: Target, tiny_target_config: TargetConfig) -> Drafter:
    return make_lively(request.param, tiny_target, tiny_target_config)


def make_lively(kind: str, target: Target, config: TargetConfig) -> Drafter:
    return {"dspark": lively_dspark, "eagle3": lively_eagle3}[kind](target, config)


def global_mean(drafter: Drafter, batches: list[DraftBatch]) -> Tensor:
    """The trainer's loss of one optimiser step, on one process."""
    accelerator = SimpleNamespace(reduce=lambda value, how: value, device=torch.device("cpu"))
    run: Any = SimpleNamespace(drafter=drafter, accelerator=accelerator, config=SimpleNamespace(seed=0))
    denominators = trainer.global_denominators(run, batches)
    for batch in batches:
        batch.vocabulary = trainer.step_vocabulary(run, batches, 0)
    parts = [drafter(batch).numerators[term] / value for batch in batches for term, value in denominators.items()]
    return torch.stack(parts).sum()


def without_supervision(batch: DraftBatch, rows: list[int]) -> DraftBatch:
    loss_mask, anchors = batch.loss_mask.clone(), batch.anchors.clone()
    loss_mask[rows], anchors[rows] = False, -1
    return replace(batch, loss_mask=loss_mask, anchors=anchors)


def test_a_chat_without_supervision_trains_nothing_and_harms_nothing(lively: Drafter) -> None:
    batch = mixed_batch(lively)
    alone = global_mean(lively, [without_supervision(batch, [0, 1, 2])])
    alone.backward()
    assert alone == 0
    assert all(p.grad is None or not p.grad.any() for p in lively.parameters())  # NaN would be "any"
    beside = without_supervision(batch, [1])
    kept = DraftBatch(**{n: v[[0, 2]] if n != "last_hidden" else v for n, v in beside.tensors().items()})
    torch.testing.assert_close(global_mean(lively, [beside]), global_mean(lively, [kept]))


def test_labels_follow_the_newest_token_from_the_store_on(lively: Drafter) -> None:
    """Token ids are positions, and the target's state at p is p everywhere: nothing is shifted twice or not at all."""
    length = 30
    record = StoreRecord(
        id="positions",
        input_ids=torch.arange(length, dtype=torch.int32),
        loss_mask=torch.arange(length) >= 5,
        features=torch.randn(length, 3 * 64, generator=torch.Generator().manual_seed(0)),
        last_hidden=torch.arange(4.0, length - 1)[:, None].expand(-1, 64).contiguous(),
    )
    batch = collate([TrainingRecord(record, record.features, torch.tensor([6, 11, 20]))], packing=False)
    if isinstance(lively, BlockDrafter):
        slots = lively.supervised_slots(batch)
        newest = batch.anchors[..., None].expand(slots.mask.shape)[slots.mask] + slots.slot_ids
        assert torch.equal(slots.labels, newest + 1) and torch.equal(slots.previous, newest)
        assert torch.equal(batch.last_hidden[slots.teacher_rows, 0].long(), newest)
        return
    starts, supervised = eagle3_module.find_chains(batch, lively.num_draft_tokens)
    consumed: list[Tensor] = []
    right_step = Eagle3.step

    def step(self: Eagle3, tokens: Tensor, *rest: Any) -> Tensor:
        consumed.append(tokens)
        return right_step(self, tokens, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Eagle3, "step", step)
        with mock.patch.object(eagle3_module, "vocab_loss", wraps=eagle3_module.vocab_loss) as spy:
            lively(batch)
    teachers = [teacher for call in spy.call_args_list for _, teacher in rows_by_total(call)]
    for step_id, (tokens, teacher) in enumerate(zip(consumed, teachers, strict=True)):
        rows = supervised[..., step_id]
        assert torch.equal(
            tokens[rows], starts.unsqueeze(-1).expand(supervised.shape)[..., step_id][rows] + 1 + step_id
        )
        assert torch.equal(teacher[:, 0].long(), tokens[rows])  # the target's own prediction stands where it is


def test_packed_documents_train_as_alone(lively: Drafter) -> None:
    batch = mixed_batch(lively)
    packed = DraftBatch(**{n: v[[1]] if n != "last_hidden" else v for n, v in batch.tensors().items()})
    parts = [document_alone(packed, 0, 0, 11), document_alone(packed, 1, 11, 20)]
    together, alone = lively(packed), [lively(part) for part in parts]
    for term, value in together.numerators.items():
        torch.testing.assert_close(value, sum(loss.numerators[term] for loss in alone), rtol=1e-4, atol=1e-5)


def losses_by_token(drafter: Drafter, batch: DraftBatch) -> list[list[Tensor]]:
    """Cross-entropy and L1 [2, R_s] of the supervised rows of each document, and within it of each step of a chain."""
    module = eagle3_module if isinstance(drafter, Eagle3) else block_module
    seen: list[Any] = []
    right = module.vocab_loss

    def kept(*arguments: Any, **options: Any) -> Any:
        seen.append(right(*arguments, **options))
        return seen[-1]

    with mock.patch.object(module, "vocab_loss", kept):
        drafter(batch)
    (loss,) = seen
    values = torch.stack((loss.cross_entropy, loss.l1))
    if isinstance(drafter, Eagle3):
        starts, supervised = eagle3_module.find_chains(batch, drafter.num_draft_tokens)
        documents = batch.document_ids.gather(1, starts.clamp(min=0))
        counts = [[int(supervised[documents == d][:, s].sum()) for d in documents.unique()] for s in range(4)]
    else:
        mask = drafter.supervised_slots(batch).mask
        documents = batch.document_ids.gather(1, batch.anchors.clamp(min=0))
        counts = [[int(mask[documents == d].sum()) for d in documents.unique()]]
    parts = iter(values.split([n for of_step in counts for n in of_step], dim=1))
    by_step = [[next(parts) for _ in of_step] for of_step in counts]
    return [list(of_document) for of_document in zip(*by_step, strict=True)]


def test_a_token_has_the_same_loss_packed_and_alone(lively: Drafter, tiny_store: FeatureStore) -> None:
    """Real records through the collator, in float64: 1e-6 is what norms and rotations in float32 leave."""
    lively.double().requires_grad_(False).bind(lively.embedding.double(), lively.head.double())
    data = TrainingData(tiny_store, layer_ids=lively.target_layer_ids, num_anchors=6, seed=0)
    items = [data[index, 0] for index in (3, 0, 7)]
    together = losses_by_token(lively, collate(items, packing=True))
    assert len(together) == 3 and sum(len(part[0]) for part in together) > 0
    for ours, item in zip(together, items, strict=True):
        (alone,) = losses_by_token(lively, collate([item], packing=False))
        for step, expected in zip(ours, alone, strict=True):
            torch.testing.assert_close(step, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("sampled_vocabulary", [None, 5])
def test_splits_of_an_unequal_batch_have_equal_gradients(
    lively: Drafter, tiny_store: FeatureStore, sampled_vocabulary: int | None
) -> None:
    """4x1, 1x4 as rows, and packed, of chats with different shares of supervision."""
    lively.sampled_vocabulary = sampled_vocabulary
    data = TrainingData(tiny_store, layer_ids=lively.target_layer_ids, num_anchors=5, seed=0)
    items = [data[index, 0] for index in (3, 0, 7, 12)]
    assert len({int(item.record.loss_mask.sum()) for item in items}) == 4
    found = []
    for batches in (
        [collate([item], packing=False) for item in items],
        [collate(items, packing=False)],
        [collate(items, packing=True)],
        [collate(items[:1], packing=True), collate(items[1:], packing=True)],
    ):
        lively.zero_grad()
        global_mean(lively, batches).backward()
        found.append(torch.cat([parameter.grad.flatten() for parameter in lively.parameters()]))
    for gradient in found[1:]:
        assert (gradient - found[0]).norm() < 1e-6 * found[0].norm()


def document_alone(batch: DraftBatch, document: int, start: int, stop: int) -> DraftBatch:
    anchors = batch.anchors[0]
    own = anchors[(anchors >= start) & (anchors < stop)] - start
    cut = {n: v[:, start:stop] for n, v in batch.tensors().items() if n not in ("last_hidden", "anchors")}
    assert set(cut["document_ids"].flatten().tolist()) == {document}
    return DraftBatch(**cut, last_hidden=batch.last_hidden, anchors=own[None])


def test_every_run_has_its_own_draft_vocabulary(
    tiny_target: Target, tiny_target_config: TargetConfig, tiny_store: FeatureStore
) -> None:
    """Two sizes on the same data, then none: no map survives from one run to the next."""
    maps = []
    for size in (30, 15, None):
        model = eagle3_config(draft_vocab_size=size)
        drafter = model.build(tiny_target.spec, target_layer_ids=(0, 1, 2), mask_token_id=None)
        drafter.bind(tiny_target.embedding, tiny_target.head)
        if size is not None:
            training_setup.set_draft_vocabulary(drafter, size, tiny_store)
        maps.append(drafter.draft_ids)
    assert [None if ids is None else len(ids) for ids in maps] == [30, 15, None]
    assert set(maps[1].tolist()) < set(maps[0].tolist())


def test_a_target_in_another_basis_is_refused(tiny_target: Target, tiny_target_config: TargetConfig) -> None:
    """A rotated residual stream gives the same text, but features, embedding and head that a drafter cannot read."""
    drafter = lively_dspark(tiny_target, tiny_target_config)
    generator = torch.Generator().manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(64, 64, generator=generator)).Q
    with pytest.raises(ValueError, match="the drafter came with another embedding than this target's"):
        drafter.bind(tiny_target.embedding @ rotation, tiny_target.head @ rotation)
    drafter.bind(tiny_target.embedding.bfloat16(), tiny_target.head.bfloat16())  # another rounding is no other target
