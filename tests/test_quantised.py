"""A drafter is tried on the quantised target that will be served, and no other script takes that for the target."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from models.checkpoint import check_target, save_drafter
from models.dspark import DSpark
from models.target import Target, TargetConfig, TargetIdentity, load_target, load_tokenizer, quantization_name
from tests.test_scripts import Script, fails, prompts_file, script  # noqa: F401 (fixtures)

FOUR_BITS: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
OPTION = "target.quantization={quant_method: bitsandbytes, load_in_4bit: true, bnb_4bit_quant_type: nf4}"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_quantised_target_computes_with_its_own_weights(
    tiny_target: Target, tiny_target_config: TargetConfig, tiny_prompts: list[list[int]], device: str
) -> None:
    config = replace(tiny_target_config, quantization=FOUR_BITS)
    target = load_target(config, torch.device(device))
    assert any(type(module).__name__ == "Linear4bit" for module in target.model.modules())
    prompts = torch.tensor([prompt[:8] for prompt in tiny_prompts if len(prompt) >= 8][:4])
    features = [one.forward_whole(prompts.to(one.device)).features.cpu() for one in (tiny_target, target)]
    error = ((features[0] - features[1]).norm() / features[0].norm()).item()
    assert 1e-4 < error < 0.5, "another target, but not a wholly different one"
    assert quantization_name(config) == "bitsandbytes (load_in_4bit=True, bnb_4bit_quant_type=nf4)"
    assert quantization_name(tiny_target_config) is None


@pytest.mark.parametrize("as_files", [False, True])
def test_eval_measures_on_the_quantised_target(
    script: Script,
    prompts_file: Path,
    tmp_path: Path,
    tiny_dspark: DSpark,
    tiny_target_config: TargetConfig,
    tiny_identity: TargetIdentity,
    as_files: bool,
) -> None:
    """Quantised while it is loaded, or by its files, which no longer are those that the drafter was trained for."""
    save_drafter(tiny_dspark, tmp_path / "drafter", target=asdict(tiny_identity))
    common = [f"output_dir={tmp_path}", f"draft={tmp_path / 'drafter'}", f"tasks=[{prompts_file}]", "num_prompts=4"]
    common += ["max_new_tokens=12", "batch_size=4", "baselines=[]", "check_transformers=2", "temperature=[0,1]"]
    if as_files:
        config = replace(tiny_target_config, quantization=FOUR_BITS)
        load_target(config, torch.device("cpu")).model.save_pretrained(tmp_path / "target")
        load_tokenizer(tiny_target_config).save_pretrained(tmp_path / "target")
        shown = script("eval", *common, target=tmp_path / "target")
    else:
        shown = script("eval", *common, OPTION)
    report = json.loads((tmp_path / "eval" / "report.json").read_text())
    assert "load_in_4bit=True" in report["quantization"] and "bitsandbytes" in shown
    assert report["rounds"] > 0 and report["transformers_generate"]["num_prompts"] == 2
    assert "bitsandbytes" in (tmp_path / "eval" / "report.html").read_text()


def test_a_whole_target_of_other_weights_is_still_refused(
    tmp_path: Path, tiny_dspark: DSpark, tiny_target_config: TargetConfig, tiny_identity: TargetIdentity
) -> None:
    save_drafter(tiny_dspark, tmp_path, target=asdict(tiny_identity))
    other = replace(tiny_identity, weights_sha256="0" * 64)
    with pytest.raises(ValueError, match="weights_sha256"):
        check_target(tmp_path, tiny_dspark, tiny_target_config, other)
    check_target(tmp_path, tiny_dspark, replace(tiny_target_config, quantization=FOUR_BITS), other)


@pytest.mark.parametrize("name", ["generate", "extract", "train", "export"])
def test_other_scripts_refuse_to_quantise(fails: Callable[..., str], name: str, tmp_path: Path) -> None:
    error = fails(name, f"output_dir={tmp_path}", OPTION)
    assert "target.quantization={'quant_method': 'bitsandbytes'" in error and "is for eval.py" in error


def test_a_quantisation_that_transformers_does_not_know_is_named(fails: Callable[..., str], tmp_path: Path) -> None:
    error = fails("eval", f"output_dir={tmp_path}", "draft=vanilla", "target.quantization={quant_method: nonsense}")
    assert "target.quantization={'quant_method': 'nonsense'}" in error


def test_the_plain_target_is_loaded_whole(tiny_target_config: TargetConfig) -> None:
    ours = load_target(tiny_target_config, torch.device("cpu")).model.state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(tiny_target_config.path, dtype=torch.float32).state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
