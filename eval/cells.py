"""A fair race of drafters: equal data, equal steps and several seeds for each, equal prompts to measure them on.

A cell is one drafter with one seed. Its file is written when it is finished, so that a race which was ended anywhere
does the rest when it is started again. Stages are the root scripts, as anyone would call them.
"""

import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from data.run import read_lines
from eval.standings import cell_text, show_standings
from models.files import read_json, write_json, write_text

ROOT = Path(__file__).parents[1]
PLAN = "plan.json"  # in the run folder
FULL_MINUTES = 120.0
# What makes drafters comparable, whatever `options.eval` says.
FAIR = ("temperature=[0,1]", "rule=ratio", "lossy_sweep=[]", "schedule=fixed", "gate=false", "tree.num_nodes=null")
FAIR += ("baselines=[]", "compare=[]", "cost_loads=[1]")
FEWEST = {"num_steps": 2, "num_answers": 16, "num_prompts": 4}

# a root script's name and its options
RunStage = Callable[[str, Sequence[str]], None]


@dataclass
class FullRace:
    """full.*: sizes of a race of FULL_MINUTES."""

    num_steps: int
    num_answers: int
    num_prompts: int


@dataclass
class StageOptions:
    """options.*: more options of each stage."""

    generate: list[str] = field(default_factory=list)
    extract: list[str] = field(default_factory=list)
    train: list[str] = field(default_factory=list)
    eval: list[str] = field(default_factory=list)


@dataclass
class RaceConfig:
    """Options of race.py; conf/race.yaml lists every value with a remark."""

    recipe: str
    name: str
    output_dir: str
    results: str
    budget_minutes: float
    full: FullRace
    num_draft_tokens: int
    seeds: list[int]
    drafters: list[str] | None
    trained: dict[str, list[str]]
    untrained: dict[str, str]
    target_options: list[str]
    options: StageOptions
    launcher: list[str]


@dataclass(frozen=True)
class Cell:
    """`seed`: None where nothing is trained, and `draft` is what eval.py is given."""

    drafter: str
    seed: int | None
    options: tuple[str, ...]  # of train.py
    draft: str | None

    @property
    def name(self) -> str:
        return self.drafter if self.seed is None else f"{self.drafter}_seed{self.seed}"


def run_race(config: RaceConfig, run_stage: RunStage | None = None) -> str:
    """All cells that are not finished yet; returns the standings (Markdown), which stand beside the cells' files.

    Raises ValueError where a finished cell or the run folder belongs to another race, and where a stage fails.
    """
    plan, cells, folder, results = plan_of(config), cells_of(config), Path(config.output_dir), Path(config.results)
    if results.resolve() == folder.resolve():
        raise ValueError(f"results={results} must be another folder than output_dir, which holds other JSON files")
    run = run_stage or (lambda script, options: run_script(config.launcher, script, options))
    finished = finished_cells(results, cells, plan)
    todo = [cell for cell in cells if cell.name not in finished]
    if todo:
        claim_folder(folder, plan)
    else:
        sys.stderr.write(f"race: all {len(cells)} cells asked for are finished in {results}\n")
    first_trained = next((cell for cell in todo if cell.seed is not None), None)
    shown = None
    for number, cell in enumerate(todo, start=1):
        if cell is first_trained:
            make_data(config, plan, run)
        sys.stderr.write(f"race: {cell.name}, {number} of {len(todo)} cells to do\n")
        record = run_cell(config, plan, cell, run)
        write_text(results / f"{cell.name}.json", cell_text(record))
        shown = show_standings(results)
    return shown or show_standings(results)


def make_data(config: RaceConfig, plan: dict[str, Any], run: RunStage) -> None:
    """Answers and features that all trained drafters learn from."""
    common, own = stage_options(plan), [f"output_dir={config.output_dir}"]
    run("generate", [*common, *config.options.generate, *builtin_options(plan), *own])
    run("extract", [*common, *config.options.extract, *own])


def plan_of(config: RaceConfig) -> dict[str, Any]:
    """What all cells of a race have in common, as JSON values. Raises ValueError on a budget, seeds or names that are
    none."""
    minutes, full = config.budget_minutes, asdict(config.full)
    if not 0 < minutes < math.inf:
        raise ValueError(f"budget_minutes must be above 0 and finite, got {minutes}")
    numbers = {"num_draft_tokens": config.num_draft_tokens, **{f"full.{name}": value for name, value in full.items()}}
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not config.seeds or len(set(config.seeds)) < len(config.seeds) or not all(0 <= x < 2**32 for x in config.seeds):
        raise ValueError(f"seeds must be one or more different numbers from 0 to 2^32 - 1, got {list(config.seeds)}")
    known = sorted(path.stem for path in (ROOT / "conf" / "experiment" / "train").glob("*.yaml"))
    if config.recipe not in known:
        raise ValueError(f"recipe={config.recipe}: no conf/experiment/train/{config.recipe}.yaml; there are {known}")
    for name in (*config.trained, *config.untrained):
        if not re.fullmatch(r"[a-z0-9_-]+", name):
            raise ValueError(f"trained, untrained: {name!r} becomes a file's name, and may have a-z, 0-9, _ and - only")
    if shared := config.trained.keys() & config.untrained.keys():
        raise ValueError(f"trained and untrained share the names {sorted(shared)}")
    sizes = {name: max(FEWEST[name], round(value * minutes / FULL_MINUTES)) for name, value in full.items()}
    return {
        "experiment": config.recipe,
        "budget_minutes": minutes,
        **sizes,
        "num_draft_tokens": config.num_draft_tokens,
        "target": list(config.target_options),
        "options": asdict(config.options),
    }


def cells_of(config: RaceConfig) -> list[Cell]:
    """Untrained ones first, then seed by seed, so that a race that was ended early compares all drafters. Raises
    ValueError on the name of none."""
    known = [*config.untrained, *config.trained]
    chosen = known if config.drafters is None else config.drafters
    if unknown := [name for name in chosen if name not in known]:
        raise ValueError(f"drafters={list(chosen)}: no {', '.join(unknown)}; there are {', '.join(known)}")
    if not chosen:
        raise ValueError(f"drafters={list(chosen)}: none is left to race; there are {', '.join(known)}")
    baselines = [Cell(name, None, (), draft) for name, draft in config.untrained.items()]
    trained = [Cell(name, seed, tuple(own), None) for seed in config.seeds for name, own in config.trained.items()]
    return [cell for cell in baselines + trained if cell.drafter in chosen]


def claim_folder(folder: Path, plan: dict[str, Any]) -> None:
    """Notes whose answers, features and weights stand in the run folder. Raises ValueError where they are another
    race's, or of no race."""
    path = folder / PLAN
    if path.is_file() and (found := differences(plan, read_json(path))):
        raise ValueError(f"{path} says that this folder holds another race ({found}); take another name= for this one")
    if not path.is_file() and (folder / "responses.jsonl").exists():
        raise ValueError(f"output_dir={folder} holds answers of another run; take another name= for this race")
    write_json(path, plan)


def finished_cells(results: Path, cells: Sequence[Cell], plan: dict[str, Any]) -> set[str]:
    """Names of those that have a file. Raises ValueError where a file is another race's."""
    own, found = {cell.name: about(cell) for cell in cells}, set()
    for path in sorted(results.glob("*.json")):
        record = read_json(path)
        pairs = [(plan, record.get("plan", {})), (own.get(path.stem, record.get("cell")), record.get("cell", {}))]
        if differing := "; ".join(filter(None, (differences(ours, theirs) for ours, theirs in pairs))):
            raise ValueError(
                f"{path} is a cell of another race ({differing}); take another name= (and results=) for this one, or "
                "the old options to go on with that one"
            )
        found.add(path.stem)
    return found


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """In words; empty where there are none."""
    names = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
    return "; ".join(f"{name}: {theirs.get(name)} there, {ours.get(name)} here" for name in names)


def about(cell: Cell) -> dict[str, Any]:
    return {"drafter": cell.drafter, "seed": cell.seed, "options": list(cell.options), "draft": cell.draft}


def stage_options(plan: dict[str, Any]) -> list[str]:
    return [f"experiment={plan['experiment']}", *plan["target"]]


def builtin_options(plan: dict[str, Any]) -> list[str]:
    return [f"builtin.num_train={plan['num_answers']}", f"builtin.num_heldout={plan['num_prompts']}"]


def run_cell(config: RaceConfig, plan: dict[str, Any], cell: Cell, run: RunStage) -> dict[str, Any]:
    """Its record: what was run, what was measured at every temperature, what training took. What makes a race fair
    stands behind a user's own options, and so wins."""
    common, folder, draft, length = stage_options(plan), Path(config.output_dir), cell.draft, plan["num_draft_tokens"]
    training = None
    if cell.seed is not None:
        own = [f"output_dir={folder / cell.name}", f"store={folder / 'store'}", f"seed={cell.seed}"]
        own += [f"num_steps={plan['num_steps']}", f"model.num_draft_tokens={length}"]
        run("train", [*common, *cell.options, *config.options.train, *own])
        draft = str(folder / cell.name / "checkpoints")
        training = training_of(folder / cell.name / "metrics.jsonl", plan["num_steps"])
    own = [*builtin_options(plan), f"output_dir={folder}", f"draft={draft}", f"num_draft_tokens={length}", *FAIR]
    run("eval", [*common, *config.options.eval, *own])
    report = read_json(folder / "eval" / "report.json")
    found = next(iter(report["findings"]), None)
    provenance = read_json(folder / "eval_provenance.json")
    return {
        "cell": about(cell),
        "plan": plan,
        "trained_parameters": 0 if found is None else found["parameters"],
        "training": training,
        "measured": list(measured_of(report)),
        "alone": alone_of(report, length),
        "date": datetime.now(UTC).date().isoformat(),
        "made_with": {name: provenance[name] for name in ("git_commit", "python", "versions")} | report["machine"],
    }


def training_of(metrics: Path, num_steps: int) -> dict[str, Any]:
    """`seconds`: of all steps at the median speed of the run, so that neither an interruption nor other work on the
    machine counts. Raises ValueError where the run was ended before its last step."""
    lines = [line for line in read_lines(metrics, repair=False) if "seconds_per_step" in line]
    if not lines or lines[-1]["step"] != num_steps:
        done = lines[-1]["step"] if lines else 0
        raise ValueError(f"{metrics} ends after {done} of {num_steps} steps; the same command goes on from there")
    names = ("loss", "teacher_forced_acceptance_length")
    last = {name: lines[-1][name] for name in names if name in lines[-1]}
    return {"num_steps": num_steps, "seconds": num_steps * median(x["seconds_per_step"] for x in lines), "last": last}


def measured_of(report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Of the drafter at every temperature: the report's row without what only a diagnosis needs. Raises ValueError
    where nothing was measured."""
    kept = (
        *("drafter", "target", "temperature", "num_draft_tokens", "slot_layout", "rule", "lossless", "schedule"),
        *("dtype", "device", "batch_size", "max_new_tokens", "num_prompts", "bonus_counted", "acceptance_length"),
        *("acceptance_length_interval", "acceptance_length_per_request", "conditional_acceptance"),
        *("outputs_identical_to_vanilla", "near_tie_divergences", "tokens_per_second", "vanilla_tokens_per_second"),
    )
    for row in report["rows"]:
        if row["drafter"] != "vanilla":
            if not row["rounds"]:
                raise ValueError("options.eval: no output was longer than one token; raise max_new_tokens")
            domains = {name: part["requests"] for name, part in row["per_domain"].items()}
            yield {name: row[name] for name in kept} | {"requests": domains}


def alone_of(report: dict[str, Any], num_draft_tokens: int) -> dict[str, Any]:
    """Seconds of a round of one request, timed side by side: drafting, verifying, and a token without drafts."""
    (costs,) = report["round_costs"]
    (draft,), (verify,) = costs["draft"], costs["verify"]
    at = {"draft_seconds": draft[num_draft_tokens], "verify_seconds": verify[num_draft_tokens]}
    return at | {"vanilla_seconds": verify[0]}


def run_script(launcher: Sequence[str], script: str, options: Sequence[str]) -> None:
    """In a process group of its own, so that a Ctrl-C reaches only the race, which asks the stage to end as after a
    SIGTERM, with its work kept. `launcher`: the words before train.py, none = this Python."""
    words = list(launcher) if script == "train" and launcher else [sys.executable]
    command = [*words, str(ROOT / f"{script}.py"), *options]
    sys.stderr.write(f"race: {' '.join([f'{script}.py', *options])}\n")
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, process_group=0)
    except OSError as error:
        raise ValueError(f"launcher={list(launcher)} cannot be started ({error})") from error
    try:
        status = process.wait()
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        raise
    if status != 0:
        raise ValueError(
            f"{script}.py ended with status {status} (its message stands above); finished cells are kept, and the race "
            "goes on from there when it is started again"
        )
