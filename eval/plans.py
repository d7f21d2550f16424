"""Which passes a report needs, and how each of them decodes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.autotune import LengthChoice
from eval.config import EvalConfig, parse_length, parse_temperatures, sampled_temperature
from eval.decode import DecodeConfig
from eval.schedule import FIXED, Schedule
from eval.stats import first_of_each
from eval.subject import VANILLA, Subject, ngram
from eval.tasks import Protocol
from eval.verify import Rule
from models.base import TreeProposer
from models.sampling import SamplingConfig
from models.target import TargetConfig
from models.trees import TreePolicy

MAIN, EXTRA, CALIBRATING, REPLAY = "main", "extra", "calibration", "replay"  # sets of prompts


@dataclass(frozen=True)
class PassPlan:
    """One row of the report. `lossy_threshold` is that of a lossy rule."""

    subject: Subject
    temperature: float
    num_draft_tokens: int
    schedule: Schedule
    rule: Rule
    task_set: str
    lossy_threshold: float | None = None

    @property
    def is_lossless(self) -> bool:
        return self.rule.is_lossless or self.temperature == 0

    def about(
        self, config: EvalConfig, target: TargetConfig, *, quantization: str | None, device: str
    ) -> dict[str, Any]:
        """What the row says of itself."""
        decoding = self.decoding(config)
        return {
            "target": target.name,
            "drafter": self.subject.name,
            "temperature": self.temperature,
            "rule": str(self.rule) if self.temperature > 0 else "greedy",
            "lossless": self.is_lossless,
            "lossy_threshold": None if self.is_lossless else decoding.lossy_threshold,
            "schedule": str(self.schedule.name) + (", gate" if self.schedule.gate else ""),
            "tree": None if decoding.tree is None else vars(decoding.tree),
            "num_draft_tokens": self.num_draft_tokens,
            "slot_layout": self.subject.slot_layout,
            "dtype": target.dtype,
            "quantization": quantization,
            "feature_dtype": config.feature_dtype or target.dtype,
            "device": device,
            "batch_size": decoding.batch_size,
            "max_new_tokens": decoding.max_new_tokens,
            "task_set": self.task_set,
        }

    def decoding(self, config: EvalConfig) -> DecodeConfig:
        tree = None
        if (
            config.tree.num_nodes is not None
            and isinstance(self.subject.drafter, TreeProposer)
            and self.num_draft_tokens
        ):
            tree = TreePolicy(config.tree.top_k, self.num_draft_tokens, config.tree.num_nodes)
        limits = {EXTRA: config.extra_max_new_tokens, CALIBRATING: config.calibrate.max_new_tokens}
        return DecodeConfig(
            max_new_tokens=limits.get(self.task_set, config.max_new_tokens),
            batch_size=1 if self.task_set == REPLAY else config.batch_size,
            num_draft_tokens=self.num_draft_tokens,
            rule=self.rule,
            schedule=self.schedule,
            sampling=SamplingConfig(
                self.temperature,
                config.top_k,
                config.top_p,
                config.min_p,
                config.seed,
                config.repetition_penalty,
                config.presence_penalty,
            ),
            lossy_threshold=config.lossy_threshold if self.lossy_threshold is None else self.lossy_threshold,
            stop_strings=tuple(config.stop_strings),
            tree=tree,
            cuda_graphs=config.cuda_graphs,
            diagnose=self.task_set != REPLAY,  # that one is looked at for its speed
            round_at_the_limit=config.protocol is Protocol.deepspec,
        )


def main_plans(
    config: EvalConfig,
    subject: Subject,
    compared: Sequence[Subject],
    choice: LengthChoice | None,
    schedule_of: Callable[[Subject], Schedule],
) -> Iterator[PassPlan]:
    """Vanilla and the drafter at each temperature, with num_draft_tokens=auto also at the chosen length; n-gram at the
    first; the drafter by the lossy rule at each threshold of the sweep; then the others as the drafter."""
    length, schedule = length_of(config, subject), schedule_of(subject)
    temperatures = parse_temperatures(config.temperature)
    for index, temperature in enumerate(temperatures):
        yield PassPlan(VANILLA, temperature, 0, FIXED, Rule.ratio, MAIN)
        if index == 0 and "ngram" in config.baselines and subject.name not in ("vanilla", "ngram"):
            yield PassPlan(ngram(length), temperature, length, FIXED, config.rule, MAIN)
        if subject.drafter is None:
            continue
        yield PassPlan(subject, temperature, length, schedule, config.rule, MAIN)
        if index == 0 and choice is not None and choice.num_draft_tokens not in (0, length):
            yield PassPlan(subject, temperature, choice.num_draft_tokens, schedule, config.rule, MAIN)
    if subject.drafter is not None:
        for threshold in config.lossy_sweep:
            yield PassPlan(
                subject, sampled_temperature(config), length, schedule, Rule.lossy_threshold, MAIN, threshold
            )
    for other in compared:
        for temperature in temperatures:
            yield PassPlan(other, temperature, length_of(config, other), schedule_of(other), config.rule, MAIN)


def replay_plans(plans: Sequence[PassPlan]) -> list[PassPlan]:
    """Of every subject once, as it is measured first, with `schedule=fixed`."""
    found = first_of_each((plan for plan in plans if plan.task_set == MAIN), lambda plan: plan.subject.name)
    return [
        PassPlan(p.subject, p.temperature, p.num_draft_tokens, FIXED, p.rule, REPLAY, p.lossy_threshold) for p in found
    ]


def length_of(config: EvalConfig, subject: Subject) -> int:
    """As configured, or (null, auto) as trained."""
    length = parse_length(config.num_draft_tokens, subject)
    if length == "auto":
        length = parse_length(None, subject)
    assert isinstance(length, int)
    return length


def same_question(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether passes with such `about`s may be compared with each other."""
    return all(one[key] == other[key] for key in ("temperature", "task_set", "max_new_tokens"))
