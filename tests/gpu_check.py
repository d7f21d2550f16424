"""What only a GPU can settle, from random weights and without a download: `launch/gpu_check.sh`.

Each check prints one line and stands in outputs/gpu_check.json; a failing one stops no other, and any makes the exit
status 1. With `--device cpu --tiny` the same code runs small where there is no GPU.
"""

import argparse
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from data.run import git_commit
from eval.decode import DecodeConfig, decode
from eval.identity import identity_of
from eval.rounds import Generation
from eval.schedule import Schedule, ScheduleName
from eval.stats import Pass, acceptance_stats
from eval.verify import Rule
from models.base import Drafter, Engine
from models.checkpoint import load_drafter
from models.export import export_drafter
from models.files import write_json
from models.sampling import SamplingConfig
from models.spec import TargetSpec
from models.target import Target
from tests.flex_against_dense import SHAPES, check_attention
from tests.gpu_setting import Setting, setting_of
from tests.gpu_steps import check_steps, training_config

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Result:
    name: str
    passed: bool
    seconds: float
    text: str
    figures: dict[str, Any]


Check = Callable[[], tuple[bool, str, dict[str, Any]]]


def run_check(name: str, check: Check) -> Result:
    """Whatever it raises is a failure of this one check."""
    torch.compiler.reset()  # each gets its own graphs: more kinds of one function than torch keeps would run uncompiled
    began = time.perf_counter()
    try:
        passed, text, figures = check()
    except Exception as error:
        logging.getLogger(__name__).exception("%s", name)
        passed, text, figures = False, f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}", {}
    result = Result(name, passed, time.perf_counter() - began, text, figures)
    print(f"{'PASS' if passed else 'FAIL'}  {name}: {text} ({result.seconds:.0f} s)", flush=True)  # noqa: T201
    return result


# ---- the runtime and export


def small_target(device: torch.device) -> Target:
    """Random, float32, of so few tokens that an untrained drafter guesses right now and then."""
    torch.manual_seed(2)
    config = Qwen3Config(
        vocab_size=24,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        eos_token_id=0,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    with device:
        model = Qwen3ForCausalLM(config)
    return Target(model, TargetSpec.from_config(config), (0, 1, 2, 3, 4))


def small_drafter(setting: Setting, target: Target, kind: str) -> Drafter:
    _, model = training_config(replace(setting, is_tiny=True), kind, compiled=False)
    torch.manual_seed(3)
    drafter = model.build(
        target.spec, target_layer_ids=target.layer_ids[: 3 if kind == "eagle3" else 5], mask_token_id=1
    )
    return drafter.to(setting.device).bind(target.embedding, target.head).eval()


def generate(target: Target, drafter: Drafter | None, *, cuda_graphs: bool = False) -> list[Generation]:
    """Greedy, 24 ragged prompts as one batch."""
    config = DecodeConfig(
        max_new_tokens=24,
        batch_size=24,
        num_draft_tokens=0 if drafter is None else drafter.num_draft_tokens,
        rule=Rule.ratio,
        schedule=Schedule(ScheduleName.fixed, 0.0),
        sampling=SamplingConfig(0.0, 0, 1.0, 0.0, 0),
        cuda_graphs=cuda_graphs,
    )
    read = target if drafter is None else target.capturing(drafter.target_layer_ids)
    return decode(read, drafter, prompts(), config).generations


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(2, 24, (3 + index % 6,), generator=generator).tolist() for index in range(24)]


def check_identity(setting: Setting, kind: str) -> tuple[bool, str, dict[str, Any]]:
    """Greedy speculation gives the tokens of plain decoding, and accepts some drafts."""
    target = small_target(setting.device)
    vanilla, drafted = generate(target, None), generate(target, small_drafter(setting, target, kind))
    stats = acceptance_stats(drafted)
    ours, theirs = (Pass(found, 1.0, 0.0, 0.0, about={}, domains=[], prompts=prompts()) for found in (drafted, vanilla))
    found = identity_of(target, ours, theirs)
    text = (
        f"{found['num_prompts']} prompts, {stats.rounds} rounds, {stats.accepted} of {stats.proposed} drafts accepted, "
        f"{len(found['divergences'])} divergences, {found['near_tie_divergences']} near ties"
    )
    return found["outputs_identical_to_vanilla"] and stats.accepted > 0, text, found


def check_graphs(setting: Setting) -> tuple[bool, str, dict[str, Any]]:
    """Greedy speculation by CUDA graphs gives the same rounds; seconds of both, the recording included."""
    target = small_target(setting.device)
    drafter, found, seconds = small_drafter(setting, target, "dspark"), [], {}
    for cuda_graphs in (False, True):
        began = time.perf_counter()
        generations = generate(target, drafter, cuda_graphs=cuda_graphs and setting.is_cuda)
        seconds["with" if cuda_graphs else "without"] = time.perf_counter() - began
        found.append([(g.tokens, g.rounds) for g in generations])
    same = sum(a == b for a, b in zip(*found, strict=True))
    times = f"{seconds['with']:.2f} s, without {seconds['without']:.2f} s"
    text = f"{same} of {len(found[0])} outputs and their rounds equal, {times}"
    return same == len(found[0]), text, {"equal": same, "seconds": seconds}


def check_export(setting: Setting) -> tuple[bool, str, dict[str, Any]]:
    """A drafter on the device, written for an engine and loaded again, drafts the same tokens."""
    target = small_target(setting.device)
    drafter = small_drafter(setting, target, "dspark")
    with tempfile.TemporaryDirectory() as folder:
        export_drafter(drafter, Path(folder), engine=Engine.deepspec, dtype=torch.float32, card="")
        again = load_drafter(Path(folder), target=target.spec).drafter
    again = again.to(setting.device).bind(target.embedding, target.head).eval()
    before, after = ([(g.tokens, g.rounds) for g in generate(target, one)] for one in (drafter, again))
    same = sum(a == b for a, b in zip(before, after, strict=True))
    return same == len(before), f"{same} of {len(before)} outputs and their rounds equal", {"equal": same}


# ---- all of them


def all_checks(setting: Setting, *, compiled: bool) -> Iterator[tuple[str, Check]]:
    for dtype in (torch.bfloat16, torch.float32):
        for shape in SHAPES:
            name = f"flex attention, {shape.name}, {str(dtype).removeprefix('torch.')}"
            yield name, lambda shape=shape, dtype=dtype: check_attention(setting, shape, dtype)
    for kind in ("dspark", "eagle3"):
        for on in (False, True) if compiled else (False,):
            name = f"bf16 steps, {kind}, compile {'on' if on else 'off'}"
            yield name, lambda kind=kind, on=on: check_steps(setting, kind, compiled=on)
    for kind in ("dspark", "eagle3"):
        yield f"greedy identity, {kind}", lambda kind=kind: check_identity(setting, kind)
    yield "cuda graphs", lambda: check_graphs(setting)
    yield "export round trip", lambda: check_export(setting)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a machine without a GPU")
    parser.add_argument("--no-compile", action="store_true", help="leave out the steps with compile=true")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "gpu_check.json")
    options = parser.parse_args()
    setting = setting_of(options.device, tiny=options.tiny)
    began = time.perf_counter()
    results = [run_check(name, check) for name, check in all_checks(setting, compiled=not options.no_compile)]
    failed = [result.name for result in results if not result.passed]
    about = {
        "device": torch.cuda.get_device_name(setting.device) if setting.is_cuda else "cpu",
        "torch": torch.__version__,
        "git_commit": git_commit(),
        "seconds": time.perf_counter() - began,
        "failed": failed,
        "checks": [vars(result) for result in results],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.out, about)
    print(f"{len(results) - len(failed)} of {len(results)} checks passed in {about['seconds']:.0f} s: {options.out}")  # noqa: T201
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
