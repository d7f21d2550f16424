"""Shared fixtures: a briefly trained tiny target with its tokenizer, a store of its features, a drafter trained on it,
a kill harness and a planted-fault helper. All on CPU, seeded, offline."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read at import: a test that reaches for the network fails at once

import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from data.chat import render_chats
from data.collate import collate
from data.dataset import RankSampler, StepPlan, TrainingData
from data.extraction import extract_records
from data.messages import Chat
from data.responses import RenderedRecord
from data.run import git_commit
from data.shards import encode_record, publish, write_shard
from data.store import FeatureStore, StoreHeader, StoreRecord
from models.base import SlotLayout
from models.dflash import DFlash, DFlashConfig
from models.dflash2 import Codebooks, DFlash2Config, Gold
from models.dspark import DSpark, DSparkConfig, MarkovHeadType
from models.eagle3 import Eagle3, Eagle3Config
from models.files import write_json
from models.layer_styles import LayerStyle
from models.losses import LossWeights
from models.target import Target, TargetConfig, TargetIdentity, load_target, target_identity

# Progress bars share a lock with forked children, and one that is killed while it holds it would stop all others.
tqdm.set_lock(threading.RLock())
tqdm.monitor_interval = 0  # nor may a thread hold it when a test forks
torch.set_num_threads(1)  # reductions in one order, and room for a second process

NUM_WORDS = 50  # the tiny language counts modulo 50
SPECIALS = ["<pad>", "<user>", "<assistant>", "<end>", "<mask>"]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
TINY_LAYER_IDS = (0, 1, 2)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Words 0..49 and a few special tokens, with a chat template that closes turns with <end>."""
    words = [*SPECIALS, *(str(n) for n in range(NUM_WORDS))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")
    fast.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>", "<mask>"]})
    fast.chat_template = TEMPLATE
    return fast


def counting_chat(rng: random.Random, *, noise: float = 0.1) -> list[dict[str, str]]:
    """`start step` is answered by counting on; now and then a number is skipped, so the target is not certain."""
    value, step = rng.randrange(NUM_WORDS), rng.randrange(1, 6)
    words = [value, step]
    answer = []
    for _ in range(rng.randrange(6, 20)):
        value = (value + step * (2 if rng.random() < noise else 1)) % NUM_WORDS
        answer.append(str(value))
    return [{"role": "user", "content": " ".join(map(str, words))}, {"role": "assistant", "content": " ".join(answer)}]


@pytest.fixture(scope="session")
def tiny_target_config(tmp_path_factory: pytest.TempPathFactory) -> TargetConfig:
    """A Qwen3 of 4 layers, head size 32, vocabulary 55, trained for some seconds to count."""
    folder = tmp_path_factory.mktemp("tiny_target")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    _train_to_count(model, tokenizer)
    model.save_pretrained(folder)
    mask = tokenizer.convert_tokens_to_ids("<mask>")
    return TargetConfig("tiny", str(folder), TINY_LAYER_IDS, mask, "float32", None, None, None, 1, None)


def _train_to_count(model: nn.Module, tokenizer: PreTrainedTokenizerFast) -> None:
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        chats = [counting_chat(rng) for _ in range(32)]
        texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
        batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt", add_special_tokens=False)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


@pytest.fixture(scope="session")
def tiny_target(tiny_target_config: TargetConfig) -> Target:
    return load_target(tiny_target_config, torch.device("cpu"))


@pytest.fixture(scope="session")
def tiny_identity(tiny_target_config: TargetConfig) -> TargetIdentity:
    return target_identity(tiny_target_config)


@pytest.fixture(scope="session")
def tiny_prompts() -> list[list[int]]:
    """Ragged prompts in token ids, from 4 to 9 tokens."""
    tokenizer, rng = tiny_tokenizer(), random.Random(7)
    prompts = []
    for index in range(12):
        words = " ".join(str(rng.randrange(NUM_WORDS)) for _ in range(1 + index % 5))
        messages = [{"role": "user", "content": words}]
        prompts.append(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    return prompts


@pytest.fixture(scope="session")
def tiny_store(
    tmp_path_factory: pytest.TempPathFactory, tiny_target: Target, tiny_identity: TargetIdentity
) -> FeatureStore:
    """Float32 features of 48 counting chats, in two shards."""
    folder = tmp_path_factory.mktemp("tiny") / "store"
    folder.mkdir()
    tokenizer, rng = tiny_tokenizer(), random.Random(1)
    chats = [render_chats(tokenizer, Chat(counting_chat(rng), None), finish_reason="stop")[0] for _ in range(48)]
    records = [RenderedRecord(f"chat-{index}", chat) for index, chat in enumerate(chats)]
    make_store(folder, tiny_header(tiny_target, tiny_identity), extracted(tiny_target, records), shard_size=24)
    return FeatureStore(folder)


def tiny_header(target: Target, identity: TargetIdentity, **changes: Any) -> StoreHeader:
    header = StoreHeader(
        target=identity,
        layer_ids=target.layer_ids,
        hidden_size=target.spec.hidden_size,
        feature_dtype="float32",
        last_hidden_dtype="float32",
        chat_template_sha256="0" * 64,
        chats={"supervise": "all", "thinking": None, "max_length": 512, "min_supervised_tokens": 2},
        records_per_shard=64,
    )
    return replace(header, **changes)


def extracted(target: Target, records: Sequence[RenderedRecord], tokens_per_batch: int = 512) -> list[StoreRecord]:
    """The target's outputs over the records, in their order."""
    found = dict(extract_records(target, records, tokens_per_batch))
    return [found[index] for index in range(len(records))]


def make_store(folder: Path, header: StoreHeader, records: Sequence[StoreRecord], *, shard_size: int) -> None:
    infos = [
        write_shard(
            folder,
            header,
            index=first // shard_size,
            records=[encode_record(record, header) for record in records[first : first + shard_size]],
            inputs_sha256="i" * 64,
        )
        for first in range(0, len(records), shard_size)
    ]
    publish(folder, header, infos, "r" * 64)


BLOCK_OPTIONS: dict[str, Any] = {
    "num_layers": 1,
    "layer_style": LayerStyle.qwen3,
    "num_draft_tokens": 4,
    "slot_layout": SlotLayout.anchor_first,
    "sliding_window": None,
    "decay": 4.0,
    "dpace_smoothing": None,
    "loss": LossWeights(cross_entropy=0.1, l1=0.9),
    "sampled_vocabulary": None,
}


def dspark_config(**changes: Any) -> DSparkConfig:
    """A small DSpark with both heads."""
    heads = {
        "markov_rank": 8,
        "markov_head": MarkovHeadType.vanilla,
        "confidence": True,
        "confidence_with_markov": True,
        "confidence_weight": 1.0,
    }
    return DSparkConfig(**BLOCK_OPTIONS | heads | changes)


def dflash_config(**changes: Any) -> DFlashConfig:
    return DFlashConfig(**BLOCK_OPTIONS | changes)


def dflash2_config(**changes: Any) -> DFlash2Config:
    """A small DFlash 2, in place as engines serve it."""
    own = {
        "slot_layout": SlotLayout.in_place,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 8,
        "selector_top_k": 6,
        "codebooks": Codebooks.tables,
        "gold": Gold.inject,
        "selector_weight": 1.0,
    }
    return DFlash2Config(**BLOCK_OPTIONS | own | changes)


def eagle3_config(**changes: Any) -> Eagle3Config:
    """A small EAGLE-3 of the portable shape: no q/k norm, no other norms, the target's head."""
    options: dict[str, Any] = {
        "num_draft_tokens": 4,
        "num_fused_layers": None,
        "step_decay": 0.8,
        "loss": LossWeights(soft_cross_entropy=1.0),
        "layer_style": LayerStyle.qwen3,
        "qk_norm": False,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "draft_vocab_size": None,
        "own_head": False,
        "sampled_vocabulary": None,
    }
    return Eagle3Config(**options | changes)


def build_drafter(model: Any, target: Target, config: TargetConfig, *, seed: int = 0) -> Any:
    """The untrained drafter of a config, bound to the target."""
    assert config.layer_ids is not None
    torch.manual_seed(seed)
    drafter = model.build(
        target.spec, target_layer_ids=tuple(config.layer_ids), mask_token_id=config.mask_token_id
    ).bind(target.embedding, target.head)
    if drafter.draft_vocab_size is not None:  # words that count: specials but the stop token are left out
        stops = target.spec.eos_token_ids
        others = [token for token in range(target.spec.vocab_size) if token not in stops]
        ids = torch.tensor([*stops, *others[len(stops) - drafter.draft_vocab_size :]])
        drafter.use_draft_vocabulary(ids.sort().values)
    drafter.copy_from_bound()
    return drafter


def build_dspark(target: Target, config: TargetConfig, *, seed: int = 0, **changes: Any) -> DSpark:
    return build_drafter(dspark_config(**changes), target, config, seed=seed)


def train_briefly(drafter: Any, store: FeatureStore, *, num_steps: int = 60) -> Any:
    """A plain loop, not the trainer: enough steps that drafts are accepted."""
    data = TrainingData(store, layer_ids=drafter.target_layer_ids, num_anchors=8, seed=0)
    plan = StepPlan(store.lengths, 16, 2048, packing=True, num_processes=1, seed=0)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    for keys in RankSampler(plan, first_step=0, last_step=num_steps, rank=0):
        batch = collate([data[key] for key in keys], packing=True)
        loss, denominators = drafter(batch), drafter.denominators(batch)
        sum(loss.numerators[term] / denominators[term] for term in loss.numerators).backward()
        optimizer.step()
        optimizer.zero_grad()
    return drafter.eval()


@pytest.fixture(scope="session")
def tiny_dspark(tiny_target: Target, tiny_target_config: TargetConfig, tiny_store: FeatureStore) -> DSpark:
    """Trained briefly, so that greedy rounds of every length from 0 to 4 accepted drafts occur."""
    return train_briefly(build_dspark(tiny_target, tiny_target_config), tiny_store)


@pytest.fixture(scope="session")
def tiny_dflash(tiny_target: Target, tiny_target_config: TargetConfig, tiny_store: FeatureStore) -> DFlash:
    return train_briefly(build_drafter(dflash_config(), tiny_target, tiny_target_config), tiny_store)


@pytest.fixture(scope="session")
def tiny_eagle3(tiny_target: Target, tiny_target_config: TargetConfig, tiny_store: FeatureStore) -> Eagle3:
    return train_briefly(build_drafter(eagle3_config(), tiny_target, tiny_target_config), tiny_store)


@contextmanager
def planted_fault(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Any) -> Iterator[None]:
    """Run the body with `owner.name` replaced by `fault` and demand that it fails: the test inside has teeth.

    Usage: `with planted_fault(monkeypatch, verify_module, "residual", lambda p, q: p): test_that_should_fail(...)`.
    """
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fault)
        try:
            yield
        except AssertionError:
            return
    raise AssertionError(f"the test does not notice a faulty {name}")


def run_killed(work: Callable[[], None], *, kill_at: tuple[Any, str, int], before: bool = True) -> int:
    """Fork, run `work` in the child, and SIGKILL it around its n-th call of `owner.name`; returns the exit code.

    `kill_at` is (owner, name, n) with n from 1, just `before` the call or just after it; the code is -9 where the kill
    came and 0 where `work` ended first. Forked from a parent that has done the imports, so a kill costs milliseconds.
    The parent must hold no thread locks.
    """
    owner, name, countdown = kill_at
    child = os.fork()
    if child == 0:
        calls, original = 0, getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            is_it = calls == countdown
            if is_it and before:
                os.kill(os.getpid(), signal.SIGKILL)
            result = original(*args, **kwargs)
            if is_it:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        status = 1
        try:
            setattr(owner, name, counted)
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture(autouse=True)
def fresh_accelerate_state() -> Iterator[None]:
    """Accelerate keeps process-wide state, mixed precision too; tests must not see each other's."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def files_of(folder: Path) -> dict[str, bytes]:
    """Relative path to content of every file under a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow-report", type=Path, help="write the commit and the counts of outcomes to this JSON file")


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """`make test-slow` leaves a record of what was run at which commit."""
    path = config.getoption("--slow-report")
    if path is not None:
        counts = {name: len(terminalreporter.stats.get(name, [])) for name in ("passed", "failed", "error", "skipped")}
        write_json(path, {"commit": git_commit(), "counts": counts, "exit_status": int(exitstatus)})
