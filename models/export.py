"""Drafters in an engine's layout: what engines load, written from `Drafter.serving`, read back and written again."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.base import Drafter, Engine, Serving
from models.checkpoint import load_drafter
from models.drafter_files import CALIBRATION, CONFIG, WEIGHTS
from models.files import write_atomic, write_json, write_text
from models.gguf import speculative_type, write_gguf_drafter
from models.gguf_target import drafter_vocabulary
from models.target import TargetConfig, TargetIdentity, load_hf_config, load_tokenizer

# vLLM's method (and SGLang's algorithm) of each architecture: left out, vLLM would go by words in the folder's path.
METHODS = {
    "Qwen3DSparkModel": "dspark",
    "Gemma4DSparkModel": "dspark",
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash",
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3Qwen3ForCausalLM": "eagle3",
    "Eagle3DraftModel": "eagle3",  # speculators
    "DSparkDraftModel": "dspark",
    "Qwen3Eagle3Model": "eagle3",
    "Gemma4Eagle3Model": "eagle3",
}

SECOND_RUNNER = (
    "Only vLLM's second model runner has this drafter: 0.32 takes it by itself on a GPU, and says where another option "
    "stands against it; `VLLM_USE_V2_MODEL_RUNNER=1` asks for it."
)


@dataclass
class ExportConfig:
    """Options of export.py; conf/export.yaml lists every value with a remark."""

    name: str
    output_dir: str
    target: Any
    draft: str
    engine: Engine
    dtype: str
    out: str
    with_target: bool
    allow_pickle: bool


def export_drafter(
    drafter: Drafter,
    folder: Path,
    *,
    engine: Engine,
    dtype: torch.dtype,
    card: str,
    target: TargetConfig | None = None,  # None: the files do not say which
    identity: TargetIdentity | None = None,  # with `target`
    calibration: Mapping[str, Any] | None = None,
) -> None:
    """Write the model card README.md and the drafter: `<drafter>.gguf`, or config.json and model.safetensors; beside it
    calibration.json, the temperatures of its confidences, where it has been calibrated.

    Nothing is written where the engine cannot serve the drafter. What was written is re-read and compared with the
    drafter before this returns.
    """
    foreign = next(folder.glob(CONFIG if engine is Engine.gguf else f"{type(drafter).__name__.lower()}.gguf"), None)
    if foreign is not None:
        raise ValueError(f"out={folder} holds {foreign.name}, made for another engine: choose a folder for this one")
    serving = drafter.serving(engine)  # refuses
    if calibration is not None:
        write_json(folder / CALIBRATION, calibration)
    else:
        (folder / CALIBRATION).unlink(missing_ok=True)  # of what was exported here before
    if engine is Engine.gguf:
        path = folder / f"{type(drafter).__name__.lower()}.gguf"
        vocabulary = None if target is None else drafter_vocabulary(load_tokenizer(target), drafter.spec.vocab_size)
        write_gguf_drafter(drafter, path, dtype=dtype, vocabulary=vocabulary)
        write_text(folder / "README.md", card)
    else:
        about = {} if identity is None else {"target": asdict(identity)}  # refused beside another target
        if engine is Engine.speculators and target is not None:
            verifier = {"name_or_path": target.path, "architectures": load_hf_config(target).architectures or []}
            about["speculators_config"] = {"verifier": verifier}
        _write_folder(serving, folder, dtype=dtype, card=card, about=about)
        _check_written(drafter, serving, folder, engine=engine, dtype=dtype)


def _write_folder(
    serving: Serving,
    folder: Path,
    *,
    dtype: torch.dtype,
    card: str,
    about: Mapping[str, Mapping[str, Any]],  # fields beyond those of the drafter
) -> None:
    weights = {name: _stored(tensor, dtype) for name, tensor in serving.tensors.items()}
    config = {**serving.config, "dtype": str(dtype).removeprefix("torch.")}
    config |= {key: {**config.get(key, {}), **value} for key, value in about.items()}
    write_atomic(folder / WEIGHTS, lambda path: save_file(weights, path, metadata={"format": "pt"}))
    write_text(folder / "README.md", card)
    write_json(folder / CONFIG, config)  # last: without it no loader takes the folder for a drafter


def _stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    tensor = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
    return tensor.contiguous().clone()  # a tied target's embedding and head share memory, which safetensors refuses


def _check_written(drafter: Drafter, serving: Serving, folder: Path, *, engine: Engine, dtype: torch.dtype) -> None:
    """Read as any other checkpoint and written once more it must be the same: every field and tensor was understood."""
    again = load_drafter(folder, target=drafter.spec).drafter.bind(drafter.embedding, drafter.head)
    found, keys = again.serving(engine), serving.config.keys()
    differing = [key for key in keys | found.config.keys() if serving.config.get(key) != found.config.get(key)]
    assert not differing, f"{folder / CONFIG}: read back otherwise: {sorted(differing)}"
    other = serving.tensors.keys() ^ found.tensors.keys()
    assert not other, f"{folder}: {sorted(other)}"
    for name, tensor in serving.tensors.items():
        same = torch.equal(_stored(found.tensors[name], dtype), _stored(tensor, dtype))
        assert same, f"{name} changed on the way to {folder}"


def serve_command(drafter: Drafter, engine: Engine, target: str, *, calibrated: bool = False) -> str:
    """Markdown for the model card: how `engine` serves what was exported for it."""
    config, drafts = drafter.serving(engine).config, drafter.num_draft_tokens
    if engine is Engine.gguf:
        name = f"{type(drafter).__name__.lower()}.gguf"
        return _command(
            f"llama-server --model TARGET.gguf --spec-draft-model {name} --spec-type {speculative_type(config)}",
            f"  --spec-draft-n-max {drafts}",
        )
    method = METHODS[config["architectures"][0]]
    if engine is Engine.sglang:
        own = {
            "eagle3": f"--speculative-num-steps {drafts} --speculative-eagle-topk 1 "
            f"--speculative-num-draft-tokens {drafts + 1}",
            "dflash": f"--speculative-dflash-block-size {drafts + 1}",
            "dspark": f"--speculative-dspark-block-size {drafts}",
        }[method]
        scaled = ["  --speculative-dspark-confidence-sts-path THIS_FOLDER/calibration.json"] if calibrated else []
        return _command(
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {method.upper()}",
            f"  --speculative-draft-model-path THIS_FOLDER {own}",
            *scaled,
        )
    options = {"method": method, "model": "THIS_FOLDER", "num_speculative_tokens": drafts}
    text = _command(
        f"vllm serve {target} --speculative-config",
        f"  '{json.dumps(options | {'draft_sample_method': 'probabilistic'})}'",
    )
    if engine is Engine.deepspec:
        served = method == "dspark" and config["markov_rank"] > 0
        return "For DeepSpec's evaluator. " + (
            f"vLLM reads it, too:\n\n{text}" if served else "To serve it, export it with engine=vllm or engine=sglang."
        )
    text += "\n\nWithout `draft_sample_method` drafts are greedy: as lossless, but not how it was trained and measured."
    if method == "dspark" or config["architectures"][0] == "DFlash2DraftModel":
        text += f" {SECOND_RUNNER}"
    return text


def _command(*lines: str) -> str:
    return "```\n" + " \\\n".join(lines) + "\n```"
