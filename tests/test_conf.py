"""Every yaml composes and types, and so does every command of the README."""

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from data.extract import ExtractConfig
from data.generate import GenerateConfig
from eval.config import EvalConfig
from eval.tasks import known_tasks
from models.config import to_dataclass, typed
from models.dspark import MarkovHeadType
from models.losses import published_decay
from models.target import TargetConfig
from train.config import TrainConfig

ROOT = Path(__file__).parents[1]
CONF = ROOT / "conf"
SCHEMAS = {"generate": GenerateConfig, "extract": ExtractConfig, "train": TrainConfig, "eval": EvalConfig}
SCRIPTS = [*SCHEMAS, "export", "race"]


def load_script(name: str) -> ModuleType:
    """Run a root script as a module, which registers its schema."""
    spec = importlib.util.spec_from_file_location(f"script_{name}", ROOT / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCHEMAS["export"] = load_script("export").ExportConfig
SCHEMAS["race"] = load_script("race").RaceConfig
for _name in SCRIPTS[:-2]:
    load_script(_name)


def compose_and_type(script: str, overrides: list[str]) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base=None):
        node = compose(script, overrides)
    to_dataclass(SCHEMAS[script], node, section=script)
    if script != "race" and node.target.get("path") != "???":
        assert isinstance(typed(node.target, section="target"), TargetConfig)
    if script == "train":
        typed(node.model, section="model")
    return node


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_config_composes_and_types(script: str) -> None:
    compose_and_type(script, [])


@pytest.mark.parametrize("target", options("target"))
def test_every_target_composes_and_types(target: str) -> None:
    overrides = [f"target={target}"] + (["target.path=some/name"] if target == "custom" else [])
    assert compose_and_type("train", overrides).target.name == target


@pytest.mark.parametrize("model", options("model"))
def test_every_drafter_composes_and_types(model: str) -> None:
    compose_and_type("train", [f"model={model}"])


@pytest.mark.parametrize("experiment", options("experiment"))
@pytest.mark.parametrize("script", SCRIPTS[:-1])
def test_every_experiment_composes_with_every_script(script: str, experiment: str) -> None:
    compose_and_type(script, [f"experiment={experiment}"])


@pytest.mark.parametrize("experiment", options("experiment"))
@pytest.mark.parametrize("model", options("model"))
def test_every_experiment_composes_with_every_drafter(model: str, experiment: str) -> None:
    compose_and_type("train", [f"experiment={experiment}", f"model={model}"])


def test_an_experiment_sets_the_options_of_the_chosen_drafter_only() -> None:
    node = compose_and_type("train", ["experiment=demo", "model=eagle3"])
    assert node.model.num_draft_tokens == 4 and "num_layers" not in node.model
    assert compose_and_type("train", ["experiment=demo", "model=dspark"]).model.markov_rank == 64


def test_the_reference_recipe_of_eagle3_fuses_all_layers_with_qk_norms() -> None:
    model = compose_and_type("train", ["experiment=deepspec", "model=eagle3"]).model
    assert model.qk_norm and model.num_fused_layers is None
    portable = compose_and_type("train", ["model=eagle3"]).model
    assert not portable.qk_norm and portable.num_fused_layers == 3


# What differs between the twelve configs of the reference, and below what does not.
PUBLISHED_LAYERS = {
    "qwen3_4b": [1, 9, 17, 25, 33],
    "qwen3_8b": [1, 9, 17, 25, 33],
    "qwen3_14b": [1, 10, 19, 28, 37],
    "gemma4_12b": [5, 17, 29, 41, 46],
}
PUBLISHED_MODELS: dict[str, dict[str, Any]] = {
    "eagle3": {"num_draft_tokens": 7, "step_decay": 0.8, "num_fused_layers": None, "draft_vocab_size": None},
    "dflash": {"num_draft_tokens": 7, "num_layers": 5, "loss": {"cross_entropy": 1.0}},
    "dspark": {
        "num_draft_tokens": 7,
        "num_layers": 5,
        "markov_rank": 256,
        "markov_head": MarkovHeadType.vanilla,
        "confidence_weight": 1.0,
        "loss": {"cross_entropy": 0.1, "l1": 0.9},
    },
}


@pytest.mark.parametrize("target", PUBLISHED_LAYERS)
@pytest.mark.parametrize("model", PUBLISHED_MODELS)
def test_the_published_recipe_is_the_references(model: str, target: str) -> None:
    node = compose_and_type("train", ["experiment=deepspec", f"model={model}", f"target={target}"])
    config, drafter = to_dataclass(TrainConfig, node, section="train"), typed(node.model, section="model")
    optim = config.optim
    assert (optim.learning_rate, optim.warmup_ratio, optim.weight_decay, optim.max_grad_norm) == (6e-4, 0.04, 0.0, 1.0)
    assert (optim.beta1, optim.beta2, optim.eps) == (0.9, 0.999, 1e-8)
    assert (config.batch_size, config.num_epochs, config.num_steps, config.num_anchors) == (512, 10, None, 512)
    assert (config.checkpoint_every, config.log_every, config.mixed_precision) == (3000, 10, "bf16")
    assert config.seed == (0 if model == "eagle3" else 42)
    assert node.target.layer_ids == PUBLISHED_LAYERS[target]
    assert node.target.mask_token_id == (4 if target == "gemma4_12b" else 151669)
    for name, value in PUBLISHED_MODELS[model].items():
        found = vars(drafter.loss) if name == "loss" else getattr(drafter, name)
        assert ({k: v for k, v in found.items() if v} if name == "loss" else found) == value, name
    if model != "eagle3":
        decay = published_decay(7) if drafter.decay is None else drafter.decay
        assert decay == 4.0 and drafter.slot_layout == "anchor_first"


def test_no_yaml_is_out_of_reach() -> None:
    """A file that no test above composes would rot."""
    known = {f"{script}.yaml" for script in SCRIPTS}
    known |= {f"{group}/{name}.yaml" for group in ("target", "model", "chats", "experiment") for name in options(group)}
    known |= {f"experiment/{s}/{name}.yaml" for s in SCRIPTS for name in options(f"experiment/{s}")}
    pairs = [(experiment, model) for experiment in options("experiment") for model in options("model")]
    known |= {
        f"experiment/train/{part}/{experiment}_{model}.yaml"
        for part in ("model", "drafter")
        for experiment, model in pairs
        if f"{experiment}_{model}" in options(f"experiment/train/{part}")
    }
    known |= {f"task/{name}.yaml" for name in known_tasks()}  # tests/test_tasks.py reads each
    found = {str(path.relative_to(CONF)) for path in CONF.rglob("*.yaml")}
    assert found == known
    for script in SCRIPTS:
        assert set(options(f"experiment/{script}")) <= set(options("experiment"))


def readme_commands() -> list[str]:
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if re.search(r"\b(generate|extract|train|eval|export|race)\.py\b", line)]


def test_the_readme_shows_every_script() -> None:
    text = "\n".join(readme_commands())
    assert all(f"{script}.py" in text for script in SCRIPTS)


@pytest.mark.parametrize("command", readme_commands())
def test_every_readme_command_composes(command: str) -> None:
    words = shlex.split(command)
    place = next(i for i, word in enumerate(words) if word.endswith(".py"))
    compose_and_type(Path(words[place]).stem, words[place + 1 :])


def test_a_wrong_type_in_a_drafter_config_names_the_key() -> None:
    with initialize_config_dir(str(CONF), version_base=None):
        node = compose("train", ["model.num_layers=many"])
    with pytest.raises(ValueError, match=r"config model.num_layers: .*many"):
        typed(node.model, section="model")


def test_an_unknown_key_in_a_drafter_config_is_named() -> None:
    with initialize_config_dir(str(CONF), version_base=None):
        node = compose("train", ["+model.num_layer=2"])
    with pytest.raises(ValueError, match="num_layer"):
        typed(node.model, section="model")


def test_a_missing_value_in_a_drafter_config_is_named() -> None:
    with initialize_config_dir(str(CONF), version_base=None):
        node = compose("train", ["~model.decay"])
    with pytest.raises(ValueError, match="decay"):
        typed(node.model, section="model")
