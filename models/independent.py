"""Draft models that are not trained, read tokens only and draft one by one.

A small causal LM with the target's tokenizer (Leviathan et al. 2023, Chen et al. 2023), or the target itself without
the layers behind some depth (self-speculative decoding, Zhang et al. 2023). Both keep keys and values of their own for
all tokens.
"""

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.base import Proposal, stacked
from models.cache import CacheState
from models.sampling import Purpose, Sampler
from models.spec import TargetSpec
from models.target import Target


@dataclass
class IndependentState(CacheState):
    written: int = 0  # tokens behind the committed ones whose keys and values the last proposal left there


class IndependentDrafter:
    """`vocab_size` is the target's: columns that the draft model lacks are never drafted, those beyond are left out."""

    needs_features = False

    def __init__(self, model: Target, num_draft_tokens: int, vocab_size: int) -> None:
        self.model, self.num_draft_tokens, self.vocab_size = model, num_draft_tokens, vocab_size

    def start(self, tokens: Tensor, features: Tensor, counts: Tensor, capacity: int) -> IndependentState:  # noqa: ARG002
        cache = self.model.new_cache(len(tokens), capacity)
        self.model.forward(tokens, cache, with_features=False)
        cache.advance(counts)
        return IndependentState(cache)

    def propose(self, state: IndependentState, last: Tensor, sampler: Sampler, num_draft_tokens: int) -> Proposal:
        committed, drafted, probs, ranked = state.cache.lengths, last[:, None], [], []
        for slot in range(num_draft_tokens):
            hidden = self.model.forward(drafted[:, -1:], state.cache, with_features=False).hidden[:, 0]
            state.cache.advance(torch.ones_like(last))
            logits = self.model.logits(hidden)[:, : self.vocab_size]
            logits = F.pad(logits, (0, self.vocab_size - logits.shape[1]), value=-torch.inf)
            ranked.append(sampler.ranked(logits))
            probs.append(sampler.probs(logits, drafted[:, 1:]))
            token = sampler.draw(probs[-1], committed + 1 + slot, Purpose.draft)
            drafted = torch.cat((drafted, token[:, None]), dim=1)
        state.cache.lengths, state.written = committed, num_draft_tokens
        lengths = torch.full_like(last, num_draft_tokens)
        return Proposal(drafted[:, 1:], torch.stack(probs, dim=1), lengths, ranked=stacked(ranked))

    def advance(self, state: IndependentState, tokens: Tensor, features: Tensor, counts: Tensor) -> None:  # noqa: ARG002
        """The newest draft was never fed: where all were accepted its keys and values are still to be written."""
        committed, written = state.cache.lengths, min(state.written, tokens.shape[1])
        if int(counts.max()) > written:
            state.cache.lengths = committed + written
            self.model.forward(tokens[:, written:], state.cache, with_features=False)
        state.cache.lengths, state.written = committed + counts, 0


class FirstLayersDrafter(IndependentDrafter):
    """The target's first `num_layers` decoder layers, whose output goes through its own final norm and head. `bind`
    must be called before drafting. An engine would share keys and values of these layers with the verification, which
    spares memory and the prompt's second pass, and changes no draft."""

    def __init__(self, num_layers: int, num_draft_tokens: int, spec: TargetSpec) -> None:
        if not 1 <= num_layers < spec.num_layers:
            raise ValueError(
                f"draft=first_layers:{num_layers} needs some of the target's layers, not all: 1..{spec.num_layers - 1}"
            )
        self.num_layers, self.num_draft_tokens, self.vocab_size = num_layers, num_draft_tokens, spec.vocab_size

    def bind(self, target: Target) -> None:
        self.model = first_layers(target, self.num_layers)


def first_layers(target: Target, num_layers: int) -> Target:
    """The same weights without the layers behind the first `num_layers`."""
    cut, backbone = copy.copy(target), copy.copy(target.backbone)
    backbone._modules = dict(backbone._modules)  # a copied module shares them with the original
    backbone.layers = cut.layers = nn.ModuleList(target.layers[:num_layers])
    cut.backbone, cut.layer_ids = backbone, ()
    return cut
