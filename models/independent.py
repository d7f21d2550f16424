"""An independent draft model: any small causal LM with the target's tokenizer, drafting token by token. No training.

The baseline of the first papers (Leviathan et al. 2023, Chen et al. 2023). It reads tokens only, and keeps keys and
values of its own for all of them.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from models.base import Proposal, stacked
from models.cache import CacheState
from models.sampling import Purpose, Sampler
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
