"""The vocabulary and head of a drafter that may have its own: fewer tokens than the target's, rows that are trained.

Published checkpoints keep the vocabulary twice: `d2t` holds offsets (target token minus draft token), `t2d` says which
of the target's tokens are in it.
"""

from typing import Self

import torch
from torch import Tensor

from models.base import Drafter
from models.packed import Linear
from models.vocab_loss import DraftHead


class VocabularyDrafter(Drafter):
    """A drafter over all of the target's tokens or `draft_vocab_size` of them, with the target's rows or its own."""

    d2t: Tensor  # [W] int64, with a draft vocabulary
    t2d: Tensor  # [V] bool, with a draft vocabulary
    lm_head: Linear | None

    def add_head(self, draft_vocab_size: int | None, *, own_head: bool) -> None:
        """Called once, when the drafter is built."""
        self.draft_vocab_size = draft_vocab_size
        width = draft_vocab_size or self.spec.vocab_size
        self.lm_head = Linear(self.spec.hidden_size, width, bias=False) if own_head else None
        if draft_vocab_size is not None:
            # Invalid until a vocabulary is chosen or loaded: `check_weights` refuses them.
            self.register_buffer("d2t", torch.full((width,), -1))
            self.register_buffer("t2d", torch.zeros(self.spec.vocab_size, dtype=torch.bool))
        self._frozen_rows: Tensor | None = None  # of the target's head, for a draft vocabulary without its own head

    @property
    def draft_ids(self) -> Tensor | None:
        """Target token [W] of each draft token; None where they are the same."""
        if self.draft_vocab_size is None:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def use_draft_vocabulary(self, token_ids: Tensor) -> None:
        if self.draft_vocab_size is None or len(token_ids) != self.draft_vocab_size:
            raise ValueError(f"model.draft_vocab_size={self.draft_vocab_size}, got a vocabulary of {len(token_ids)}")
        self.d2t.copy_(token_ids - torch.arange(len(token_ids), device=token_ids.device))
        self.t2d.copy_(torch.isin(torch.arange(len(self.t2d), device=token_ids.device), token_ids))
        self.check_weights()

    def check_weights(self) -> None:
        ids, self._frozen_rows = self.draft_ids, None
        if ids is None:
            return
        if int(ids.min()) < 0 or int(ids.max()) >= self.spec.vocab_size or len(ids.unique()) < len(ids):
            raise ValueError(
                f"d2t maps draft tokens to {int(ids.min())}..{int(ids.max())} with "
                f"{len(ids) - len(ids.unique())} repeats; it must hold offsets to distinct ids of the target's "
                f"{self.spec.vocab_size} tokens"
            )
        if not torch.equal(self.t2d.nonzero().squeeze(1), ids.sort().values):
            raise ValueError("t2d and d2t name different draft tokens: t2d must be true exactly at index + d2t[index]")

    def copy_from_bound(self) -> None:
        if self.lm_head is not None:
            ids = self.draft_ids
            with torch.no_grad():
                self.lm_head.weight.copy_(self.head if ids is None else self.head[ids])

    def draft_head(self) -> DraftHead | None:
        """None where the draft uses the target's head as it is."""
        ids = self.draft_ids
        if ids is None and self.lm_head is None:
            return None
        if ids is None:
            ids = torch.arange(self.spec.vocab_size, device=self.head.device)
        if self.lm_head is not None:
            return DraftHead(self.lm_head.weight, ids)
        if self._frozen_rows is None:  # copied once: a draft vocabulary may have 32,000 rows
            self._frozen_rows = self.head[ids]
        return DraftHead(self._frozen_rows, ids)

    def bind(self, embedding: Tensor, head: Tensor) -> Self:
        self._frozen_rows = None
        return super().bind(embedding, head)

    def engine_tensors(self, *, always_head: bool) -> dict[str, Tensor]:
        """All weights under published names. The head's rows, and d2t and t2d where they are fewer than the target's,
        are among them unless they are the target's own, or where `always_head`."""
        tensors = {name: tensor for name, tensor in self.state_dict().items() if name not in ("d2t", "t2d")}
        own = self.draft_head()
        if own is None:
            return tensors | ({"lm_head.weight": self.head} if always_head else {})
        if len(own.ids) == self.spec.vocab_size:  # engines take a whole vocabulary for one in the target's order
            return tensors | {"lm_head.weight": own.weight[own.ids.argsort()]}
        return tensors | {"lm_head.weight": own.weight, "d2t": self.d2t, "t2d": self.t2d}
