"""The loss of draft against target distributions, which never holds a [rows, V] matrix, only a chunk of it.

All terms, their gradients and the metrics come from one pass over the vocabulary: what the backward pass needs is
computed in the forward pass, chunk by chunk, so that it only scales.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from models.losses import LossWeights, by_slot

# Rows of a chunk are chosen so that one float32 [rows, V] buffer stays near this size; three to five exist at once.
CHUNK_BYTES = 128 * 2**20
# Columns widened at a time where a product of narrow types cannot be accumulated and returned in float32 (CPU).
WIDE_COLUMNS = 8192
LK_DECAY = 3.0  # of `LossWeights.lk_hybrid`, the paper's choice
LEAST_ACCEPTANCE = 1e-6  # where a draft misses the target altogether, its -log would have no end


@dataclass(frozen=True)
class DraftHead:
    """A head of the draft's own, trained or not: row w stands for target token `ids[w]`."""

    weight: Tensor  # [W, D]
    ids: Tensor  # [W] int64, distinct


@dataclass(frozen=True)
class VocabLoss:
    """Result of `vocab_loss`. Only `totals` is differentiable; the rest is per row and unweighted."""

    totals: Tensor  # [G] sum over each group's rows of weight * (weighted terms)
    cross_entropy: Tensor  # [R] nats: against the labels where there are any, else the soft one
    l1: Tensor  # [R] sum over V of |draft_probs - target_probs|, in 0..2
    top1_agrees: Tensor  # [R] bool, the draft's most likely token is the target's

    @property
    def total(self) -> Tensor:
        return self.totals.sum()

    @property
    def accept_rate(self) -> Tensor:
        """[R] probability that exact rejection sampling accepts: 1 - total variation = 1 - l1 / 2."""
        return (1 - self.l1 / 2).clamp(0, 1)

    def metrics(self, slot_ids: Tensor, num_slots: int) -> dict[str, tuple[Tensor, Tensor]]:
        """(sum, count) of each metric per slot, [num_slots] each in float64; slot_ids [R] int64."""
        values = {
            "cross_entropy": self.cross_entropy,
            "accept_rate": self.accept_rate,
            "top1_agreement": self.top1_agrees,
        }
        return {name: by_slot(rows, slot_ids, num_slots) for name, rows in values.items()}


def vocab_loss(
    hidden: Tensor,  # [R, D] draft states after the final norm
    teacher: Tensor,  # [T, D] target's last hidden states
    *,
    head: Tensor,  # [V, D] the target's, frozen; its type is that of all products, accumulated in float32
    weights: Tensor,  # [R] position weights, not differentiated
    terms: LossWeights,
    labels: Tensor | None = None,  # [R] int64, needed by cross_entropy
    teacher_ids: Tensor | None = None,  # [R] int64 row of `teacher` that a draft row is compared with; None: its own
    group_ids: Tensor | None = None,  # [R] int64 in 0..num_groups-1, the total that a row counts in; None: all in one
    num_groups: int = 1,
    draft_head: DraftHead | None = None,  # None: the draft uses `head`
    bias_input: Tensor | None = None,  # [R, r], with bias_head [V, r]: logits += bias_input @ bias_head.T
    bias_head: Tensor | None = None,
    softcap: float | None = None,  # logits = softcap * tanh(logits / softcap), before the bias
    log_weights: Tensor | None = None,  # [V] added to both logits: the columns are a sample (`SampledVocabulary`)
    compiled: bool = False,  # torch.compile what stands between the products: fewer passes over a chunk
) -> VocabLoss:
    """Weighted losses of draft rows, and their metrics. Gradients reach hidden, bias_input, bias_head and
    draft_head.weight; the draft's head is multiplied twice a draft row, the target's once a teacher row that occurs,
    however many draft rows share it. Logits are float32, or float64 for such a head.

    With a draft head of fewer tokens soft terms take the target's distribution renormalised over these, and a row whose
    most likely target token is not among them has no loss but counts as a miss in the metrics (EAGLE-3, section 3); l1
    always counts the mass that the draft cannot reach.
    """
    assert terms.cross_entropy == 0 or labels is not None, "cross_entropy needs labels"
    assert draft_head is None or (labels is None and bias_head is None and log_weights is None)
    own, own_ids = (None, None) if draft_head is None else (draft_head.weight, draft_head.ids)
    sums_rows = any(x is not None and x.requires_grad for x in (bias_head, own))
    assert num_groups == 1 or not sums_rows, "a trained head's gradient sums over rows, so it can be scaled once only"
    rows, order = _Rows(weights, labels, group_ids, num_groups), None
    if teacher_ids is not None:  # rows that share a teacher row shall stand together
        used, ids = teacher_ids.unique(return_inverse=True)
        teacher, order = teacher[used], ids.argsort(stable=True)
        hidden, rows = hidden[order], rows.ordered(order, ids)
        bias_input = None if bias_input is None else bias_input[order]
    empty = hidden.new_zeros(0)
    leaves = (hidden, *(empty if x is None else x for x in (bias_input, bias_head, own)))
    columns = _Columns(head, own_ids, log_weights, softcap)
    totals, *per_row = _ChunkedVocabLoss.apply(*leaves, teacher, rows, columns, terms, compiled)
    if order is not None:
        per_row = [torch.empty_like(x).index_copy_(0, order, x) for x in per_row]
    return VocabLoss(totals, *per_row)


@dataclass(frozen=True)
class _Rows:
    """What draft rows are; nothing here has a gradient."""

    weights: Tensor  # [R]
    labels: Tensor | None  # [R]
    group_ids: Tensor | None  # [R]
    num_groups: int
    teacher_ids: Tensor | None = None  # [R] ascending, every teacher row occurs; None: row r has teacher row r

    def ordered(self, order: Tensor, teacher_ids: Tensor) -> "_Rows":
        labels, groups = (None if x is None else x[order] for x in (self.labels, self.group_ids))
        return _Rows(self.weights[order], labels, groups, self.num_groups, teacher_ids[order])

    def chunks(self, size: int) -> Iterator[tuple[slice, slice]]:
        """Slices of draft rows and of the teacher rows that they need; waits for the device once, if rows share."""
        count = len(self.weights)
        size = math.ceil(count / max(1, math.ceil(count / size)))  # as many chunks as it takes, all alike
        parts = [slice(start, min(start + size, count)) for start in range(0, count, max(1, size))]
        if self.teacher_ids is None:
            yield from zip(parts, parts, strict=True)
        elif parts:
            edges = self.teacher_ids[[x for part in parts for x in (part.start, part.stop - 1)]].view(-1, 2).tolist()
            yield from ((part, slice(first, last + 1)) for part, (first, last) in zip(parts, edges, strict=True))


@dataclass(frozen=True)
class _Columns:
    """What columns are; nothing here has a gradient."""

    head: Tensor  # [V, D]
    draft_ids: Tensor | None  # [W]
    log_weights: Tensor | None  # [V]
    softcap: float | None


class _Scratch:
    """Named [rows, columns] buffers, made once: fresh memory for a chunk costs more than some of its arithmetic."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._numel, self._options, self._buffers = numel, {"dtype": dtype, "device": device}, dict[str, Tensor]()

    def take(self, name: str, rows: int, columns: int) -> Tensor:
        if name not in self._buffers:
            self._buffers[name] = torch.empty(self._numel, **self._options)
        return self._buffers[name][: rows * columns].view(rows, columns)


class _ChunkedVocabLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, bias_input, bias_head, own, teacher, rows: _Rows, columns: _Columns, terms, compiled):
        compare, differentiate = _compare, _logit_gradient
        if compiled:
            compare, differentiate = _compile(compare), _compile(differentiate)
        leaves, wanted = (hidden, bias_input, bias_head, own), ctx.needs_input_grad[:4]
        typed = [leaf.to(columns.head.dtype) for leaf in leaves]
        head = typed[3] if own.numel() else columns.head
        wide = torch.promote_types(columns.head.dtype, torch.float32)
        blank = torch.empty_like if len(hidden) else torch.zeros_like  # the first chunk fills them
        grads = [blank(x, dtype=wide) if want else None for x, want in zip(leaves, wanted, strict=True)]
        ce_rows, l1_rows = (hidden.new_zeros(len(hidden), dtype=wide) for _ in range(2))
        agrees = torch.zeros(len(hidden), dtype=torch.bool, device=hidden.device)
        totals = hidden.new_zeros(rows.num_groups, dtype=wide)
        size = max(1, min(len(hidden), CHUNK_BYTES // (wide.itemsize * len(columns.head))))
        scratch = _Scratch(size * len(columns.head), wide, hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for part, teachers in rows.chunks(size):
                target = _target_chunk(teacher[teachers], columns, scratch, with_logs=terms.reverse_kl > 0)
                ids = None if rows.teacher_ids is None else rows.teacher_ids[part] - teachers.start
                target = target.at(ids, scratch)
                logits, slope = _logits(typed[0][part], head, columns.softcap, scratch, with_slope=any(wanted))
                if bias_head.numel():
                    _multiply(typed[1][part], typed[2], logits, add=True)
                chunk = compare(logits, target, rows, part, columns, terms)
                agrees[part], ce_rows[part], l1_rows[part] = chunk.agrees, chunk.cross_entropy, chunk.l1
                groups = torch.zeros_like(chunk.agrees, dtype=torch.int64)
                totals.index_add_(0, groups if rows.group_ids is None else rows.group_ids[part], chunk.loss)
                if any(wanted):
                    _push_back(grads, part, differentiate(chunk, terms), slope, head, typed)
        saved = [None if g is None else g.to(x.dtype) for g, x in zip(grads, leaves, strict=True)]
        ctx.save_for_backward(rows.group_ids, *saved)
        ctx.mark_non_differentiable(ce_rows, l1_rows, agrees)
        return totals, ce_rows, l1_rows, agrees

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        group_ids, *grads = ctx.saved_tensors  # type: ignore[attr-defined]
        scale = grad_outputs[0]
        by_row = scale if group_ids is None else scale[group_ids][:, None]
        factors = (by_row, by_row, scale, scale)
        scaled = [None if g is None else (g * f).to(g.dtype) for g, f in zip(grads, factors, strict=True)]
        return (*scaled, None, None, None, None, None)


@cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Once a process, for any number of rows."""
    return torch.compile(function, dynamic=True)


@dataclass(frozen=True)
class _Target:
    """Target distributions over the draft's W columns (all V where it has no head of its own)."""

    probs: Tensor  # [t, W]
    top: Tensor  # [t] most likely token of all V
    reach: Tensor | None  # [t, 1] target mass on these columns; None: all of it
    inside: Tensor | None  # [t] bool, `top` is one of these columns
    logs: Tensor | None  # [t, W] logarithms, renormalised over these columns

    def at(self, ids: Tensor | None, scratch: _Scratch) -> "_Target":
        """A row for each of ids [r] (None: as they are), out of the buffer that the draft's logits will take."""
        count = len(self.probs) if ids is None else len(ids)
        probs = scratch.take("target", count, self.probs.shape[1])
        if ids is None:
            return replace(self, probs=probs.copy_(self.probs))
        reach, inside, logs = (None if x is None else x[ids] for x in (self.reach, self.inside, self.logs))
        return _Target(torch.index_select(self.probs, 0, ids, out=probs), self.top[ids], reach, inside, logs)


def _target_chunk(teacher: Tensor, columns: _Columns, scratch: _Scratch, *, with_logs: bool) -> _Target:
    logits, _ = _logits(teacher.to(columns.head.dtype), columns.head, columns.softcap, scratch, with_slope=False)
    top = logits.argmax(-1)
    if columns.log_weights is not None:
        logits += columns.log_weights
    logs = logits - logits.logsumexp(-1, keepdim=True) if with_logs else None
    probs = torch.softmax(logits, dim=-1, out=logits)
    ids = columns.draft_ids
    if ids is None:
        return _Target(probs, top, None, None, logs)
    probs = probs[:, ids]
    # A sure target may leave exactly nothing here; its row weighs 0, which 0 / 0 would turn into NaN.
    reach = probs.sum(-1, keepdim=True).clamp(min=torch.finfo(probs.dtype).tiny)
    return _Target(probs, top, reach, torch.isin(top, ids), None if logs is None else logs[:, ids] - reach.log())


@dataclass(frozen=True)
class _Chunk:
    """Some draft rows beside their targets; per-row coefficients [r, 1] hold the row's weight already."""

    probs: Tensor  # [r, W]
    difference: Tensor  # [r, W] probs - target probs
    target: _Target
    log_ratio: Tensor | None  # [r, W] log(probs / target probs), for the reverse KL
    labels: Tensor | None  # [r, 1]
    hard: Tensor  # [r, 1] coefficient of the cross-entropy's gradient
    soft: Tensor  # [r, 1] of the soft cross-entropy's
    moved: Tensor  # [r, 1] of the L1 distance's
    reverse: Tensor  # [r, 1] of the reverse KL's
    reverse_kl: Tensor  # [r, 1]
    agrees: Tensor  # [r]
    cross_entropy: Tensor  # [r]
    l1: Tensor  # [r]
    loss: Tensor  # [r] weighted


def _compare(
    logits: Tensor, target: _Target, rows: _Rows, part: slice, columns: _Columns, terms: LossWeights
) -> _Chunk:
    """Draft distribution, distances and losses of some rows; `logits` is used up."""
    weights = rows.weights[part] if target.inside is None else rows.weights[part] * target.inside
    peak, place = logits.max(-1, keepdim=True)
    top = place.squeeze(1) if columns.draft_ids is None else columns.draft_ids[place.squeeze(1)]
    if columns.log_weights is not None:
        logits += columns.log_weights
        peak, place = logits.max(-1, keepdim=True)
    labels = None if rows.labels is None else rows.labels[part, None]
    zeros = torch.zeros_like(peak)
    label_logits = zeros if labels is None else logits.gather(1, labels)
    mean_logits = _dot(target.probs, logits) if terms.soft_cross_entropy or terms.lk_hybrid else zeros
    log_ratio = None if target.logs is None else logits - target.logs
    probs = torch.softmax(logits, dim=-1, out=logits)
    log_norm = peak - probs.gather(1, place).log()
    hard = zeros if labels is None else log_norm - label_logits
    soft = log_norm - mean_logits / (1.0 if target.reach is None else target.reach)
    reverse_kl = zeros if log_ratio is None else _dot(probs, log_ratio.sub_(log_norm))
    # 1 - l1 / 2 would lose a small overlap's digits
    overlap = torch.minimum(probs, target.probs).sum(-1, keepdim=True) if terms.log_acceptance else None
    keeps_target = terms.needs_target or (target.reach is not None and terms.soft_cross_entropy > 0)
    difference = torch.sub(probs, target.probs, out=None if keeps_target else target.probs)
    l1 = torch.linalg.vector_norm(difference, ord=1, dim=-1, keepdim=True)
    if target.reach is not None:
        l1 = l1 + (1 - target.reach)
    accept = (1 - l1 / 2 if overlap is None else overlap).clamp(min=LEAST_ACCEPTANCE)
    mix = torch.exp(-LK_DECAY * accept)
    loss = terms.cross_entropy * hard + terms.soft_cross_entropy * soft + terms.reverse_kl * reverse_kl + terms.l1 * l1
    loss = loss - terms.log_acceptance * accept.log()
    if terms.lk_hybrid:
        loss = loss + terms.lk_hybrid * (mix * (soft - _entropy(target)) + (1 - mix) * l1 / 2)
    w = weights[:, None]
    return _Chunk(
        probs=probs,
        difference=difference,
        target=target,
        log_ratio=log_ratio,
        labels=labels if terms.cross_entropy else None,
        hard=w * terms.cross_entropy,
        soft=w * (terms.soft_cross_entropy + terms.lk_hybrid * mix),
        moved=w * (terms.l1 + terms.log_acceptance / (2 * accept) + terms.lk_hybrid * (1 - mix) / 2),
        reverse=w * terms.reverse_kl,
        reverse_kl=reverse_kl,
        agrees=top == target.top,
        cross_entropy=(soft if labels is None else hard).squeeze(1),
        l1=l1.squeeze(1),
        loss=weights * loss.squeeze(1),
    )


def _logit_gradient(chunk: _Chunk, terms: LossWeights) -> Tensor:
    """d(weighted loss)/d logits [r, W], written over the chunk's buffers.

    Cross-entropy: probs - onehot or probs - target. L1: 2 probs * (sum(probs * lacking) - lacking), lacking = 1 where
    the draft gives at most what the target does (its mass is small where little is accepted, so digits are kept).
    Reverse KL: probs * (log ratio - reverse KL).
    """
    probs, soft, reach = chunk.probs, chunk.soft, chunk.target.reach
    pulls_only = not (terms.cross_entropy or terms.moves_mass or terms.reverse_kl)
    if pulls_only and reach is None:
        return chunk.difference.mul_(soft)
    factor = chunk.hard + soft
    if terms.moves_mass:
        lacking = chunk.difference.le_(0)
        mass = _dot(probs, lacking)
        factor = torch.addcmul(factor + 2 * chunk.moved * mass, chunk.moved, lacking, value=-2, out=lacking)
    if chunk.log_ratio is not None:
        factor = factor + chunk.reverse * chunk.log_ratio.sub_(chunk.reverse_kl)
    grad = probs.mul_(factor)
    if terms.soft_cross_entropy or terms.lk_hybrid:
        grad.addcmul_(chunk.target.probs, soft if reach is None else soft / reach, value=-1)
    if chunk.labels is not None:
        grad.scatter_add_(1, chunk.labels, -chunk.hard)
    return grad


def _push_back(
    grads: list[Tensor | None], part: slice, grad: Tensor, slope: Tensor | None, head: Tensor, typed: list[Tensor]
) -> None:
    """Add one chunk's logit gradient [r, W] to those of hidden, bias input, bias head and own head."""
    hidden, bias_input, bias_head, _ = typed
    narrow = grad.to(head.dtype)
    if grads[1] is not None:
        _multiply(narrow, bias_head.T, grads[1][part])
    if grads[2] is not None:
        _multiply(narrow.T, bias_input[part].T, grads[2], add=part.start > 0)
    if slope is not None:
        narrow = grad.mul_(slope).to(head.dtype)
    if grads[0] is not None:
        _multiply(narrow, head.T, grads[0][part])
    if grads[3] is not None:
        _multiply(narrow.T, hidden[part].T, grads[3], add=part.start > 0)


def _logits(
    x: Tensor, head: Tensor, softcap: float | None, scratch: _Scratch, *, with_slope: bool
) -> tuple[Tensor, Tensor | None]:
    """Wide logits [r, W] of states [r, D] and, under a soft cap, their slope d capped / d raw."""
    logits = scratch.take("logits", len(x), len(head))
    _multiply(x, head, logits)
    if softcap is None:
        return logits, None
    squashed = logits.div_(softcap).tanh_()
    slope = 1 - squashed.square() if with_slope else None
    return squashed.mul_(softcap), slope


def _multiply(x: Tensor, weight: Tensor, out: Tensor, *, add: bool = False) -> None:
    """out [r, C] = (out +) x [r, D] @ weight [C, D].T, accumulated and returned in out's type."""
    beta = 1 if add else 0
    if x.dtype is out.dtype:
        torch.addmm(out, x, weight.T, beta=beta, out=out)
    elif x.is_cuda:
        product = torch.mm(x, weight.T, out_dtype=out.dtype)
        out.add_(product) if add else out.copy_(product)
    else:
        for start in range(0, out.shape[1], WIDE_COLUMNS):
            columns = out[:, start : start + WIDE_COLUMNS]
            product = x.to(out.dtype) @ weight[start : start + WIDE_COLUMNS].to(out.dtype).T
            columns.add_(product) if add else columns.copy_(product)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Row by row [r, 1], without a product matrix."""
    return torch.einsum("rw,rw->r", a, b)[:, None]


def _entropy(target: _Target) -> Tensor:
    """[r, 1] nats, of the target renormalised over the draft's columns."""
    probs = target.probs if target.reach is None else target.probs / target.reach
    return torch.special.entr(probs).sum(-1, keepdim=True)
