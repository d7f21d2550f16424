"""Chats, options and finished stores that the tests of extraction share."""

import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from torch import Tensor

import data.extraction as extraction_module
import data.shards as shards_module
from data.chat import Supervise
from data.extract import ExtractConfig, extract
from data.responses import ChatOptions, RenderedRecord, Responses
from models.target import (
    Target,
    TargetConfig,
)
from tests.conftest import (
    counting_chat,
    files_of,
    tiny_tokenizer,
)

NUM_CHATS = 10
RECORDS_PER_SHARD = 4


def write_responses(path: Path, chats: list[list[dict[str, str]]]) -> None:
    lines = [
        {"id": f"chat-{index}", "messages": chat, "finish_reason": "length" if index % 4 == 3 else "stop"}
        for index, chat in enumerate(chats)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def chats_of(seed: int, count: int = NUM_CHATS) -> list[list[dict[str, str]]]:
    rng = random.Random(seed)
    return [counting_chat(rng) for _ in range(count)]


def config_of(folder: Path, **changes: Any) -> ExtractConfig:
    """Three shards of ragged chats, several batches a shard."""
    responses = folder / "responses.jsonl"
    if not responses.exists():
        write_responses(responses, chats_of(1))
    base = ExtractConfig(
        name="tiny",
        output_dir=str(folder),
        responses=str(responses),
        captured=str(folder / "captured"),
        store=str(folder / "store"),
        target=None,
        chats=chats_config(),
        feature_dtype="float32",
        last_hidden_dtype="float32",
        records_per_shard=RECORDS_PER_SHARD,
        tokens_per_batch=60,
        repair=False,
        verify=False,
        verify_records=4,
        stats=False,
        preview=0,
    )
    return replace(base, **changes)


def chats_config(**changes: Any) -> ChatOptions:
    return replace(ChatOptions(Supervise.all, max_length=64, min_supervised_tokens=2), **changes)


def rendered(config: ExtractConfig) -> list[RenderedRecord]:
    responses = Responses(
        config.responses, tiny_tokenizer(), config.chats, thinking=None, context=512, records_per_shard=100
    )
    return responses.shard(0).records


Run = Callable[[ExtractConfig], None]


@pytest.fixture
def run(tiny_target: Target, tiny_target_config: TargetConfig, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(extraction_module, "POLL_SECONDS", 0.02)
    return lambda config: extract(config, tiny_target_config, Accelerator(cpu=True), lambda *_, **__: tiny_target)


@pytest.fixture(scope="module")
def wanted(
    tmp_path_factory: pytest.TempPathFactory, tiny_target: Target, tiny_target_config: TargetConfig
) -> dict[str, bytes]:
    """Files of the store that an undisturbed run makes."""
    config = config_of(tmp_path_factory.mktemp("undisturbed"))
    extract(config, tiny_target_config, Accelerator(cpu=True), lambda *_, **__: tiny_target)
    return files_of(Path(config.store))


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the shard files that are written from now on."""
    names: list[str] = []
    save = shards_module.save_file

    def recorded(tensors: dict[str, Tensor], path: Path, **options: Any) -> None:
        names.append(path.name)
        save(tensors, path, **options)

    monkeypatch.setattr(shards_module, "save_file", recorded)
    return names


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
