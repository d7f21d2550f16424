"""The whole decoding loop by chi-square: what it emits on a tiny language against the exact product of the target."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

import eval.decode as decode_module
import eval.verify as verify_module
from eval.decode import DecodeConfig, decode
from eval.schedule import Schedule, ScheduleName
from eval.verify import Rule
from models.base import Proposal
from models.cache import KVCache
from models.sampling import Purpose, Sampler, SamplingConfig, probs_from_logits
from models.target import TargetOutput

VOCAB_SIZE = 5
NUM_TOKENS = 4
PASSES = 1e-4  # some forty seeded comparisons: a right loop passes them all
FAILS = 1e-6
FIXED = Schedule(ScheduleName.fixed, 0.0)
CONFIDENT = Schedule(ScheduleName.confidence, 0.5)
GENERATOR = torch.Generator().manual_seed(0)
TARGET_LOGITS = 1.5 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=GENERATOR)
OTHER_LOGITS = 1.5 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=GENERATOR)
CONFIDENCES = torch.tensor([0.9, 0.2, 0.8, 0.4, 0.95])  # of the slot after each token


class BigramTarget:
    """Logits depend on the last token only; the state between tokens is nothing but lengths."""

    spec = SimpleNamespace(eos_token_ids=(), max_position_embeddings=64)
    device = torch.device("cpu")

    def new_cache(self, batch_size: int, capacity: int) -> KVCache:
        return KVCache(0, batch_size, capacity, self.device)

    def forward(self, input_ids: Tensor, cache: KVCache, *, with_features: bool = True) -> TargetOutput:
        cache.begin(input_ids.shape[1])
        return TargetOutput(hidden=input_ids, features=torch.zeros(*input_ids.shape, 0))

    def logits(self, hidden: Tensor) -> Tensor:
        return TARGET_LOGITS[hidden]


@dataclass
class BigramState:
    lengths: Tensor

    def select(self, rows: Tensor) -> None:
        self.lengths = self.lengths[rows]


class BigramDrafter:
    """Drafts from its own table; one_hot and top columns come as candidates, as n-gram and reduced drafters do."""

    needs_features = False
    num_draft_tokens = 3

    def __init__(self, logits: Tensor, form: str = "dense") -> None:
        self.table, self.form = logits, form

    def start(self, tokens: Tensor, features: Tensor, counts: Tensor, capacity: int) -> BigramState:
        return BigramState(counts.clone())

    def advance(self, state: BigramState, tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        state.lengths = state.lengths + counts

    def propose(self, state: BigramState, last: Tensor, sampler: Sampler, num_draft_tokens: int) -> Proposal:
        tokens, probs, candidates, confidences = [], [], [], []
        for slot in range(num_draft_tokens):
            confidences.append(CONFIDENCES[last])
            logits, ids = self.table[last], torch.arange(VOCAB_SIZE).expand(len(last), -1)
            if self.form != "dense":
                logits, ids = logits.topk(1 if self.form == "one_hot" else 3)
            probs.append(sampler.probs(logits))
            column = sampler.draw(self.drawn_from(probs[-1]), state.lengths + 1 + slot, Purpose.draft)
            last = ids.gather(1, column[:, None]).squeeze(1)
            tokens.append(last)
            candidates.append(ids)
        return Proposal(
            tokens=torch.stack(tokens, 1),
            probs=torch.stack(probs, 1),
            lengths=torch.full_like(last, num_draft_tokens),
            candidate_ids=None if self.form == "dense" else torch.stack(candidates, 1),
            confidence=torch.stack(confidences, 1),
        )

    def drawn_from(self, probs: Tensor) -> Tensor:
        return probs


DRAFTERS: dict[str, Callable[[], BigramDrafter]] = {
    "other": lambda: BigramDrafter(OTHER_LOGITS),
    "flat": lambda: BigramDrafter(torch.zeros_like(OTHER_LOGITS)),
    "peaked": lambda: BigramDrafter(4 * TARGET_LOGITS),
    "one_hot": lambda: BigramDrafter(TARGET_LOGITS, "one_hot"),
    "top3": lambda: BigramDrafter(OTHER_LOGITS, "top3"),
}


def config_of(**changes: Any) -> DecodeConfig:
    sampling = SamplingConfig(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=5)
    return replace(DecodeConfig(NUM_TOKENS, 1 << 20, 3, Rule.ratio, FIXED, sampling), **changes)


def p_value(drafter: BigramDrafter | None, config: DecodeConfig, *, num_rows: int) -> float:
    """Over all sequences, and over the last two tokens, whose few cells see a drift sooner; the smaller one, twice."""
    prompts = [[row % VOCAB_SIZE] for row in range(VOCAB_SIZE)] * (num_rows // VOCAB_SIZE)
    generations = decode(BigramTarget(), drafter, prompts, config).generations  # type: ignore[arg-type]
    emitted = torch.tensor([generation.tokens for generation in generations])
    probs = probs_from_logits(TARGET_LOGITS, config.sampling).double()
    expected = torch.full((VOCAB_SIZE,), 1 / VOCAB_SIZE, dtype=torch.float64) @ probs  # of the first token
    for _ in range(NUM_TOKENS - 1):
        expected = expected[..., None] * probs
    cells = torch.zeros_like(expected).index_put_(tuple(emitted.T), torch.tensor(1.0).double(), accumulate=True)
    expected = expected * len(prompts)
    whole = tail_probability(cells.flatten(), expected.flatten())
    ends = tail_probability(cells.sum((0, 1)).flatten(), expected.sum((0, 1)).flatten())
    return 2 * min(whole, ends)


def tail_probability(cells: Tensor, expected: Tensor) -> float:
    """Chi-square over all cells, and the worst single cell by Bonferroni; the smaller one, twice."""
    rare = expected < 10  # pooled: chi-square needs some counts in every cell
    if not bool((cells[expected == 0] == 0).all()):
        return 0.0  # emitted what the target excludes
    found = torch.cat((cells[~rare], cells[rare].sum()[None]))
    wanted = torch.cat((expected[~rare], expected[rare].sum()[None]))
    found, wanted = found[wanted > 0], wanted[wanted > 0]
    whole = stats.chisquare(found, wanted * (found.sum() / wanted.sum())).pvalue
    total, shares = int(found.sum()), (wanted / wanted.sum()).numpy()
    below, above = stats.binom.cdf(found, total, shares), stats.binom.sf(found - 1, total, shares)
    worst = 2 * float(min(below.min(), above.min())) * len(found)
    return 2 * min(float(whole), worst)


CONFIGS: dict[str, dict[str, Any]] = {
    "ratio": {},
    "match": {"rule": Rule.match},
    "temperature": {"sampling": SamplingConfig(0.7, 0, 1.0, 0.0, 6)},
    "top_p": {"sampling": SamplingConfig(1.0, 0, 0.8, 0.0, 7)},
    "confidence": {"schedule": CONFIDENT},
    "match_confidence": {"rule": Rule.match, "schedule": CONFIDENT},
    "two_drafts": {"num_draft_tokens": 2},
}
FEW = [("ratio", "other"), ("ratio", "one_hot"), ("ratio", "peaked"), ("match", "other"), ("top_p", "top3")]
FEW += [("temperature", "flat"), ("confidence", "other"), ("confidence", "one_hot"), ("match_confidence", "top3")]


@pytest.mark.parametrize(("options", "drafter"), FEW)
def test_emitted_sequences_follow_the_target(options: str, drafter: str) -> None:
    assert p_value(DRAFTERS[drafter](), config_of(**CONFIGS[options]), num_rows=20_000) > PASSES


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("options", CONFIGS)
def test_emitted_sequences_follow_the_target_in_200k_rows(options: str, drafter: str) -> None:
    assert p_value(DRAFTERS[drafter](), config_of(**CONFIGS[options]), num_rows=200_000) > PASSES


@pytest.mark.parametrize("rule", list(Rule))
def test_vanilla_decoding_follows_the_target(rule: Rule) -> None:
    assert p_value(None, config_of(rule=rule), num_rows=20_000) > PASSES


def off_by_one_percent(original: Callable[..., Any]) -> Callable[..., Any]:
    """`verify` for a target whose every distribution is 0.01 in total variation away from the true one."""

    def fault(rule: Rule, proposal: Proposal, target_probs: Tensor, *rest: Any) -> Any:
        most, least = target_probs.argmax(-1, keepdim=True), target_probs.argmin(-1, keepdim=True)
        step = torch.full_like(most, 0.01, dtype=target_probs.dtype)
        moved = target_probs.scatter_add(-1, most, -step).scatter_add(-1, least, step)
        return original(rule, proposal, moved, *rest)

    return fault


@pytest.mark.parametrize("rule", list(Rule))
def test_a_total_variation_of_one_percent_is_seen(monkeypatch: pytest.MonkeyPatch, rule: Rule) -> None:
    monkeypatch.setattr(decode_module, "verify", off_by_one_percent(decode_module.verify))
    assert p_value(DRAFTERS["other"](), config_of(rule=rule), num_rows=60_000) < FAILS


class Unfaithful(BigramDrafter):
    """Drafts from sharper probabilities than it reports."""

    def drawn_from(self, probs: Tensor) -> Tensor:
        return probs**1.3


def test_drafts_from_other_probabilities_than_reported_are_seen() -> None:
    assert p_value(Unfaithful(OTHER_LOGITS), config_of(), num_rows=20_000) < FAILS
    # The match rule asks nothing of the drafter's probabilities.
    assert p_value(Unfaithful(OTHER_LOGITS), config_of(rule=Rule.match), num_rows=20_000) > PASSES


def test_a_correction_drawn_from_the_target_itself_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "residual", lambda target_probs, draft_probs: target_probs)
    assert p_value(DRAFTERS["other"](), config_of(), num_rows=20_000) < FAILS


def test_a_cut_that_looks_at_the_token_it_cuts_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The confidence of the slot after d_k decides on d_k itself."""

    def lengths(self: Schedule, proposal: Proposal) -> Tensor:
        return (CONFIDENCES[proposal.tokens] >= self.threshold).long().cumprod(1).sum(1)

    monkeypatch.setattr(Schedule, "lengths", lengths)
    assert p_value(DRAFTERS["other"](), config_of(schedule=CONFIDENT), num_rows=20_000) < FAILS


def test_random_numbers_shared_between_purposes_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Sampler.uniform
    monkeypatch.setattr(Sampler, "uniform", lambda self, places, purpose: original(self, places, Purpose.draft))
    assert p_value(DRAFTERS["other"](), config_of(), num_rows=20_000) < FAILS
