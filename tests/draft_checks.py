"""Checks that every drafter has to pass: a step along the gradient helps, and greedy output is the target's own."""

import torch

from data.collate import collate
from data.dataset import TrainingData
from data.store import FeatureStore
from eval.decode import DecodeConfig, decode
from eval.rounds import Generation
from eval.schedule import Schedule, ScheduleName
from eval.verify import Rule
from models.base import DraftBatch, Drafter
from models.sampling import SamplingConfig
from models.target import Target

IDENTITY = {"name": "tiny", "config_sha256": "c" * 64, "weights_sha256": "w" * 64}


def stored_batch(store: FeatureStore, layer_ids: tuple[int, ...]) -> DraftBatch:
    data = TrainingData(store, layer_ids=layer_ids, num_anchors=4, seed=0)
    return collate([data[index, 0] for index in range(4)], packing=False)


def total_loss(drafter: Drafter, batch: DraftBatch) -> torch.Tensor:
    loss, denominators = drafter(batch), drafter.denominators(batch)
    return torch.stack([loss.numerators[term] / denominators[term] for term in loss.numerators]).sum()


def check_a_step_helps(drafter: Drafter, batch: DraftBatch) -> None:
    """Every weight has a finite gradient, and a small step along it lowers the loss."""
    loss = total_loss(drafter, batch)
    loss.backward()
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name
            assert parameter.grad.any(), f"{name} is never trained"
        norm = torch.stack([p.grad.norm() for p in drafter.parameters() if p.grad is not None]).norm()
        for parameter in drafter.parameters():
            parameter -= 1e-2 * parameter.grad / norm
        assert total_loss(drafter, batch) < loss


def greedy(target: Target, drafter: Drafter | None, prompts: list[list[int]]) -> list[Generation]:
    config = DecodeConfig(
        max_new_tokens=12,
        batch_size=4,
        num_draft_tokens=4,
        rule=Rule.ratio,
        schedule=Schedule(ScheduleName.fixed, 0.0),
        sampling=SamplingConfig(0.0, 0, 1.0, 0.0, 0),
    )
    return decode(target, drafter, prompts, config).generations
