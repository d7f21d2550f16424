"""Why an acceptance length is no higher: likely causes by what was measured, and what to try next.

The right token of every rejected draft is known, and whether the drafter had it among its likeliest 16. So what is
missing to accepting whole blocks parts in two: what better choices among those would add, and what only a drafter that
knows more would. A drafter that was trained here has its last figures on the training answers beside.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from data.run import read_lines
from data.tracking import METRICS, PROBE_PREFIX

LAST_LINES = 10  # of a training run's metrics, whose mean is where it ended
LOST = 0.2  # share of the drafts accepted in training that must be accepted in decoding, or something is broken
IGNORANT = 0.3  # of the rounds in which a drafter that works has the first draft's token among 16
FORGOTTEN = 0.75  # and that share, or it does not carry over to other texts
WORSE_TASK = 0.8  # a task's tokens a round, of all tasks'
FALLING = 0.7  # the last draft's conditional acceptance, of the first one's
LONG_BLOCK = 0.5  # share of blocks accepted to their end from which longer ones would pay
FEWEST_ROUNDS = 50


@dataclass(frozen=True)
class Finding:
    """`at_stake`: tokens a round that something measured has more, None where there is nothing to compare with."""

    cause: str
    evidence: str
    advice: str
    at_stake: float | None = None
    is_fault: bool = False  # something is broken, before all else


def training_record(folder: Path | None) -> dict[str, Any] | None:
    """Where the training of a drafter in outputs/NAME/checkpoints/step_N ended; None for one from elsewhere."""
    if folder is None or not (path := folder.resolve().parent.parent / METRICS).is_file():
        return None
    lines = read_lines(path, repair=False)
    steps = [line for line in lines if "teacher_forced_acceptance_length" in line][-LAST_LINES:]
    if not steps:
        return None
    probes = [value for line in lines if (value := line.get(f"{PROBE_PREFIX}acceptance_length")) is not None]
    return {
        "step": steps[-1]["step"],
        "sampled_acceptance_length": mean(_expected(line, "accept_rate") for line in steps),
        "greedy_acceptance_length": mean(_expected(line, "top1_agreement") for line in steps),
        "probe_acceptance_length": probes[-1] if probes else None,
    }


def _expected(line: Mapping[str, float], rate: str) -> float:
    """Tokens a round where slots are accepted at such rates, each given those before it."""
    total, survival, slot = 1.0, 1.0, 0
    while (value := line.get(f"{rate}@{slot}")) is not None:
        survival *= value
        total, slot = total + survival, slot + 1
    return total


def diagnose(row: Mapping[str, Any], training: Mapping[str, Any] | None, n_gram: Mapping[str, Any]) -> list[Finding]:
    """Findings on a drafter's report row: faults, then what costs most. `n_gram`: the row of n-gram lookup where it
    really is better or worse, {} where that may be chance."""
    if row["acceptance_length"] is None or not row["proposed"]:
        return []
    checks = (_broken(row, training), _beaten(row, n_gram), _by_heart(row, training))
    checks = (*checks, *_split(row), *_uneven(row), _short(row))
    found = [one for one in checks if one is not None]
    return sorted(found, key=lambda one: (not one.is_fault, -(one.at_stake or 0.0)))


def _trained(row: Mapping[str, Any], training: Mapping[str, Any]) -> float:
    return training["greedy_acceptance_length" if row["temperature"] == 0 else "sampled_acceptance_length"]


def _broken(row: Mapping[str, Any], training: Mapping[str, Any] | None) -> Finding | None:
    """Decoding has next to nothing of what training had; where that is not known, of what any drafter knows."""
    length, known = row["acceptance_length"], next(iter(row["recall_at_16"]), None)
    if training is not None:
        probe = training["probe_acceptance_length"]
        if length - 1 >= LOST * (_trained(row, training) - 1) or (
            probe is not None and length - 1 >= LOST * (probe - 1)
        ):
            return None  # with such a probe it was so during training as well: not broken since, but not learnt
        seen = f"training ended at {_trained(row, training):.2f} tokens a round, here it is {length:.2f}"
    elif known is None or known >= IGNORANT:
        return None
    else:
        seen = f"the first draft's right token is among its likeliest 16 in {known:.0%} of the rounds"
    return Finding(
        "The drafter does not get what it was trained on",
        seen,
        "Compare with its training: target_layer_ids, slot_layout, the target's weights and dtype (target.dtype, a "
        "quantised target), chat template and target.thinking. Then python extract.py verify=true on its store.",
        is_fault=True,
    )


def _beaten(row: Mapping[str, Any], n_gram: Mapping[str, Any]) -> Finding | None:
    """By a lookup, which learns nothing."""
    other, length = n_gram.get("acceptance_length"), row["acceptance_length"]
    if other is None or other <= length:
        return None
    return Finding(
        "Looking up the prompt does better",
        f"n-gram lookup, which learns nothing, has {other:.2f} tokens a round, this drafter {length:.2f}",
        "Serve draft=ngram where texts repeat their prompts, as here, until training has got beyond it: see the other "
        "causes for what it lacks.",
        other - length,
    )


def _by_heart(row: Mapping[str, Any], training: Mapping[str, Any] | None) -> Finding | None:
    """Much of what is accepted on the training answers is not on these prompts."""
    if training is None:
        return None
    there, here = _trained(row, training) - 1, row["acceptance_length"] - 1
    if here >= FORGOTTEN * there:
        return None
    return Finding(
        "It does not carry over to these prompts",
        f"at the end of training {1 + there:.2f} tokens a round on its own answers (each place judged behind the true "
        f"text), here {1 + here:.2f}",
        "More answers, and answers to prompts like these (generate.py prompts=..., weights=...), before more steps: a "
        "drafter learns a small set by heart.",
        there - here,
    )


def _split(row: Mapping[str, Any]) -> list[Finding | None]:
    """The right token was on the drafter's list, or it was not."""
    rejections, oracle = row.get("rejections"), row.get("oracle_length")
    if not rejections or oracle is None:
        return []
    listed, missed = rejections["in_top_16"], rejections["not_in_top_16"]
    if not listed + missed:
        return []
    length = row["acceptance_length"]
    choice = Finding(
        "Often it knows the right token but drafts another",
        f"in {listed / (listed + missed):.0%} of the rejections the right token was among its likeliest 16; if that "
        f"were always drafted, there would be {oracle:.2f} tokens a round or more",
        "What its kind allows: longer training, a wider head over the draft before (DSpark: model.markov_rank; "
        "DFlash 2: model.selector_rank), several candidates at once (EAGLE-3: tree.num_nodes), or another kind of "
        "drafter."
        + (" At this temperature a part of it is the target's own chance." if row["temperature"] > 0 else ""),
        max(oracle - length, 0.0),
    )
    knowledge = Finding(
        "Often it does not know the right token",
        f"in {missed / (listed + missed):.0%} of the rejections the right token was not among its likeliest 16",
        "More training data, then more steps; then more layers (model.num_layers) and features of more target layers "
        "(target.layer_ids). Where it has a reduced vocabulary, model.draft_vocab_size.",
    )
    return [choice if listed else None, knowledge if missed else None]


def _uneven(row: Mapping[str, Any]) -> list[Finding | None]:
    """Some tasks, later drafts or long contexts do worse than the rest."""
    length, domains = row["acceptance_length"], row["per_domain"]
    known = {name: part["acceptance_length"] for name, part in domains.items() if part["acceptance_length"] is not None}
    found: list[Finding | None] = []
    if len(known) > 1:
        worst = min(known, key=lambda name: known[name])
        if known[worst] - 1 < WORSE_TASK * (length - 1):
            found.append(
                Finding(
                    f"It is weak on {worst}",
                    ", ".join(f"{name} {value:.2f}" for name, value in sorted(known.items(), key=lambda one: one[1])),
                    f"Prompts like those of {worst} in its training data (generate.py prompts=[..] weights=[..]). "
                    "Chat is less predictable than code and mathematics for any drafter.",
                    length - known[worst],
                )
            )
    slots = [value for value in row["conditional_acceptance"] if value is not None]
    if len(slots) > 2 and slots[-1] < FALLING * slots[0]:
        kept = 1 + sum(slots[0] ** (k + 1) for k in range(len(slots)))
        found.append(
            Finding(
                "Later drafts are guessed worse than the first",
                f"accepted after those before them: {', '.join(f'{value:.0%}' for value in slots)}",
                "A head that knows the draft before (DSpark's; model.markov_rank), a larger model.decay, which weighs "
                "later slots more in training, or fewer drafts (num_draft_tokens=auto).",
                max(kept - length, 0.0),
            )
        )
    contexts = [one for one in row["acceptance_by_context"] if one["rounds"] >= FEWEST_ROUNDS]
    if len(contexts) > 1 and contexts[-1]["acceptance_length"] - 1 < WORSE_TASK * (
        contexts[0]["acceptance_length"] - 1
    ):
        found.append(
            Finding(
                "It loses its way in long contexts",
                ", ".join(f"from token {one['from']} on {one['acceptance_length']:.2f}" for one in contexts),
                "Longer training answers (sampling.max_new_tokens, chats.max_length); a sliding window in training "
                "must be the one in serving.",
                contexts[0]["acceptance_length"] - contexts[-1]["acceptance_length"],
            )
        )
    return found


def _short(row: Mapping[str, Any]) -> Finding | None:
    """Most blocks are accepted whole."""
    survival: Sequence[float] = row["survival"]
    if not survival or survival[-1] < LONG_BLOCK:
        return None
    return Finding(
        "Its blocks are short",
        f"{survival[-1]:.0%} of the rounds accepted all {len(survival)} drafts",
        "Train it with more model.num_draft_tokens.",
        survival[-1],
    )
