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
import torch.nn.functional as F
from accelerate import Accelerator
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from eval.config import EvalConfig
from eval.decode import DecodeConfig, decode
from eval.harness import Harness
from eval.markdown import render
from eval.rounds import Generation
from eval.schedule import Schedule, ScheduleName
from eval.stats import acceptance_stats
from eval.subject import Subject
from eval.tasks import Protocol
from eval.verify import Rule
from models.base import DraftBatch, Drafter
from models.block import BlockDrafter
from models.checkpoint import load_drafter
from models.config import to_dataclass
from models.eagle3 import Eagle3
from models.losses import LossWeights
from models.published import known_architecture
from models.sampling import SamplingConfig
from models.target import Target, TargetConfig, load_spec, load_target
from tests.test_conf import compose_and_type
from tests.training_logits import TrainingLogits, training_logits

REPOSITORY = Path(__file__).parents[1]
GOLDEN = REPOSITORY / os.environ.get("GOLDEN", "../shared/golden")  # an absolute GOLDEN replaces the repository
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/expected.json"))
TRAINED_CASES = [name for name in CASES if (GOLDEN / name / "expected.safetensors").is_file()]
CHAIN_CASES = [
    name
    for name in TRAINED_CASES
    if "eagle" in json.loads((GOLDEN / name / "config.json").read_text())["architectures"][0].lower()
]
BLOCK_CASES = [name for name in TRAINED_CASES if name not in CHAIN_CASES]
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


TARGET = TargetConfig("golden", str(GOLDEN / "target"), None, None, "float32", None, None, None, 1, None)


@cache
def target_of(layer_ids: tuple[int, ...]) -> Target:
    return load_target(TARGET, torch.device("cpu"), layer_ids=layer_ids)


def load_case(case: str) -> Any:
    """A fresh drafter bound to the golden target. Skips kinds that this project does not have (yet)."""
    config = json.loads((GOLDEN / case / "config.json").read_text())
    if known_architecture(config) is None:
        architectures = config["architectures"]
        # every kind of drafter has one yaml, named like a part of its architecture
        kinds = [path.stem for path in (REPOSITORY / "conf/model").glob("*.yaml")]
        ours = [kind for kind in kinds if any(kind in name.lower() for name in architectures)]
        if ours and os.environ.get("CI") == "true":
            pytest.fail(f"{case}: this project has drafter {ours[0]}, but load_drafter does not know {architectures}")
        pytest.skip(f"{case}: unknown drafter kind {architectures}")
    drafter = load_drafter(GOLDEN / case, target=load_spec(TARGET)).drafter
    target = target_of(drafter.target_layer_ids)
    return drafter.bind(target.embedding, target.head)


@pytest.mark.parametrize("case", TRAINED_CASES)
def test_target_features_equal_the_recorded_ones(case: str) -> None:
    target = target_of(load_case(case).target_layer_ids)
    batch = load_file(GOLDEN / case / "batch.safetensors")
    output = target.forward_whole(batch["input_ids"])
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(output.features[real], batch["target_hidden_states"][real], **LOGITS)
    torch.testing.assert_close(output.hidden[real], batch["target_last_hidden_states"][real], **LOGITS)


@cache
def trained(case: str) -> tuple[BlockDrafter, DraftBatch, TrainingLogits]:
    """One training forward and backward at the recorded loss weights; gradients are left on the drafter."""
    drafter = load_case(case)
    assert isinstance(drafter, BlockDrafter)
    hyper = expected(case)["hyper"]
    weights: dict[str, Any] = {"loss": LossWeights(cross_entropy=hyper["ce"], l1=hyper["l1"])}
    if hasattr(drafter.config, "confidence_weight"):
        weights["confidence_weight"] = hyper["conf"]
    drafter.config = replace(drafter.config, **weights)
    drafter.decay = expected(case)["loss_decay_gamma"] or 0.0  # the reference takes null for no decay
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
        anchors=anchors_of(case),
    )


def anchors_of(case: str) -> Tensor:
    """Recorded for block drafters; a chain starts everywhere."""
    recorded = numbers(case)
    if "anchor_positions" not in recorded:
        return torch.empty(3, 0, dtype=torch.int64)
    return torch.where(recorded["block_keep_mask"], recorded["anchor_positions"], -1)


def total_loss(drafter: BlockDrafter, batch: DraftBatch, logits: TrainingLogits) -> Tensor:
    denominators = drafter.denominators(batch)
    numerators = logits.loss.numerators
    return torch.stack([numerators[term] / (denominators[term] + 1e-6) for term in numerators]).sum()


@pytest.mark.parametrize("case", BLOCK_CASES)
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


@pytest.mark.parametrize("case", BLOCK_CASES)
def test_supervision_equals_the_reference(case: str) -> None:
    _, _, logits = trained(case)
    recorded = numbers(case)
    kept = recorded["block_keep_mask"]
    assert torch.equal(logits.mask[kept], recorded["eval_mask"][kept])
    assert not logits.mask[~kept].any()
    assert torch.equal(logits.labels, recorded["target_ids"][logits.mask])


@pytest.mark.parametrize("case", BLOCK_CASES)
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


@cache
def trained_chain(case: str) -> tuple[Eagle3, Tensor]:
    """The reference's EAGLE-3 loss out of ours, gradients left on the drafter.

    The reference supervises step s at t where token t + s is supervised and is not the last, we where token t + 2 + s
    is: a mask moved by two is its supervision, which then reaches one token past a row. It divides every step by padded
    batch size times length.
    """
    drafter, batch = load_case(case), golden_batch(case)
    drafter.num_draft_tokens = expected(case)["hyper"]["ttt"]
    drafter.config = replace(drafter.config, step_decay=expected(case)["step_loss_decay"])
    num_rows, length = batch.input_ids.shape
    ends = (batch.document_ids >= 0).sum(1)
    supervised = batch.loss_mask.clone()
    supervised[torch.arange(num_rows), ends - 1] = False
    batch = DraftBatch(**{name: widened(value, length) for name, value in batch.tensors().items()})
    batch.loss_mask = F.pad(supervised, (2, 0))[:, : length + 1]
    batch.document_ids = torch.where(torch.arange(length + 1) <= ends[:, None], 0, -1)
    loss = sum(drafter(batch).numerators.values()) / (num_rows * length)
    assert isinstance(loss, Tensor)
    loss.backward()
    return drafter, loss.detach()


def widened(value: Tensor, length: int) -> Tensor:
    """One more column where a tensor has one per position."""
    if value.dim() < 2 or value.shape[1] != length:
        return value
    return torch.cat((value, torch.zeros_like(value[:, :1])), dim=1)


@pytest.mark.parametrize("case", CHAIN_CASES)
def test_chain_loss_equals_the_reference(case: str) -> None:
    torch.testing.assert_close(trained_chain(case)[1], numbers(case)["loss"], rtol=1e-4, atol=0)


@pytest.mark.parametrize("case", TRAINED_CASES)
def test_gradients_equal_the_reference(case: str) -> None:
    drafter: Drafter = trained_chain(case)[0] if case in CHAIN_CASES else trained(case)[0]
    recorded = {
        name.removeprefix("grad.").replace("midlayer.", "layers.0."): value
        for name, value in numbers(case).items()
        if name.startswith("grad.")
    }
    parameters = dict(drafter.named_parameters())
    assert set(parameters) - {"lm_head.weight"} == set(recorded) - {"lm_head.weight"}  # frozen in the reference
    for name, reference in recorded.items():
        error = (parameters[name].grad - reference).norm() / reference.norm()
        assert error < 1e-3, f"{case}: gradient of {name} is {error:.1e} off"


def decode_case(case: str, *, batch_size: int, threshold: float | None) -> list[Generation]:
    """Greedy decoding of the recorded prompts, cut to the recorded number of tokens.

    The reference looks at its limit before a round, by position, so it runs one more where exactly max_new_tokens are
    out: one token more than it allows gives the same rounds.
    """
    drafter, recorded = load_case(case), expected(case)["decode"]
    target = target_of(drafter.target_layer_ids)
    assert set(target.spec.eos_token_ids) == set(recorded["stop_token_ids"])
    schedule = Schedule(ScheduleName.fixed, 0.0) if threshold is None else Schedule(ScheduleName.confidence, threshold)
    config = DecodeConfig(
        max_new_tokens=recorded["max_new_tokens"] + 1,
        batch_size=batch_size,
        num_draft_tokens=max(n for sample in recorded["samples"] for n in sample["proposal_lengths"]),
        rule=Rule.ratio,
        schedule=schedule,
        sampling=SamplingConfig(recorded["temperature"], 0, 1.0, 0.0, 0),
    )
    generations = decode(target, drafter, [sample["prompt"] for sample in recorded["samples"]], config).generations
    for generation in generations:
        generation.tokens = generation.tokens[: recorded["max_new_tokens"]]
    return generations


def check_rounds(ours: Generation, recorded: dict[str, list[int]], max_new_tokens: int) -> None:
    """Every recorded round; one more of ours only where the record stops because exactly its limit is out.

    Some records have lists of different lengths: the proposals then say how long each was, but not for which rounds.
    """
    accepted, proposed = recorded["acceptance_lengths"], recorded["proposal_lengths"]
    more = ours.rounds[len(accepted) :]
    assert not more or (len(more) == 1 and 1 + sum(accepted) == max_new_tokens)
    ours.rounds = ours.rounds[: len(accepted)]
    assert [r.accepted + r.bonus for r in ours.rounds] == accepted
    if len(proposed) == len(accepted):
        assert [r.proposed for r in ours.rounds] == proposed
    else:
        assert {r.proposed for r in ours.rounds} == set(proposed)


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("case", CASES)
def test_greedy_decoding_equals_the_reference(case: str, batch_size: int) -> None:
    generations = decode_case(case, batch_size=batch_size, threshold=None)
    recorded = expected(case)["decode"]
    for index, (ours, sample) in enumerate(zip(generations, recorded["samples"], strict=True)):
        assert ours.tokens == sample["output"], f"{case}: output of prompt {index}"
        check_rounds(ours, sample, recorded["max_new_tokens"])
    mean = acceptance_stats(generations).acceptance_length
    assert mean == pytest.approx(recorded["mean_acceptance_length"], rel=1e-12)


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("case", [name for name in CASES if THRESHOLD_KEY in expected(name)["decode"]])
def test_confidence_schedule_equals_the_reference(case: str, batch_size: int) -> None:
    generations = decode_case(case, batch_size=batch_size, threshold=float(THRESHOLD_KEY.rpartition("_")[2]))
    recorded = expected(case)["decode"]
    for ours, sample, rounds in zip(generations, recorded["samples"], recorded[THRESHOLD_KEY], strict=True):
        assert ours.tokens == sample["output"]  # the schedule changes the rounds, never the text
        check_rounds(ours, rounds, recorded["max_new_tokens"])


# Recorded by the evaluator that protocol=deepspec counts as; another project's runs end at their limit.
DEEPSPEC_CASES = [name for name in CASES if "DFlashDraftModel" not in (GOLDEN / name / "config.json").read_text()]


@pytest.mark.parametrize("case", CASES)
def test_the_harness_prints_the_references_mean_acceptance_length(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under protocol=deepspec, but for its temperature and length: what was recorded is greedy, and short."""
    recorded = expected(case)["decode"]
    config = golden_eval(tmp_path, recorded)
    if case in DEEPSPEC_CASES:
        config = replace(config, protocol=Protocol.deepspec)
    monkeypatch.setattr("eval.harness.under_protocol", lambda config, target: (config, target))
    drafter = load_case(case)
    tokenizer = golden_tokenizer()
    subject = Subject(case, drafter, str(drafter.slot_layout), case)
    report = Harness(config, target_of(()), TARGET, tokenizer, Accelerator()).run(subject)
    row = next(row for row in report["rows"] if row["drafter"] == case)
    assert row["acceptance_length"] == pytest.approx(recorded["mean_acceptance_length"], rel=1e-12)
    assert row["outputs_identical_to_vanilla"] and f"{recorded['mean_acceptance_length']:.2f}" in render(report)
    kept = next((tmp_path / "eval" / "passes").glob(f"{case}_main_*"))
    outputs = [g["tokens"] for file in sorted(kept.iterdir()) for g in json.loads(file.read_text())["generations"]]
    assert outputs == [sample["output"] for sample in recorded["samples"]]


def golden_eval(folder: Path, recorded: dict[str, Any]) -> EvalConfig:
    """conf/eval.yaml's options for the recorded prompts, which are written as words."""
    prompts = folder / "recorded.jsonl"
    lines = [json.dumps({"turns": [" ".join(map(str, sample["prompt"]))]}) for sample in recorded["samples"]]
    prompts.write_text("\n".join(lines) + "\n")
    options = [f"tasks=[{prompts}]", f"output_dir={folder}", f"max_new_tokens={recorded['max_new_tokens']}"]
    options += ["target=custom", "target.path=x", "name=x", "batch_size=5", "baselines=[]", "check_transformers=0"]
    composed = compose_and_type("eval", options)
    return to_dataclass(EvalConfig, composed, section="eval")


def golden_tokenizer() -> PreTrainedTokenizerFast:
    """A word for every id of the golden target, and a template that adds nothing."""
    words = Tokenizer(WordLevel({str(index): index for index in range(97)}))
    words.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    return tokenizer
