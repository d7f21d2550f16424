"""Terms of a loss, what is supervised and weighs how much, columns that stand for the vocabulary, sums for metrics."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from models.base import DraftBatch, SampledVocabulary


@dataclass(kw_only=True)
class LossWeights:
    """Weight of each term of a row's loss; zero costs nothing. Part of drafters' configs, and not frozen like these:
    OmegaConf cannot fill a frozen part."""

    cross_entropy: float = 0.0  # against the labels, nats
    soft_cross_entropy: float = 0.0  # against the target's distribution, nats: forward KL plus the target's entropy
    reverse_kl: float = 0.0  # KL(draft || target), nats
    l1: float = 0.0  # ||draft - target||_1, twice the total variation
    log_acceptance: float = 0.0  # -log(accept rate), nats (LK alpha, arXiv 2602.23881)
    lk_hybrid: float = 0.0  # c KL(target || draft) + (1 - c) total variation, c = exp(-3 accept rate) held constant

    @property
    def needs_target(self) -> bool:
        """Whether the gradient takes the target's probabilities by themselves, not only their distance."""
        others = self.cross_entropy or self.reverse_kl or self.moves_mass
        return bool((self.soft_cross_entropy and others) or self.lk_hybrid)

    @property
    def moves_mass(self) -> bool:
        """Whether a term differentiates the L1 distance."""
        return bool(self.l1 or self.log_acceptance or self.lk_hybrid)


def check_terms(terms: LossWeights) -> None:
    """Raises ValueError on a negative weight, and where no term has one."""
    for name, value in vars(terms).items():
        if value < 0:
            raise ValueError(f"model.loss.{name} must be at least 0 (0 = off), got {value}")
    if not any(vars(terms).values()):
        raise ValueError("model.loss has no term: give at least one of its weights a value above 0")


def check_sampled_vocabulary(num_drawn: int | None) -> None:
    """Raises ValueError unless a positive number of columns or None, the whole vocabulary."""
    if num_drawn is not None and num_drawn < 1:
        raise ValueError(f"model.sampled_vocabulary must be positive or null (exact), got {num_drawn}")


def tokens_of(batches: Iterable[DraftBatch], vocab_size: int) -> Tensor:
    """Which tokens [V] bool the documents hold, in host memory."""
    found = torch.zeros(vocab_size, dtype=torch.bool)
    for batch in batches:
        found[batch.host.input_ids[batch.host.document_ids >= 0]] = True
    return found


def sample_vocabulary(sure: Tensor, num_drawn: int, generator: torch.Generator) -> SampledVocabulary:
    """The tokens of `sure` [V] bool, and up to `num_drawn` of the others without replacement."""
    others = (~sure).nonzero().squeeze(1)
    order = torch.randperm(len(others), generator=generator)[:num_drawn]
    drawn = others[order.to(others.device)]
    ids = torch.cat((sure.nonzero().squeeze(1), drawn))
    log_weights = torch.zeros(len(ids), device=sure.device)
    if len(drawn):
        log_weights[-len(drawn) :] = torch.tensor(len(others) / len(drawn)).log()
    ids, order = ids.sort()
    return SampledVocabulary(ids, log_weights[order])


def find_chains(batch: DraftBatch, num_steps: int) -> tuple[Tensor, Tensor]:
    """Of a batch in host memory: positions [B, N] of chains with a supervised step, -1 = unused; which steps [B, N, K].

    Step s of the chain at t predicts token t + 2 + s, and is supervised where that token is, in t's document.
    """
    length, device = batch.input_ids.shape[1], batch.input_ids.device
    labels = torch.arange(length, device=device)[:, None] + 2 + torch.arange(num_steps, device=device)  # [S, K]
    inside = labels < length
    places = labels.clamp(max=length - 1).flatten()
    shape = (len(batch.input_ids), length, num_steps)
    documents = batch.document_ids[:, places].view(shape)
    supervised = batch.loss_mask[:, places].view(shape) & inside & (documents == batch.document_ids[..., None])
    stored = batch.last_hidden_ids[:, (labels - 1).clamp(max=length - 1).flatten()].view(shape) >= 0
    assert bool(stored[supervised].all()), "a supervised token has no stored last hidden state"
    used = supervised.any(-1)  # [B, S]
    num_chains = int(used.sum(1).max())
    # A stable sort brings the used positions of each row to the front, in order.
    starts = (~used).long().argsort(dim=1, stable=True)[:, :num_chains]
    unused = ~used.gather(1, starts)
    supervised = supervised.gather(1, starts[..., None].expand(-1, -1, num_steps))
    return starts.masked_fill(unused, -1), supervised


def position_decay(num_slots: int, decay: float, device: torch.device) -> Tensor:
    """Static slot weights exp(-k / decay) [K] (DFlash section 3); decay 0 stands for none, all slots weigh 1."""
    slots = torch.arange(num_slots, device=device, dtype=torch.float32)
    return torch.exp(-slots / decay) if decay else torch.ones_like(slots)


def published_decay(num_draft_tokens: int) -> float:
    """DFlash's decay for blocks of K drafts: 4, 5 and 7 are published for 7, 9 and 15, here joined by a line."""
    return 1 + 3 * (num_draft_tokens + 1) / 8


def dynamic_weights(cross_entropy: Tensor, mask: Tensor, smoothing: float) -> Tensor:
    """D-PACE position weights (arXiv 2605.18810, eqs. 7 and 8): how much the expected number of accepted drafts of a
    block hangs on each slot, by the draft's own probability of the labels.

    cross_entropy [R] nats of the supervised slots of mask [B, A, K] -> weights [R], not differentiated.
    """
    probs = torch.zeros(mask.shape, dtype=cross_entropy.dtype, device=mask.device)
    probs[mask] = (1 - smoothing) * torch.exp(-cross_entropy.detach()) + smoothing
    reached = probs.cumprod(-1)  # an unsupervised slot ends its block
    return reached.flip(-1).cumsum(-1).flip(-1)[mask]


def by_slot(values: Tensor, slot_ids: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    """(sum, count) of values [R] for each slot that slot_ids [R] name, [num_slots] each, float64, unweighted."""
    zeros = torch.zeros(num_slots, dtype=torch.float64, device=slot_ids.device)
    counts = zeros.index_add(0, slot_ids, torch.ones_like(slot_ids, dtype=torch.float64))
    return zeros.index_add(0, slot_ids, values.detach().double()), counts


def sum_of(values: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(sum, count) of a metric, detached, float64 so that counts stay exact."""
    values = values.detach().double()
    if weights is None:
        return values.sum(), torch.tensor(float(values.numel()), dtype=torch.float64, device=values.device)
    weights = weights.detach().double()
    return (values * weights).sum(), weights.sum()
