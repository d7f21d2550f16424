"""Is a greedy output the target's own? Equal, or first different where the target itself cannot tell."""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from eval.stats import Pass
from models.target import Target

# Float32 sums in another order move logits by some 1e-5; a gap under this in float64 is no preference.
NEAR_TIE = 1e-4
PROMPTS_PER_NEAR_TIE = 200


def identity_of(target: Target, measured: Pass, reference: Pass) -> dict[str, Any]:
    """`identity_from` of their `divergences`."""
    return identity_from(len(measured.generations), divergences(target, measured, reference))


def divergences(target: Target, measured: Pass, reference: Pass) -> list[dict[str, Any]]:
    """Of every output that is not the reference's: its prompt, where they first differ, and the gap of the target's two
    best logits there, recomputed in float64."""
    found = []
    for index, (ours, theirs) in enumerate(zip(measured.generations, reference.generations, strict=True)):
        place = first_difference(ours.tokens, theirs.tokens)
        if place is not None:
            gap = top2_gap(target, measured.prompts[index] + ours.tokens[:place])
            found.append({"prompt": index, "position": place, "top2_gap": gap})
    return found


def is_near_tie(divergence: Mapping[str, Any]) -> bool:
    """The target itself cannot tell: a gap under 1e-4."""
    return divergence["top2_gap"] < NEAR_TIE


def identity_from(num_prompts: int, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """At most 1 in 200 prompts may diverge at a near tie, none elsewhere."""
    differing = [one for one in found if not is_near_tie(one)]
    near_ties = len(found) - len(differing)
    allowed = math.ceil(num_prompts / PROMPTS_PER_NEAR_TIE)
    return {
        "num_prompts": num_prompts,
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
    """Difference of the two largest next-token logits after `tokens`, in float64 (a copy of the target, on demand); of
    a quantised one, which has no such form, as it computes."""
    is_whole = all(parameter.is_floating_point() for parameter in target.model.parameters())
    model = copy.deepcopy(target.model).double() if is_whole else target.model
    backbone = model.get_decoder()  # type: ignore[operator]
    hidden = backbone(input_ids=torch.tensor([tokens], device=target.device), use_cache=False).last_hidden_state[0, -1]
    logits = hidden.double() @ target.head.double().T
    if target.spec.logit_softcap is not None:
        logits = target.spec.logit_softcap * torch.tanh(logits / target.spec.logit_softcap)
    first, second = logits.topk(2).values.tolist()
    return first - second
