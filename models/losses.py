"""Losses over the vocabulary that never hold a [rows, V] matrix, only a chunk of it, in forward and backward."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

# Rows of a chunk are chosen so that one float32 [rows, V] buffer stays near this size.
CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True)
class VocabLoss:
    """Result of `vocab_loss`. Only `total` is differentiable."""

    total: Tensor  # [] sum over rows of weight * (ce * cross-entropy + l1 * ||draft - target||_1)
    cross_entropy: Tensor  # [R] nats, unweighted
    l1: Tensor  # [R] sum over V of |draft_probs - target_probs|, in 0..2
    top1_agrees: Tensor  # [R] bool, the draft's most likely token is the target's

    @property
    def accept_rate(self) -> Tensor:
        """[R] probability that exact rejection sampling accepts: 1 - total variation = 1 - l1 / 2."""
        return (1 - self.l1 / 2).clamp(0, 1)


def vocab_loss(
    hidden: Tensor,  # [R, D] draft states after the final norm
    teacher: Tensor,  # [R, D] target's last hidden states of the same predictions
    *,
    head: Tensor,  # [V, D] frozen
    labels: Tensor,  # [R] int64
    weights: Tensor,  # [R] static position weights
    cross_entropy: float,  # weight of the cross-entropy term
    l1: float,  # weight of the L1 term (twice the total variation)
    bias_input: Tensor | None = None,  # [R, r], with bias_head [V, r]: logits += bias_input @ bias_head.T
    bias_head: Tensor | None = None,
    softcap: float | None = None,  # logits = softcap * tanh(logits / softcap), before the bias
    log_weights: Tensor | None = None,  # [V] added to both logits: the columns are a sample (`SampledVocabulary`)
) -> VocabLoss:
    """Cross-entropy and L1 distance of draft and target distributions, and their metrics, in one pass.

    Gradients (to hidden, bias_input, bias_head) are computed chunk by chunk in the forward pass, so the backward pass
    only scales them: the head is multiplied three times a row in all. Logits are float32, or float64 for such inputs.
    """
    empty = hidden.new_zeros(0)
    total, ce_rows, l1_rows, agrees = _ChunkedVocabLoss.apply(
        hidden,
        empty if bias_input is None else bias_input,
        empty if bias_head is None else bias_head,
        teacher,
        head,
        labels,
        weights,
        log_weights,
        (cross_entropy, l1, softcap),
    )
    return VocabLoss(total, ce_rows, l1_rows, agrees)


class _ChunkedVocabLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, bias_input, bias_head, teacher, head, labels, weights, log_weights, options):
        ce_weight, l1_weight, softcap = options
        rows, has_bias = hidden.shape[0], bias_head.numel() > 0
        needs = ctx.needs_input_grad[0] or (has_bias and any(ctx.needs_input_grad[1:3]))
        wide = torch.promote_types(hidden.dtype, torch.float32)
        grads = [torch.zeros_like(x, dtype=wide) if needs else None for x in (hidden, bias_input, bias_head)]
        ce_rows, l1_rows = (hidden.new_zeros(rows, dtype=wide) for _ in range(2))
        agrees = torch.zeros(rows, dtype=torch.bool, device=hidden.device)
        step = max(1, CHUNK_BYTES // (4 * head.shape[0]))
        for start in range(0, rows, step):
            part = slice(start, start + step)
            logits, cap_slope = _logits(hidden[part], head, softcap, keep_slope=needs)
            if has_bias:
                logits += (bias_input[part] @ bias_head.T).to(wide)
            target_logits, _ = _logits(teacher[part], head, softcap, keep_slope=False)
            agrees[part] = logits.argmax(-1) == target_logits.argmax(-1)
            if log_weights is not None:
                logits += log_weights
                target_logits += log_weights
            target_probs = torch.softmax(target_logits, dim=-1)
            label = labels[part, None]
            log_norm = logits.logsumexp(-1, keepdim=True)
            ce_rows[part] = (log_norm - logits.gather(1, label)).squeeze(1)
            probs = logits.sub_(log_norm).exp_()
            difference = torch.sub(probs, target_probs, out=target_probs)
            l1_rows[part] = difference.abs().sum(-1)
            if needs:
                grad = _logit_gradient(probs, difference, label, weights[part], ce_weight, l1_weight)
                _accumulate(grads, part, grad, cap_slope, head, bias_input, bias_head, has_bias)
        total = (weights * (ce_weight * ce_rows + l1_weight * l1_rows)).sum()
        if needs:
            inputs = (hidden, bias_input, bias_head)
            ctx.save_for_backward(*(g.to(x.dtype) for g, x in zip(grads, inputs, strict=True) if g is not None))
        ctx.mark_non_differentiable(ce_rows, l1_rows, agrees)
        return total, ce_rows, l1_rows, agrees

    @staticmethod
    def backward(ctx: FunctionCtx, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        hidden, bias_input, bias_head = ctx.saved_tensors  # type: ignore[attr-defined]
        scale = grad_outputs[0]
        with_bias = bias_head.numel() > 0
        return (
            scale.to(hidden.dtype) * hidden,
            scale.to(hidden.dtype) * bias_input if with_bias else None,
            scale.to(hidden.dtype) * bias_head if with_bias else None,
            *[None] * 6,
        )


def _logits(x: Tensor, head: Tensor, softcap: float | None, *, keep_slope: bool) -> tuple[Tensor, Tensor | None]:
    """Wide logits [r, V] and, under a soft cap, their slope d capped / d raw."""
    logits = (x @ head.T).to(torch.promote_types(x.dtype, torch.float32))
    if softcap is None:
        return logits, None
    squashed = torch.tanh(logits / softcap)
    slope = 1 - squashed.square() if keep_slope else None
    return softcap * squashed, slope


def _logit_gradient(
    probs: Tensor, difference: Tensor, label: Tensor, weights: Tensor, ce_weight: float, l1_weight: float
) -> Tensor:
    """d(weighted loss)/d logits [r, V], written over its inputs.

    Cross-entropy: probs - onehot. L1: probs * (sign - sum(probs * sign)) with sign = sign(draft - target).
    """
    sign = difference.sign_()
    mean_sign = torch.einsum("rv,rv->r", probs, sign)[:, None]
    factor = sign.sub_(mean_sign).mul_(l1_weight).add_(ce_weight)
    grad = probs.mul_(factor)
    grad.scatter_add_(1, label, grad.new_full(label.shape, -ce_weight))
    return grad.mul_(weights[:, None])


def _accumulate(grads, part, grad, cap_slope, head, bias_input, bias_head, has_bias) -> None:
    """Push one chunk's logit gradient [r, V] through the head and the bias head."""
    typed = grad.to(head.dtype)
    if has_bias:
        grads[1][part] = (typed @ bias_head).to(grad.dtype)
        grads[2] += (typed.T @ bias_input[part]).to(grad.dtype)
    if cap_slope is not None:
        typed = (grad * cap_slope).to(head.dtype)
    grads[0][part] = (typed @ head).to(grad.dtype)


@dataclass(frozen=True)
class SampledVocabulary:
    """Columns of the head that stand for all of it in one loss: some for sure, the rest drawn uniformly.

    A drawn column stands for (V - sure) / drawn others, so log of that is added to its logits and the softmax
    normaliser keeps its expectation. Cross-entropy and L1 become estimates with a small bias (log of a mean).
    """

    ids: Tensor  # [C] int64 ascending
    log_weights: Tensor  # [C]

    def places(self, token_ids: Tensor) -> Tensor:
        """Column of each token; every one must be in `ids`."""
        return torch.searchsorted(self.ids, token_ids)


def sample_vocabulary(sure: Tensor, vocab_size: int, num_drawn: int, generator: torch.Generator) -> SampledVocabulary:
    """`sure` token ids (any shape, repeats allowed) plus up to `num_drawn` of the others, without replacement."""
    is_sure = torch.zeros(vocab_size, dtype=torch.bool, device=sure.device)
    is_sure[sure.flatten()] = True
    others = (~is_sure).nonzero().squeeze(1)
    order = torch.randperm(len(others), generator=generator)[:num_drawn]
    drawn = others[order.to(others.device)]
    ids = torch.cat((is_sure.nonzero().squeeze(1), drawn))
    log_weights = torch.zeros(len(ids), device=sure.device)
    if len(drawn):
        log_weights[-len(drawn) :] = torch.tensor(len(others) / len(drawn)).log()
    ids, order = ids.sort()
    return SampledVocabulary(ids, log_weights[order])


def position_decay(num_slots: int, decay: float | None, device: torch.device) -> Tensor:
    """Static slot weights exp(-k / decay) [K]; None = no decay (DFlash section 3, decay 4 for 7 draft tokens)."""
    slots = torch.arange(num_slots, device=device, dtype=torch.float32)
    return torch.ones_like(slots) if decay is None else torch.exp(-slots / decay)


def sum_of(values: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(sum, count) of a metric, detached, float64 so that counts stay exact."""
    values = values.detach().double()
    if weights is None:
        return values.sum(), torch.tensor(float(values.numel()), dtype=torch.float64, device=values.device)
    weights = weights.detach().double()
    return (values * weights).sum(), weights.sum()
