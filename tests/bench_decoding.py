"""Greedy decoding on the embedded target against a loop over single sequences; rows of `make bench`.

ours: this runtime, at the number of draft tokens that num_draft_tokens=auto chooses. dense: the loop of
tests/huggingface_loop.py with the same drafter and weights, which drafts all its tokens. floor: transformers' own
`generate`, one sequence after another, without a drafter. Outputs are asserted equal. float32, two threads; the fastest
of several rounds in which all take turns. Needs the demo's drafter (`make demo`).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from data.prompts import builtin_prompts
from eval.autotune import choose_num_draft_tokens
from eval.decode import DecodeConfig, decode
from eval.schedule import FIXED
from eval.tasks import render_prompts
from eval.verify import Rule
from models.checkpoint import load_drafter
from models.drafter_files import resolve_folder
from models.dspark import DSpark
from models.sampling import GREEDY
from models.target import Target, load_target, load_tokenizer
from tests.bench_extract import embedded_target
from tests.bench_setting import fastest
from tests.huggingface_loop import decode_greedily

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "outputs" / "demo" / "checkpoints"
NUM_PROMPTS, NUM_TOKENS, ROUNDS = 8, 48, 2
BATCHES = (1, 8)


def settings(batch_size: int, num_draft_tokens: int, *, max_new_tokens: int = NUM_TOKENS) -> DecodeConfig:
    return DecodeConfig(
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        num_draft_tokens=num_draft_tokens,
        rule=Rule.ratio,
        schedule=FIXED,
        sampling=GREEDY,
    )


def measure() -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of the bench, and what they mean as lines."""
    if not DEMO.is_dir():
        return [], [f"decoding: not measured, {DEMO} holds no drafter (make demo)"]
    config = embedded_target()
    target = load_target(config, torch.device("cpu"))
    drafter = load_drafter(resolve_folder(str(DEMO)), target=target.spec).drafter
    assert isinstance(drafter, DSpark)
    drafter.bind(target.embedding, target.head)
    target = target.capturing(drafter.target_layer_ids)
    model = AutoModelForCausalLM.from_pretrained(config.path, dtype=torch.float32)
    texts = builtin_prompts(0, num_train=0, num_heldout=NUM_PROMPTS)
    prompts = render_prompts(load_tokenizer(config), texts, config.thinking)
    return compare(target, drafter, model, prompts)


def compare(
    target: Target, drafter: DSpark, model: Any, prompts: list[list[int]]
) -> tuple[list[dict[str, Any]], list[str]]:
    outputs: dict[str, list[list[int]]] = {}
    full, stops = drafter.num_draft_tokens, target.spec.eos_token_ids

    def ours(name: str, batch_size: int, num_draft_tokens: int) -> Callable[[], None]:
        asked = settings(batch_size, num_draft_tokens)

        def work() -> None:
            outputs[name] = [g.tokens for g in decode(target, drafter, prompts, asked).generations]

        return work

    def loop(name: str, num_draft_tokens: int) -> Callable[[], None]:
        options = {"max_new_tokens": NUM_TOKENS, "num_draft_tokens": num_draft_tokens, "eos_token_ids": stops}

        def work() -> None:
            outputs[name] = [decode_greedily(model, drafter, prompt, **options) for prompt in prompts]

        return work

    def generate() -> None:
        options = {"do_sample": False, "max_new_tokens": NUM_TOKENS, "eos_token_id": list(stops), "pad_token_id": 0}
        found = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            whole = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            found.append(whole[0, len(prompt) :].tolist())
        outputs["generate"] = found

    works = {"generate": generate, "loop": loop("loop", 0), f"loop K={full}": loop(f"loop K={full}", full)}
    lines, chosen = [], {}
    for batch_size in BATCHES:
        asked = settings(batch_size, full, max_new_tokens=NUM_TOKENS // 2)
        choice = choose_num_draft_tokens(target, drafter, prompts, asked)
        chosen[batch_size] = choice.num_draft_tokens
        for length in sorted({0, chosen[batch_size], full}):
            name = f"batch {batch_size} K={length}"
            works[name] = ours(name, batch_size, length)
    seconds = fastest(works, ROUNDS)
    count = sum(len(tokens) for tokens in outputs["generate"])
    for name, tokens in outputs.items():
        assert tokens == outputs["generate"], f"{name} gives other tokens than generate"
    lines += [f"decode: {name:<14}{count / value:8.1f} tokens/s" for name, value in seconds.items()]
    lines.append(f"decode: the loop without drafts has {seconds['generate'] / seconds['loop']:.2f} of generate's speed")
    rows = []
    for batch_size, length in chosen.items():
        best = seconds[f"batch {batch_size} K={length}"]
        rows.append({"name": f"decode, batch {batch_size}", "ours_s": best, "dense_s": seconds[f"loop K={full}"]})
        rows[-1] |= {"floor_s": seconds["generate"], "ours_peak_mb": None, "dense_peak_mb": None}
        lines.append(
            f"decode: batch {batch_size} at K={length} (auto) has {rows[-1]['dense_s'] / best:.2f} of the loop's speed "
            f"with the same drafter, {seconds['loop'] / best:.2f} of the loop's without, "
            f"{seconds[f'batch {batch_size} K=0'] / best:.2f} of this runtime's own without"
        )
    return rows, lines


if __name__ == "__main__":
    torch.set_num_threads(2)
    print("\n".join(measure()[1]))  # noqa: T201
