"""The acceptance probe of training: the real runtime on what a checkpoint holds."""

import json
from pathlib import Path

import pytest
import torch

from eval.decode import DecodeConfig, decode
from eval.probe import Probe, heldout_prompts
from eval.schedule import Schedule, ScheduleName
from eval.stats import acceptance_stats
from eval.verify import Rule
from models.checkpoint import save_drafter
from models.dspark import DSpark
from models.sampling import SamplingConfig
from models.target import Target, TargetConfig, TargetIdentity
from tests.conftest import build_dspark, tiny_tokenizer


@pytest.fixture
def probe(tiny_target_config: TargetConfig, tiny_identity: TargetIdentity, tiny_prompts: list[list[int]]) -> Probe:
    device = torch.device("cpu")
    return Probe(tiny_target_config, tiny_identity, device, tiny_prompts, max_new_tokens=12, temperature=0.0)


def save(drafter: DSpark, folder: Path, identity: TargetIdentity) -> Path:
    save_drafter(drafter, folder, target=vars(identity))
    return folder


def test_a_probe_is_the_acceptance_of_greedy_decoding(
    tmp_path: Path, probe: Probe, tiny_dspark: DSpark, tiny_target: Target, tiny_identity: TargetIdentity
) -> None:
    found = probe(save(tiny_dspark, tmp_path, tiny_identity))
    schedule, sampling = Schedule(ScheduleName.fixed, 0), SamplingConfig(0.0, 0, 1.0, 0.0, 0)
    config = DecodeConfig(12, 3, 4, Rule.ratio, schedule, sampling)  # in other batches: greedy does not care
    stats = acceptance_stats(decode(tiny_target, tiny_dspark, probe.prompts, config).generations)
    assert found["acceptance_length"] == stats.acceptance_length and found["rounds"] == stats.rounds > 10
    by_position = [found[f"conditional_acceptance@{k}"] for k in range(4)]
    assert by_position == stats.conditional_acceptance


def test_a_probe_sees_what_training_gained(
    tmp_path: Path, probe: Probe, tiny_dspark: DSpark, tiny_target: Target, tiny_identity: TargetIdentity
) -> None:
    fresh = build_dspark(tiny_target, probe.config)
    before, after = (
        probe(save(drafter, tmp_path / name, tiny_identity))["acceptance_length"]
        for name, drafter in (("before", fresh), ("after", tiny_dspark))
    )
    assert 1 <= before < after - 0.3


def test_held_out_prompts_come_from_a_file_or_from_the_projects_own(tmp_path: Path) -> None:
    path = tmp_path / "heldout.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n} 2"}) + "\n" for n in range(5)))
    tokenizer = tiny_tokenizer()
    prompts = heldout_prompts(str(path), 3, tokenizer, None)
    expected = [tokenizer(f"<user> {n} 2 <end> <assistant>", add_special_tokens=False).input_ids for n in range(3)]
    assert prompts == expected
    assert len(heldout_prompts(None, 4, tokenizer, None)) == 4
    with pytest.raises(ValueError, match=r"probe.num_prompts=0 gives no prompt"):
        heldout_prompts(None, 0, tokenizer, None)
