"""The whole decoding loop by chi-square: what it emits on a tiny language against the exact product of the target."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

import eval.decode as decode_module
import eval.schedule as schedule_module
import eval.verify as verify_module
from eval.costs import CostTable
from eval.decode import DecodeConfig, decode
from eval.schedule import Schedule, ScheduleName, Scheduler
from eval.verify import Rule
from models.base import Proposal
from models.cache import KVCache
from models.sampling import Purpose, Sampler, SamplingConfig, probs_from_logits
from models.target import TargetOutput
from models.trees import TreePolicy, grow_tree
from tests import planted_faults as faults
from tests.conftest import dflash2_config
from tests.draft_batches import enliven
from tests.published_files import SPEC

VOCAB_SIZE = 5
NUM_TOKENS = 4
COLUMNS = 40  # of one token, in the form split
PASSES = 1e-4  # some forty seeded comparisons: a right loop passes them all
FAILS = 1e-6
LOSSLESS = [rule for rule in Rule if rule.is_lossless]
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

    def new_cache(self, batch_size: int, capacity: int, **_: Any) -> KVCache:
        return KVCache(0, batch_size, capacity, self.device)

    def forward(self, input_ids: Tensor, cache: KVCache, **_: Any) -> TargetOutput:
        cache.begin(input_ids.shape[1])
        return TargetOutput(hidden=input_ids, features=torch.zeros(*input_ids.shape, 0))

    def logits(self, hidden: Tensor, tokens: Tensor | None = None) -> Tensor:
        return TARGET_LOGITS[hidden]


@dataclass
class BigramState:
    lengths: Tensor

    def select(self, rows: Tensor) -> None:
        self.lengths = self.lengths[rows]

    def put(self, rows: Tensor, other: "BigramState") -> None:
        self.lengths = self.lengths.index_copy(0, rows, other.lengths)


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
            if self.form == "split":
                logits, ids = (x.repeat_interleave(COLUMNS, dim=1) for x in (logits, ids))
            elif self.form != "dense":
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


class ParallelDrafter(BigramDrafter):
    """All slots at once, from a table by slot: no slot knows what another one drew, as in DFlash."""

    def propose(self, state: BigramState, last: Tensor, sampler: Sampler, num_draft_tokens: int) -> Proposal:
        slots = torch.arange(num_draft_tokens)
        tokens, probs = sampler.draw_block(
            self.table[(last[:, None] + slots) % VOCAB_SIZE], state.lengths[:, None] + 1 + slots
        )
        lengths = torch.full_like(last, num_draft_tokens)
        return Proposal(tokens, probs, lengths, confidence=CONFIDENCES[(last[:, None] + slots) % VOCAB_SIZE])


class TreeDrafter(BigramDrafter):
    def propose_tree(self, state: BigramState, last: Tensor, policy: TreePolicy) -> Proposal:
        return grow_tree(policy, last, lambda tokens, behind: self.table[tokens], None)


class SelectorDrafter(BigramDrafter):
    """A real DFlash 2 of random weights, fed random features of each token: a walk through three candidates a slot."""

    def __init__(self) -> None:
        generator, size = torch.Generator().manual_seed(3), SPEC.hidden_size
        spec = replace(SPEC, vocab_size=VOCAB_SIZE, initializer_range=0.5)
        config = dflash2_config(num_draft_tokens=self.num_draft_tokens, selector_top_k=3, selector_rank=4)
        self.drafter = enliven(config.build(spec, target_layer_ids=(1, 2), mask_token_id=4))
        for parameter in self.drafter.candidate_selector.parameters():
            parameter.data.mul_(4)  # where a slot stands matters as much as what it is
        self.drafter.bind(*(torch.randn(VOCAB_SIZE, size, generator=generator) for _ in range(2)))
        self.features = torch.randn(VOCAB_SIZE, 2 * size, generator=generator)

    def start(self, tokens: Tensor, features: Tensor, counts: Tensor, capacity: int) -> Any:
        return self.drafter.start(tokens, self.features[tokens], counts, capacity)

    def advance(self, state: Any, tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        self.drafter.advance(state, tokens, self.features[tokens], counts)

    def propose(self, state: Any, last: Tensor, sampler: Sampler, num_draft_tokens: int) -> Proposal:
        found = self.drafter.propose(state, last, sampler, num_draft_tokens)
        before = torch.cat((last[:, None], found.tokens[:, :-1]), dim=1)
        return replace(found, confidence=CONFIDENCES[before])


DRAFTERS: dict[str, Callable[[], BigramDrafter]] = {
    "other": lambda: BigramDrafter(OTHER_LOGITS),
    "flat": lambda: BigramDrafter(torch.zeros_like(OTHER_LOGITS)),
    "peaked": lambda: BigramDrafter(4 * TARGET_LOGITS),
    "one_hot": lambda: BigramDrafter(TARGET_LOGITS, "one_hot"),
    "top3": lambda: BigramDrafter(OTHER_LOGITS, "top3"),
    "parallel": lambda: ParallelDrafter(OTHER_LOGITS),
    "tree": lambda: TreeDrafter(OTHER_LOGITS),
    "dflash2": SelectorDrafter,
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
# ---- every pair of settings at least once

COSTS = CostTable([1, 4], [[0.0] * 4] * 2, [[1.0, 1.1, 1.6, 1.65], [4.0, 4.4, 6.4, 6.6]])  # jagged
LEVELS: dict[str, dict[str, Any]] = {
    "rule": {rule: {"rule": rule} for rule in LOSSLESS},
    "drafter": {name: {} for name in DRAFTERS},
    "temperature": {t: {"temperature": t} for t in (0.5, 1.0, 1.5)},
    "filter": {"plain": {}, "top_k": {"top_k": 3}, "top_p": {"top_p": 0.8}, "min_p": {"min_p": 0.15}},
    "batch": {1: {"batch_size": 1}, 4: {"batch_size": 4}},
    "schedule": {name: {"schedule": Schedule(name, 0.5, COSTS)} for name in ScheduleName},
}


def covering_set() -> list[tuple[Any, ...]]:
    """Admissible cells that hold every admissible pair of levels, each time the cell with most pairs that are new."""
    cells = [
        cell
        for cell in itertools.product(*LEVELS.values())
        if cell[1] != "tree" or cell[5] is ScheduleName.fixed  # a tree is verified whole
    ]
    pairs = {cell: {((i, cell[i]), (j, cell[j])) for i, j in itertools.combinations(range(6), 2)} for cell in cells}
    left, chosen = set().union(*pairs.values()), []
    while left:
        chosen.append(max(cells, key=lambda cell: len(pairs[cell] & left)))
        left -= pairs[chosen[-1]]
    return chosen


COVERING = covering_set()


def cell_p_value(cell: tuple[Any, ...], *, num_rows: int) -> float:
    options = [levels[level] for levels, level in zip(LEVELS.values(), cell, strict=True)]
    merged = {name: value for option in options for name, value in option.items()}
    names = {f.name for f in fields(SamplingConfig)}
    sampling = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": COVERING.index(cell)}
    sampling |= {name: value for name, value in merged.items() if name in names}
    rest = {name: value for name, value in merged.items() if name not in names}
    tree = TreePolicy(top_k=2, depth=3, num_nodes=7) if cell[1] == "tree" else None
    config = config_of(sampling=SamplingConfig(**sampling), tree=tree, **rest)
    return p_value(DRAFTERS[cell[1]](), config, num_rows=num_rows)


def named(cell: tuple[Any, ...]) -> str:
    return "-".join(str(level) for level in cell)


SOME = [cell for cell in COVERING if cell[4] == 4][::7]


@pytest.mark.parametrize("cell", SOME, ids=named)
def test_the_loop_follows_the_target_under_some_settings(cell: tuple[Any, ...]) -> None:
    """Some 5,000 rounds each, by the loop's own batches."""
    assert cell_p_value(cell, num_rows=2_500) > PASSES / len(COVERING)


@pytest.mark.slow
@pytest.mark.parametrize("cell", COVERING, ids=named)
def test_the_loop_follows_the_target_under_every_pair_of_settings(cell: tuple[Any, ...]) -> None:
    """Of a real network fewer: one request at a time takes a second for a hundred of them."""
    assert cell_p_value(cell, num_rows=500 if cell[1] == "dflash2" else 2_500) > PASSES / len(COVERING)


FEW = [("ratio", "other"), ("top_p", "top3")]


@pytest.mark.parametrize(("options", "drafter"), FEW)
def test_emitted_sequences_follow_the_target(options: str, drafter: str) -> None:
    """Tables, a hundred thousand rows at a time."""
    assert p_value(DRAFTERS[drafter](), config_of(**CONFIGS[options]), num_rows=100_000) > PASSES


@pytest.mark.parametrize("options", ["ratio", "top_p"])
def test_what_a_path_selector_drafts_follows_the_target(options: str) -> None:
    assert p_value(SelectorDrafter(), config_of(**CONFIGS[options]), num_rows=20_000) > PASSES


class ForgetfulSelector(SelectorDrafter):
    """Reports what it would have drawn from had every slot stood behind the newest token."""

    def propose(self, state: Any, last: Tensor, sampler: Sampler, num_draft_tokens: int) -> Proposal:
        drafter, walk = self.drafter, super().propose(state, last, sampler, num_draft_tokens)
        states, ids = drafter.propose_states(state, last, num_draft_tokens), walk.candidate_ids
        assert ids is not None
        unary = drafter.logits(states).gather(-1, ids)
        gates = drafter.candidate_selector.gate(states)
        slots = [drafter._transitions(gates[:, slot], last, ids[:, slot]) for slot in range(num_draft_tokens)]
        return replace(walk, probs=sampler.probs(unary + torch.stack(slots, 1)))


def test_a_path_whose_probabilities_forget_where_it_came_from_is_seen() -> None:
    assert p_value(ForgetfulSelector(), config_of(), num_rows=20_000) < FAILS


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if name not in ("tree", "dflash2")])
@pytest.mark.parametrize("options", CONFIGS)
def test_emitted_sequences_follow_the_target_under_every_option(options: str, drafter: str) -> None:
    assert p_value(DRAFTERS[drafter](), config_of(**CONFIGS[options]), num_rows=100_000) > PASSES


@pytest.mark.parametrize("rule", LOSSLESS)
def test_vanilla_decoding_follows_the_target(rule: Rule) -> None:
    assert p_value(None, config_of(rule=rule), num_rows=20_000) > PASSES


def off_by_one_percent(original: Callable[..., Any]) -> Callable[..., Any]:
    """`verify` for a target whose every distribution is 0.01 in total variation away from the true one."""

    def fault(rule: Rule, proposal: Proposal, target_probs: Tensor, *rest: Any, **options: Any) -> Any:
        most, least = target_probs.argmax(-1, keepdim=True), target_probs.argmin(-1, keepdim=True)
        step = torch.full_like(most, 0.01, dtype=target_probs.dtype)
        moved = target_probs.scatter_add(-1, most, -step).scatter_add(-1, least, step)
        return original(rule, proposal, moved, *rest, **options)

    return fault


@pytest.mark.parametrize("rule", LOSSLESS)
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

    def lengths(self: Scheduler, proposal: Proposal, request_ids: list[int]) -> Tensor:
        return (CONFIDENCES[proposal.tokens] >= self.schedule.threshold).long().cumprod(1).sum(1)

    monkeypatch.setattr(Scheduler, "lengths", lengths)
    assert p_value(DRAFTERS["other"](), config_of(schedule=CONFIDENT), num_rows=20_000) < FAILS


def test_random_numbers_shared_between_purposes_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Sampler.uniform
    monkeypatch.setattr(Sampler, "uniform", lambda self, places, purpose: original(self, places, Purpose.draft))
    assert p_value(DRAFTERS["other"](), config_of(), num_rows=20_000) < FAILS


def test_drafts_over_many_columns_follow_the_target() -> None:
    """200 columns, each token in 40 of them: a real vocabulary has more."""
    assert p_value(BigramDrafter(OTHER_LOGITS, "split"), config_of(), num_rows=20_000) > PASSES


def test_drafts_that_were_drawn_in_bfloat16_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BigramDrafter, "drawn_from", faults.drawn_by_a_rounded_sum)
    assert p_value(BigramDrafter(OTHER_LOGITS, "split"), config_of(), num_rows=20_000) < FAILS


def test_the_ratio_rule_accepts_more_than_the_match_rule_of_a_soft_target() -> None:
    accepted = {}
    for rule in LOSSLESS:
        prompts = [[row % VOCAB_SIZE] for row in range(5_000)]
        generations = decode(BigramTarget(), DRAFTERS["other"](), prompts, config_of(rule=rule)).generations  # type: ignore[arg-type]
        accepted[rule] = sum(r.accepted for g in generations for r in g.rounds)
    assert accepted[Rule.ratio] > 1.1 * accepted[Rule.match]


@pytest.mark.slow
def test_a_retrospective_schedule_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks over the whole curve with this round's confidences, which know the tokens that it cuts away."""

    costs = CostTable([1], [[0.0] * 4], [[1.0, 1 / 0.5, 1 / 0.45, 100.0]])
    config = config_of(schedule=Schedule(ScheduleName.algorithm1, 0.0, costs), batch_size=1)
    assert p_value(DRAFTERS["flat"](), config, num_rows=1_000) > PASSES
    monkeypatch.setattr(schedule_module, "algorithm1", faults.looks_back_from_the_whole_curve)
    assert p_value(DRAFTERS["flat"](), config, num_rows=1_500) < FAILS


def test_filters_after_the_test_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are compared with the target's plain probabilities; only what it draws itself is filtered."""
    original = decode_module.verify

    def fault(
        rule: Rule, proposal: Proposal, target_probs: Tensor, positions: Tensor, sampler: Sampler, **_: Any
    ) -> Any:
        fed = torch.cat((fed_last["tokens"][:, None], proposal.tokens), dim=1)
        plain = torch.softmax(TARGET_LOGITS[fed], dim=-1)
        verdict = original(rule, proposal, plain, positions, sampler)
        rows = torch.arange(len(fed))
        places = positions + verdict.num_accepted
        drawn = sampler.draw(target_probs[rows, verdict.num_accepted], places, Purpose.target)
        return replace(verdict, next_token=drawn)

    fed_last: dict[str, Tensor] = {}
    forward = BigramTarget.forward

    def seen(self: BigramTarget, input_ids: Tensor, cache: KVCache, **options: Any) -> TargetOutput:
        fed_last["tokens"] = input_ids[:, 0]
        return forward(self, input_ids, cache, **options)

    monkeypatch.setattr(BigramTarget, "forward", seen)
    monkeypatch.setattr(decode_module, "verify", fault)
    config = config_of(sampling=SamplingConfig(1.0, 0, 0.8, 0.0, 7))
    assert p_value(DRAFTERS["peaked"](), config, num_rows=20_000) < FAILS


def test_a_random_stream_that_rows_share_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Sampler.uniform

    def shared(self: Sampler, positions: Tensor, purpose: Purpose) -> Tensor:
        return original(replace(self, request_ids=torch.zeros_like(self.request_ids)), positions, purpose)

    monkeypatch.setattr(Sampler, "uniform", shared)
    assert p_value(DRAFTERS["other"](), config_of(), num_rows=20_000) < FAILS
