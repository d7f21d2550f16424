"""EAGLE-3 by its definition, one chain and one token at a time, and the logits of a training forward by chain."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from models import eagle3
from models.base import DraftBatch, DraftLoss
from models.eagle3 import Eagle3, find_chains
from models.target import Target, TargetConfig
from tests.conftest import build_drafter, eagle3_config
from tests.draft_batches import enliven
from tests.training_logits import rows_by_total

Chain = tuple[int, int, int]  # row, position t of the first pair, step s: predicts token t + 2 + s


def lively_eagle3(target: Target, config: TargetConfig, *, seed: int = 0, **changes: Any) -> Eagle3:
    """Smaller weights than a block's: a chain feeds rounding back to itself, and sharp attention multiplies it."""
    return enliven(build_drafter(eagle3_config(**changes), target, config, seed=seed), seed=seed, scale=0.15)


def gemma_eagle3(target: Target, config: TargetConfig, **changes: Any) -> Eagle3:
    """For a target that scales its embedding and caps its logits."""
    spec = replace(target.spec, embedding_scale=8.0, logit_softcap=3.0)
    like = SimpleNamespace(spec=spec, embedding=target.embedding, head=target.head)
    return lively_eagle3(like, config, **changes)  # type: ignore[arg-type]


def supervised_chains(batch: DraftBatch, num_steps: int) -> list[Chain]:
    """Double loop: the token that a step predicts exists, in the chain's own document, and is supervised."""
    num_rows, length = batch.input_ids.shape
    chains = []
    for row in range(num_rows):
        for start in range(length):
            for step in range(num_steps):
                label = start + 2 + step
                if label < length and batch.document_ids[row, label] == batch.document_ids[row, start]:
                    chains += [(row, start, step)] if batch.loss_mask[row, label] else []
    return chains


# ---- the definition


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def turned(heads: Tensor, position: int, base: float) -> Tensor:
    """heads [H, d]: dimensions i and i + d/2 rotated together by position / base^(2i/d)."""
    half = heads.shape[-1] // 2
    angles = position * base ** -(torch.arange(half) / half)
    first, second = heads[:, :half], heads[:, half:]
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


@dataclass
class SlowEagle3:
    """Computes with the drafter's parameters, but with none of its code."""

    drafter: Eagle3

    def norm(self, x: Tensor, name: str) -> Tensor:
        return normed(x, self.drafter.get_parameter(f"{name}.weight"), self.drafter.spec.rms_norm_eps)

    def layer(self, name: str) -> Tensor:
        return self.drafter.get_parameter(f"layers.0.{name}.weight")

    def fuse(self, features: Tensor) -> Tensor:
        """features [L*D] -> [D]."""
        if self.drafter.config.norm_before_fc:
            features = self.norm(features, "input_norm")
        if self.drafter.config.fc_norm:
            parts = features.view(-1, self.drafter.spec.hidden_size)
            features = torch.cat([self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)])
        return self.drafter.fc.weight @ features

    def pair(self, token: int, hidden: Tensor) -> Tensor:
        embedded = self.drafter.embedding[token] * self.drafter.spec.embedding_scale
        embedded = self.norm(embedded, "layers.0.input_layernorm")
        return torch.cat((embedded, self.norm(hidden, "layers.0.hidden_norm")))

    def heads(self, pair: Tensor, part: str, position: int) -> Tensor:
        """Queries, keys or values [H, d] of a pair."""
        heads = (self.layer(f"self_attn.{part}_proj") @ pair).view(-1, self.drafter.spec.head_dim)
        if part == "v":
            return heads
        if self.drafter.config.qk_norm:
            heads = self.norm(heads, f"layers.0.self_attn.{part}_norm")
        return turned(heads, position, self.drafter.spec.rope_parameters["rope_theta"])

    def step(self, pair: Tensor, hidden: Tensor, memory: list[tuple[Tensor, Tensor]], position: int) -> Tensor:
        """One pair through the layer; its keys and values join the memory."""
        memory.append((self.heads(pair, "k", position), self.heads(pair, "v", position)))
        queries = self.heads(pair, "q", position)
        keys, values = (torch.stack(parts) for parts in zip(*memory, strict=True))  # [n, H_kv, d]
        group = queries.shape[0] // keys.shape[1]
        mixed = []
        for head, query in enumerate(queries):
            scores = keys[:, head // group] @ query / query.shape[0] ** 0.5
            mixed.append(scores.softmax(0) @ values[:, head // group])
        if self.drafter.config.norm_before_residual:
            hidden = self.norm(hidden, "layers.0.hidden_norm")
        x = hidden + self.layer("self_attn.o_proj") @ torch.cat(mixed)
        inner = self.norm(x, "layers.0.post_attention_layernorm")
        gate = self.layer("mlp.gate_proj") @ inner
        return x + self.layer("mlp.down_proj") @ (gate * gate.sigmoid() * (self.layer("mlp.up_proj") @ inner))

    def states(self, batch: DraftBatch, row: int, start: int) -> Iterator[Tensor]:
        """Normed states [D] of the steps of the chain at `start`, as far as its document has tokens."""
        tokens, documents = batch.input_ids[row].tolist(), batch.document_ids[row].tolist()
        first = documents.index(documents[start])
        fused = [self.fuse(batch.features[row, position]) for position in range(first, start + 1)]
        memory: list[tuple[Tensor, Tensor]] = []
        for index, hidden in enumerate(fused[:-1]):  # pairs of positions before the chain's own
            pair = self.pair(tokens[first + index + 1], hidden)
            memory.append((self.heads(pair, "k", index), self.heads(pair, "v", index)))
        hidden = fused[-1]
        for step in range(self.drafter.num_draft_tokens):
            newest = start + 1 + step  # the true token, whatever the draft says
            if newest >= len(tokens) or documents[newest] != documents[start]:
                return
            hidden = self.step(self.pair(tokens[newest], hidden), hidden, memory, start - first + step)
            state = self.norm(hidden, "norm")
            yield state
            if self.drafter.config.norm_output:
                hidden = state

    def own_logits(self, state: Tensor) -> Tensor:
        head = self.drafter.head if self.drafter.draft_ids is None else self.drafter.head[self.drafter.draft_ids]
        return self.capped((head if self.drafter.lm_head is None else self.drafter.lm_head.weight) @ state)

    def capped(self, logits: Tensor) -> Tensor:
        cap = self.drafter.spec.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def loss(self, batch: DraftBatch, chain: Chain, state: Tensor) -> Tensor:
        """Soft cross-entropy over the draft vocabulary; none where the target's first choice is not in it."""
        row, start, step = chain
        target = self.capped(self.drafter.head @ batch.last_hidden[batch.last_hidden_ids[row, start + 1 + step]])
        ids = torch.arange(len(target)) if self.drafter.draft_ids is None else self.drafter.draft_ids
        if target.argmax() not in ids:
            return 0 * state.sum()
        return -(target[ids].softmax(0) * self.own_logits(state).log_softmax(0)).sum()


# ---- the training forward


@dataclass(frozen=True)
class ChainOutput:
    """What each supervised chain's step was trained with."""

    states: dict[Chain, Tensor]  # [D] after the final norm
    logits: dict[Chain, Tensor]  # [W]
    loss: DraftLoss


def chain_output(drafter: Eagle3, batch: DraftBatch) -> ChainOutput:
    """Run `drafter(batch)` once and read states and logits out of the calls that turn them into losses."""
    with mock.patch.object(eagle3, "vocab_loss", wraps=eagle3.vocab_loss) as spy:
        loss = drafter(batch)
    starts, supervised = find_chains(batch, drafter.num_draft_tokens)
    states, logits = {}, {}
    options, steps = spy.call_args.kwargs, [rows for call in spy.call_args_list for rows, _ in rows_by_total(call)]
    head = options["head"] if options["draft_head"] is None else options["draft_head"].weight
    for step, hidden in enumerate(steps):
        chains = [(row, int(starts[row, place]), step) for row, place in supervised[..., step].nonzero().tolist()]
        assert len(chains) == len(hidden)
        states |= dict(zip(chains, hidden, strict=True))
        capped = SlowEagle3(drafter).capped((hidden @ head.T).detach())
        logits |= dict(zip(chains, capped, strict=True))
    return ChainOutput(states, logits, loss)
