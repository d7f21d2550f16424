"""`server=URL`: a running engine's acceptance beside the runtime's own, on equal prompts and settings, counted alike.

The offline numbers are those of the drafter's normal passes; each is turned into what the engine would have counted of
the same rounds (eval/counting.py), so that an equal drafter gives equal counts in a greedy run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from data.server import record_seed
from eval.config import EvalConfig
from eval.counting import Counts, pooled
from eval.decode import decode
from eval.engines import Answered, RunningEngine, Settings, find_engine
from eval.identity import first_difference
from eval.intervals import paired_interval
from eval.plans import MAIN, PassPlan, length_of
from eval.schedule import FIXED, ScheduleName
from eval.stats import Pass
from eval.subject import VANILLA, Subject
from eval.verify import Rule
from models.sampling import SamplingConfig
from models.target import Target

TOLERANCE = 0.03  # of acceptance lengths, relative
PROBE_PROMPTS, PROBE_TOKENS = 4, 32  # asked greedily before any work is done


@dataclass(frozen=True)
class _Part:
    """Answers to some prompts, and what the engine would have counted of our rounds on each."""

    answered: Answered
    measured: list[list[int]]  # our outputs
    offline: list[Counts]


class Serving:
    """A running engine that is measured beside `subject`."""

    def __init__(self, config: EvalConfig, target: Target, subject: Subject) -> None:
        """Raises ValueError on settings in which it could not be compared, and where nothing is served."""
        assert config.server is not None
        check_options(config, subject)
        self.config, self.target, self.subject = config, target, subject
        self.num_draft_tokens = length_of(config, subject)
        self.engine: RunningEngine = find_engine(
            config.server,
            api_key_file=config.api_key_file,
            timeout=config.request_timeout,
            concurrency=config.batch_size,
        )
        self.url = self.engine.connection.url

    def probe(self, prompts: Sequence[list[int]]) -> None:
        """A few short greedy answers, before hours of work. Raises ValueError where the server has another model than
        the target, does not speculate, drafts another number of tokens or has too little context."""
        self._check_sizes(prompts)
        asked = list(prompts[:PROBE_PROMPTS])
        plan = PassPlan(VANILLA, 0.0, 0, FIXED, Rule.ratio, MAIN).decoding(self.config)
        plan = replace(plan, max_new_tokens=min(plan.max_new_tokens, PROBE_TOKENS), round_at_the_limit=False)
        ours = [generation.tokens for generation in decode(self.target, None, asked, plan).generations]
        settings = self._settings(plan.sampling, plan.max_new_tokens)
        answered = self.engine.answer_all(asked, settings, [0] * len(asked), concurrency=1)
        theirs = [answer.tokens for answer in answered.answers]
        same = sum(a[:1] == b[:1] for a, b in zip(ours, theirs, strict=True))
        if 2 * same < len(asked):
            raise ValueError(
                f"server={self.url} serves {self.engine.facts.model}, whose greedy answers to {len(asked) - same} of "
                f"{len(asked)} prompts begin otherwise than the target's: serve the target (target=) with its tokenizer"
            )
        at_limit = sum(len(tokens) == plan.max_new_tokens for tokens in theirs)
        self._check_drafts(answered.counts, at_limit)

    def report(self, passes: Sequence[Pass]) -> dict[str, Any]:
        """Of every pass of the drafter at this number of drafts: JSON values."""
        own = [p for p in passes if p.about["drafter"] == self.subject.name and p.about["task_set"] == MAIN]
        chosen = [p for p in own if p.about["num_draft_tokens"] == self.num_draft_tokens and p.about["lossless"]]
        return {
            "engine": self.engine.name,
            "url": self.url,
            **asdict(self.engine.facts),
            "counted": self.engine.counted,
            "concurrency": self.config.batch_size,
            "seed": self.config.seed,
            "tolerance": TOLERANCE,
            "rows": [self._row(measured) for measured in chosen],
        }

    def _settings(self, sampling: SamplingConfig, max_new_tokens: int) -> Settings:
        return Settings(max_new_tokens, self.num_draft_tokens, sampling, self.target.spec.eos_token_ids)

    def _check_sizes(self, prompts: Sequence[list[int]]) -> None:
        facts, vocab_size = self.engine.facts, self.target.spec.vocab_size
        if facts.vocab_size is not None and facts.vocab_size != vocab_size:
            raise ValueError(
                f"server={self.url} serves {facts.model} with a vocabulary of {facts.vocab_size} tokens, the target "
                f"has {vocab_size}: serve the target (target=)"
            )
        own = self.target.spec.max_position_embeddings
        context = own if facts.context is None else min(own, facts.context)
        # A round near the end of the context is cut, by each engine in its own way.
        needed = max(map(len, prompts)) + self.config.max_new_tokens + self.num_draft_tokens + 1
        if needed > context:
            raise ValueError(
                f"server={self.url} has a context of {context} tokens, and {needed} are needed for the longest prompt, "
                f"max_new_tokens={self.config.max_new_tokens} and the drafts: start it with more or ask for less"
            )

    def _check_drafts(self, counts: Counts, at_limit: int) -> None:
        """`at_limit`: answers in whose last rounds an engine may draft less."""
        engine, k = self.engine, self.num_draft_tokens
        if not counts.proposed:
            raise ValueError(
                f"server={self.url} ({engine.title}) answers, but no draft is counted: start it with speculation on, "
                f"{engine.switch}"
            )
        cut = at_limit * k * (k + 1) // 2 if engine.caps_drafts else 0
        if not k * counts.rounds - cut <= counts.proposed <= k * counts.rounds:
            raise ValueError(
                f"server={self.url} ({engine.title}) drafts {counts.proposed / counts.rounds:.2f} tokens a round, here "
                f"num_draft_tokens={k}: set that to the server's, or start it with {engine.switch}"
            )

    def _row(self, measured: Pass) -> dict[str, Any]:
        self._check_sizes(measured.prompts)  # later turns are longer than those that were probed
        temperature = measured.about["temperature"]
        plan = PassPlan(self.subject, temperature, self.num_draft_tokens, FIXED, self.config.rule, MAIN)
        settings = self._settings(plan.decoding(self.config).sampling, measured.about["max_new_tokens"])
        parts = {task: self._part(measured, task, settings) for task in dict.fromkeys(measured.domains)}
        row = {
            "temperature": temperature,
            "rule": measured.about["rule"],
            "num_draft_tokens": self.num_draft_tokens,
            "max_new_tokens": settings.max_new_tokens,
            "dtype": measured.about["dtype"],
            "quantization": measured.about["quantization"],
            "device": measured.about["device"],
            **self._numbers(list(parts.values()), temperature),
            "tasks": [{"task": task, **self._numbers([part], temperature)} for task, part in parts.items()],
        }
        agrees = row["agrees"] and all(part["agrees"] for part in row["tasks"])
        return row | {"causes": [] if agrees else self._causes(row)}

    def _part(self, measured: Pass, task: str, settings: Settings) -> _Part:
        members = [index for index, own in enumerate(measured.domains) if own == task]
        seeds = [record_seed(self.config.seed, str(index)) for index in members]
        prompts = [measured.prompts[index] for index in members]
        answered = self.engine.answer_all(prompts, settings, seeds, concurrency=self.config.batch_size)
        generations = [measured.generations[index] for index in members]
        offline = [self.engine.counts_of(generation, settings.max_new_tokens) for generation in generations]
        return _Part(answered, [generation.tokens for generation in generations], offline)

    @staticmethod
    def _numbers(parts: Sequence[_Part], temperature: float) -> dict[str, Any]:
        """Pooled over parts. `difference` is relative; `interval` (95 %, paired bootstrap over prompts) that of the
        lengths' difference, for sampled answers that were counted one by one."""
        answers = [answer for part in parts for answer in part.answered.answers]
        outputs, offline = [o for part in parts for o in part.measured], [c for part in parts for c in part.offline]
        theirs, ours = pooled(part.answered.counts for part in parts), pooled(offline)
        one_by_one = [answer.counts for answer in answers if answer.counts is not None]
        is_told, is_greedy = len(one_by_one) == len(answers), temperature == 0
        lengths = theirs.acceptance_length, ours.acceptance_length
        difference = None if None in lengths else lengths[0] / lengths[1] - 1  # type: ignore[operator]
        interval = paired_interval(_pairs(one_by_one), _pairs(offline)) if is_told and not is_greedy else None
        same = sum(first_difference(a.tokens, tokens) is None for a, tokens in zip(answers, outputs, strict=True))
        num_tokens, seconds = sum(p.answered.num_tokens for p in parts), sum(p.answered.seconds for p in parts)
        return {
            "num_prompts": len(answers),
            "num_tokens": num_tokens,
            "tokens_per_second": num_tokens / seconds,
            "acceptance_length": lengths[0],
            "offline_acceptance_length": lengths[1],
            "difference": difference,
            "interval": None if interval is None else list(interval),
            "agrees": difference is not None and abs(difference) <= TOLERANCE,
            "counts": _of_rounds(theirs),
            "offline_counts": _of_rounds(ours),
            "survival": theirs.survival,
            "offline_survival": None if theirs.survival is None else ours.survival,
            "equal_outputs": same if is_greedy else None,
            "equal_counts": sum(a == b for a, b in zip(one_by_one, offline, strict=True)) if is_told else None,
        }

    def _causes(self, row: Mapping[str, Any]) -> list[str]:
        """Of a disagreement, the likeliest first."""
        found, dtype = [], self.engine.facts.dtype
        drafter = "layer ids, slot layout or weights of the drafter that it loaded are others, or its features are"
        if row["temperature"] > 0:
            if row["interval"] is not None and row["interval"][0] <= 0 <= row["interval"][1]:
                found.append("chance: the 95 % interval of the difference holds 0; measure more prompts")
            found += [self.engine.drafting, f"{drafter} (temperature=0 tells)"]
        elif row["equal_outputs"] == row["num_prompts"]:
            found.append(f"all outputs are equal, so it is not the target: {drafter}")
        elif 2 * row["equal_outputs"] < row["num_prompts"]:
            found += [
                "most outputs differ, so its target is not quite this one: quantised, another float type, other "
                "weights or stop tokens",
                drafter,
            ]
        else:
            found += [drafter, "a quantised target or another float type, as some outputs differ"]
        if dtype is not None and dtype != row["dtype"]:
            found.append(f"it says that its target is {dtype}, here it is {row['dtype']}")
        return found


def _of_rounds(counts: Counts) -> dict[str, int]:
    return {"rounds": counts.rounds, "proposed": counts.proposed, "accepted": counts.accepted}


def _pairs(counts: Sequence[Counts]) -> np.ndarray:
    """As `tokens_and_rounds`."""
    return np.array([(c.rounds + c.accepted, c.rounds) for c in counts], dtype=float).reshape(-1, 2)


def check_options(config: EvalConfig, subject: Subject) -> None:
    """Raises ValueError on what an engine does otherwise, or not at all."""
    if subject.drafter is None:
        raise ValueError(
            f"server= compares what drafts are worth, and draft={config.draft} drafts nothing: give the folder of the "
            "drafter that it serves"
        )
    asked = {
        "rule": (config.rule, config.rule.is_lossless, Rule.ratio),
        "schedule": (config.schedule, config.schedule is ScheduleName.fixed, ScheduleName.fixed),
        "gate": (config.gate, not config.gate, "false"),
        "tree.num_nodes": (config.tree.num_nodes, config.tree.num_nodes is None, "null"),
        "feature_dtype": (config.feature_dtype, config.feature_dtype is None, "null"),
        "stop_strings": (config.stop_strings, not config.stop_strings, "[]"),
        "repetition_penalty": (config.repetition_penalty, config.repetition_penalty == 1, "1.0"),
        "presence_penalty": (config.presence_penalty, config.presence_penalty == 0, "0.0"),
    }
    for name, (value, is_off, off) in asked.items():
        if not is_off:
            raise ValueError(
                f"{name}={value}: engines do that otherwise or not at all, so server= could not be compared; use "
                f"{name}={off}"
            )
