"""Losses over the vocabulary that never hold a [rows, V] matrix, only a chunk of it, in forward and backward."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from models.base import DraftBatch

# Rows of a chunk are chosen so that one float32 [rows, V] buffer stays near this size.
CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True)
class LossWeights:
    """Weight of each term of a row's loss."""

    cross_entropy: float = 0.0  # against the labels, nats
    soft_cross_entropy: float = 0.0  # against the target's distribution, nats: forward KL plus the target's entropy
    l1: float = 0.0  # ||draft - target||_1, twice the total variation


@dataclass(frozen=True)
class DraftHead:
    """A head of the draft's own, trained or not: row w stands for target token `ids[w]`."""

    weight: Tensor  # [W, D]
    ids: Tensor  # [W] int64, distinct


@dataclass(frozen=True)
class VocabLoss:
    """Result of `vocab_loss`. Only `total` is differentiable; the rest is per row and unweighted."""

    total: Tensor  # [] sum over rows of weight * (weighted terms)
    cross_entropy: Tensor  # [R] nats; the soft one where that has a weight, else against the labels
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
    head: Tensor,  # [V, D] the target's, frozen
    weights: Tensor,  # [R] static position weights
    terms: LossWeights,
    labels: Tensor | None = None,  # [R] int64, needed by cross_entropy
    draft_head: DraftHead | None = None,  # None: the draft uses `head`
    bias_input: Tensor | None = None,  # [R, r], with bias_head [V, r]: logits += bias_input @ bias_head.T
    bias_head: Tensor | None = None,
    softcap: float | None = None,  # logits = softcap * tanh(logits / softcap), before the bias
    log_weights: Tensor | None = None,  # [V] added to both logits: the columns are a sample (`SampledVocabulary`)
) -> VocabLoss:
    """Losses of draft against target distributions, and their metrics, in one pass over the vocabulary.

    Gradients (to hidden, bias_input, bias_head, draft_head.weight) are computed chunk by chunk in the forward pass, so
    the backward pass only scales them: a head is multiplied three times a row in all. Logits are float32, or float64
    for such inputs.

    With a draft head of fewer tokens the soft target is the target's distribution renormalised over these, and a row
    whose most likely target token is not among them has no loss but counts as a miss in the metrics (EAGLE-3,
    section 3); l1 always counts the mass that the draft cannot reach.
    """
    assert terms.cross_entropy == 0 or labels is not None, "cross_entropy needs labels"
    assert draft_head is None or (terms.cross_entropy == 0 and bias_head is None and log_weights is None)
    empty = hidden.new_zeros(0)
    total, ce_rows, l1_rows, agrees = _ChunkedVocabLoss.apply(
        hidden,
        empty if bias_input is None else bias_input,
        empty if bias_head is None else bias_head,
        empty if draft_head is None else draft_head.weight,
        teacher,
        head,
        _Constants(labels, weights, log_weights, None if draft_head is None else draft_head.ids, softcap, terms),
    )
    return VocabLoss(total, ce_rows, l1_rows, agrees)


@dataclass(frozen=True)
class _Constants:
    """What rows and columns mean, and the options; nothing here has a gradient."""

    labels: Tensor | None  # [R]
    weights: Tensor  # [R]
    log_weights: Tensor | None  # [V]
    draft_ids: Tensor | None  # [W]
    softcap: float | None
    terms: LossWeights


class _ChunkedVocabLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, bias_input, bias_head, draft_weight, teacher, head, constants: _Constants):
        leaves = (hidden, bias_input, bias_head, draft_weight)
        wanted = ctx.needs_input_grad[:4]
        needs = any(wanted)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        grads = [torch.zeros_like(x, dtype=wide) if want else None for x, want in zip(leaves, wanted, strict=True)]
        ce_rows, l1_rows = (hidden.new_zeros(len(hidden), dtype=wide) for _ in range(2))
        agrees = torch.zeros(len(hidden), dtype=torch.bool, device=hidden.device)
        total = hidden.new_zeros((), dtype=wide)
        own_head = draft_weight if draft_weight.numel() else head
        step = max(1, CHUNK_BYTES // (4 * head.shape[0]))
        for start in range(0, len(hidden), step):
            part = slice(start, start + step)
            logits, cap_slope = _logits(hidden[part], own_head, constants.softcap, keep_slope=needs)
            if bias_head.numel():
                logits += (bias_input[part] @ bias_head.T).to(wide)
            target_logits, _ = _logits(teacher[part], head, constants.softcap, keep_slope=False)
            chunk = _compare(logits, target_logits, part, constants)
            agrees[part], ce_rows[part], l1_rows[part] = chunk.agrees, chunk.cross_entropy, chunk.l1
            total += (chunk.weights * chunk.loss).sum()
            if needs:
                _accumulate(grads, part, _logit_gradient(chunk, constants.terms), cap_slope, own_head, leaves)
        if needs:
            ctx.save_for_backward(*(None if g is None else g.to(x.dtype) for g, x in zip(grads, leaves, strict=True)))
        ctx.mark_non_differentiable(ce_rows, l1_rows, agrees)
        return total, ce_rows, l1_rows, agrees

    @staticmethod
    def backward(ctx: FunctionCtx, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # type: ignore[attr-defined]
        return (*(None if grad is None else grad_outputs[0].to(grad.dtype) * grad for grad in saved), None, None, None)


@dataclass(frozen=True)
class _Chunk:
    """Some rows of draft and target over the draft's W columns (all V where it has no head of its own)."""

    probs: Tensor  # [r, W]
    difference: Tensor  # [r, W] probs - target_probs
    target_probs: Tensor  # [r, W]; overwritten by `difference` unless a soft cross-entropy needs it
    reach: Tensor  # [r, 1] target mass on these columns
    label: Tensor | None  # [r, 1]
    weights: Tensor  # [r]
    agrees: Tensor  # [r]
    cross_entropy: Tensor  # [r]
    l1: Tensor  # [r]
    loss: Tensor  # [r]


def _compare(logits: Tensor, target_logits: Tensor, part: slice, constants: _Constants) -> _Chunk:
    """Both distributions and the loss of each row; `logits` and `target_logits` are used up."""
    terms, draft_ids, weights = constants.terms, constants.draft_ids, constants.weights[part]
    top, target_top = logits.argmax(-1), target_logits.argmax(-1)
    if constants.log_weights is not None:
        logits += constants.log_weights
        target_logits += constants.log_weights
    target_probs = torch.softmax(target_logits, dim=-1)
    reach = target_probs.new_ones(len(target_probs), 1)
    if draft_ids is not None:
        top, weights = draft_ids[top], weights * torch.isin(target_top, draft_ids)
        target_probs = target_probs[:, draft_ids]
        # A sure target may leave exactly nothing here; its row weighs 0, which 0 / 0 would turn into NaN.
        reach = target_probs.sum(-1, keepdim=True).clamp(min=torch.finfo(target_probs.dtype).tiny)
    label = None if constants.labels is None else constants.labels[part, None]
    log_norm = logits.logsumexp(-1, keepdim=True)
    hard = soft = log_norm.new_zeros(len(logits))
    if label is not None:
        hard = (log_norm - logits.gather(1, label)).squeeze(1)
    if terms.soft_cross_entropy:
        soft = (log_norm - torch.einsum("rw,rw->r", target_probs, logits)[:, None] / reach).squeeze(1)
    probs = logits.sub_(log_norm).exp_()
    difference = torch.sub(probs, target_probs, out=None if terms.soft_cross_entropy else target_probs)
    l1 = torch.linalg.vector_norm(difference, ord=1, dim=-1) + (1 - reach.squeeze(1))
    return _Chunk(
        probs=probs,
        difference=difference,
        target_probs=target_probs,
        reach=reach,
        label=label,
        weights=weights,
        agrees=top == target_top,
        cross_entropy=soft if terms.soft_cross_entropy else hard,
        l1=l1,
        loss=terms.cross_entropy * hard + terms.soft_cross_entropy * soft + terms.l1 * l1,
    )


def _logits(x: Tensor, head: Tensor, softcap: float | None, *, keep_slope: bool) -> tuple[Tensor, Tensor | None]:
    """Wide logits [r, V] and, under a soft cap, their slope d capped / d raw."""
    logits = (x @ head.T).to(torch.promote_types(x.dtype, torch.float32))
    if softcap is None:
        return logits, None
    squashed = torch.tanh(logits / softcap)
    slope = 1 - squashed.square() if keep_slope else None
    return softcap * squashed, slope


def _logit_gradient(chunk: _Chunk, terms: LossWeights) -> Tensor:
    """d(weighted loss)/d logits [r, W], written over the chunk's buffers.

    Cross-entropy: probs - onehot, or probs - target. L1: probs * (sign - sum(probs * sign)), sign of draft - target.
    """
    probs, factor = chunk.probs, terms.cross_entropy + terms.soft_cross_entropy
    if terms.l1:
        sign = chunk.difference.sign_()
        mean_sign = torch.einsum("rw,rw->r", probs, sign)[:, None]
        grad = probs.mul_(sign.sub_(mean_sign).mul_(terms.l1).add_(factor))
    else:
        grad = probs.mul_(factor)
    if terms.soft_cross_entropy:
        grad -= chunk.target_probs.mul_(terms.soft_cross_entropy / chunk.reach)
    if terms.cross_entropy:
        assert chunk.label is not None
        grad.scatter_add_(1, chunk.label, grad.new_full(chunk.label.shape, -terms.cross_entropy))
    return grad.mul_(chunk.weights[:, None])


def _accumulate(grads, part, grad, cap_slope, own_head, leaves) -> None:
    """Push one chunk's logit gradient [r, W] through the draft's head and the bias head."""
    hidden, bias_input, bias_head, _ = leaves
    typed = grad.to(own_head.dtype)
    if grads[1] is not None:
        grads[1][part] = (typed @ bias_head).to(grad.dtype)
    if grads[2] is not None:
        grads[2] += (typed.T @ bias_input[part]).to(grad.dtype)
    if cap_slope is not None:
        typed = (grad * cap_slope).to(own_head.dtype)
    if grads[0] is not None:
        grads[0][part] = (typed @ own_head).to(grad.dtype)
    if grads[3] is not None:
        grads[3] += (typed.T @ hidden[part]).to(grad.dtype)


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


def batch_vocabulary(batch: DraftBatch, vocab_size: int, num_drawn: int) -> SampledVocabulary:
    """The batch's own tokens for sure and `num_drawn` others, seeded by the batch: a resumed run draws the same."""
    generator = torch.Generator().manual_seed(int(batch.anchors.sum() * 1_000_003 + batch.input_ids.sum()))
    return sample_vocabulary(batch.input_ids, vocab_size, num_drawn, generator)


def position_decay(num_slots: int, decay: float, device: torch.device) -> Tensor:
    """Static slot weights exp(-k / decay) [K] (DFlash section 3); decay 0 stands for none, all slots weigh 1."""
    slots = torch.arange(num_slots, device=device, dtype=torch.float32)
    return torch.exp(-slots / decay) if decay else torch.ones_like(slots)


def published_decay(num_draft_tokens: int) -> float:
    """DFlash's decay for blocks of K drafts: 4, 5 and 7 are published for 7, 9 and 15, here joined by a line."""
    return 1 + 3 * (num_draft_tokens + 1) / 8


def sum_of(values: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(sum, count) of a metric, detached, float64 so that counts stay exact."""
    values = values.detach().double()
    if weights is None:
        return values.sum(), torch.tensor(float(values.numel()), dtype=torch.float64, device=values.device)
    weights = weights.detach().double()
    return (values * weights).sum(), weights.sum()
