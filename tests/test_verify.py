"""Verification against the target's distribution by exact enumeration: no sampling, no statistics."""

import itertools
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

import eval.verify as verify_module
from eval.verify import Rule, prob_of, residual, scatter_probs, verify
from models.base import Proposal
from models.sampling import Purpose, Sampler, SamplingConfig, draw
from tests.conftest import planted_fault

# Sums of a dozen float64 products; the thresholds themselves are found to the last bit.
EXACT = 1e-12
LARGEST_BELOW_ONE = 1 - 2.0**-53


@dataclass
class Scripted:
    """A sampler whose uniforms [B, K] are given and whose draws only note the distribution they were asked for."""

    uniforms: Tensor
    asked: Tensor = field(default_factory=lambda: torch.empty(0))

    def uniform(self, places: Tensor, purpose: Purpose) -> Tensor:
        assert purpose is Purpose.accept and places.shape == self.uniforms.shape
        return self.uniforms

    def draw(self, probs: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
        assert purpose is Purpose.target and positions.shape == probs.shape[:1]
        self.asked = probs / probs.sum(-1, keepdim=True)
        return probs.argmax(-1)


@dataclass
class Case:
    """Conditional distributions of a tiny language: one row for every prefix of drafted tokens."""

    target: dict[tuple[int, ...], Tensor]  # prefixes of 0 .. K tokens -> [V]
    draft: dict[tuple[int, ...], Tensor]  # prefixes of 0 .. K-1 tokens -> [V]
    num_drafts: int
    vocab_size: int

    def drafts(self) -> list[tuple[int, ...]]:
        return list(itertools.product(range(self.vocab_size), repeat=self.num_drafts))

    def chance(self, table: dict[tuple[int, ...], Tensor], tokens: tuple[int, ...], start: int = 0) -> float:
        """Probability of tokens[start:] after tokens[:start]."""
        product = 1.0
        for place in range(start, len(tokens)):
            product *= float(table[tokens[:place]][tokens[place]])
        return product


def make_case(seed: int, *, vocab_size: int = 3, num_drafts: int = 3, holes: bool = False, equal: bool = False) -> Case:
    """Random tables in float64. `holes` puts zeros where the other side has mass; `equal` drafts perfectly."""
    generator = torch.Generator().manual_seed(seed)

    def row(hole: int | None) -> Tensor:
        values = torch.rand(vocab_size, generator=generator, dtype=torch.float64) + 0.05
        if hole is not None:
            values[hole % vocab_size] = 0
        return values / values.sum()

    target, draft = {}, {}
    for length in range(num_drafts + 1):
        for index, prefix in enumerate(itertools.product(range(vocab_size), repeat=length)):
            target[prefix] = row(index if holes else None)
            if length < num_drafts:
                draft[prefix] = target[prefix] if equal else row(index + 1 if holes else None)
    return Case(target, draft, num_drafts, vocab_size)


def peaked(case: Case) -> Case:
    """Every draft distribution is one token, as an n-gram's: some of them tokens that the target excludes."""
    rows = {
        prefix: torch.eye(case.vocab_size, dtype=torch.float64)[sum(prefix) % case.vocab_size] for prefix in case.draft
    }
    return Case(case.target, rows, case.num_drafts, case.vocab_size)


def proposal_of(case: Case, drafts: list[tuple[int, ...]], lengths: list[int], form: str) -> Proposal:
    """All `drafts` as one batch: dense probabilities, or candidates that are shuffled, repeated or one column only."""
    tokens = torch.tensor(drafts).view(len(drafts), case.num_drafts)
    probs = torch.stack([torch.stack([case.draft[d[:k]] for k in range(case.num_drafts)]) for d in drafts])
    limits = torch.tensor(lengths)
    if form == "dense":
        return Proposal(tokens, probs, limits)
    if form == "one_hot":
        return Proposal(tokens, torch.ones_like(probs[..., :1]), limits, candidate_ids=tokens[..., None])
    order = torch.arange(case.vocab_size).flip(0)
    columns = probs[..., order]
    if form == "repeated":  # one id in two columns: their mass adds up
        order, columns = torch.cat((order, order[:1])), torch.cat((columns, columns[..., :1]), dim=-1)
        columns[..., 0] *= 0.25
        columns[..., -1] *= 0.75
    return Proposal(tokens, columns, limits, candidate_ids=order.expand(*tokens.shape, -1))


def emitted_distribution(case: Case, *, form: str = "dense", lengths: list[int] | None = None) -> dict[tuple, float]:
    """Distribution over K+1 tokens that `verify` implements, its uniforms integrated out.

    A round emits 1 to K+1 tokens; shorter ones are completed by the target's own conditionals, as later rounds would.
    """
    drafts = case.drafts()
    limits = [case.num_drafts] * len(drafts) if lengths is None else lengths
    target_probs = torch.stack([torch.stack([case.target[d[:k]] for k in range(case.num_drafts + 1)]) for d in drafts])
    proposal = proposal_of(case, drafts, limits, form)
    positions = torch.zeros(len(drafts), dtype=torch.int64)
    result = dict.fromkeys(itertools.product(range(case.vocab_size), repeat=case.num_drafts + 1), 0.0)
    reaching = torch.tensor([case.chance(case.draft, d) for d in drafts], dtype=torch.float64)
    if form == "one_hot":
        reaching = (reaching == 1).double()
    for accepted in range(case.num_drafts + 1):
        threshold = torch.zeros(len(drafts), dtype=torch.float64)
        uniforms = torch.zeros(len(drafts), case.num_drafts, dtype=torch.float64)
        is_last = torch.tensor([limit <= accepted for limit in limits])
        if accepted < case.num_drafts:
            threshold = accept_threshold(proposal, target_probs, slot=accepted)
            uniforms[:, accepted] = LARGEST_BELOW_ONE
        sampler = Scripted(uniforms)
        verdict = verify(Rule.ratio, proposal, target_probs, positions, sampler)
        stopping = torch.where(is_last, 1.0, 1 - threshold)  # P(no more accepted | `accepted` accepted)
        for row, draft in enumerate(drafts):
            weight = float(reaching[row] * stopping[row])
            if weight <= 0 or accepted > limits[row]:
                continue
            assert int(verdict.num_accepted[row]) == accepted
            for token in range(case.vocab_size):
                start = (*draft[:accepted], token)
                for rest in itertools.product(range(case.vocab_size), repeat=case.num_drafts - accepted):
                    completed = case.chance(case.target, start + rest, start=accepted + 1)
                    result[start + rest] += weight * float(sampler.asked[row, token]) * completed
        reaching = reaching * torch.where(is_last, 0.0, threshold)
    return result


def accept_threshold(proposal: Proposal, target_probs: Tensor, *, slot: int) -> Tensor:
    """The u [B] under which the draft at `slot` is accepted, by bisection down to neighbouring float64 numbers."""
    batch, num_drafts = proposal.tokens.shape
    positions = torch.zeros(batch, dtype=torch.int64)
    low, high = torch.zeros(batch, dtype=torch.float64), torch.ones(batch, dtype=torch.float64)

    def accepts(value: Tensor) -> Tensor:
        uniforms = torch.zeros(batch, num_drafts, dtype=torch.float64)
        uniforms[:, slot] = value
        return verify(Rule.ratio, proposal, target_probs, positions, Scripted(uniforms)).num_accepted > slot

    always, never = accepts(torch.full_like(low, LARGEST_BELOW_ONE)), ~accepts(low)
    for _ in range(60):
        middle = (low + high) / 2
        accepted = accepts(middle)
        low, high = torch.where(accepted, middle, low), torch.where(accepted, high, middle)
    return torch.where(always, 1.0, torch.where(never, 0.0, high))


def assert_is_target(case: Case, emitted: dict[tuple, float], tolerance: float = EXACT) -> None:
    assert sum(emitted.values()) == pytest.approx(1, abs=tolerance * len(emitted))
    for tokens, mass in emitted.items():
        assert mass == pytest.approx(case.chance(case.target, tokens), abs=tolerance), tokens


@pytest.mark.parametrize(("vocab_size", "num_drafts"), [(3, 1), (3, 2), (3, 3), (4, 2)])
@pytest.mark.parametrize("kind", ["generic", "holes", "equal", "one_hot"])
def test_ratio_rule_emits_exactly_the_target_distribution(vocab_size: int, num_drafts: int, kind: str) -> None:
    case = make_case(
        num_drafts, vocab_size=vocab_size, num_drafts=num_drafts, holes=kind != "generic", equal=kind == "equal"
    )
    if kind == "one_hot":
        case = peaked(case)
    assert_is_target(case, emitted_distribution(case, form="one_hot" if kind == "one_hot" else "dense"))


@pytest.mark.parametrize("form", ["shuffled", "repeated"])
def test_candidate_columns_emit_exactly_the_target_distribution(form: str) -> None:
    case = make_case(5, num_drafts=2, holes=True)
    assert_is_target(case, emitted_distribution(case, form=form))


def test_one_hot_candidates_equal_their_dense_form() -> None:
    case = peaked(make_case(6, num_drafts=2, holes=True))
    dense, columns = emitted_distribution(case), emitted_distribution(case, form="one_hot")
    assert dense == pytest.approx(columns, abs=EXACT)


@pytest.mark.parametrize("kind", ["generic", "holes", "one_hot"])
def test_lengths_that_depend_on_earlier_drafts_keep_the_distribution(kind: str) -> None:
    """Rows of every length from 0 to K in one batch; a row is cut before slot k because of its tokens before k."""
    case = make_case(7, num_drafts=3, holes=kind == "holes")
    case = peaked(case) if kind == "one_hot" else case
    assert_is_target(case, emitted_distribution(case, lengths=[cut_by_prefix(d) for d in case.drafts()]))


def cut_by_prefix(draft: tuple[int, ...]) -> int:
    return next((k for k in range(len(draft)) if (3 * k + sum(draft[:k])) % 4 == 3), len(draft))


def test_lengths_that_depend_on_the_draft_at_the_cut_are_seen() -> None:
    """The enumeration has teeth: a schedule that looks at the token it cuts away is not lossless."""
    case = make_case(7, num_drafts=2)
    lengths = [next((k for k in range(2) if draft[k] == 0), 2) for draft in case.drafts()]
    emitted = emitted_distribution(case, lengths=lengths)
    assert max(abs(mass - case.chance(case.target, tokens)) for tokens, mass in emitted.items()) > 0.01


@pytest.mark.parametrize("length", [0, 1, 2])
def test_rows_of_equal_length_shorter_than_the_block_keep_the_distribution(length: int) -> None:
    case = make_case(8, num_drafts=2, holes=True)
    assert_is_target(case, emitted_distribution(case, lengths=[length] * len(case.drafts())))


def test_accept_thresholds_are_the_probability_ratios() -> None:
    case = make_case(9, num_drafts=1, vocab_size=4, holes=True)
    drafts = [d for d in case.drafts() if case.chance(case.draft, d) > 0]  # others are never drafted
    proposal = proposal_of(case, drafts, [1] * len(drafts), "dense")
    target_probs = torch.stack([torch.stack([case.target[()], case.target[d]]) for d in drafts])
    found = accept_threshold(proposal, target_probs, slot=0)
    wanted = [min(1.0, float(case.target[()][d[0]] / case.draft[()][d[0]])) for d in drafts]
    assert found.tolist() == pytest.approx(wanted, abs=EXACT)


def test_float32_probabilities_emit_the_target_to_float32_rounding() -> None:
    """Rounded rows sum to 1 only to 1e-7 each; four of them are multiplied."""
    case = make_case(10, num_drafts=3)
    for table in (case.target, case.draft):
        for prefix in table:
            table[prefix] = table[prefix].float()
    assert_is_target(case, emitted_distribution(case), tolerance=1e-6)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("residual", lambda target, draft: target),  # correction drawn from the target itself
        ("residual", lambda target, draft: (target - draft).abs()),
        ("prob_of", lambda proposal: torch.ones_like(proposal.probs[..., 0])),  # every draft taken for certain
    ],
)
def test_faulty_parts_are_seen(monkeypatch: pytest.MonkeyPatch, name: str, fault: object) -> None:
    with planted_fault(monkeypatch, verify_module, name, fault):
        test_ratio_rule_emits_exactly_the_target_distribution(3, 2, "generic")


def test_greedy_accepts_equal_tokens_and_corrects_the_first_other_one() -> None:
    """One-hot target and drafter: no random number matters."""
    chain = (2, 0, 1)
    eye = torch.eye(3)
    drafts = list(itertools.product(range(3), repeat=2))
    target_probs = torch.stack([eye[list(chain)]] * len(drafts))
    proposal = Proposal(torch.tensor(drafts), eye[torch.tensor(drafts)], torch.full((len(drafts),), 2))
    for value in (0.0, 0.5, LARGEST_BELOW_ONE):
        sampler = Scripted(torch.full((len(drafts), 2), value, dtype=torch.float64))
        verdict = verify(Rule.ratio, proposal, target_probs, torch.zeros(len(drafts), dtype=torch.int64), sampler)
        for row, draft in enumerate(drafts):
            agreed = next((k for k in range(2) if draft[k] != chain[k]), 2)
            assert (int(verdict.num_accepted[row]), int(verdict.next_token[row])) == (agreed, chain[agreed])


@pytest.mark.parametrize("rule", list(Rule))
def test_without_any_slot_the_next_token_is_drawn_from_the_target(rule: Rule) -> None:
    sampler = Sampler(SamplingConfig(1.0, 0, 1.0, 0.0, 3), torch.arange(64))
    target_probs = torch.softmax(torch.randn(64, 1, 5, generator=torch.Generator().manual_seed(0)), dim=-1)
    positions = torch.arange(64)
    nothing = torch.zeros(64, 0, dtype=torch.int64)
    proposal = Proposal(nothing, torch.zeros(64, 0, 5), torch.zeros(64, dtype=torch.int64))
    verdict = verify(rule, proposal, target_probs, positions, sampler)
    assert not verdict.num_accepted.any()
    assert torch.equal(verdict.next_token, sampler.draw(target_probs[:, 0], positions, Purpose.target))


@pytest.mark.parametrize("seed", range(5))
def test_match_rule_keeps_the_targets_own_sample_under_every_proposal(seed: int) -> None:
    """Every draft of every length: what is emitted is a prefix of the sample that the noise alone decides."""
    case = make_case(seed, num_drafts=3, holes=True)
    drafts = case.drafts()
    sampler = Sampler(SamplingConfig(1.0, 0, 1.0, 0.0, seed), torch.full((len(drafts),), 11))
    positions = torch.full((len(drafts),), 4)
    noise = sampler.uniform(positions[:, None] + torch.arange(4), Purpose.target)[0]
    chain: tuple[int, ...] = ()
    for place in range(4):
        chain = (*chain, int(draw(case.target[chain], noise[place])))
    target_probs = torch.stack([torch.stack([case.target[d[:k]] for k in range(4)]) for d in drafts])
    for length in range(4):
        proposal = proposal_of(case, drafts, [length] * len(drafts), "dense")
        verdict = verify(Rule.match, proposal, target_probs, positions, sampler)
        for row, draft in enumerate(drafts):
            agreed = next((k for k in range(length) if draft[k] != chain[k]), length)
            assert int(verdict.num_accepted[row]) == agreed
            assert int(verdict.next_token[row]) == chain[agreed]


def test_residual_is_the_positive_part_and_falls_back_where_nothing_is_left() -> None:
    target, draft = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.5, 0.3]])
    torch.testing.assert_close(residual(target, draft), torch.tensor([[0.3, 0.0, 0.0]]))
    assert torch.equal(residual(target, target), target)


def test_candidates_scatter_to_their_dense_distribution() -> None:
    case = make_case(12, num_drafts=2, holes=True)
    drafts = case.drafts()
    slots = torch.arange(len(drafts)) % 2
    dense = proposal_of(case, drafts, [2] * len(drafts), "dense")
    for form in ("shuffled", "repeated"):
        columns = proposal_of(case, drafts, [2] * len(drafts), form)
        torch.testing.assert_close(scatter_probs(columns, slots, 3), scatter_probs(dense, slots, 3))
        torch.testing.assert_close(prob_of(columns), prob_of(dense))
