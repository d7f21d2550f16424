"""Is a greedy output the target's own? Equal, or first different where the target itself cannot tell."""

import copy
import math
from typing import Any

import torch

from eval.stats import Pass
from models.target import Target

# Float32 sums in another order move logits by some 1e-5; a gap under this in float64 is no preference.
NEAR_TIE = 1e-4
PROMPTS_PER_NEAR_TIE = 200


def identity_of(target: Target, measured: Pass, reference: Pass) -> dict[str, Any]:
    """Compare token by token. A first divergence counts as a near tie where the target's top-2 logit gap, recomputed
    in float64 at that place, is under 1e-4; at most 1 in 200 prompts may be one."""
    near_ties, differing = 0, []
    for index, (ours, theirs) in enumerate(zip(measured.generations, reference.generations, strict=True)):
        place = first_difference(ours.tokens, theirs.tokens)
        if place is None:
            continue
        gap = top2_gap(target, measured.prompts[index] + ours.tokens[:place])
        near_ties += gap < NEAR_TIE
        if gap >= NEAR_TIE:
            differing.append({"prompt": index, "position": place, "top2_gap": gap})
    allowed = math.ceil(len(measured.generations) / PROMPTS_PER_NEAR_TIE)
    return {
        "num_prompts": len(measured.generations),
        "outputs_identical_to_vanilla": not differing and near_ties <= allowed,
        "near_tie_divergences": near_ties,
        "divergences": differing,
    }


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    """Index of the first differing token; a shorter list differs where it ends."""
    for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return index
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


@torch.inference_mode()
def top2_gap(target: Target, tokens: list[int]) -> float:
    """Difference of the two largest next-token logits after `tokens`, in float64 (a copy of the target, on demand)."""
    model = copy.deepcopy(target.model).double()
    backbone = model.get_decoder()  # type: ignore[operator]
    hidden = backbone(input_ids=torch.tensor([tokens], device=target.device), use_cache=False).last_hidden_state[0, -1]
    logits = hidden @ target.head.double().T
    if target.spec.logit_softcap is not None:
        logits = target.spec.logit_softcap * torch.tanh(logits / target.spec.logit_softcap)
    first, second = logits.topk(2).values.tolist()
    return first - second
