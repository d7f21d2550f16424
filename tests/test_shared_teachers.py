"""What `vocab_loss` adds to a plain loss: rows that share a teacher, totals by group, narrow types; dynamic weights."""

import shutil
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from models import vocab_loss as vocab_loss_module
from models.losses import LossWeights, dynamic_weights
from models.vocab_loss import DraftHead, VocabLoss, vocab_loss
from tests.conftest import planted_fault

VOCAB_SIZE, HIDDEN_SIZE, NUM_TEACHERS, NUM_ROWS, NUM_GROUPS = 29, 8, 6, 17, 3
ALL_TERMS = LossWeights(
    cross_entropy=0.3, soft_cross_entropy=0.5, reverse_kl=0.4, l1=0.3, log_acceptance=0.2, lk_hybrid=0.6
)


def inputs(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Rows in no order; teacher 4 belongs to none, and groups have different sizes."""
    generator = torch.Generator().manual_seed(0)
    teacher_ids = torch.randint(NUM_TEACHERS, (NUM_ROWS,), generator=generator)
    return {
        "hidden": torch.randn(NUM_ROWS, HIDDEN_SIZE, generator=generator, dtype=dtype),
        "teacher": torch.randn(NUM_TEACHERS, HIDDEN_SIZE, generator=generator, dtype=dtype),
        "head": torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator, dtype=dtype),
        "weights": 0.5 + torch.rand(NUM_ROWS, generator=generator, dtype=dtype),
        "labels": torch.randint(VOCAB_SIZE, (NUM_ROWS,), generator=generator),
        "teacher_ids": torch.where(teacher_ids == 4, 3, teacher_ids),
        "group_ids": torch.randint(NUM_GROUPS, (NUM_ROWS,), generator=generator),
    }


def loss_of(values: dict[str, Any], **changes: Any) -> VocabLoss:
    options = {**values, "terms": ALL_TERMS, "num_groups": NUM_GROUPS, **changes}
    return vocab_loss(options.pop("hidden"), options.pop("teacher"), **options)


def check_equals_rows_by_themselves(values: dict[str, Any], **changes: Any) -> None:
    """Every row with its own copy of its teacher, group by group."""
    shared, alone = values["hidden"].clone().requires_grad_(), values["hidden"].clone().requires_grad_()
    scales = torch.tensor([0.5, 2.0, -3.0])
    loss = loss_of({**values, "hidden": shared}, **changes)
    (scales * loss.totals).sum().backward()
    for group in range(NUM_GROUPS):
        rows = values["group_ids"] == group
        labels = None if values["labels"] is None else values["labels"][rows]
        own = {"weights": values["weights"][rows], "labels": labels}
        own |= {
            "hidden": alone[rows],
            "teacher": values["teacher"][values["teacher_ids"][rows]],
            "head": values["head"],
        }
        part = loss_of(own, num_groups=1, **changes)
        torch.testing.assert_close(loss.totals[group], part.total, rtol=1e-5, atol=1e-5)
        for name in ("cross_entropy", "l1", "top1_agrees"):
            torch.testing.assert_close(getattr(loss, name)[rows], getattr(part, name), rtol=1e-5, atol=1e-5)
        (scales[group] * part.total).backward()
    torch.testing.assert_close(shared.grad, alone.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows_per_chunk", [1, 4, 17, 100])
def test_shared_teachers_and_groups_change_nothing(monkeypatch: pytest.MonkeyPatch, rows_per_chunk: int) -> None:
    monkeypatch.setattr(vocab_loss_module, "CHUNK_BYTES", 4 * VOCAB_SIZE * rows_per_chunk)
    check_equals_rows_by_themselves(inputs())


def test_shared_teachers_serve_a_reduced_vocabulary() -> None:
    ids = torch.arange(3, 23)
    own = DraftHead(torch.randn(20, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1)), ids)
    terms = LossWeights(soft_cross_entropy=0.5, reverse_kl=0.4, l1=0.3)
    check_equals_rows_by_themselves({**inputs(), "labels": None}, draft_head=own, terms=terms)


def test_a_teacher_is_multiplied_once_however_many_rows_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    right = vocab_loss_module._target_chunk

    def counted(teacher: Tensor, *rest: Any, **options: Any) -> Any:
        counts.append(len(teacher))
        return right(teacher, *rest, **options)

    monkeypatch.setattr(vocab_loss_module, "_target_chunk", counted)
    loss_of(inputs())
    assert sum(counts) == len(inputs()["teacher_ids"].unique()) < NUM_TEACHERS


def test_rows_compared_with_another_teacher_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = vocab_loss_module._Target.at

    def shuffled(target: Any, ids: Tensor | None, scratch: Any) -> Any:
        return right(target, None if ids is None else ids.flip(0), scratch)

    with planted_fault(monkeypatch, vocab_loss_module._Target, "at", shuffled):
        check_equals_rows_by_themselves(inputs())


def test_a_trained_head_takes_one_total_only() -> None:
    values, ids = inputs(), torch.arange(VOCAB_SIZE)
    own = DraftHead(torch.randn(VOCAB_SIZE, HIDDEN_SIZE).requires_grad_(), ids)
    with pytest.raises(AssertionError, match="scaled once only"):
        loss_of({**values, "labels": None}, draft_head=own, terms=LossWeights(soft_cross_entropy=1.0))


def test_dynamic_weights_are_suffix_sums_of_reached_products() -> None:
    """By the definition (D-PACE, eqs. 7 and 8), block by block; supervision stops at a block's first gap."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[[True] * 4, [True, True, False, False]], [[True, False, False, False], [False] * 4]])
    cross_entropy = torch.rand(int(mask.sum()), generator=generator)
    expected, rows = [], iter(cross_entropy.tolist())
    for block in mask.flatten(0, 1).tolist():
        smoothed = [0.5 * torch.tensor(-next(rows)).exp().item() + 0.5 for on in block if on]
        reached = [float(torch.tensor(smoothed[: m + 1]).prod()) for m in range(len(smoothed))]
        expected += [sum(reached[j:]) for j in range(len(smoothed))]
    weights = dynamic_weights(cross_entropy, mask, 0.5)
    torch.testing.assert_close(weights, torch.tensor(expected), rtol=1e-5, atol=1e-6)
    assert dynamic_weights(cross_entropy, mask, 1.0).tolist() == [4.0, 3.0, 2.0, 1.0, 2.0, 1.0, 1.0]


# ---- bfloat16


def test_bfloat16_losses_are_those_of_float32_without_bias() -> None:
    """Both see the same rounded inputs, so what is left is how products are accumulated: 100 seeds, 1e-2, no side."""
    errors = []
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        hidden, teacher = (torch.randn(24, 64, generator=generator).bfloat16() for _ in range(2))
        head, labels = (
            torch.randn(501, 64, generator=generator).bfloat16(),
            torch.randint(501, (24,), generator=generator),
        )
        options: dict[str, Any] = {"weights": torch.ones(24), "labels": labels, "terms": ALL_TERMS}
        narrow = vocab_loss(hidden, teacher, head=head, **options)
        wide = vocab_loss(hidden.float(), teacher.float(), head=head.float(), **options)
        errors.append(float(narrow.total / wide.total - 1))
    measured = torch.tensor(errors)
    assert measured.abs().max() < 1e-2
    assert abs(measured.mean()) < 4 * measured.std() / 10 + 1e-6


@pytest.mark.parametrize(("state", "head"), list(product([torch.float32, torch.bfloat16], repeat=2)))
def test_gradients_come_back_in_the_type_of_what_they_belong_to(state: torch.dtype, head: torch.dtype) -> None:
    values = inputs()
    hidden = values["hidden"].to(state).requires_grad_()
    bias_input, bias_head = torch.zeros(NUM_ROWS, 2, dtype=state), torch.zeros(VOCAB_SIZE, 2)
    bias = {"bias_input": bias_input.requires_grad_(), "bias_head": bias_head.requires_grad_()}
    changes = {"hidden": hidden, "head": values["head"].to(head), "group_ids": None, **bias}
    loss = loss_of({**values, **changes}, num_groups=1)
    loss.total.backward()
    assert loss.totals.dtype == torch.float32
    assert hidden.grad is not None and hidden.grad.dtype == state
    assert bias_head.grad is not None and bias_head.grad.dtype == torch.float32


def test_autocast_does_not_narrow_the_products() -> None:
    values = {**inputs(), "hidden": inputs()["hidden"].requires_grad_()}
    plain = loss_of(values).totals
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(loss_of(values).totals, plain)


# ---- the compiled path


def check_compiled_equals_eager(device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Values and gradients, with several chunks of different sizes under one compilation."""
    results = []
    for compiled in (False, True):
        values = {n: v.to(device, dtype) if v.is_floating_point() else v.to(device) for n, v in inputs().items()}
        hidden = values["hidden"].requires_grad_()
        loss = loss_of(values, compiled=compiled)
        loss.totals.sum().backward()
        results.append((loss.totals, loss.l1, hidden.grad))
    for eager, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_a_compiled_loss_equals_the_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocab_loss_module, "CHUNK_BYTES", 4 * VOCAB_SIZE * 7)
    check_compiled_equals_eager("cpu", torch.float32, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_a_compiled_loss_equals_the_eager_one_on_a_gpu(dtype: torch.dtype, tolerance: float) -> None:
    check_compiled_equals_eager("cuda", dtype, tolerance)
