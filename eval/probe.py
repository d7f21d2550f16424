"""Acceptance of a drafter in training: rounds of the real runtime on held-out prompts."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from data.prompts import builtin_prompts, read_prompts
from eval.decode import DecodeConfig, decode
from eval.schedule import FIXED
from eval.stats import acceptance_stats
from eval.subject import load_subject
from eval.tasks import render_prompts
from eval.verify import Rule
from models.sampling import SamplingConfig
from models.target import Target, TargetConfig, TargetIdentity, load_target


@dataclass
class Probe:
    """Called with a checkpoint's folder, it decodes with what is in there and with nothing of the run that wrote it.

    The target is loaded at the first call and kept.
    """

    config: TargetConfig
    identity: TargetIdentity
    device: torch.device
    prompts: list[list[int]]  # token ids
    max_new_tokens: int
    temperature: float

    @cached_property
    def target(self) -> Target:
        return load_target(self.config, self.device, layer_ids=())

    def __call__(self, folder: Path) -> dict[str, float]:
        """Acceptance length pooled over rounds, bonus counted, and conditional acceptance of each draft position."""
        subject = load_subject(str(folder), self.config, self.identity, self.device)
        subject.bind(self.target)
        assert subject.drafter is not None
        config = DecodeConfig(
            max_new_tokens=self.max_new_tokens,
            batch_size=len(self.prompts),
            num_draft_tokens=subject.drafter.num_draft_tokens,
            rule=Rule.ratio,
            schedule=FIXED,
            sampling=SamplingConfig(self.temperature, 0, 1.0, 0.0, 0),
        )
        result = decode(self.target.capturing(subject.layer_ids), subject.drafter, self.prompts, config)
        stats = acceptance_stats(result.generations)
        by_position = {f"conditional_acceptance@{k}": rate for k, rate in enumerate(stats.conditional_acceptance)}
        values = {"acceptance_length": stats.acceptance_length, "rounds": stats.rounds, **by_position}
        return {name: float(value) for name, value in values.items() if value is not None}


def heldout_prompts(
    source: str | None, num_prompts: int, tokenizer: PreTrainedTokenizerBase, thinking: bool | None
) -> list[list[int]]:
    """Token ids of the first prompts of a file, or (None) of the project's own held-out ones. Raises ValueError where
    there are none."""
    if source is None:
        prompts = builtin_prompts(0, num_train=0, num_heldout=num_prompts)
    else:
        prompts = read_prompts(Path(source), split="heldout")[:num_prompts]
    if not prompts:
        raise ValueError(f"probe.prompts={source} with probe.num_prompts={num_prompts} gives no prompt")
    return render_prompts(tokenizer, prompts, thinking)
