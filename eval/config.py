"""Options of eval.py; conf/eval.yaml lists every value with a remark."""

from dataclasses import dataclass, replace
from typing import Any

from data.generate import BuiltinPrompts
from data.tracking import TrackerName, WandbConfig
from eval.calibrate import Form
from eval.schedule import ScheduleName
from eval.subject import Subject
from eval.tasks import DEEPSPEC_SEED, Protocol, Turns
from eval.verify import Rule
from models.target import TargetConfig


@dataclass
class TreeOptions:
    """tree.*: a `TreePolicy` but for its depth, which is num_draft_tokens."""

    num_nodes: int | None
    top_k: int


@dataclass
class CalibrateOptions:
    """calibrate.*: fit the scaling of a drafter's confidences, and keep it beside its weights."""

    enabled: bool
    prompts: str | None
    num_prompts: int
    max_new_tokens: int
    temperature: float
    scaling: Form


@dataclass
class SimulateOptions:
    """simulate.*: throughput of every schedule under load, from measured costs and the rounds of this run."""

    enabled: bool
    loads: list[int]
    num_rounds: int


@dataclass
class EvalConfig:
    """Options of eval.py; conf/eval.yaml lists every value with a remark."""

    name: str
    output_dir: str
    target: Any
    draft: str
    compare: list[str]
    allow_pickle: bool
    tasks: list[str]
    protocol: Protocol
    turns: Turns
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
    lossy_threshold: float
    lossy_sweep: list[float]
    schedule: ScheduleName
    confidence_threshold: float
    gate: bool
    tree: TreeOptions
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    stop_strings: list[str]
    calibrate: CalibrateOptions
    cost_loads: list[int]
    simulate: SimulateOptions
    baselines: list[str]
    replay: int | None
    check_transformers: int
    feature_dtype: str | None
    cuda_graphs: bool
    server: str | None
    api_key_file: str | None
    request_timeout: float
    tracker: TrackerName | None
    wandb: WandbConfig


def under_protocol(config: EvalConfig, target: TargetConfig) -> tuple[EvalConfig, TargetConfig]:
    """Both with what the protocol fixes."""
    if config.protocol is Protocol.own:
        return config, target
    fixed = {"turns": Turns.first, "temperature": 1.0, "max_new_tokens": 2048, "seed": DEEPSPEC_SEED}
    return replace(config, **fixed), replace(target, thinking=False)


def parse_temperatures(value: Any) -> list[float]:
    """A number or a list of them. Raises ValueError on anything else."""
    values = value if isinstance(value, list) else [value]
    for number in values:
        if isinstance(number, bool) or not isinstance(number, int | float) or number < 0:
            raise ValueError(f"temperature must be a number >= 0 or a list of them, got {value}")
    return [float(number) for number in values]


def sampled_temperature(config: EvalConfig) -> float:
    """That of the lossy sweep: the first that is not greedy, where the lossy rule is the lossless one. Raises
    ValueError where there is none, and on thresholds that are no probabilities."""
    found = next((t for t in parse_temperatures(config.temperature) if t > 0), None)
    if found is None:
        raise ValueError(
            f"lossy_sweep={list(config.lossy_sweep)} needs a temperature above 0, at which rules differ, got "
            f"temperature={config.temperature}"
        )
    for threshold in config.lossy_sweep:
        if not 0 < threshold <= 1:
            raise ValueError(f"lossy_sweep={list(config.lossy_sweep)}: {threshold} must be in (0, 1]")
    return found


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
