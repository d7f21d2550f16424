"""Tests of models/losses.py: soft cross-entropy and heads of the draft's own, against autograd on dense logits."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models import vocab_loss as losses
from models.losses import LossWeights
from models.vocab_loss import DraftHead, VocabLoss, vocab_loss
from tests.conftest import planted_fault

VOCAB_SIZE, DRAFT_SIZE, HIDDEN_SIZE, NUM_ROWS = 23, 9, 8, 11
# Gradients of up to 1e1; float32 sums of 23 terms in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
SOFT = LossWeights(soft_cross_entropy=1.0)
WITHOUT_LABELS = [
    SOFT,
    LossWeights(l1=1.0),
    LossWeights(reverse_kl=0.7),
    LossWeights(log_acceptance=1.1),
    LossWeights(lk_hybrid=0.8),
    LossWeights(soft_cross_entropy=0.6, l1=1.3),
    LossWeights(soft_cross_entropy=0.5, reverse_kl=0.4, l1=0.3, log_acceptance=0.2, lk_hybrid=0.6),
]
WITH_LABELS = [replace(terms, cross_entropy=0.3) for terms in WITHOUT_LABELS]
HEADS = ["permuted", "reduced"]


@dataclass
class Inputs:
    """Arguments of `vocab_loss`; without `ids` the draft uses the target's head."""

    hidden: Tensor
    teacher: Tensor
    head: Tensor
    weights: Tensor
    labels: Tensor
    own: Tensor
    ids: Tensor | None

    def loss(self, terms: LossWeights, softcap: float | None, log_weights: Tensor | None = None) -> VocabLoss:
        return vocab_loss(
            self.hidden,
            self.teacher,
            head=self.head,
            weights=self.weights,
            terms=terms,
            labels=self.labels if terms.cross_entropy else None,
            draft_head=None if self.ids is None else DraftHead(self.own, self.ids),
            softcap=softcap,
            log_weights=log_weights,
        )


def make_inputs(
    kind: str | None = None, *, num_rows: int = NUM_ROWS, trained: bool = True, dtype: torch.dtype = torch.float32
) -> Inputs:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    order = torch.randperm(VOCAB_SIZE, generator=generator)
    ids = {None: None, "permuted": order, "reduced": order[:DRAFT_SIZE]}[kind]
    return Inputs(
        hidden=normal(num_rows, HIDDEN_SIZE).requires_grad_(),
        teacher=normal(num_rows, HIDDEN_SIZE),
        head=normal(VOCAB_SIZE, HIDDEN_SIZE),
        weights=0.5 + torch.rand(num_rows, generator=generator, dtype=dtype),
        labels=torch.randint(VOCAB_SIZE, (num_rows,), generator=generator),
        own=normal(VOCAB_SIZE if ids is None else len(ids), HIDDEN_SIZE).requires_grad_(trained and ids is not None),
        ids=ids,
    )


@dataclass
class Dense:
    """The same loss by its definition, over whole [R, V] matrices."""

    total: Tensor
    cross_entropy: Tensor
    l1: Tensor
    overlap: Tensor
    top1_agrees: Tensor
    counted: Tensor  # the target's most likely token is in the draft vocabulary


def dense_loss(inputs: Inputs, terms: LossWeights, softcap: float | None, log_weights: Tensor | None = None) -> Dense:
    def capped(logits: Tensor) -> Tensor:
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    ids = torch.arange(VOCAB_SIZE) if inputs.ids is None else inputs.ids
    draft = capped(inputs.hidden @ (inputs.head if inputs.ids is None else inputs.own).T)
    target = capped(inputs.teacher @ inputs.head.T)
    agrees, counted = ids[draft.argmax(-1)] == target.argmax(-1), torch.isin(target.argmax(-1), ids)
    if log_weights is not None:
        draft, target = draft + log_weights, target + log_weights
    target_probs = target.softmax(-1)
    teacher = target_probs[:, ids] / target_probs[:, ids].sum(-1, keepdim=True)
    soft = -(teacher * draft.log_softmax(-1)).sum(-1)
    everywhere = torch.zeros_like(target_probs).index_copy(1, ids, draft.softmax(-1))
    l1 = (everywhere - target_probs).abs().sum(-1)
    overlap = torch.minimum(everywhere, target_probs).sum(-1)
    hard = F.cross_entropy(draft, inputs.labels, reduction="none") if terms.cross_entropy else torch.zeros(len(soft))
    reverse_kl = (draft.softmax(-1) * (draft.log_softmax(-1) - teacher.log())).sum(-1)
    accept = torch.minimum(everywhere, target_probs).sum(-1)
    mix = torch.exp(-3 * accept.detach())
    hybrid = mix * (soft + (teacher * teacher.log()).sum(-1)) + (1 - mix) * l1 / 2
    rows = terms.cross_entropy * hard + terms.soft_cross_entropy * soft + terms.reverse_kl * reverse_kl
    rows = rows + terms.l1 * l1 - terms.log_acceptance * accept.log() + terms.lk_hybrid * hybrid
    shown = soft if inputs.labels is None or not terms.cross_entropy else hard
    return Dense((inputs.weights * counted * rows).sum(), shown, l1, overlap, agrees & counted, counted)


def check_against_dense(
    kind: str | None, terms: LossWeights, *, softcap: float | None = None, num_rows: int = NUM_ROWS, **options: Any
) -> None:
    ours, reference = (make_inputs(kind, num_rows=num_rows) for _ in range(2))
    loss, dense = ours.loss(terms, softcap, **options), dense_loss(reference, terms, softcap, **options)
    torch.testing.assert_close(loss.total, dense.total, **CLOSE)
    torch.testing.assert_close(loss.l1, dense.l1, **CLOSE)
    torch.testing.assert_close(loss.accept_rate, dense.overlap, **CLOSE)
    if terms.soft_cross_entropy:
        torch.testing.assert_close(loss.cross_entropy, dense.cross_entropy, **CLOSE)
    assert torch.equal(loss.top1_agrees, dense.top1_agrees)
    (3.0 * loss.total).backward()  # a factor that the backward pass has to carry
    (3.0 * dense.total).backward()
    assert (ours.own.grad is None) == (kind is None)
    for name in ("hidden",) if kind is None else ("hidden", "own"):
        torch.testing.assert_close(getattr(ours, name).grad, getattr(reference, name).grad, **CLOSE)


@pytest.mark.parametrize("terms", WITHOUT_LABELS + WITH_LABELS)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_soft_cross_entropy_equals_autograd(terms: LossWeights, softcap: float | None) -> None:
    check_against_dense(None, terms, softcap=softcap)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("terms", WITHOUT_LABELS)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_head_of_the_drafts_own_equals_autograd(kind: str, terms: LossWeights, softcap: float | None) -> None:
    check_against_dense(kind, terms, softcap=softcap)


def test_soft_cross_entropy_over_sampled_columns_equals_autograd() -> None:
    log_weights = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    check_against_dense(None, WITH_LABELS[-1], softcap=5.0, log_weights=log_weights)


@pytest.mark.parametrize("rows_per_chunk", [1, 4, 11, 12])
@pytest.mark.parametrize("kind", [None, *HEADS])
def test_chunks_do_not_change_the_result(
    monkeypatch: pytest.MonkeyPatch, kind: str | None, rows_per_chunk: int
) -> None:
    """11 rows: single rows, two whole chunks and a partial one, exactly one chunk, and one that is not filled."""
    monkeypatch.setattr(losses, "CHUNK_BYTES", rows_per_chunk * 4 * VOCAB_SIZE)
    check_against_dense(kind, LossWeights(soft_cross_entropy=0.6, l1=1.3), softcap=5.0)


@pytest.mark.parametrize("num_rows", [0, 1])
@pytest.mark.parametrize("kind", [None, *HEADS])
def test_no_row_and_one_row_work(kind: str | None, num_rows: int) -> None:
    check_against_dense(kind, SOFT, num_rows=num_rows)


@pytest.mark.parametrize("kind", [None, *HEADS])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_gradients_pass_gradcheck_in_float64(kind: str | None, softcap: float | None) -> None:
    inputs, terms = make_inputs(kind, dtype=torch.float64), LossWeights(soft_cross_entropy=0.6, l1=1.3)

    def total(hidden: Tensor, own: Tensor) -> Tensor:
        return replace(inputs, hidden=hidden, own=own).loss(terms, softcap).total

    assert torch.autograd.gradcheck(total, (inputs.hidden, inputs.own))


def test_soft_cross_entropy_is_kl_plus_the_targets_entropy() -> None:
    """So its least value, where the draft is the target, is that entropy, with no gradient left."""
    inputs = make_inputs()
    inputs.hidden = inputs.teacher.clone().requires_grad_()
    loss = inputs.loss(SOFT, None)
    entropy = torch.distributions.Categorical(logits=inputs.teacher @ inputs.head.T).entropy()
    torch.testing.assert_close(loss.cross_entropy, entropy, **CLOSE)
    loss.total.backward()
    assert inputs.hidden.grad is not None
    torch.testing.assert_close(inputs.hidden.grad, torch.zeros_like(inputs.hidden), **CLOSE)


@pytest.mark.parametrize("kind", HEADS)
def test_a_frozen_head_gets_no_gradient_and_leaves_the_others_alone(kind: str) -> None:
    frozen, trained = make_inputs(kind, trained=False), make_inputs(kind)
    for inputs in (frozen, trained):
        inputs.loss(LossWeights(soft_cross_entropy=0.6, l1=1.3), 5.0).total.backward()
    assert frozen.own.grad is None and trained.own.grad is not None and trained.own.grad.any()
    assert frozen.hidden.grad is not None and trained.hidden.grad is not None
    assert torch.equal(frozen.hidden.grad, trained.hidden.grad)


def test_the_targets_own_rows_as_a_permuted_head_change_nothing() -> None:
    plain, permuted = make_inputs(), make_inputs("permuted")
    assert permuted.ids is not None
    permuted.own = permuted.head[permuted.ids]
    expected, loss = (inputs.loss(LossWeights(soft_cross_entropy=0.6, l1=1.3), 5.0) for inputs in (plain, permuted))
    for name in ("total", "cross_entropy", "l1", "accept_rate"):
        torch.testing.assert_close(getattr(loss, name), getattr(expected, name), **CLOSE)
    assert torch.equal(loss.top1_agrees, expected.top1_agrees)


def check_unreachable_rows() -> None:
    """Half the rows' most likely target token is outside the draft vocabulary."""
    inputs = make_inputs("reduced")
    assert inputs.ids is not None
    outside = torch.tensor([i for i in range(VOCAB_SIZE) if i not in inputs.ids.tolist()])
    inputs.teacher[::2] = 3 * inputs.head[outside[: len(inputs.teacher[::2])]]
    loss, dense = inputs.loss(SOFT, None), dense_loss(inputs, SOFT, None)
    assert 0 < dense.counted.sum() < NUM_ROWS
    loss.total.backward()
    assert inputs.hidden.grad is not None
    assert torch.equal(inputs.hidden.grad.any(-1), dense.counted)
    expected = (inputs.weights * dense.cross_entropy)[dense.counted].sum()
    torch.testing.assert_close(loss.total, expected, **CLOSE)
    assert not loss.top1_agrees[~dense.counted].any()
    torch.testing.assert_close(loss.accept_rate, dense.overlap, **CLOSE)
    assert loss.accept_rate[~dense.counted].max() > 0.05  # the mass that both have counts there, too


def test_rows_out_of_reach_have_no_loss_and_count_as_misses() -> None:
    check_unreachable_rows()


def test_a_target_without_any_mass_in_reach_does_no_harm() -> None:
    """In float32 a very sure target leaves exactly zero, and 0 / 0 would spread to every weight."""
    inputs = make_inputs("reduced")
    assert inputs.ids is not None
    unreachable = next(i for i in range(VOCAB_SIZE) if i not in inputs.ids.tolist())
    inputs.teacher[3] = 1e3 * inputs.head[unreachable]
    target_probs = (inputs.teacher @ inputs.head.T).softmax(-1)
    assert target_probs[3, inputs.ids].sum() == 0
    loss = inputs.loss(LossWeights(soft_cross_entropy=0.6, l1=1.3), None)
    loss.total.backward()
    for value in (loss.total, loss.cross_entropy, loss.l1, inputs.hidden.grad, inputs.own.grad):
        assert value is not None and value.isfinite().all()
    assert loss.accept_rate[3] == 0 and not loss.top1_agrees[3]


def test_bfloat16_inputs_are_reduced_in_float32() -> None:
    inputs = make_inputs("reduced")
    narrow = replace(inputs, **{name: getattr(inputs, name).detach().bfloat16() for name in ("teacher", "head")})
    narrow.hidden, narrow.own = (x.detach().bfloat16().requires_grad_() for x in (inputs.hidden, inputs.own))
    loss = narrow.loss(SOFT, None)
    assert loss.cross_entropy.dtype == loss.l1.dtype == torch.float32
    loss.total.backward()
    assert narrow.own.grad is not None and narrow.own.grad.dtype == torch.bfloat16
    # bfloat16 keeps 8 bits: logits of up to 1e1 carry errors of 0.04
    torch.testing.assert_close(loss.cross_entropy, inputs.loss(SOFT, None).cross_entropy, rtol=0.05, atol=0.2)


@pytest.mark.parametrize("kind", [None, "reduced"])
def test_a_missing_soft_factor_is_noticed(monkeypatch: pytest.MonkeyPatch, kind: str | None) -> None:
    right = losses._logit_gradient

    def halved(chunk: Any, terms: LossWeights) -> Tensor:
        return right(replace(chunk, soft=chunk.soft / 2), terms)

    with planted_fault(monkeypatch, losses, "_logit_gradient", halved):
        check_against_dense(kind, SOFT)


@pytest.mark.parametrize("part", ["reach", "weights", "l1"])
def test_a_reduced_vocabulary_taken_for_a_whole_one_is_noticed(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """The target not renormalised, rows out of reach not dropped, the mass out of reach not counted."""
    right = losses._compare

    def blind(logits: Tensor, target: Any, *rest: Any) -> Any:
        all_inside = replace(target, inside=torch.ones_like(target.inside))
        chunk = right(logits, all_inside if part == "weights" else target, *rest)
        if part == "reach":
            return replace(chunk, target=replace(target, reach=torch.ones_like(target.reach)))
        return replace(chunk, l1=chunk.l1 - (1 - target.reach.squeeze(1))) if part == "l1" else chunk

    with planted_fault(monkeypatch, losses, "_compare", blind):
        check_against_dense("reduced", SOFT)


def test_a_loss_on_rows_out_of_reach_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with planted_fault(monkeypatch, torch, "isin", lambda tokens, ids: torch.ones_like(tokens, dtype=torch.bool)):
        check_unreachable_rows()
