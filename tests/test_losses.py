"""Tests of models/losses.py: the chunked loss against plain autograd on dense logits."""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models import vocab_loss as losses
from models.losses import LossWeights, position_decay, published_decay, sample_vocabulary, sum_of
from models.vocab_loss import VocabLoss, vocab_loss
from tests.conftest import planted_fault

VOCAB_SIZE, HIDDEN_SIZE, RANK = 23, 8, 3
# Gradients of up to 1e1; float32 sums of 23 terms in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
WEIGHTS = [(1.0, 0.0), (0.0, 1.0), (0.1, 0.9), (0.0, 0.0)]


@dataclass
class Inputs:
    """Arguments of `vocab_loss`; bias tensors are None without a bias."""

    hidden: Tensor
    teacher: Tensor
    head: Tensor
    labels: Tensor
    weights: Tensor
    bias_input: Tensor | None
    bias_head: Tensor | None

    def leaves(self) -> list[Tensor]:
        return [x for x in (self.hidden, self.bias_input, self.bias_head) if x is not None]

    def loss(
        self, *, cross_entropy: float, l1: float, softcap: float | None, log_weights: Tensor | None = None
    ) -> VocabLoss:
        return vocab_loss(
            self.hidden,
            self.teacher,
            head=self.head,
            labels=self.labels,
            weights=self.weights,
            terms=LossWeights(cross_entropy=cross_entropy, l1=l1),
            bias_input=self.bias_input,
            bias_head=self.bias_head,
            softcap=softcap,
            log_weights=log_weights,
        )


def make_inputs(num_rows: int = 11, *, bias: bool = True, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    return Inputs(
        hidden=normal(num_rows, HIDDEN_SIZE).requires_grad_(),
        teacher=normal(num_rows, HIDDEN_SIZE),
        head=normal(VOCAB_SIZE, HIDDEN_SIZE),
        labels=torch.randint(VOCAB_SIZE, (num_rows,), generator=generator),
        weights=torch.rand(num_rows, generator=generator, dtype=dtype),
        bias_input=normal(num_rows, RANK).requires_grad_() if bias else None,
        bias_head=normal(VOCAB_SIZE, RANK).requires_grad_() if bias else None,
    )


@dataclass
class Dense:
    """The same loss by its definition, over whole [R, V] matrices."""

    total: Tensor
    cross_entropy: Tensor
    l1: Tensor
    top1_agrees: Tensor


def dense_loss(
    inputs: Inputs, *, cross_entropy: float, l1: float, softcap: float | None, log_weights: Tensor | None = None
) -> Dense:
    def capped(logits: Tensor) -> Tensor:
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    draft, target = capped(inputs.hidden @ inputs.head.T), capped(inputs.teacher @ inputs.head.T)
    if inputs.bias_input is not None and inputs.bias_head is not None:
        draft = draft + inputs.bias_input @ inputs.bias_head.T
    agrees = draft.argmax(-1) == target.argmax(-1)
    if log_weights is not None:
        draft, target = draft + log_weights, target + log_weights
    ce_rows = F.cross_entropy(draft, inputs.labels, reduction="none")
    l1_rows = (draft.softmax(-1) - target.softmax(-1)).abs().sum(-1)
    total = (inputs.weights * (cross_entropy * ce_rows + l1 * l1_rows)).sum()
    return Dense(total, ce_rows, l1_rows, agrees)


def check_against_dense(num_rows: int = 11, *, bias: bool = True, **options: Any) -> None:
    ours, reference = make_inputs(num_rows, bias=bias), make_inputs(num_rows, bias=bias)
    loss, dense = ours.loss(**options), dense_loss(reference, **options)
    for name in ("total", "cross_entropy", "l1"):
        torch.testing.assert_close(getattr(loss, name), getattr(dense, name), **CLOSE)
    assert torch.equal(loss.top1_agrees, dense.top1_agrees)
    (3.0 * loss.total).backward()  # a factor that the backward pass has to carry
    (3.0 * dense.total).backward()
    for a, b in zip(ours.leaves(), reference.leaves(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, **CLOSE)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_loss_and_gradients_equal_autograd(weights: tuple[float, float], bias: bool, softcap: float | None) -> None:
    check_against_dense(bias=bias, cross_entropy=weights[0], l1=weights[1], softcap=softcap)


@pytest.mark.parametrize("rows_per_chunk", [1, 4, 11, 12])
def test_chunks_do_not_change_loss_or_gradients(monkeypatch: pytest.MonkeyPatch, rows_per_chunk: int) -> None:
    """11 rows: single rows, two whole chunks and a partial one, exactly one chunk, and one that is not filled."""
    monkeypatch.setattr(losses, "CHUNK_BYTES", rows_per_chunk * 4 * VOCAB_SIZE)
    check_against_dense(cross_entropy=0.1, l1=0.9, softcap=5.0)


def test_a_chunk_limit_under_one_row_still_takes_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "CHUNK_BYTES", 1)
    check_against_dense(cross_entropy=0.1, l1=0.9, softcap=None)


@pytest.mark.parametrize("num_rows", [0, 1])
@pytest.mark.parametrize("bias", [True, False])
def test_no_row_and_one_row_work(num_rows: int, bias: bool) -> None:
    check_against_dense(num_rows, bias=bias, cross_entropy=0.1, l1=0.9, softcap=None)


@pytest.mark.parametrize(("weights", "softcap"), itertools.product(WEIGHTS[:3], [None, 5.0]))
def test_gradients_pass_gradcheck_in_float64(weights: tuple[float, float], softcap: float | None) -> None:
    inputs = make_inputs(4, dtype=torch.float64)

    def total(hidden: Tensor, bias_input: Tensor, bias_head: Tensor) -> Tensor:
        changed = Inputs(hidden, inputs.teacher, inputs.head, inputs.labels, inputs.weights, bias_input, bias_head)
        return changed.loss(cross_entropy=weights[0], l1=weights[1], softcap=softcap).total

    assert torch.autograd.gradcheck(total, inputs.leaves())


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_weighted_columns_have_the_gradients_of_shifted_logits(softcap: float | None) -> None:
    log_weights = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    check_against_dense(cross_entropy=0.1, l1=0.9, softcap=softcap, log_weights=log_weights)


@pytest.mark.parametrize("num_drawn", [1, 6, 1000])
def test_a_sampled_vocabulary_holds_sure_tokens_once_and_others_at_random(num_drawn: int) -> None:
    sure, generator = torch.tensor([[7, 3, 3], [21, 7, 0]]), torch.Generator().manual_seed(0)
    drawn = sample_vocabulary(torch.zeros(VOCAB_SIZE).index_fill(0, sure.flatten(), 1).bool(), num_drawn, generator)
    num_others = min(num_drawn, VOCAB_SIZE - 4)
    assert drawn.ids.tolist() == sorted(set(drawn.ids.tolist()))
    assert len(drawn.ids) == 4 + num_others
    assert torch.equal(drawn.ids[drawn.places(sure)], sure)
    is_sure = torch.isin(drawn.ids, sure)
    assert is_sure.sum() == 4 and not drawn.log_weights[is_sure].any()
    weights = drawn.log_weights[~is_sure].exp()
    torch.testing.assert_close(weights, torch.full((num_others,), (VOCAB_SIZE - 4) / num_others), **CLOSE)


def test_a_sampled_normaliser_has_the_exact_expectation() -> None:
    """Over 4000 draws of 5 others; the error of the mean is under 4 standard errors."""
    logits, generator = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(2)), torch.Generator()
    generator.manual_seed(3)
    sure = torch.isin(torch.arange(VOCAB_SIZE), torch.tensor([1, 4]))
    draws = [sample_vocabulary(sure, 5, generator) for _ in range(4000)]
    sums = torch.stack([(logits[d.ids] + d.log_weights).exp().sum() for d in draws])
    error = (sums.mean() - logits.exp().sum()).abs()
    assert error < 4 * sums.std() / len(sums) ** 0.5


def test_only_the_total_is_differentiable() -> None:
    loss = make_inputs().loss(cross_entropy=0.1, l1=0.9, softcap=None)
    assert loss.total.requires_grad
    assert not (loss.cross_entropy.requires_grad or loss.l1.requires_grad or loss.accept_rate.requires_grad)


def test_without_gradients_the_values_are_the_same() -> None:
    inputs, options = make_inputs(), {"cross_entropy": 0.1, "l1": 0.9, "softcap": 5.0}
    with torch.no_grad():
        frozen = inputs.loss(**options)
    loss = inputs.loss(**options)
    assert torch.equal(frozen.total, loss.total)
    assert torch.equal(frozen.l1, loss.l1)


def test_frozen_tensors_get_no_gradient_and_inputs_are_left_alone() -> None:
    inputs, untouched = make_inputs(), make_inputs()
    inputs.head.requires_grad_()
    inputs.teacher.requires_grad_()
    inputs.loss(cross_entropy=0.1, l1=0.9, softcap=5.0).total.backward()
    assert inputs.head.grad is None and inputs.teacher.grad is None
    for name, value in vars(inputs).items():
        assert torch.equal(value, getattr(untouched, name)), name


def test_accept_rate_is_the_overlap_of_the_distributions() -> None:
    inputs = make_inputs()
    loss = inputs.loss(cross_entropy=1.0, l1=0.0, softcap=None)
    draft = (inputs.hidden @ inputs.head.T + inputs.bias_input @ inputs.bias_head.T).softmax(-1)
    target = (inputs.teacher @ inputs.head.T).softmax(-1)
    torch.testing.assert_close(loss.accept_rate, torch.minimum(draft, target).sum(-1).detach(), **CLOSE)


def test_accept_rate_is_one_where_the_distributions_agree_and_never_leaves_its_range() -> None:
    inputs = make_inputs(bias=False)
    inputs.teacher = inputs.hidden.detach().clone()
    loss = inputs.loss(cross_entropy=0.0, l1=1.0, softcap=None)
    torch.testing.assert_close(loss.accept_rate, torch.ones(11), rtol=0, atol=1e-6)  # two softmaxes round apart
    assert loss.top1_agrees.all()
    inputs.teacher = -1e4 * inputs.teacher  # disjoint: rounding may push l1 over 2
    rates = inputs.loss(cross_entropy=0.0, l1=1.0, softcap=None).accept_rate
    assert (rates >= 0).all() and (rates < 1).all()


def test_bfloat16_inputs_are_reduced_in_float32() -> None:
    inputs = make_inputs()
    narrow = Inputs(*(None if x is None else x.detach() for x in vars(inputs).values()))
    for name in ("hidden", "teacher", "head", "bias_input", "bias_head"):
        setattr(narrow, name, getattr(narrow, name).bfloat16())
    narrow.hidden.requires_grad_()
    loss = narrow.loss(cross_entropy=0.1, l1=0.9, softcap=None)
    assert loss.cross_entropy.dtype == loss.l1.dtype == torch.float32
    loss.total.backward()
    assert narrow.hidden.grad is not None and narrow.hidden.grad.dtype == torch.bfloat16
    reference = inputs.loss(cross_entropy=0.1, l1=0.9, softcap=None)
    # bfloat16 keeps 8 bits: logits of up to 1e1 carry errors of 0.04
    torch.testing.assert_close(loss.cross_entropy, reference.cross_entropy, rtol=0.05, atol=0.2)


def test_position_decay_weighs_later_slots_less() -> None:
    weights = position_decay(7, 4.0, torch.device("cpu"))
    published = [1.0, 0.778801, 0.606531, 0.472367, 0.367879, 0.286505, 0.223130]
    torch.testing.assert_close(weights, torch.tensor(published), rtol=0, atol=1e-6)  # six printed digits
    assert torch.equal(position_decay(7, 0.0, torch.device("cpu")), torch.ones(7))


def test_the_published_decay_is_that_of_the_published_blocks() -> None:
    """Blocks of 8, 10 and 16 tokens hold one known token, so 7, 9 and 15 drafts."""
    assert [round(published_decay(k), 1) for k in (7, 9, 15)] == [4.0, 4.8, 7.0]


def test_sum_of_gives_sum_and_count_in_float64() -> None:
    values, weights = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0.5, 0.0, 0.25])
    assert [x.item() for x in sum_of(values)] == [7.0, 3.0]
    assert [x.item() for x in sum_of(values, weights)] == [1.5, 0.75]
    assert all(x.dtype == torch.float64 for x in sum_of(values, weights))
    assert [x.item() for x in sum_of(values[:0])] == [0.0, 0.0]


def test_a_missing_l1_factor_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = losses._logit_gradient

    def halved(chunk: Any, terms: LossWeights) -> Tensor:
        return right(replace(chunk, moved=chunk.moved / 2), terms)

    with planted_fault(monkeypatch, losses, "_logit_gradient", halved):
        check_against_dense(cross_entropy=0.1, l1=0.9, softcap=None)
