"""Runs a drafter and its baselines over the same prompts, pass by pass; a finished pass is kept and not run again."""

import json
import math
import resource
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from data.codecs import find_codec, round_trip
from data.generate import read_sources
from data.prompts import SourcePrompt
from eval.autotune import LengthChoice, choose_num_draft_tokens
from eval.calibrate import assess, calibration_file, load_scaling, recorded
from eval.config import EvalConfig, parse_length, parse_temperatures, under_protocol
from eval.costs import LOADS, CostTable, measure_costs
from eval.decode import DecodeConfig, decode
from eval.identity import divergences, identity_from, identity_of
from eval.lossless import greedy_agreement, sampled_agreement
from eval.markdown import setting_of
from eval.passes import Passes
from eval.plots import reliability_diagram
from eval.report import build_report
from eval.rounds import DecodeResult, Generation
from eval.schedule import FIXED, Schedule, ScheduleName
from eval.simulate import compare
from eval.stats import Pass
from eval.subject import VANILLA, Subject, ngram
from eval.tasks import TaskOptions, Turns, load_tasks
from eval.verify import Rule
from models.base import TreeProposer
from models.checkpoint import CALIBRATION
from models.files import sha256_text, write_json, write_text
from models.sampling import SamplingConfig
from models.target import Target, TargetConfig
from models.trees import TreePolicy

SAME_QUESTION = ("temperature", "task_set", "max_new_tokens")  # of passes that may be compared with each other
SETTING = ("drafter", "num_draft_tokens", "temperature", "rule", "lossless")
AUTO_PROMPTS = 16  # num_draft_tokens=auto learns from so many at least how long drafts survive


@dataclass(frozen=True)
class PassPlan:
    """One row of the report."""

    subject: Subject
    temperature: float
    num_draft_tokens: int
    schedule: Schedule
    rule: Rule
    task_set: str  # main, extra or calibration


class Harness:
    """Holds the target, the prompts and the folder of kept passes."""

    def __init__(
        self,
        config: EvalConfig,
        target: Target,
        target_config: TargetConfig,
        tokenizer: PreTrainedTokenizerBase,
        accelerator: Accelerator,
    ) -> None:
        self.config, self.target_config = config, target_config = under_protocol(config, target_config)
        self.target, self.tokenizer = target, tokenizer
        self.rounding = None if config.feature_dtype is None else find_codec(config.feature_dtype, "feature_dtype")
        self.folder = Path(config.output_dir) / "eval"
        all_turns = config.turns is Turns.all
        self.passes = Passes(self.folder / "passes", accelerator, tokenizer, target_config.thinking, all_turns)
        self.missing_tasks: list[str] = []
        self.prompts = {
            "main": self._load(config.tasks, config.num_prompts),
            "extra": self._load(config.extra_tasks, config.num_extra_prompts),
        }
        self.prompts["calibration"] = self._calibration_prompts()

    def run(self, subject: Subject, compared: Sequence[Subject] = ()) -> dict[str, Any]:
        """All passes of `subject`, its baselines and the drafters it is compared with, on the same prompts; returns the
        report and writes eval/report.json."""
        if self.config.tree.num_nodes is not None and not isinstance(subject.drafter, TreeProposer):
            raise ValueError(
                f"tree.num_nodes={self.config.tree.num_nodes}: only EAGLE-3 drafts trees, draft={self.config.draft} is "
                f"{subject.name}; use tree.num_nodes=null"
            )
        length = parse_length(self.config.num_draft_tokens, subject)
        choice = self._choose_length(subject) if length == "auto" else None
        if self.config.calibrate.enabled:
            subject = self._calibrated(subject)
        plans = [*self._plans(subject, length, choice), *self._compared_plans(compared)]
        passes = [self._pass(plan) for plan in plans]
        identities, agreements = self._against_vanilla(passes)
        report = build_report(passes, identities, choice) | {"losslessness": agreements}
        report["missing_tasks"] = self.missing_tasks
        report["calibration"] = calibration = self._calibration_report(subject, passes)
        is_main = self.passes.accelerator.is_main_process
        if calibration is not None and is_main:
            write_text(self.folder / "reliability.svg", reliability_diagram(calibration))
        if self.config.simulate.enabled:
            report["simulation"] = self._simulation_report(subject, passes)
        report["transformers_generate"] = self._against_transformers(passes)
        report["peak_rss_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        if is_main:
            write_json(self.folder / "report.json", report)
        return report

    def _plans(self, subject: Subject, length: int | str, choice: LengthChoice | None) -> Iterator[PassPlan]:
        """Vanilla and the drafter at each temperature, with `auto` also at the chosen length; n-gram at the first."""
        config, schedule = self.config, self._schedule_of(subject)
        own = subject.drafter.num_draft_tokens if subject.drafter is not None else 0
        full = own if choice is not None or length == 0 else length
        assert isinstance(full, int)
        for index, temperature in enumerate(parse_temperatures(config.temperature)):
            yield PassPlan(VANILLA, temperature, 0, FIXED, Rule.ratio, "main")
            if index == 0 and "ngram" in config.baselines and subject.name not in ("vanilla", "ngram"):
                yield PassPlan(ngram(full), temperature, full, FIXED, config.rule, "main")
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
                yield PassPlan(subject, temperature, length, self._schedule_of(subject), self.config.rule, "main")

    def _schedule_of(self, subject: Subject) -> Schedule:
        asked = self.config
        if subject.drafter is None or (asked.schedule is ScheduleName.fixed and not asked.gate):
            return FIXED
        needs_costs = asked.gate or asked.schedule is not ScheduleName.confidence
        costs = (
            self._costs(subject, [load for load in LOADS if load < asked.batch_size] + [asked.batch_size])
            if needs_costs
            else None
        )
        return Schedule(asked.schedule, asked.confidence_threshold, costs, subject.scaling, asked.gate)

    def _costs(self, subject: Subject, loads: Sequence[int]) -> CostTable:
        """Measured once per drafter and loads, and kept."""
        assert subject.drafter is not None
        path = self.folder / f"costs_{'_'.join(map(str, loads))}_{subject.fingerprint[:12]}.json"
        sample, drafter = self._first_turns("main", max(loads)), subject.drafter
        made = self.passes.once(path, lambda: asdict(measure_costs(self._target_of(subject), drafter, sample, loads)))
        return CostTable(**made)

    def _calibrated(self, subject: Subject) -> Subject:
        """With a scaling fitted on prompts that are not measured, and kept beside its weights."""
        asked = self.config.calibrate
        if subject.folder is None or subject.drafter is None:
            raise ValueError(f"calibrate.enabled=true needs a trained drafter, got draft={self.config.draft}")
        rounds = recorded(self._pass(self._calibration_plan(subject)).generations)
        about = {"temperature": asked.temperature, "num_prompts": len(self.prompts["calibration"])}
        dataset = asked.prompts or "held-out prompts of the project's own"
        found = calibration_file(rounds, asked.scaling, dataset=dataset) | {"fitted_at": about}
        if self.passes.accelerator.is_main_process:
            write_json(subject.folder / CALIBRATION, found)
        self.passes.accelerator.wait_for_everyone()
        return replace(subject, scaling=load_scaling(subject.folder, subject.drafter.num_draft_tokens))

    def _calibration_plan(self, subject: Subject) -> PassPlan:
        assert subject.drafter is not None
        temperature, length = self.config.calibrate.temperature, subject.drafter.num_draft_tokens
        return PassPlan(subject, temperature, length, FIXED, Rule.ratio, "calibration")

    def _calibration_prompts(self) -> list[SourcePrompt]:
        """Raises ValueError where one of them is measured, too."""
        asked, builtin = self.config.calibrate, self.config.builtin
        if not asked.enabled:
            return []
        if asked.prompts is None:  # held out, too, and behind all that may be measured
            more = replace(builtin, num_train=0, num_heldout=builtin.num_heldout + asked.num_prompts)
            found = read_sources(None, more)[0][builtin.num_heldout :]
        else:
            found = [s for source in read_sources(asked.prompts, builtin) for s in source][: asked.num_prompts]
        measured = {tuple(ids) for ids in self._first_turns("main")}
        calibrating = self.passes.render([source.first_turn for source in found])
        if shared := sum(tuple(ids) in measured for ids in calibrating):
            raise ValueError(
                f"calibrate.prompts={asked.prompts}: {shared} of {len(found)} are among the measured prompts (tasks=), "
                "on which calibration would then look better than it is"
            )
        return found

    def _calibration_report(self, subject: Subject, passes: Sequence[Pass]) -> dict[str, Any] | None:
        """Of the drafter's measured rounds, as its confidences are and with its scaling."""
        own = [p for p in passes if p.about["drafter"] == subject.name and p.about["schedule"] == "fixed"]
        sampled = [p for p in own if p.about["temperature"] == self.config.calibrate.temperature]
        measured = next(
            (p for p in [*sampled, *own] if any(r.confidence for g in p.generations for r in g.rounds)), None
        )
        if measured is None:
            return None
        rounds = recorded(measured.generations)
        return {
            "temperature": measured.about["temperature"],
            "rounds": len(rounds.confidence),
            "scaling": None if subject.scaling is None else vars(subject.scaling),
            "before": assess(rounds).to_dict(),
            "after": None if subject.scaling is None else assess(rounds, subject.scaling).to_dict(),
        }

    def _simulation_report(self, subject: Subject, passes: Sequence[Pass]) -> dict[str, Any]:
        asked = self.config.simulate
        measured = next((p for p in passes if p.about["drafter"] == subject.name), None)
        if measured is None or measured.about["schedule"] != "fixed" or measured.about["tree"] is not None:
            raise ValueError("simulate.enabled=true needs a drafter with a confidence head, schedule=fixed and no tree")
        costs = self._costs(subject, asked.loads)
        found = compare(
            measured.generations,
            costs,
            asked.loads,
            scaling=subject.scaling,
            threshold=self.config.confidence_threshold,
            num_rounds=asked.num_rounds,
        )
        rows = {name: [vars(load) for load in loads] for name, loads in found.items()}
        return {"temperature": measured.about["temperature"], "costs": asdict(costs), "schedules": rows}

    def _load(self, names: Sequence[str], num_prompts: int | None) -> list[SourcePrompt]:
        if not names:
            return []
        asked = self.config
        found, missing = load_tasks(names, TaskOptions(asked.builtin, asked.prompts_dir, num_prompts, asked.protocol))
        self.missing_tasks += missing
        return found

    def _first_turns(self, task_set: str, count: int | None = None) -> list[list[int]]:
        return self.passes.render([source.first_turn for source in self.prompts[task_set][:count]])

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
        sample = self._first_turns("main", max(self.config.batch_size, AUTO_PROMPTS))
        target, drafter = self._target_of(subject), subject.drafter
        plan = PassPlan(subject, 0.0, 0, FIXED, Rule.ratio, "main")

        def choose() -> dict[str, Any]:
            return asdict(choose_num_draft_tokens(target, drafter, sample, self._decode_config(plan)))

        return LengthChoice(**self.passes.once(self.folder / name, choose))

    def _decode_config(self, plan: PassPlan) -> DecodeConfig:
        asked, tree = self.config, None
        if (
            asked.tree.num_nodes is not None
            and isinstance(plan.subject.drafter, TreeProposer)
            and plan.num_draft_tokens
        ):
            tree = TreePolicy(asked.tree.top_k, plan.num_draft_tokens, asked.tree.num_nodes)
        limits = {"extra": asked.extra_max_new_tokens, "calibration": asked.calibrate.max_new_tokens}
        return DecodeConfig(
            max_new_tokens=limits.get(plan.task_set, asked.max_new_tokens),
            batch_size=asked.batch_size,
            num_draft_tokens=plan.num_draft_tokens,
            rule=plan.rule,
            schedule=plan.schedule,
            sampling=SamplingConfig(
                plan.temperature,
                asked.top_k,
                asked.top_p,
                asked.min_p,
                asked.seed,
                asked.repetition_penalty,
                asked.presence_penalty,
            ),
            lossy_threshold=asked.lossy_threshold,
            stop_strings=tuple(asked.stop_strings),
            tree=tree,
            cuda_graphs=asked.cuda_graphs,
            diagnose=True,
        )

    def _pass(self, plan: PassPlan) -> Pass:
        config = self._decode_config(plan)
        about = {
            "target": self.target_config.name,
            "drafter": plan.subject.name,
            "temperature": plan.temperature,
            "rule": str(plan.rule) if plan.temperature > 0 else "greedy",
            "lossless": plan.rule.is_lossless or plan.temperature == 0,
            "schedule": str(plan.schedule.name) + (", gate" if plan.schedule.gate else ""),
            "tree": None if config.tree is None else vars(config.tree),
            "num_draft_tokens": plan.num_draft_tokens,
            "slot_layout": plan.subject.slot_layout,
            "dtype": self.target_config.dtype,
            "feature_dtype": self.config.feature_dtype or self.target_config.dtype,
            "device": self.target.device.type,
            "batch_size": self.config.batch_size,
            "max_new_tokens": config.max_new_tokens,
            "task_set": plan.task_set,
        }
        label = f"{setting_of(about)} {plan.task_set}"
        target, drafter, tokenizer = self._target_of(plan.subject), plan.subject.drafter, self.tokenizer

        def run(prompts: Sequence[list[int]], ids: Sequence[int], on_finish: Callable[..., object]) -> DecodeResult:
            return decode(target, drafter, prompts, config, request_ids=ids, on_finish=on_finish, tokenizer=tokenizer)

        options = [asdict(config), plan.subject.fingerprint]
        return self.passes.run(about, options, self.prompts[plan.task_set], run, label)

    def _against_vanilla(self, passes: Sequence[Pass]) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]:
        """Every pass against plain decoding of the same prompts at its temperature: of greedy ones whether it is
        identical, by index of the pass, and of all how far they agree, task by task."""
        identities, agreements = {}, []
        for index, measured in enumerate(passes):
            same = [p for p in passes if all(p.about[key] == measured.about[key] for key in SAME_QUESTION)]
            vanilla = next((p for p in same if p.about["drafter"] == "vanilla"), None)
            if vanilla is None or vanilla is measured or vanilla.prompts != measured.prompts:
                continue
            if measured.about["temperature"] == 0:
                found = divergences(self.target, measured, vanilla)
                identities[index] = identity_from(len(measured.generations), found)
                tasks = greedy_agreement(measured, found)
            else:
                tasks = sampled_agreement(measured, vanilla)
            agreements.append({**{key: measured.about[key] for key in SETTING}, "tasks": tasks})
        return identities, agreements

    def _against_transformers(self, passes: Sequence[Pass]) -> dict[str, Any] | None:
        """The speculative greedy outputs of the first prompts against transformers' own `generate`."""
        greedy = [p for p in passes if p.about["temperature"] == 0 and p.about["task_set"] == "main"]
        if not greedy or not self.config.check_transformers:
            return None
        chosen, count = greedy[-1], self.config.check_transformers
        asked = [chosen.about["target"], chosen.about["dtype"], self.config.max_new_tokens, chosen.prompts[:count]]
        path = self.folder / "passes" / f"transformers_{sha256_text(json.dumps(asked))[:16]}.json"

        def generate() -> list[list[int]]:
            model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
                self.target_config.path, dtype=self.target.head.dtype
            )
            model.to(self.target.device)  # pyright: ignore[reportArgumentType] (a decorator hides its signature)
            model.eval()
            return [self._generate_one(model, prompt) for prompt in chosen.prompts[:count]]

        outputs = self.passes.once(path, generate)
        reference = Pass(
            about={**chosen.about, "drafter": "transformers"},
            domains=chosen.domains[:count],
            prompts=chosen.prompts[:count],
            generations=[Generation(i, tokens) for i, tokens in enumerate(outputs)],
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
