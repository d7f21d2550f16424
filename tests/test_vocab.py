"""Tests of data/vocab.py: a draft vocabulary is counted from the store at hand, with the stop tokens in it."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

import data.store as store_module
from data import vocab
from data.store import FeatureStore
from data.vocab import choose_draft_vocabulary
from models.checkpoint import load_drafter, save_drafter
from models.target import Target, TargetConfig, load_tokenizer
from tests.conftest import dflash_config, dspark_config, eagle3_config, planted_fault, train_briefly
from tests.draft_checks import IDENTITY, check_a_step_helps, greedy, stored_batch
from tests.test_train import train_config
from train.setup import build_drafter, set_draft_vocabulary

VOCAB_SIZE, STOP = 55, 3


def loop_counts(store: FeatureStore) -> list[int]:
    counts = [0] * VOCAB_SIZE
    for index in range(len(store)):
        record = store[index]
        for token, supervised in zip(record.input_ids.tolist(), record.loss_mask.tolist(), strict=True):
            counts[token] += supervised
    return counts


def loop_choice(counts: list[int], size: int, stops: tuple[int, ...]) -> list[int]:
    """Stop tokens, then the most frequent others, the lower id first among equals."""
    others = sorted((token for token in range(len(counts)) if token not in stops), key=lambda t: (-counts[t], t))
    return sorted([*stops, *others[: size - len(stops)]])


def check_choice() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        counts = torch.randint(0, 6, (VOCAB_SIZE,), generator=generator)  # many ties, and tokens that never occur
        for size, stops in ((2, (3,)), (20, (3,)), (20, (0, 54)), (54, (3, 7, 9)), (55, (3,)), (20, ())):
            chosen = vocab.choose_draft_vocabulary(counts, size, stops)
            assert chosen.tolist() == loop_choice(counts.tolist(), size, stops)


def test_counts_equal_a_loop_over_records(tiny_store: FeatureStore) -> None:
    """Supervised tokens only, over both shards."""
    assert len(tiny_store.manifest.shards) == 2
    counts = tiny_store.count_supervised_tokens(VOCAB_SIZE)
    assert counts.tolist() == loop_counts(tiny_store) and counts.dtype == torch.int64
    assert counts.sum() == tiny_store.manifest.num_supervised_tokens
    assert counts[1] == 0  # <user> is in every prompt and never supervised


def test_the_most_frequent_tokens_and_the_stops_are_chosen() -> None:
    check_choice()


def test_stop_tokens_are_inside_however_rare_they_are() -> None:
    counts = torch.arange(VOCAB_SIZE) + 100
    counts[[STOP, 40]] = 0
    assert choose_draft_vocabulary(counts, 4, (STOP, 40)).tolist() == [STOP, 40, 53, 54]
    assert choose_draft_vocabulary(torch.zeros(VOCAB_SIZE).long(), 4, (STOP, 40)).tolist() == [0, 1, STOP, 40]


def test_the_counts_are_left_alone() -> None:
    counts = torch.arange(VOCAB_SIZE)
    choose_draft_vocabulary(counts, 4, (STOP,))
    assert torch.equal(counts, torch.arange(VOCAB_SIZE))


def to_the_higher_id(counts: Tensor, size: int, stops: tuple[int, ...]) -> Tensor:
    flipped = choose_draft_vocabulary(counts.flip(0), size, [len(counts) - 1 - stop for stop in stops])
    return (len(counts) - 1 - flipped).sort().values


def without_stops(counts: Tensor, size: int, stops: tuple[int, ...]) -> Tensor:
    return choose_draft_vocabulary(counts, size, ())


@pytest.mark.parametrize("fault", [to_the_higher_id, without_stops])
def test_a_wrong_choice_is_noticed(monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    with planted_fault(monkeypatch, vocab, "choose_draft_vocabulary", fault):
        check_choice()


@pytest.fixture
def build(tmp_path: Path, tiny_target_config: TargetConfig, tiny_store: FeatureStore) -> Any:
    def built(model: Any) -> Any:
        tokenizer, accelerator = load_tokenizer(tiny_target_config), Accelerator(cpu=True)
        torch.manual_seed(0)
        return build_drafter(train_config(tmp_path), model, tiny_target_config, tokenizer, tiny_store, accelerator)

    return built


def test_a_run_chooses_from_its_own_store(build: Any, tiny_store: FeatureStore, tiny_target: Target) -> None:
    """Nothing is cached between runs: another size gives another map, and no size the whole vocabulary."""
    counts = loop_counts(tiny_store)
    maps = []
    for size in (30, 12):
        drafter = build(eagle3_config(draft_vocab_size=size, own_head=True))
        assert drafter.draft_ids.tolist() == loop_choice(counts, size, (STOP,))
        assert drafter.t2d.nonzero().flatten().tolist() == drafter.draft_ids.tolist()
        assert torch.equal(drafter.lm_head.weight, tiny_target.head[drafter.draft_ids])
        maps.append(set(drafter.draft_ids.tolist()))
    assert maps[1] < maps[0] and STOP in maps[1]
    whole = build(eagle3_config(own_head=True))
    assert whole.draft_ids is None and torch.equal(whole.lm_head.weight, tiny_target.head)


@pytest.mark.parametrize(
    "model", [dspark_config(), dflash_config(), eagle3_config()], ids=["dspark", "dflash", "eagle3"]
)
def test_drafters_without_a_reduced_vocabulary_are_built_without_counting(
    monkeypatch: pytest.MonkeyPatch, build: Any, model: Any
) -> None:
    monkeypatch.setattr(FeatureStore, "count_supervised_tokens", None)
    assert build(model).draft_vocab_size is None


def test_a_block_drafter_takes_no_vocabulary(build: Any, tiny_store: FeatureStore) -> None:
    with pytest.raises(ValueError, match="DFlash has no reduced draft vocabulary"):
        set_draft_vocabulary(build(dflash_config()), 12, tiny_store)


def test_the_log_says_how_much_is_covered(
    build: Any, tiny_store: FeatureStore, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        build(eagle3_config(draft_vocab_size=12))
    counts = loop_counts(tiny_store)
    covered = 100 * sum(counts[token] for token in loop_choice(counts, 12, (STOP,))) / sum(counts)
    assert f"draft vocabulary of 12 tokens covers {covered:.2f} % of supervised tokens" in caplog.text


def test_a_drafter_of_the_stores_vocabulary_trains_decodes_and_comes_back(
    build: Any, tiny_store: FeatureStore, tiny_target: Target, tiny_prompts: list[list[int]], tmp_path: Path
) -> None:
    drafter = build(eagle3_config(draft_vocab_size=30, own_head=True))
    check_a_step_helps(drafter, stored_batch(tiny_store, drafter.target_layer_ids))
    train_briefly(drafter, tiny_store, num_steps=30)
    save_drafter(drafter, tmp_path, target=IDENTITY)
    loaded = load_drafter(tmp_path).drafter.bind(tiny_target.embedding, tiny_target.head)
    expected = greedy(tiny_target, None, tiny_prompts)
    ours = greedy(tiny_target, loaded, tiny_prompts)
    assert [generation.tokens for generation in ours] == [generation.tokens for generation in expected]
    assert sum(r.accepted for generation in ours for r in generation.rounds) > 0


def test_counting_unsupervised_tokens_is_noticed(monkeypatch: pytest.MonkeyPatch, tiny_store: FeatureStore) -> None:
    right = store_module.safe_open

    class Everything:
        def __init__(self, *args: Any, **options: Any) -> None:
            self.file = right(*args, **options)

        def __enter__(self) -> "Everything":
            return self

        def __exit__(self, *error: object) -> None: ...

        def get_tensor(self, name: str) -> Tensor:
            tensor = self.file.__enter__().get_tensor(name)
            return torch.ones_like(tensor) if name == "loss_mask" else tensor

    with planted_fault(monkeypatch, store_module, "safe_open", Everything):
        test_counts_equal_a_loop_over_records(tiny_store)
