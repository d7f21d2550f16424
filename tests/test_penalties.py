"""Penalties on what was said before: as transformers applies them, and the same for target and drafters."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from eval.decode import decode
from eval.verify import Rule
from models.independent import IndependentDrafter
from models.ngram import NgramDrafter
from models.sampling import Sampler, SamplingConfig, SeenTokens
from models.target import Target, TargetConfig
from models.trees import TreePolicy
from tests.chains import lively_eagle3
from tests.conftest import build_drafter, dflash_config
from tests.draft_batches import enliven, lively_dspark
from tests.test_decode import K, config_of, texts

PENALTIES = [(1.4, 0.0), (1.0, 0.8), (0.7, -0.5), (1.3, 1.2)]


def sampling_of(repetition: float, presence: float, temperature: float = 0.0) -> SamplingConfig:
    return SamplingConfig(temperature, 0, 1.0, 0.0, 3, repetition, presence)


def penalised_slowly(
    logits: Tensor, prompt: list[int], output: list[int], repetition: float, presence: float
) -> Tensor:
    """One slot [V]."""
    seen = torch.tensor([prompt + output])
    found = RepetitionPenaltyLogitsProcessor(repetition)(seen, logits[None].clone())[0]  # type: ignore[arg-type]
    for token in set(output):
        found[token] -= presence
    return found


@pytest.mark.parametrize(("repetition", "presence"), PENALTIES)
def test_every_slot_is_penalised_by_its_own_past(repetition: float, presence: float) -> None:
    generator = torch.Generator().manual_seed(0)
    prompts, outputs = [[3, 4, 4], [9, 1, 0]], [[5, 3], [2]]
    seen = SeenTokens.of_prompts(torch.tensor(prompts), torch.tensor([3, 2]), 20)  # the 0 is padding
    seen.add(torch.tensor([[5, 3], [2, 17]]), torch.tensor([2, 1]))
    drafted = torch.randint(20, (2, 4), generator=generator)
    logits = torch.randn(2, 5, 20, generator=generator)
    config = sampling_of(repetition, presence, 1.0)
    sampler = Sampler(config, torch.arange(2), seen)
    found = sampler.probs(logits, drafted)
    prompts[1] = [9, 1]
    for row in range(2):
        for slot in range(5):
            output = outputs[row] + drafted[row, :slot].tolist()
            expected = penalised_slowly(logits[row, slot], prompts[row], output, repetition, presence).softmax(-1)
            torch.testing.assert_close(found[row, slot], expected)
            alone = sampler.probs(logits[:, slot], drafted[:, :slot])[row]
            torch.testing.assert_close(alone, expected)
    columns = torch.tensor([1, 2, 3, 5, 9, 17])
    reduced = sampler.probs(logits[:, 4][:, columns], drafted, columns=columns)
    for row in range(2):
        output = outputs[row] + drafted[row].tolist()
        whole = penalised_slowly(logits[row, 4], prompts[row], output, repetition, presence)
        torch.testing.assert_close(reduced[row], whole[columns].softmax(-1))


@pytest.mark.parametrize("repetition", [1.4, 0.8])
def test_a_repetition_penalty_gives_the_outputs_of_transformers(
    tiny_target: Target, tiny_target_config: TargetConfig, tiny_prompts: list[list[int]], repetition: float
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target_config.path, dtype=torch.float32).eval()
    config = config_of(sampling=sampling_of(repetition, 0.0), max_new_tokens=24)
    for prompt, generation in zip(
        tiny_prompts, decode(tiny_target, None, tiny_prompts, config).generations, strict=True
    ):
        ids, options = torch.tensor([prompt]), {"do_sample": False, "max_new_tokens": 24}
        output = model.generate(ids, attention_mask=torch.ones_like(ids), repetition_penalty=repetition, **options)
        assert output[0, len(prompt) :].tolist() == generation.tokens


def drafters(target: Target, config: TargetConfig) -> dict[str, tuple[Any, TreePolicy | None]]:
    eagle3 = lively_eagle3(target, config)
    return {
        "dspark": (lively_dspark(target, config), None),
        "dflash": (enliven(build_drafter(dflash_config(), target, config)), None),
        "eagle3": (eagle3, None),
        "eagle3_reduced": (lively_eagle3(target, config, draft_vocab_size=30, own_head=True), None),
        "tree": (eagle3, TreePolicy(3, K, 10)),
        "independent": (IndependentDrafter(target, K, target.spec.vocab_size), None),
        "ngram": (NgramDrafter(K), None),
    }


KINDS = ["dspark", "dflash", "eagle3", "eagle3_reduced", "tree", "independent", "ngram"]


@pytest.mark.parametrize("kind", KINDS)
def test_speculation_with_penalties_gives_the_vanilla_sample(
    tiny_target: Target, tiny_target_config: TargetConfig, tiny_prompts: list[list[int]], kind: str
) -> None:
    """Greedily, and by the match rule, whose noise decides: any other past behind a slot would show."""
    drafter, tree = drafters(tiny_target, tiny_target_config)[kind]
    prompts = tiny_prompts[:5]
    for repetition, presence in PENALTIES[2:]:
        for temperature, rule in ((0.0, Rule.ratio), (1.0, Rule.match)):
            sampling = sampling_of(repetition, presence, temperature)
            config = config_of(sampling=sampling, max_new_tokens=16, rule=rule, batch_size=3)
            vanilla = decode(tiny_target, None, prompts, config).generations
            assert texts(decode(tiny_target, drafter, prompts, replace(config, tree=tree)).generations) == texts(
                vanilla
            )


def test_a_draft_model_equal_to_the_target_is_believed_in_full(
    tiny_target: Target, tiny_prompts: list[list[int]]
) -> None:
    """Only if its probabilities are penalised as the target's are, slot by slot."""
    drafter = IndependentDrafter(tiny_target, K, tiny_target.spec.vocab_size)
    config = config_of(sampling=sampling_of(1.3, 0.7, 1.0), max_new_tokens=30)
    rounds = [r for g in decode(tiny_target, drafter, tiny_prompts, config).generations for r in g.rounds]
    assert sum(r.accepted for r in rounds) > 0.99 * sum(r.proposed for r in rounds)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repetition_penalty": 0.0}, r"sampling\.repetition_penalty must be > 0 \(1 = off\), got 0\.0"),
        ({"presence_penalty": 2.5}, r"sampling\.presence_penalty must be in \[-2, 2\] \(0 = off\), got 2\.5"),
    ],
)
def test_penalties_out_of_range_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingConfig(1.0, 0, 1.0, 0.0, 0, **changes)
