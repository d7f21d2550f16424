"""Our drafters against numbers recorded from the public reference implementation, case folder by case folder.

Cases live outside the repository: GOLDEN names their folder, ../shared/golden by default. Each holds config.json,
model.safetensors and expected.json; batch.safetensors and expected.safetensors where training numbers were recorded.
"""

import json
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eval.decode import DecodeConfig, Generation, decode
from eval.schedule import Schedule, ScheduleName
from eval.stats import acceptance_stats
from eval.verify import Rule
from models.base import DraftBatch
from models.block import BlockDrafter
from models.checkpoint import DEEPSPEC_ARCHITECTURES, load_drafter
from models.dspark import DSpark
from models.sampling import SamplingConfig
from models.target import Target, TargetConfig, load_target
from tests.training_logits import TrainingLogits, training_logits

REPOSITORY = Path(__file__).parents[1]
GOLDEN = REPOSITORY / os.environ.get("GOLDEN", "../shared/golden")  # an absolute GOLDEN replaces the repository
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/expected.json"))
TRAINED_CASES = [name for name in CASES if (GOLDEN / name / "expected.safetensors").is_file()]
THRESHOLD_KEY = "confidence_threshold_0.6"
# Float32 sums in another order; the recorded logits reach 1e1.
LOGITS = {"rtol": 1e-4, "atol": 1e-4}

pytestmark = pytest.mark.skipif(not CASES, reason=f"no golden cases under {GOLDEN}; name their folder with GOLDEN")


@cache
def expected(case: str) -> dict[str, Any]:
    return json.loads((GOLDEN / case / "expected.json").read_text())


@cache
def numbers(case: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / case / "expected.safetensors")


@cache
def target_of(layer_ids: tuple[int, ...]) -> Target:
    config = TargetConfig("golden", str(GOLDEN / "target"), layer_ids, None, "float32", None, None)
    return load_target(config, torch.device("cpu"))


def load_case(case: str) -> Any:
    """A fresh drafter bound to the golden target. Skips kinds that this project does not have (yet)."""
    architectures = json.loads((GOLDEN / case / "config.json").read_text())["architectures"]
    if not set(architectures) & set(DEEPSPEC_ARCHITECTURES):
        # every kind of drafter has one yaml, named like a part of its architecture
        kinds = [path.stem for path in (REPOSITORY / "conf/model").glob("*.yaml")]
        ours = [kind for kind in kinds if any(kind in name.lower() for name in architectures)]
        if ours and os.environ.get("CI") == "true":
            pytest.fail(f"{case}: this project has drafter {ours[0]}, but load_drafter does not know {architectures}")
        pytest.skip(f"{case}: unknown drafter kind {architectures}")
    drafter = load_drafter(GOLDEN / case).drafter
    target = target_of(tuple(drafter.target_layer_ids))
    return drafter.bind(target.embedding, target.head)


@pytest.mark.parametrize("case", TRAINED_CASES)
def test_target_features_equal_the_recorded_ones(case: str) -> None:
    layer_ids = json.loads((GOLDEN / case / "config.json").read_text())["target_layer_ids"]
    target = target_of(tuple(layer_ids))
    batch = load_file(GOLDEN / case / "batch.safetensors")
    output = target.forward_whole(batch["input_ids"])
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(output.features[real], batch["target_hidden_states"][real], **LOGITS)
    torch.testing.assert_close(output.hidden[real], batch["target_last_hidden_states"][real], **LOGITS)


@cache
def trained(case: str) -> tuple[DSpark, DraftBatch, TrainingLogits]:
    """One training forward and backward at the recorded loss weights; gradients are left on the drafter."""
    drafter = load_case(case)
    if not isinstance(drafter, BlockDrafter):
        pytest.skip(f"{case}: training numbers are compared here for block drafters only")
    hyper, decay = expected(case)["hyper"], expected(case)["loss_decay_gamma"]
    weights = {"cross_entropy_weight": hyper["ce"], "l1_weight": hyper["l1"], "confidence_weight": hyper["conf"]}
    drafter.config = replace(drafter.config, decay=decay, **weights)
    drafter.decay = decay
    batch = golden_batch(case)
    logits = training_logits(drafter, batch)
    total_loss(drafter, batch, logits).backward()
    return drafter, batch, logits


def golden_batch(case: str) -> DraftBatch:
    batch = load_file(GOLDEN / case / "batch.safetensors")
    shape = batch["input_ids"].shape
    return DraftBatch(
        input_ids=batch["input_ids"],
        position_ids=torch.arange(shape[1]).expand(shape),
        document_ids=torch.where(batch["attention_mask"].bool(), 0, -1),
        loss_mask=batch["loss_mask"] > 0.5,
        features=batch["target_hidden_states"],
        last_hidden=batch["target_last_hidden_states"].flatten(0, 1),
        last_hidden_ids=torch.arange(shape.numel()).view(shape),
        anchors=torch.where(numbers(case)["block_keep_mask"], numbers(case)["anchor_positions"], -1),
    )


def total_loss(drafter: DSpark, batch: DraftBatch, logits: TrainingLogits) -> Tensor:
    denominators = drafter.denominators(batch)
    numerators = logits.loss.numerators
    return torch.stack([numerators[term] / (denominators[term] + 1e-6) for term in numerators]).sum()


@pytest.mark.parametrize("case", TRAINED_CASES)
def test_loss_and_every_term_equal_the_reference(case: str) -> None:
    drafter, batch, logits = trained(case)
    hyper, recorded, metrics = expected(case)["hyper"], numbers(case), logits.loss.metrics
    ours = {"loss": total_loss(drafter, batch, logits)}
    terms = {"ce_loss": ("cross_entropy", "ce"), "l1_loss": ("l1", "l1"), "confidence_loss": ("confidence_bce", "conf")}
    for name, (metric, weight) in terms.items():
        if hyper[weight] > 0:  # the reference leaves out a term without weight
            ours[f"{name}_num"], ours[f"{name}_den"] = metrics[metric]
    assert len(ours) >= 3
    for name, value in ours.items():
        torch.testing.assert_close(value.detach().float(), recorded[name], rtol=1e-4, atol=0, msg=f"{case}: {name}")


@pytest.mark.parametrize("case", TRAINED_CASES)
def test_supervision_equals_the_reference(case: str) -> None:
    _, _, logits = trained(case)
    recorded = numbers(case)
    kept = recorded["block_keep_mask"]
    assert torch.equal(logits.mask[kept], recorded["eval_mask"][kept])
    assert not logits.mask[~kept].any()
    assert torch.equal(logits.labels, recorded["target_ids"][logits.mask])


@pytest.mark.parametrize("case", TRAINED_CASES)
def test_logits_equal_the_reference(case: str) -> None:
    _, _, logits = trained(case)
    recorded = {
        name: numbers(case).get(name) for name in ("draft_logits", "aligned_target_logits", "confidence_logits")
    }
    assert (recorded["confidence_logits"] is None) == (logits.confidence is None)
    ours = zip((logits.draft, logits.target, logits.confidence), recorded.items(), strict=True)
    for value, (name, reference) in ours:
        if value is not None:
            torch.testing.assert_close(value, reference[logits.mask], **LOGITS, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("case", TRAINED_CASES)
def test_gradients_equal_the_reference(case: str) -> None:
    drafter, _, _ = trained(case)
    recorded = {name[5:]: value for name, value in numbers(case).items() if name.startswith("grad.")}
    parameters = dict(drafter.named_parameters())
    assert set(parameters) == set(recorded)
    for name, reference in recorded.items():
        error = (parameters[name].grad - reference).norm() / reference.norm()
        assert error < 1e-3, f"{case}: gradient of {name} is {error:.1e} off"


def decode_case(case: str, *, batch_size: int, threshold: float | None) -> list[Generation]:
    """Greedy decoding of the recorded prompts, cut to the recorded number of tokens.

    The reference looks at its limit before a round, by position, so it runs one more where exactly max_new_tokens are
    out: one token more than it allows gives the same rounds.
    """
    drafter, recorded = load_case(case), expected(case)["decode"]
    target = target_of(tuple(drafter.target_layer_ids))
    assert set(target.spec.eos_token_ids) == set(recorded["stop_token_ids"])
    schedule = Schedule(ScheduleName.fixed, 0.0) if threshold is None else Schedule(ScheduleName.confidence, threshold)
    config = DecodeConfig(
        max_new_tokens=recorded["max_new_tokens"] + 1,
        batch_size=batch_size,
        num_draft_tokens=drafter.num_draft_tokens,
        rule=Rule.ratio,
        schedule=schedule,
        sampling=SamplingConfig(recorded["temperature"], 0, 1.0, 0.0, 0),
    )
    generations = decode(target, drafter, [sample["prompt"] for sample in recorded["samples"]], config).generations
    for generation in generations:
        generation.tokens = generation.tokens[: recorded["max_new_tokens"]]
    return generations


def rounds_of(generation: Generation) -> tuple[list[int], list[int]]:
    return [r.accepted + r.bonus for r in generation.rounds], [r.proposed for r in generation.rounds]


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("case", CASES)
def test_greedy_decoding_equals_the_reference(case: str, batch_size: int) -> None:
    generations = decode_case(case, batch_size=batch_size, threshold=None)
    recorded = expected(case)["decode"]
    for index, (ours, sample) in enumerate(zip(generations, recorded["samples"], strict=True)):
        assert ours.tokens == sample["output"], f"{case}: output of prompt {index}"
        assert rounds_of(ours) == (sample["acceptance_lengths"], sample["proposal_lengths"]), f"{case}: prompt {index}"
    mean = acceptance_stats(generations).acceptance_length
    assert mean == pytest.approx(recorded["mean_acceptance_length"], rel=1e-12)


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("case", [name for name in CASES if THRESHOLD_KEY in expected(name)["decode"]])
def test_confidence_schedule_equals_the_reference(case: str, batch_size: int) -> None:
    generations = decode_case(case, batch_size=batch_size, threshold=float(THRESHOLD_KEY.rpartition("_")[2]))
    recorded = expected(case)["decode"]
    for ours, sample, rounds in zip(generations, recorded["samples"], recorded[THRESHOLD_KEY], strict=True):
        assert ours.tokens == sample["output"]  # the schedule changes the rounds, never the text
        assert rounds_of(ours) == (rounds["acceptance_lengths"], rounds["proposal_lengths"])
