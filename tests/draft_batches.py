"""A hand-made training batch with everything that goes wrong in masks, and drafters whose every weight matters."""

from typing import Any

import torch
from torch import Tensor

from models.base import DraftBatch, Drafter, SampledVocabulary
from models.dspark import DSpark
from models.losses import sample_vocabulary, tokens_of
from models.sampling import Sampler, SamplingConfig
from models.target import Target, TargetConfig
from tests.conftest import build_dspark

LENGTH = 24
# Row 0: one document. Row 1: two documents, a gap in the first one's mask, padding. Row 2: one document, padding.
DOCUMENTS = [[0] * 24, [0] * 11 + [1] * 9 + [-1] * 4, [0] * 17 + [-1] * 7]
# The second document is supervised from its first token, which no block of the first one may take for a label.
UNSUPERVISED = [{0, 1, 2}, {0, 1, 2, 7, 20, 21, 22, 23}, {0, 1, 2, 17, 18, 19, 20, 21, 22, 23}]
# 1 apart, just before a gap, at a document's end, in the second document, at the row's end, unused.
ANCHORS = [[3, 4, 12, 20, 22], [3, 6, 9, 13, 17], [5, 6, 14, 15, -1]]


def mixed_batch(drafter: Drafter, *, seed: int = 0) -> DraftBatch:
    """Random tokens and features, every last hidden row stored."""
    generator = torch.Generator().manual_seed(seed)
    spec, shape = drafter.spec, (len(DOCUMENTS), LENGTH)
    documents = torch.tensor(DOCUMENTS)
    positions = [[row[:i].count(document) for i, document in enumerate(row)] for row in DOCUMENTS]
    supervised = [[i not in gaps for i in range(LENGTH)] for gaps in UNSUPERVISED]
    num_features = len(drafter.target_layer_ids) * spec.hidden_size
    return DraftBatch(
        input_ids=torch.randint(spec.vocab_size, shape, generator=generator),
        position_ids=torch.tensor(positions),
        document_ids=documents,
        loss_mask=torch.tensor(supervised),
        features=torch.randn(*shape, num_features, generator=generator),
        last_hidden=torch.randn(shape[0] * LENGTH, spec.hidden_size, generator=generator),
        last_hidden_ids=torch.arange(shape[0] * LENGTH).view(shape),
        anchors=torch.tensor(ANCHORS),
    )


def draw_vocabulary(batch: DraftBatch, num_drawn: int) -> SampledVocabulary:
    """As the trainer does for a step of this one batch of a tiny target."""
    return sample_vocabulary(tokens_of([batch], 55), num_drawn, torch.Generator().manual_seed(0))


def ragged_state(drafter: Drafter, counts: list[int]) -> tuple[Any, Tensor, Tensor]:
    """Prompts of `counts` tokens in one batch; returns the drafter's state, tokens [B, S] and features."""
    batch = mixed_batch(drafter, seed=2)
    tokens, features = batch.input_ids[: len(counts)], batch.features[: len(counts)]
    width = max(counts)
    state = drafter.start(tokens[:, :width], features[:, :width], torch.tensor(counts), 64)
    return state, tokens, features


def lively_dspark(target: Target, config: TargetConfig, *, seed: int = 0, **changes: Any) -> DSpark:
    return enliven(build_dspark(target, config, seed=seed, **changes), seed=seed)


@torch.no_grad()
def enliven(drafter: Any, *, seed: int = 0, scale: float = 0.3) -> Any:
    """Weights far from zero, norms and biases too: a fresh drafter's outputs hardly depend on its context."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(scale * noise if parameter.dim() > 1 else parameter + 0.3 * noise)
    return drafter.eval()


def greedy_sampler(num_requests: int) -> Sampler:
    return Sampler(SamplingConfig(0.0, 0, 1.0, 0.0, 0), torch.arange(num_requests))


def stochastic_sampler(request_ids: Tensor) -> Sampler:
    return Sampler(SamplingConfig(1.0, 0, 1.0, 0.0, 5), request_ids)
