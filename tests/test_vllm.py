"""Exported drafters in vLLM's CPU build: the same tokens, and as many drafts and accepted tokens, prompt by prompt. And
exports in the speculators format as that package and vLLM understand them.

How vLLM (0.32) counts, and how its counts follow from our rounds:
- A draft is counted when it is verified, in full: of the last one neither the drafted nor the accepted tokens are cut
  at the limit. Nor are they in our rounds.
- The first token comes from the prompt's own forward and belongs to no round, in both.
A mean over prompts hides faults that these counts show: a drafter that reads the wrong layers loses a few per cent.
"""

import copy
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from data.store import FeatureStore
from eval.counting import as_vllm
from eval.rounds import Generation
from models.base import Drafter, Engine, SlotLayout
from models.dflash2 import DFlash2
from models.drafter_files import CONFIG
from models.dspark import DSpark, MarkovHeadType
from models.eagle3 import Eagle3
from models.export import METHODS, export_drafter, serve_command
from models.files import read_json
from models.layer_styles import LayerStyle
from models.target import Target, TargetConfig, TargetIdentity
from tests.conftest import build_drafter, dflash2_config, dflash_config, dspark_config, eagle3_config, train_briefly
from tests.draft_batches import enliven
from tests.test_engines import LLAMA3, NUM_DRAFT_TOKENS, NUM_TOKENS, endless, runtime  # noqa: F401 (a fixture)
from tests.test_golden import CASES, GOLDEN, expected, load_case
from tests.vllm_engine import PYTHON, Served, Understood, serve, understand
from tests.wider_heads import widen_heads

IN_PLACE: dict[str, Any] = {"slot_layout": SlotLayout.in_place}
DRAFTERS: dict[str, Any] = {
    "eagle3": eagle3_config(),
    "eagle3, qk norm, scaled positions": eagle3_config(qk_norm=True),
    "eagle3, reduced vocabulary, two layers": eagle3_config(
        draft_vocab_size=40, num_fused_layers=2, norm_before_fc=True
    ),
    "eagle3, norms": eagle3_config(norm_before_residual=True, fc_norm=True, norm_output=True, own_head=True),
    "dspark": dspark_config(num_layers=2),
    "dspark in place": dspark_config(**IN_PLACE),
    "dspark in place, window": dspark_config(sliding_window=8, **IN_PLACE),
    "dflash": dflash_config(),
    "dflash in place": dflash_config(num_layers=2, **IN_PLACE),
    "dflash in place, window": dflash_config(sliding_window=8, **IN_PLACE),
    "dflash2": dflash2_config(),
}
GEMMA4 = {"dspark, gemma4": dspark_config(layer_style=LayerStyle.gemma4)}  # which speculators has not
SPECS: dict[str, dict[str, Any]] = {  # what some learn of a target that is not so
    "eagle3, qk norm, scaled positions": {
        "rope_parameters": {**LLAMA3, "rope_theta": 10000.0, "original_max_position_embeddings": 16}
    },
    # without a cap on logits, which vLLM's Gemma 4 layers put on the Markov head's bias as well
    "dspark, gemma4": {"embedding_scale": 8.0, "keys_are_values": True, "hidden_act": "gelu_pytorch_tanh"},
}
SERVED = [
    *((Engine.vllm, name) for name in DRAFTERS | GEMMA4 if name != "dspark in place, window"),
    (Engine.speculators, "eagle3, qk norm, scaled positions"),
    (Engine.speculators, "eagle3, reduced vocabulary, two layers"),
    (Engine.speculators, "dspark in place, window"),
    (Engine.speculators, "dflash in place, window"),
    (Engine.deepspec, "dspark"),
]
GOLDEN_CASES = ["eagle3", "dspark_vanilla", "dflash_anchor_first", "dflash_in_place"]

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no {PYTHON}: `make test-vllm` builds its environment"),
]


def build(name: str, target: Target, config: TargetConfig, model: Any) -> Any:
    like = copy.copy(target)
    like.spec = replace(target.spec, **SPECS.get(name, {}))
    return build_drafter(model, like, config)


@pytest.fixture(scope="module")
def trained(endless: Target, tiny_target_config: TargetConfig, tiny_store: FeatureStore) -> Callable[[str], Drafter]:
    @cache
    def train(name: str) -> Drafter:
        drafter = build(name, endless, tiny_target_config, (DRAFTERS | GEMMA4)[name])
        return train_briefly(drafter, tiny_store, num_steps=150)

    return train


def exported(drafter: Drafter, folder: Path, *, engine: Engine = Engine.vllm, **about: Any) -> Path:
    card = serve_command(drafter, engine, "TARGET")
    export_drafter(drafter, folder, engine=engine, dtype=torch.float32, card=card, **about)
    return folder


def speculation(folder: Path) -> dict[str, Any]:
    """What the model card tells users to pass as --speculative-config."""
    said = re.search(r"--speculative-config \\\n  '(.+)'", (folder / "README.md").read_text())
    assert said is not None
    options = json.loads(said[1])
    assert options["num_speculative_tokens"] == NUM_DRAFT_TOKENS and options["model"] == "THIS_FOLDER"
    return options | {"model": str(folder)}


def vllm(target: str | Path, options: Mapping[str, Any], prompts: list[list[int]]) -> list[Served]:
    return serve(Path(target), prompts, speculation=options, num_tokens=NUM_TOKENS)


# ---- served


def runtime_serves(target: Target, drafter: Drafter, prompts: list[list[int]]) -> list[Served]:
    reading = target.capturing(drafter.target_layer_ids)
    return [as_vllm_counts(generation) for generation in runtime(reading, drafter, prompts, 0.0)]


def as_vllm_counts(generation: Generation) -> Served:
    counts = as_vllm(generation, NUM_TOKENS)
    return Served(generation.tokens, counts.rounds, counts.proposed, counts.accepted)


def recorded_counts(sample: dict[str, Any]) -> Served:
    """Of a golden case. Its reference may run one round more, where exactly the limit is out."""
    ends = list(accumulate(sample["acceptance_lengths"]))
    drafts = 1 + sum(end < NUM_TOKENS - 1 for end in ends)
    return Served(sample["output"], drafts, drafts * NUM_DRAFT_TOKENS, ends[drafts - 1] - drafts)


@pytest.mark.parametrize(("engine", "name"), SERVED)
def test_vllm_drafts_and_accepts_what_the_runtime_does(
    engine: Engine,
    name: str,
    trained: Callable[[str], Drafter],
    endless: Target,
    tiny_target_config: TargetConfig,
    tiny_identity: TargetIdentity,
    tiny_prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    drafter, prompts = trained(name), tiny_prompts[:8]
    ours = runtime_serves(endless, drafter, prompts)
    assert all(len(answer.tokens) == NUM_TOKENS for answer in ours)
    assert len({answer.accepted for answer in ours}) > 3  # it would notice a mix-up of prompts
    exported(drafter, tmp_path, engine=engine, target=tiny_target_config, identity=tiny_identity)
    assert vllm(tiny_target_config.path, speculation(tmp_path), prompts) == ours


@pytest.mark.skipif(not CASES, reason=f"no golden cases under {GOLDEN}; name their folder with GOLDEN")
@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_vllm_drafts_and_accepts_what_the_reference_does(case: str, tmp_path: Path) -> None:
    target = widen_heads(GOLDEN / "target", tmp_path / "target")
    folder = exported(load_case(case), tmp_path / "exported")
    drafter = widen_heads(folder, tmp_path / "drafter")
    recorded = expected(case)["decode"]
    assert recorded["max_new_tokens"] == NUM_TOKENS
    prompts = [sample["prompt"] for sample in recorded["samples"]]
    served = vllm(target, speculation(folder) | {"model": str(drafter)}, prompts)
    assert served == [recorded_counts(sample) for sample in recorded["samples"]]


FAULTS: dict[str, dict[str, Any]] = {
    "eagle3": {
        "eagle_aux_hidden_state_layer_ids": [2, 3, 4],
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [2, 3, 4]},
    },
    "dflash in place, window": {"is_causal": True},
    "dspark": {"sample_from_anchor": False, "dspark_bonus_anchor": True},
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_export_does_not_pass(
    name: str,
    trained: Callable[[str], Drafter],
    endless: Target,
    tiny_target_config: TargetConfig,
    tiny_prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    """vLLM serves these without a word, and the text is right: only the counts tell."""
    drafter, prompts = trained(name), tiny_prompts[:8]
    config = read_json(exported(drafter, tmp_path) / CONFIG)
    assert FAULTS[name].keys() <= config.keys()
    (tmp_path / CONFIG).write_text(json.dumps(config | FAULTS[name]))
    served = vllm(tiny_target_config.path, speculation(tmp_path), prompts)
    ours = runtime_serves(endless, drafter, prompts)
    assert [answer.tokens for answer in served] == [answer.tokens for answer in ours]
    assert served != ours


# ---- the speculators format

HEADS: dict[str, Any] = {
    "dspark gated": dspark_config(markov_head=MarkovHeadType.gated),
    "dspark rnn": dspark_config(markov_head=MarkovHeadType.rnn, confidence_with_markov=False),
    "dspark without heads": dspark_config(markov_rank=0, confidence=False, confidence_with_markov=False),
}


@pytest.fixture(scope="module")
def understood(
    tiny_target: Target,
    tiny_target_config: TargetConfig,
    tiny_identity: TargetIdentity,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Any, dict[str, Any], Understood]]:
    """Drafter, what was written, and what was understood of it; by name."""
    folder, models = tmp_path_factory.mktemp("speculators"), DRAFTERS | HEADS
    drafters = {name: enliven(build(name, tiny_target, tiny_target_config, models[name])) for name in models}
    about: dict[str, Any] = {"target": tiny_target_config, "identity": tiny_identity}
    folders = [
        exported(drafter, folder / name, engine=Engine.speculators, **about) for name, drafter in drafters.items()
    ]
    written = [read_json(folder / CONFIG) for folder in folders]
    found = zip(drafters.values(), written, understand(folders), strict=True)
    return dict(zip(models, found, strict=True))


@pytest.mark.parametrize("name", DRAFTERS | HEADS)
def test_the_speculators_package_loads_every_tensor_and_field(name: str, understood: Mapping[str, Any]) -> None:
    _, written, answer = understood[name]
    assert answer.misfits == []
    check_fields(written | {"dtype": "torch.float32"}, answer.speculators)


def check_fields(written: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Rotary parameters are kept in one spelling of two, transformers 5's."""
    for key, value in written.items():
        if key in ("rope_theta", "rope_scaling") and "rope_parameters" in found:
            continue
        if isinstance(value, dict):
            check_fields(value, found[key])
        else:
            assert found[key] == value, key


@pytest.mark.parametrize("name", DRAFTERS | HEADS)
def test_vllm_understands_the_speculators_format_as_it_was_meant(name: str, understood: Mapping[str, Any]) -> None:
    drafter, written, answer = understood[name]
    ids, spec, found = list(drafter.target_layer_ids), drafter.spec, answer.vllm
    layers = {key: value for key, value in written["transformer_layer_config"].items() if key != "model_type"}
    check_fields(layers, found)
    sizes = (found["hidden_size"], found["head_dim"], found["num_attention_heads"], found["num_key_value_heads"])
    assert sizes == (spec.hidden_size, spec.head_dim, spec.num_heads, spec.num_kv_heads)
    assert (found["vocab_size"], found["target_hidden_size"]) == (spec.vocab_size, spec.hidden_size)
    assert found["draft_vocab_size"] == (drafter.draft_vocab_size or spec.vocab_size)
    assert found["rope_parameters"] == spec.rope_parameters
    assert found["eagle_aux_hidden_state_layer_ids"] == [index + 1 for index in ids]
    method = METHODS[written["architectures"][0]]
    assert answer.vllm_method == {"method": method, "num_speculative_tokens": NUM_DRAFT_TOKENS}
    own = {"eagle3": check_eagle3, "dflash": check_dflash, "dspark": check_dspark}[method]
    own(drafter, found)


def check_eagle3(drafter: Eagle3, found: Mapping[str, Any]) -> None:
    config = drafter.config
    kind = "Eagle3Qwen3ForCausalLM" if config.qk_norm else "Eagle3LlamaForCausalLM"
    assert found["architectures"] == [kind] and found["num_hidden_layers"] == 1
    assert found["num_aux_hidden_states"] == len(drafter.target_layer_ids)
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        assert found[flag] is getattr(config, flag), flag


def check_block(drafter: Any, found: Mapping[str, Any]) -> None:
    window = drafter.config.sliding_window
    kind = "full_attention" if window is None else "sliding_attention"
    assert found["layer_types"] == [kind] * found["num_hidden_layers"] == [kind] * len(drafter.layers)
    assert (found["sliding_window"], found["use_sliding_window"]) == (window, window is not None)
    assert found["is_causal"] is False


def check_dflash(drafter: Any, found: Mapping[str, Any]) -> None:
    check_block(drafter, found)
    names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    sizes = {name: getattr(drafter.config, name) for name in names} if isinstance(drafter, DFlash2) else {}
    assert found["architectures"] == ["DFlash2DraftModel" if sizes else "DFlashDraftModel"]
    assert found["dflash_config"] == {
        **sizes,
        "causal": False,
        "mask_token_id": drafter.mask_token_id,
        "sample_from_anchor": False,
        "target_layer_ids": list(drafter.target_layer_ids),
    }


def check_dspark(drafter: Any, found: Mapping[str, Any]) -> None:
    """A drafter without a Markov head, a DFlash among them, goes out with a zero one."""
    check_block(drafter, found)
    in_place = drafter.slot_layout is SlotLayout.in_place
    assert found["architectures"] == ["Qwen3DSparkModel"]
    assert (found["sample_from_anchor"], found["dspark_bonus_anchor"]) == (not in_place, in_place)
    assert found["block_size"] == NUM_DRAFT_TOKENS + in_place
    assert (found["target_layer_ids"], found["mask_token_id"]) == (
        list(drafter.target_layer_ids),
        drafter.mask_token_id,
    )
    heads = (1, "vanilla", False, False)
    if isinstance(drafter, DSpark) and drafter.config.markov_rank:
        config = drafter.config
        heads = (config.markov_rank, config.markov_head, config.confidence, config.confidence_with_markov)
    names = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    assert tuple(found[name] for name in names) == heads
