"""Runs a drafter and its baselines over the same prompts, pass by pass; a finished pass is kept and not run again."""

import json
import math
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from data.codecs import find_codec, round_trip
from data.generate import read_sources
from data.prompts import SourcePrompt
from eval.autotune import LengthChoice, choose_num_draft_tokens
from eval.calibrate import assess, calibration_file, load_scaling, recorded
from eval.config import EvalConfig, parse_length, sampled_temperature, under_protocol
from eval.costs import LOADS, CostTable, measure_costs
from eval.decode import decode
from eval.diagnosis import diagnose, training_record
from eval.html import render_page
from eval.identity import divergences, identity_from, identity_of
from eval.lossless import greedy_agreement, sampled_agreement
from eval.markdown import setting_of
from eval.passes import Passes
from eval.plans import (
    CALIBRATING,
    EXTRA,
    MAIN,
    REPLAY,
    PassPlan,
    length_of,
    main_plans,
    replay_plans,
    same_question,
)
from eval.plots import reliability_diagram
from eval.replay import replay_of
from eval.report import build_report
from eval.rounds import DecodeResult, Generation
from eval.schedule import FIXED, Schedule, ScheduleName
from eval.serving import Serving
from eval.simulate import compare
from eval.stats import Pass
from eval.subject import Subject
from eval.sweeps import confidence_sweep, lossy_sweep
from eval.tasks import TaskOptions, Turns, load_tasks
from eval.verify import Rule
from models.base import TreeProposer
from models.drafter_files import CALIBRATION
from models.files import sha256_text, write_json, write_text
from models.target import Target, TargetConfig, load_model, quantization_name

SETTING = ("drafter", "num_draft_tokens", "temperature", "rule", "lossless", "lossy_threshold")
WARM_UP_TOKENS = 8  # before a replay
AUTO_PROMPTS = 16  # num_draft_tokens=auto learns from so many at least how long drafts survive


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
        if config.lossy_sweep:
            sampled_temperature(config)  # refused before any work is done
        loads = list(config.cost_loads)
        if loads != sorted(set(loads)) or min(loads, default=1) < 1:
            raise ValueError(f"cost_loads must ascend from 1 or more, got {loads}")
        self.target, self.tokenizer = target, tokenizer
        self.rounding = None if config.feature_dtype is None else find_codec(config.feature_dtype, "feature_dtype")
        self.folder = Path(config.output_dir) / "eval"
        self.quantization = quantization_name(target_config)
        self.target_key = sha256_text(json.dumps([target_config.dtype, self.quantization]))[:6]
        all_turns = config.turns is Turns.all
        self.passes = Passes(self.folder / "passes", accelerator, tokenizer, target_config.thinking, all_turns)
        self.missing_tasks: list[str] = []
        self.prompts = {
            MAIN: self._load(config.tasks, config.num_prompts),
            EXTRA: self._load(config.extra_tasks, config.num_extra_prompts),
        }
        if config.replay is not None:
            last = len(self.prompts[MAIN]) - 1
            if not 0 <= config.replay <= last:
                raise ValueError(f"replay={config.replay} must be null or a measured prompt, 0..{last}")
            self.prompts[REPLAY] = [self.prompts[MAIN][config.replay]]
        self.prompts[CALIBRATING] = self._calibration_prompts()

    def run(self, subject: Subject, compared: Sequence[Subject] = ()) -> dict[str, Any]:
        """All passes of `subject`, its baselines and the drafters it is compared with, on the same prompts; returns the
        report and writes eval/report.json."""
        if self.config.tree.num_nodes is not None and not isinstance(subject.drafter, TreeProposer):
            raise ValueError(
                f"tree.num_nodes={self.config.tree.num_nodes}: only EAGLE-3 drafts trees, draft={self.config.draft} is "
                f"{subject.name}; use tree.num_nodes=null"
            )
        serving = self._probed(subject)
        choice = None
        if parse_length(self.config.num_draft_tokens, subject) == "auto":
            choice = self._choose_length(subject)
        if self.config.calibrate.enabled:
            subject = self._calibrated(subject)
        plans = list(main_plans(self.config, subject, compared, choice, self._schedule_of))
        if self.prompts[EXTRA] and subject.drafter is not None:
            length = length_of(self.config, subject)
            plans.append(PassPlan(subject, 0.0, length, self._schedule_of(subject), self.config.rule, EXTRA))
        passes = [self._pass(plan) for plan in plans]
        identities, agreements = self._against_vanilla(passes)
        report: dict[str, Any] = build_report(passes, identities, choice) | {"losslessness": agreements}
        report["missing_tasks"] = self.missing_tasks
        report["machine"] = {"threads": torch.get_num_threads(), "torch": torch.__version__, "seed": self.config.seed}
        report["lossy_sweep"] = lossy_sweep(report["rows"])
        report["findings"] = self._findings(report, [subject, *compared])
        report["replay"] = self._replay(plans)
        report["server"] = None if serving is None else serving.report(passes)
        report["round_costs"] = self._round_costs([subject, *compared])
        report["weights"] = {s.name: s.fingerprint for s in (subject, *compared) if s.folder is not None}
        report |= self._confidence_report(subject, passes)
        if self.config.simulate.enabled:
            report["simulation"] = self._simulation_report(subject, passes)
        report["transformers_generate"] = self._against_transformers(passes)
        report["peak_rss_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        if self.passes.accelerator.is_main_process:
            write_json(self.folder / "report.json", report)
            write_text(self.folder / "report.html", render_page(report))
            if report["calibration"] is not None:
                write_text(self.folder / "reliability.svg", reliability_diagram(report["calibration"]))
        return report

    def _probed(self, subject: Subject) -> Serving | None:
        """The running engine that is measured beside; asked by the main process alone."""
        if self.config.server is None or not self.passes.accelerator.is_main_process:
            return None
        serving = Serving(self.config, self.target, subject)
        serving.probe(self._first_turns(MAIN))
        return serving

    def _findings(self, report: Mapping[str, Any], subjects: Sequence[Subject]) -> list[dict[str, Any]]:
        """Of every drafter with weights, at the first temperature and as many drafts as it is measured with first."""
        found = []
        for subject in subjects:
            row = next(row for row in report["rows"] if row["drafter"] == subject.name)
            if subject.folder is not None and isinstance(subject.drafter, torch.nn.Module):
                training = training_record(subject.folder)
                findings = [asdict(one) for one in diagnose(row, training, self._certain_n_gram(report, row))]
                about = {"name": setting_of(row), "parameters": sum(p.numel() for p in subject.drafter.parameters())}
                found.append(about | {"training": training, "findings": findings})
        return found

    @staticmethod
    def _certain_n_gram(report: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
        """The row of n-gram lookup, where its difference to a drafter's is no chance."""
        pairs = [(one["drafter"], one["other"], one["temperature"]) for one in report["comparisons"] if one["is_real"]]
        return report["n_gram"] if (row["drafter"], "ngram", row["temperature"]) in pairs else {}

    def _replay(self, plans: Sequence[PassPlan]) -> dict[str, Any] | None:
        if self.config.replay is None:
            return None
        (source,) = self.prompts[REPLAY]
        lanes = [self._pass(plan) for plan in replay_plans(plans)]
        return replay_of(lanes, str(source.first_turn.messages[-1]["content"]), self.tokenizer)

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
        path = self.folder / f"costs_{'_'.join(map(str, loads))}_{subject.fingerprint[:12]}_{self.target_key}.json"
        sample, drafter = self._first_turns(MAIN, max(loads)), subject.drafter
        made = self.passes.once(path, lambda: asdict(measure_costs(self._target_of(subject), drafter, sample, loads)))
        return CostTable(**made)

    def _round_costs(self, subjects: Sequence[Subject]) -> list[dict[str, Any]]:
        """Of every drafter, where `cost_loads` asks for it."""
        loads = list(self.config.cost_loads)
        drafting = [subject for subject in subjects if subject.drafter is not None and loads]
        return [{"drafter": s.name, **asdict(self._costs(s, loads))} for s in drafting]

    def _calibrated(self, subject: Subject) -> Subject:
        """With a scaling fitted on prompts that are not measured, and kept beside its weights."""
        asked = self.config.calibrate
        if subject.folder is None or subject.drafter is None:
            raise ValueError(f"calibrate.enabled=true needs a trained drafter, got draft={self.config.draft}")
        rounds = recorded(self._pass(self._calibration_plan(subject)).generations)
        about = {"temperature": asked.temperature, "num_prompts": len(self.prompts[CALIBRATING])}
        dataset = asked.prompts or "held-out prompts of the project's own"
        found = calibration_file(rounds, asked.scaling, dataset=dataset) | {"fitted_at": about}
        if self.passes.accelerator.is_main_process:
            write_json(subject.folder / CALIBRATION, found)
        self.passes.accelerator.wait_for_everyone()
        return replace(subject, scaling=load_scaling(subject.folder, subject.drafter.num_draft_tokens))

    def _calibration_plan(self, subject: Subject) -> PassPlan:
        assert subject.drafter is not None
        temperature, length = self.config.calibrate.temperature, subject.drafter.num_draft_tokens
        return PassPlan(subject, temperature, length, FIXED, Rule.ratio, CALIBRATING)

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
        measured = {tuple(ids) for ids in self._first_turns(MAIN)}
        calibrating = self.passes.render([source.first_turn for source in found])
        if shared := sum(tuple(ids) in measured for ids in calibrating):
            raise ValueError(
                f"calibrate.prompts={asked.prompts}: {shared} of {len(found)} are among the measured prompts (tasks=), "
                "on which calibration would then look better than it is"
            )
        return found

    def _confidence_report(self, subject: Subject, passes: Sequence[Pass]) -> dict[str, Any]:
        """Of the drafter's measured rounds: its confidences as they are and with its scaling; what a threshold on them
        would have done."""
        own = [p for p in passes if p.about["drafter"] == subject.name and p.about["schedule"] == "fixed"]
        sampled = [p for p in own if p.about["temperature"] == self.config.calibrate.temperature]
        measured = next(
            (p for p in [*sampled, *own] if any(r.confidence for g in p.generations for r in g.rounds)), None
        )
        if measured is None:
            return {"calibration": None, "confidence_sweep": []}
        rounds = recorded(measured.generations)
        calibration = {
            "temperature": measured.about["temperature"],
            "rounds": len(rounds.confidence),
            "scaling": None if subject.scaling is None else vars(subject.scaling),
            "before": assess(rounds).to_dict(),
            "after": None if subject.scaling is None else assess(rounds, subject.scaling).to_dict(),
        }
        return {"calibration": calibration, "confidence_sweep": confidence_sweep(measured, subject.scaling)}

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
        about = {"drafter": subject.name, "temperature": measured.about["temperature"]}
        return about | {"costs": asdict(costs), "schedules": rows}

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
        name = (
            f"length_choice_batch{self.config.batch_size}{rounding}_{subject.fingerprint[:12]}_{self.target_key}.json"
        )
        sample = self._first_turns(MAIN, max(self.config.batch_size, AUTO_PROMPTS))
        target, drafter = self._target_of(subject), subject.drafter
        config = PassPlan(subject, 0.0, 0, FIXED, Rule.ratio, MAIN).decoding(self.config)

        def choose() -> dict[str, Any]:
            return asdict(choose_num_draft_tokens(target, drafter, sample, config))

        return LengthChoice(**self.passes.once(self.folder / name, choose))

    def _pass(self, plan: PassPlan) -> Pass:
        config = plan.decoding(self.config)
        device = self.target.device.type
        about = plan.about(self.config, self.target_config, quantization=self.quantization, device=device)
        label = f"{setting_of(about)} {plan.task_set}"
        target, drafter, tokenizer = self._target_of(plan.subject), plan.subject.drafter, self.tokenizer

        def run(prompts: Sequence[list[int]], ids: Sequence[int], on_finish: Callable[..., object]) -> DecodeResult:
            if plan.task_set == REPLAY:  # what is done at the first call alone is no part of it
                decode(target, drafter, prompts, replace(config, max_new_tokens=WARM_UP_TOKENS), tokenizer=tokenizer)
            return decode(target, drafter, prompts, config, request_ids=ids, on_finish=on_finish, tokenizer=tokenizer)

        options = [asdict(config), plan.subject.fingerprint]
        return self.passes.run(about, options, self.prompts[plan.task_set], run, label)

    def _against_vanilla(self, passes: Sequence[Pass]) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]:
        """Every pass against plain decoding of the same prompts at its temperature: of greedy ones whether it is
        identical, by index of the pass, and of all how far they agree, task by task."""
        identities, agreements = {}, []
        for index, measured in enumerate(passes):
            same = [p for p in passes if same_question(p.about, measured.about)]
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
        greedy = [p for p in passes if p.about["temperature"] == 0 and p.about["task_set"] == MAIN]
        if not greedy or not self.config.check_transformers:
            return None
        chosen, count = greedy[-1], self.config.check_transformers
        asked = [chosen.about["target"], self.target_key, self.config.max_new_tokens, chosen.prompts[:count]]
        path = self.folder / "passes" / f"transformers_{sha256_text(json.dumps(asked))[:16]}.json"

        def generate() -> list[list[int]]:
            model = load_model(self.target_config, self.target.device).eval()
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
