"""What must hold for every drafter alike, on a trained tiny target: decoding does what training saw, and no more."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from data.store import FeatureStore
from eval.decode import DecodeConfig, decode
from eval.rounds import Generation
from eval.schedule import Schedule, ScheduleName
from eval.verify import Rule
from models import masks
from models.base import Drafter, SlotLayout
from models.block import BlockDrafter
from models.cache import KVCache
from models.dflash2 import Codebooks
from models.dspark import MarkovHeadType
from models.layer_styles import LayerStyle
from models.sampling import Sampler, SamplingConfig
from models.target import Target, TargetConfig, TargetOutput
from tests.conftest import (
    build_drafter,
    dflash2_config,
    dflash_config,
    dspark_config,
    eagle3_config,
    planted_fault,
    train_briefly,
)
from tests.teacher_forced import Text, drafts_after, text_of

K, LENGTH = 4, 24
GREEDY = SamplingConfig(0.0, 0, 1.0, 0.0, 0)
MODELS: dict[str, Any] = {
    "dflash": dflash_config(),
    "dflash_in_place": dflash_config(slot_layout=SlotLayout.in_place),
    "dflash_window": dflash_config(sliding_window=6),
    # all tokens are candidates, so that every true one can be walked through
    "dflash2": dflash2_config(selector_top_k=55),
    "dflash2_anchor_first": dflash2_config(
        selector_top_k=55, slot_layout=SlotLayout.anchor_first, codebooks=Codebooks.projected
    ),
    "dspark": dspark_config(),
    "dspark_in_place_rnn": dspark_config(slot_layout=SlotLayout.in_place, markov_head=MarkovHeadType.rnn),
    "dspark_gated": dspark_config(markov_head=MarkovHeadType.gated),
    "eagle3": eagle3_config(),
    "eagle3_deepspec": eagle3_config(qk_norm=True),
    "dspark_gemma4": dspark_config(layer_style=LayerStyle.gemma4),
    "eagle3_gemma4": eagle3_config(qk_norm=True, layer_style=LayerStyle.gemma4),
    "eagle3_all_norms": eagle3_config(norm_before_residual=True, fc_norm=True, norm_output=True, own_head=True),
}


@cache
def trained(name: str, target: Target, config: TargetConfig, store: FeatureStore) -> Drafter:
    return train_briefly(build_drafter(MODELS[name], target, config), store)


@pytest.fixture(params=MODELS)
def drafter(
    request: pytest.FixtureRequest, tiny_target: Target, tiny_target_config: TargetConfig, tiny_store: FeatureStore
) -> Drafter:
    return trained(request.param, tiny_target, tiny_target_config, tiny_store)


def decoded(target: Target, drafter: Drafter | None, prompts: list[list[int]], length: int) -> list[Generation]:
    config = DecodeConfig(length, 5, K, Rule.ratio, Schedule(ScheduleName.fixed, 0.0), GREEDY)
    return decode(target, drafter, prompts, config).generations


@pytest.fixture(scope="session")
def texts(tiny_target: Target, tiny_prompts: list[list[int]]) -> list[Text]:
    """The target's own greedy answers, one block longer than what is decoded below."""
    answers = decoded(tiny_target, None, tiny_prompts, LENGTH + K + 1)
    return [text_of(tiny_target, p, a.tokens) for p, a in zip(tiny_prompts, answers, strict=True)]


def walk(drafter: Drafter, text: Text, stops: tuple[int, ...]) -> Iterator[tuple[int, bool]]:
    """(accepted, bonus) of each round along the text: leading slots whose best token is the text's own."""
    drafts, tokens, newest = drafts_after(drafter, text), text.tokens, text.num_prompt
    while newest - text.num_prompt + 1 < LENGTH and tokens[newest] not in stops:
        best = drafts[newest].argmax(-1).tolist()
        labels = tokens[newest + 1 : newest + 1 + len(best)]
        hits = next((k for k in range(len(best)) if best[k] != labels[k]), len(best))
        ended = next((k + 1 for k in range(hits) if labels[k] in stops), None)
        yield (hits, True) if ended is None else (ended, False)
        newest += hits + 1
        if ended is not None:
            return


def check_walk(drafter: Drafter, target: Target, texts: list[Text]) -> None:
    prompts = [text.tokens[: text.num_prompt] for text in texts]
    lengths = set()
    for text, generation in zip(texts, decoded(target, drafter, prompts, LENGTH), strict=True):
        rounds = [(r.accepted, r.bonus) for r in generation.rounds]
        assert rounds == list(walk(drafter, text, target.spec.eos_token_ids))
        assert generation.tokens == text.tokens[text.num_prompt :][: len(generation.tokens)]
        lengths |= {accepted for accepted, _ in rounds}
    assert len(lengths) > 2, "a drafter that always or never hits shows nothing"


def test_walking_the_teacher_forced_hits_gives_the_greedy_rounds(
    drafter: Drafter, tiny_target: Target, texts: list[Text]
) -> None:
    check_walk(drafter, tiny_target, texts)


@dataclass
class Recorder:
    """Records the logits of each slot and draws the text's own tokens."""

    labels: list[int]
    logits: list[Tensor]
    seen = None  # no penalties
    ranking = None
    draw_block = Sampler.draw_block
    ranked = Sampler.ranked

    def probs(self, logits: Tensor, *_drafted: Tensor, **_options: Any) -> Tensor:
        self.logits.append(logits[0] if logits.dim() == 2 else logits[0, :, :])
        return logits.softmax(-1)

    def draw(self, probs: Tensor, positions: Tensor, purpose: Any) -> Tensor:
        if probs.dim() == 3:  # independent slots are drawn at once
            return torch.tensor([(self.labels + [0] * K)[: probs.shape[1]]])
        return torch.tensor([(self.labels + [0] * K)[len(self.logits) - 1]])


@torch.no_grad()
def check_logits(drafter: Drafter, text: Text) -> None:
    """A prompt, then verified tokens one by one, so that every newest token of the answer is drafted from once."""
    batch, tokens = text.batch, text.tokens
    drafts, state = drafts_after(drafter, text), None
    for newest in range(text.num_prompt, len(tokens) - 1):
        if state is None:
            prefix = batch.input_ids[:, :newest], batch.features[:, :newest]
            state = drafter.start(*prefix, torch.tensor([newest]), 64)
        else:
            step = slice(newest - 1, newest)
            drafter.advance(state, batch.input_ids[:, step], batch.features[:, step], torch.tensor([1]))
        recorder = Recorder(tokens[newest + 1 :], [])
        drafter.propose(state, batch.input_ids[:, newest], recorder, K)  # type: ignore[arg-type]
        ours = torch.cat([logits.view(-1, logits.shape[-1]) for logits in recorder.logits])
        expected = drafts[newest]
        torch.testing.assert_close(ours[: len(expected)], expected, rtol=1e-4, atol=1e-4)


def test_training_logits_equal_decoding_logits(drafter: Drafter, texts: list[Text]) -> None:
    for text in texts[:4]:
        check_logits(drafter, text)


def test_a_rotary_position_off_by_one_in_decoding_is_noticed(
    drafter: Drafter, texts: list[Text], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotary positions are relative, so it is context against draft that is shifted."""
    right = KVCache.begin
    with planted_fault(monkeypatch, KVCache, "begin", lambda self, num_new: right(self, num_new) + 1):
        check_logits(drafter, texts[0])


def check_no_leak(drafter: Drafter, text: Text) -> None:
    """Bitwise: features at or after the newest known token are not seen, the one before it is."""
    before = drafts_after(drafter, text)
    for newest in list(before)[:-K:3]:
        for first, is_seen in ((newest, False), (newest - 1, True)):
            features = text.batch.features.clone()
            features[:, first:] = 3.0 - 7.0 * features[:, first:]
            after = drafts_after(drafter, Text(replace(text.batch, features=features), text.num_prompt))
            assert torch.equal(after[newest], before[newest]) != is_seen, (newest, first)


def test_no_feature_at_or_after_the_newest_token_leaks(drafter: Drafter, texts: list[Text]) -> None:
    check_no_leak(drafter, texts[0])


def test_a_leaking_mask_is_noticed(drafter: Drafter, texts: list[Text], monkeypatch: pytest.MonkeyPatch) -> None:
    def off_by_one(position: Tensor, anchor: Tensor, slot: Tensor, window: int | None) -> Tensor:
        return position <= anchor

    if not isinstance(drafter, BlockDrafter):
        # a chain's own first pair stands at its start: one further leaks
        def off_by_one(position: Tensor, anchor: Tensor, slot: Tensor, window: int | None) -> Tensor:
            return position <= anchor + 1

    with planted_fault(monkeypatch, masks, "sees_context", off_by_one):
        check_no_leak(drafter, texts[0])


# ---- an oracle, for texts that count: the token at position p is p


class CountingTarget:
    """Says n + 1 after n; its state is nothing but lengths."""

    spec = SimpleNamespace(eos_token_ids=(), max_position_embeddings=600)
    device = torch.device("cpu")

    def new_cache(self, batch_size: int, capacity: int, **_: Any) -> KVCache:
        return KVCache(0, batch_size, capacity, self.device)

    def forward(self, input_ids: Tensor, cache: KVCache, **_: Any) -> TargetOutput:
        cache.begin(input_ids.shape[1])
        return TargetOutput(hidden=input_ids, features=torch.zeros(*input_ids.shape, ORACLE_VOCAB))

    def logits(self, hidden: Tensor, tokens: Tensor | None = None) -> Tensor:
        return nn.functional.one_hot((hidden + 1) % ORACLE_VOCAB, ORACLE_VOCAB).float()


ORACLE_VOCAB = 512


class OracleLayer(nn.Module):
    """A slot at position p says the token of position p + shift, whatever it is fed: p is read from the rotation."""

    def __init__(self, drafter: BlockDrafter, shift: int) -> None:
        super().__init__()
        self.slowest, self.shift = float(drafter.rotary.inv_freq[-1]), shift
        self.self_attn = drafter.block_layers()[0].self_attn

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], *_context: Any) -> Tensor:
        return self.draft(x, rotary)

    def draft(self, x: Tensor, rotary: tuple[Tensor, Tensor], *_context: Any, **_options: Any) -> Tensor:
        positions = (torch.atan2(rotary[1][..., -1], rotary[0][..., -1]) / self.slowest).round().long()
        return nn.functional.one_hot(positions + self.shift, ORACLE_VOCAB).float()


def oracle(target: Target, layout: SlotLayout, *, trained_for: SlotLayout) -> BlockDrafter:
    """The perfect drafter of one layout, run in another (or the same)."""
    spec = replace(target.spec, vocab_size=ORACLE_VOCAB, hidden_size=ORACLE_VOCAB, num_heads=2, num_kv_heads=1)
    drafter = dflash_config(slot_layout=layout).build(spec, target_layer_ids=(0,), mask_token_id=0)
    drafter.bind(torch.eye(ORACLE_VOCAB), torch.eye(ORACLE_VOCAB))
    shift = {SlotLayout.anchor_first: 1, SlotLayout.in_place: 0}[trained_for]
    drafter.layers = nn.ModuleList([OracleLayer(drafter, shift)])
    return drafter


def counting_rounds(drafter: BlockDrafter, num_prompt: int) -> set[int]:
    """Accepted drafts of the rounds after a prompt 0, 1, .., num_prompt - 1."""
    generations = decoded(CountingTarget(), drafter, [list(range(num_prompt))] * 2, 15)  # type: ignore[arg-type]
    return {r.accepted for generation in generations for r in generation.rounds}


@pytest.mark.parametrize("layout", SlotLayout)
@pytest.mark.parametrize("num_prompt", [1, 7, 450])
def test_an_oracle_scores_the_full_block_in_its_own_layout_only(
    tiny_target: Target, layout: SlotLayout, num_prompt: int
) -> None:
    """At any context length; in the other layout the same weights miss by one token, every time."""
    other = next(x for x in SlotLayout if x is not layout)
    assert counting_rounds(oracle(tiny_target, layout, trained_for=layout), num_prompt) == {K}
    assert counting_rounds(oracle(tiny_target, layout, trained_for=other), num_prompt) == {0}


@pytest.mark.parametrize("layout", SlotLayout)
def test_training_reports_an_oracle_as_perfect_in_its_own_layout_only(tiny_target: Target, layout: SlotLayout) -> None:
    tokens = torch.arange(20)[None]
    batch = text_of_states(tokens)
    other = next(x for x in SlotLayout if x is not layout)
    for trained_for, agreement in ((layout, 1.0), (other, 0.0)):
        hits, counts = oracle(tiny_target, layout, trained_for=trained_for)(batch).metrics["top1_agreement"]
        assert (hits / counts).tolist() == [agreement] * K


def text_of_states(tokens: Tensor) -> Any:
    """Counting tokens whose last hidden state is the one-hot of the next."""
    states = CountingTarget().logits(tokens)
    target = SimpleNamespace(
        forward_whole=lambda ids: TargetOutput(hidden=states, features=torch.zeros(*ids.shape, ORACLE_VOCAB))
    )
    return text_of(target, tokens[0, :4].tolist(), tokens[0, 4:].tolist()).batch  # type: ignore[arg-type]


def test_a_stop_token_inside_a_chain_or_block_ends_the_walk_as_in_plain_decoding(
    drafter: Drafter, tiny_target: Target, texts: list[Text]
) -> None:
    """Every token that occurs in an answer is made the stop token once."""
    text = texts[1]
    for stop in set(text.tokens[text.num_prompt :][:8]):
        target, other = copy.copy(tiny_target), copy.copy(drafter)
        target.spec = other.spec = replace(tiny_target.spec, eos_token_ids=(stop,))
        prompt = text.tokens[: text.num_prompt]
        (plain,), (ours,) = (decoded(target, d, [prompt], LENGTH) for d in (None, other))
        assert (ours.tokens, ours.finish_reason) == (plain.tokens, plain.finish_reason)
        if plain.finish_reason == "stop" and ours.rounds and not ours.rounds[-1].bonus:
            assert ours.tokens[-1] == stop
