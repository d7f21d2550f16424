"""Runs a drafter and its baselines over the same prompts, pass by pass; a finished pass is kept and not run again."""

import json
import math
import resource
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from data.codecs import find_codec, round_trip
from data.generate import BuiltinPrompts
from data.prompts import Prompt
from eval.autotune import LengthChoice, choose_num_draft_tokens
from eval.decode import DecodeConfig, Generation, decode
from eval.identity import identity_of
from eval.report import build_report
from eval.schedule import Schedule, ScheduleName
from eval.stats import Pass
from eval.subject import VANILLA, Subject, ngram
from eval.tasks import load_tasks, render_prompts
from eval.verify import Rule
from models.files import read_json, sha256_text, write_json
from models.sampling import SamplingConfig
from models.target import Target, TargetConfig


@dataclass
class EvalConfig:
    """Options of eval.py; conf/eval.yaml lists every value with a remark."""

    name: str
    output_dir: str
    target: Any
    draft: str
    compare: list[str]
    tasks: list[str]
    prompts_dir: str | None
    num_prompts: int | None
    builtin: BuiltinPrompts
    extra_tasks: list[str]
    num_extra_prompts: int | None
    extra_max_new_tokens: int
    temperature: Any
    seed: int
    max_new_tokens: int
    batch_size: int
    num_draft_tokens: Any
    rule: Rule
    schedule: ScheduleName
    confidence_threshold: float
    baselines: list[str]
    check_transformers: int
    feature_dtype: str | None


@dataclass(frozen=True)
class PassPlan:
    """One row of the report."""

    subject: Subject
    temperature: float
    num_draft_tokens: int
    schedule: Schedule
    rule: Rule
    task_set: str  # main or extra


class Harness:
    """Holds the target, the prompts and the folder of kept passes."""

    def __init__(
        self, config: EvalConfig, target: Target, target_config: TargetConfig, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.config, self.target, self.target_config, self.tokenizer = config, target, target_config, tokenizer
        self.rounding = None if config.feature_dtype is None else find_codec(config.feature_dtype, "feature_dtype")
        self.folder = Path(config.output_dir) / "eval"
        self.prompts = {
            "main": self._load(config.tasks, config.num_prompts),
            "extra": self._load(config.extra_tasks, config.num_extra_prompts),
        }

    def run(self, subject: Subject, compared: Sequence[Subject] = ()) -> dict[str, Any]:
        """All passes of `subject`, its baselines and the drafters it is compared with, on the same prompts; returns the
        report and writes eval/report.json."""
        length = parse_length(self.config.num_draft_tokens, subject)
        choice = self._choose_length(subject) if length == "auto" else None
        plans = [*self._plans(subject, length, choice), *self._compared_plans(compared)]
        passes = [self._pass(plan) for plan in plans]
        report = build_report(passes, self._identities(passes), choice)
        report["transformers_generate"] = self._against_transformers(passes)
        report["peak_rss_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        write_json(self.folder / "report.json", report)
        return report

    def _plans(self, subject: Subject, length: int | str, choice: LengthChoice | None) -> Iterator[PassPlan]:
        """Baselines at the first temperature; the drafter at each, with `auto` at its own length and the chosen one."""
        config, schedule = self.config, self._schedule
        fixed = Schedule(ScheduleName.fixed, 0)
        own = subject.drafter.num_draft_tokens if subject.drafter is not None else 0
        full = own if choice is not None or length == 0 else length
        assert isinstance(full, int)
        for index, temperature in enumerate(parse_temperatures(config.temperature)):
            if index == 0:
                yield PassPlan(VANILLA, temperature, 0, fixed, Rule.ratio, "main")
                if "ngram" in config.baselines and subject.name not in ("vanilla", "ngram"):
                    yield PassPlan(ngram(full), temperature, full, fixed, config.rule, "main")
            if subject.drafter is None:
                continue
            yield PassPlan(subject, temperature, full, schedule, config.rule, "main")
            if index == 0 and choice is not None and choice.num_draft_tokens not in (0, full):
                yield PassPlan(subject, temperature, choice.num_draft_tokens, schedule, config.rule, "main")
        if self.prompts["extra"] and subject.drafter is not None:
            yield PassPlan(subject, 0.0, full, schedule, config.rule, "extra")

    def _compared_plans(self, compared: Sequence[Subject]) -> Iterator[PassPlan]:
        """Each at every temperature, at the configured length or (null, auto) as trained."""
        for subject in compared:
            length = parse_length(self.config.num_draft_tokens, subject)
            if length == "auto":
                length = parse_length(None, subject)
            assert isinstance(length, int)
            for temperature in parse_temperatures(self.config.temperature):
                yield PassPlan(subject, temperature, length, self._schedule, self.config.rule, "main")

    @property
    def _schedule(self) -> Schedule:
        return Schedule(self.config.schedule, self.config.confidence_threshold)

    def _load(self, names: Sequence[str], num_prompts: int | None) -> list[Prompt]:
        if not names:
            return []
        return load_tasks(names, self.config.builtin, prompts_dir=self.config.prompts_dir, num_prompts=num_prompts)

    def _render(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        return render_prompts(self.tokenizer, prompts, self.target_config.thinking)

    def _target_of(self, subject: Subject) -> Target:
        """The target read out at the subject's layers, rounded as a store would where that is asked for."""
        size, codec = self.target.spec.hidden_size, self.rounding
        rounded = None if codec is None else lambda features: round_trip(features, codec, size)
        return self.target.capturing(subject.layer_ids, rounded)

    def _choose_length(self, subject: Subject) -> LengthChoice:
        """Measured once per drafter, batch size and machine state, and kept."""
        assert subject.drafter is not None, "auto needs a drafter"
        rounding = "" if self.config.feature_dtype is None else f"_{self.config.feature_dtype}"
        name = f"length_choice_batch{self.config.batch_size}{rounding}_{subject.fingerprint[:12]}.json"
        path = self.folder / name
        if path.is_file():
            return LengthChoice(**read_json(path))
        sample = self._render(self.prompts["main"][: self.config.batch_size])
        target = self._target_of(subject)
        choice = choose_num_draft_tokens(target, subject.drafter, sample, self._decode_config(0.0, 0))
        write_json(path, asdict(choice))
        return choice

    def _decode_config(
        self, temperature: float, num_draft_tokens: int, schedule: Schedule | None = None, rule: Rule = Rule.ratio
    ) -> DecodeConfig:
        return DecodeConfig(
            max_new_tokens=self.config.max_new_tokens,
            batch_size=self.config.batch_size,
            num_draft_tokens=num_draft_tokens,
            rule=rule,
            schedule=schedule or Schedule(ScheduleName.fixed, 0),
            sampling=SamplingConfig(temperature, 0, 1.0, 0.0, self.config.seed),
        )

    def _pass(self, plan: PassPlan) -> Pass:
        prompts = self.prompts[plan.task_set]
        rendered = self._render(prompts)
        config = self._decode_config(plan.temperature, plan.num_draft_tokens, plan.schedule, plan.rule)
        if plan.task_set == "extra":
            config = replace(config, max_new_tokens=self.config.extra_max_new_tokens)
        about = {
            "target": self.target_config.name,
            "drafter": plan.subject.name,
            "temperature": plan.temperature,
            "rule": str(plan.rule) if plan.temperature > 0 else "greedy",
            "schedule": str(plan.schedule.name),
            "num_draft_tokens": plan.num_draft_tokens,
            "slot_layout": plan.subject.slot_layout,
            "dtype": self.target_config.dtype,
            "feature_dtype": self.config.feature_dtype or self.target_config.dtype,
            "device": str(self.target.device),
            "batch_size": self.config.batch_size,
            "max_new_tokens": config.max_new_tokens,
            "task_set": plan.task_set,
        }
        key = sha256_text(json.dumps([about, asdict(config), plan.subject.fingerprint, rendered], sort_keys=True))
        path = self.folder / "passes" / f"{plan.subject.name}_{plan.task_set}_{key[:16]}.json"
        if path.is_file():
            return Pass.from_dict(read_json(path))
        label = f"{plan.subject.name} T={plan.temperature:g} K={plan.num_draft_tokens} {plan.task_set}"
        target = self._target_of(plan.subject)
        with tqdm(total=len(prompts), desc=label, unit="prompt") as progress:
            result = decode(
                target, plan.subject.drafter, rendered, config, on_finish=lambda _generation: progress.update()
            )
        finished = Pass(
            about=about,
            domains=[prompt.domain for prompt in prompts],
            prompts=rendered,
            generations=result.generations,
            seconds=result.seconds,
            draft_seconds=result.draft_seconds,
            verify_seconds=result.verify_seconds,
        )
        write_json(path, finished.to_dict())
        return finished

    def _identities(self, passes: Sequence[Pass]) -> dict[int, dict[str, Any]]:
        """Greedy passes against the vanilla pass of the same prompts, by index of the pass."""
        vanilla = next((p for p in passes if p.about["drafter"] == "vanilla" and p.about["temperature"] == 0), None)
        return {
            index: identity_of(self.target, p, vanilla)
            for index, p in enumerate(passes)
            if vanilla and p is not vanilla and p.about["temperature"] == 0 and p.prompts == vanilla.prompts
        }

    def _against_transformers(self, passes: Sequence[Pass]) -> dict[str, Any] | None:
        """The speculative greedy outputs of the first prompts against transformers' own `generate`."""
        greedy = [p for p in passes if p.about["temperature"] == 0 and p.about["task_set"] == "main"]
        if not greedy or not self.config.check_transformers:
            return None
        chosen, count = greedy[-1], self.config.check_transformers
        asked = [chosen.about["target"], chosen.about["dtype"], self.config.max_new_tokens, chosen.prompts[:count]]
        path = self.folder / "passes" / f"transformers_{sha256_text(json.dumps(asked))[:16]}.json"
        if not path.is_file():
            model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
                self.target_config.path, dtype=self.target.head.dtype
            )
            model.to(self.target.device)  # pyright: ignore[reportArgumentType] (a decorator hides its signature)
            model.eval()
            write_json(path, [self._generate_one(model, prompt) for prompt in chosen.prompts[:count]])
        reference = Pass(
            about={**chosen.about, "drafter": "transformers"},
            domains=chosen.domains[:count],
            prompts=chosen.prompts[:count],
            generations=[Generation(i, tokens) for i, tokens in enumerate(read_json(path))],
            seconds=math.nan,
            draft_seconds=0.0,
            verify_seconds=0.0,
        )
        return {"drafter": chosen.about["drafter"], **identity_of(self.target, chosen.head(count), reference)}

    def _generate_one(self, model: torch.nn.Module, prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt], device=self.target.device)
        options = {"do_sample": False, "max_new_tokens": self.config.max_new_tokens}
        output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)  # type: ignore[operator]
        return output[0, len(prompt) :].tolist()


def parse_temperatures(value: Any) -> list[float]:
    """A number or a list of them. Raises ValueError on anything else."""
    values = value if isinstance(value, list) else [value]
    for number in values:
        if isinstance(number, bool) or not isinstance(number, int | float) or number < 0:
            raise ValueError(f"temperature must be a number >= 0 or a list of them, got {value}")
    return [float(number) for number in values]


def parse_length(value: Any, subject: Subject) -> int | str:
    """`auto`, null (the drafter's own) or 1 .. the drafter's own. Raises ValueError on anything else."""
    if subject.drafter is None:
        return 0
    own = subject.drafter.num_draft_tokens
    if value is None:
        return own
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= own):
        return value
    raise ValueError(f"num_draft_tokens must be auto, null or 1..{own} for this drafter, got {value}")
