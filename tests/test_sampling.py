"""Tests of models/sampling.py: probabilities against transformers' own warpers, draws by statistics."""

from itertools import product
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from models import sampling
from models.sampling import Purpose, Sampler, SamplingConfig, draw, keyed_uniform, probs_from_logits
from tests.conftest import planted_fault

VOCAB_SIZE = 40
# Fixed seeds make these deterministic; the level is what a fresh choice of seed would fail at.
SIGNIFICANCE = 1e-3


def config(**changes: Any) -> SamplingConfig:
    return SamplingConfig(**{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0} | changes)


def random_logits(num_rows: int = 64, seed: int = 0) -> Tensor:
    return 3 * torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def warped_probs(logits: Tensor, cfg: SamplingConfig) -> Tensor:
    """transformers' warpers in the order of its generate()."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(cfg.temperature)])
    if cfg.top_k:
        warpers.append(TopKLogitsWarper(cfg.top_k))
    if cfg.top_p < 1:
        warpers.append(TopPLogitsWarper(cfg.top_p))
    if cfg.min_p:
        warpers.append(MinPLogitsWarper(cfg.min_p))
    return warpers(None, logits).softmax(-1)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"), product([0.3, 1.0, 1.7], [0, 1, 7, 100], [1.0, 0.8], [0.0, 0.05])
)
def test_probabilities_equal_those_of_transformers(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    cfg, logits = config(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p), random_logits()
    probs = probs_from_logits(logits, cfg)
    expected = warped_probs(logits, cfg)
    assert torch.equal(probs > 0, expected > 0)
    torch.testing.assert_close(probs, expected, rtol=1e-5, atol=1e-7)  # renormalised once more than there


def test_probabilities_are_the_softmax_when_nothing_is_cut() -> None:
    logits = random_logits().bfloat16()
    probs = probs_from_logits(logits, config(temperature=0.7))
    assert probs.dtype == torch.float32
    torch.testing.assert_close(probs, (logits.double() / 0.7).softmax(-1).float(), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("cfg", [config(temperature=0.0), config(temperature=1e-6), config(top_k=1)])
def test_greedy_settings_put_all_mass_on_the_maximum(cfg: SamplingConfig) -> None:
    logits = random_logits()
    probs = probs_from_logits(logits, cfg)
    assert torch.equal(probs.argmax(-1), logits.argmax(-1))
    assert torch.equal(probs, torch.zeros_like(probs).scatter(-1, logits.argmax(-1, keepdim=True), 1.0))
    drawn = draw(probs, torch.linspace(0, 1, len(probs) + 1, dtype=torch.float64)[:-1])
    assert torch.equal(drawn, logits.argmax(-1))


def test_greedy_breaks_ties_by_the_first_maximum() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    assert probs_from_logits(logits, config(temperature=0.0)).tolist() == [[0.0, 1.0, 0.0, 0.0]]


def test_nucleus_is_the_smallest_set_that_reaches_top_p() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()
    for top_p, kept in ((0.4, 1), (0.6, 2), (0.8, 3), (0.95, 4)):
        probs = probs_from_logits(logits, config(top_p=top_p))
        assert (probs > 0).sum() == kept
        assert probs.sum().item() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -0.1}, r"sampling\.temperature must be >= 0, got -0\.1"),
        ({"temperature": float("nan")}, r"sampling\.temperature must be >= 0, got nan"),
        ({"top_k": -1}, r"sampling\.top_k must be >= 0 \(0 = off\), got -1"),
        ({"top_p": 0.0}, r"sampling\.top_p must be in \(0, 1\] \(1 = off\), got 0\.0"),
        ({"top_p": 1.1}, r"sampling\.top_p must be in"),
        ({"min_p": 1.0}, r"sampling\.min_p must be in \[0, 1\) \(0 = off\), got 1\.0"),
        ({"min_p": -0.2}, r"sampling\.min_p must be in"),
    ],
)
def test_settings_out_of_range_are_named(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


def grid(num: int) -> Tensor:
    return torch.arange(num, dtype=torch.float64) / num


def check_zero_probabilities_are_never_drawn() -> None:
    probs = torch.tensor([0.0, 0.25, 0.0, 0.0, 0.5, 0.25, 0.0])
    edges = torch.tensor([0.0, 0.25, 0.75, 1 - 2**-53], dtype=torch.float64)
    uniforms = torch.cat((grid(1000), edges, (edges - 2**-53).clamp(min=0)))
    drawn = draw(probs.expand(len(uniforms), -1), uniforms)
    assert set(drawn.tolist()) == {1, 4, 5}


def test_zero_probabilities_are_never_drawn() -> None:
    check_zero_probabilities_are_never_drawn()


def test_the_largest_uniform_stays_inside_a_float32_sum_under_one() -> None:
    probs = torch.softmax(torch.randn(50_000, generator=torch.Generator().manual_seed(0)), -1)
    last = torch.tensor(1 - 2**-53, dtype=torch.float64)
    assert draw(probs, last).item() == 49_999
    assert draw(torch.cat((probs, torch.zeros(3))), last).item() == 49_999


def test_draws_are_the_inverse_of_the_cumulative_sum() -> None:
    probs = probs_from_logits(random_logits(8), config(top_k=9))
    uniforms = grid(97)[:, None].expand(97, 8)
    drawn = draw(probs.expand(97, -1, -1), uniforms)
    for row in range(8):
        cumulative = 0.0
        expected = torch.full((97,), -1)
        for token in range(VOCAB_SIZE):
            step = probs[row, token].double().item()
            inside = (uniforms[:, row] >= cumulative) & (uniforms[:, row] < cumulative + step)
            expected[inside] = token
            cumulative += step
        known = expected >= 0  # float32 probabilities sum to 1 - 1e-7
        assert known.sum() >= 96
        assert torch.equal(drawn[known, row], expected[known])


def test_unnormalised_probabilities_draw_the_same_tokens() -> None:
    probs = probs_from_logits(random_logits(1), config()).expand(500, -1)
    assert torch.equal(draw(probs, grid(500)), draw(probs * 0.25, grid(500)))


@pytest.mark.parametrize("cfg", [config(), config(temperature=0.5, top_p=0.9), config(top_k=5, seed=3)])
def test_draws_follow_the_probabilities(cfg: SamplingConfig) -> None:
    num_draws = 20_000
    probs = probs_from_logits(random_logits(1), cfg)[0]
    sampler = Sampler(cfg, torch.arange(num_draws))
    drawn = sampler.draw(probs.expand(num_draws, -1), torch.full((num_draws,), 5), Purpose.target)
    counts = torch.bincount(drawn, minlength=VOCAB_SIZE).double()
    assert counts[probs == 0].sum() == 0
    expected = probs.double() * num_draws
    common = expected >= 5  # the chi-square approximation needs it
    rest = [expected[~common].sum().item()] if expected[~common].sum() >= 5 else []
    observed = [*counts[common].tolist(), *([counts[~common].sum().item()] if rest else [])]
    wanted = torch.tensor([*expected[common].tolist(), *rest])
    wanted = wanted * (sum(observed) / wanted.sum())
    assert stats.chisquare(observed, wanted.numpy(), sum_check=False).pvalue > SIGNIFICANCE


def test_random_numbers_do_not_depend_on_the_order_of_the_batch() -> None:
    sampler = Sampler(config(), torch.tensor([4, 9, 2]))
    positions = torch.tensor([[10, 11], [3, 4], [70, 71]])
    uniforms = sampler.uniform(positions, Purpose.draft)
    rows = torch.tensor([2, 0])
    assert torch.equal(sampler.select(rows).uniform(positions[rows], Purpose.draft), uniforms[rows])
    alone = Sampler(config(), torch.tensor([9])).uniform(torch.tensor([4]), Purpose.draft)
    assert alone.item() == uniforms[1, 1].item()


@pytest.mark.parametrize("changed", ["seed", "request", "position", "purpose"])
def test_every_key_changes_the_number(changed: str) -> None:
    keys: dict[str, Any] = {"seed": 1, "request": 5, "position": 8, "purpose": Purpose.draft}
    values = set()
    for _ in range(3):
        values.add(uniform(**keys))
        keys[changed] = Purpose(keys[changed] + 1) if changed == "purpose" and keys[changed] < 3 else keys[changed] + 1
    assert len(values) == 3


def uniform(*, seed: int, request: int, position: int, purpose: int) -> float:
    return keyed_uniform(seed, torch.tensor([request]), torch.tensor([position]), Purpose(purpose)).item()


def python_uniform(seed: int, *keys: int) -> float:
    """splitmix64 in Python's own integers."""
    golden, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
    state = seed * golden & mask
    for key in keys:
        x = ((state ^ (key * golden & mask)) + golden) & mask
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        state = x ^ (x >> 31)
    return (state >> 11) * 2.0**-53


def test_numbers_equal_splitmix_in_unbounded_integers() -> None:
    for seed, request, position in product([0, 1, 980_406, 2**63 + 5], [0, 3, 10**6], [0, 17, 10**5]):
        ours = uniform(seed=seed, request=request, position=position, purpose=Purpose.accept)
        assert ours == python_uniform(seed, request, position, Purpose.accept)


def test_a_number_is_pinned_so_that_runs_stay_comparable_across_versions() -> None:
    assert uniform(seed=7, request=3, position=11, purpose=Purpose.draft) == 0.7848656511551668


def numbers(purpose: Purpose, num_requests: int = 100, num_positions: int = 200) -> Tensor:
    sampler = Sampler(config(seed=42), torch.arange(num_requests))
    return sampler.uniform(torch.arange(num_positions).expand(num_requests, -1), purpose)


@pytest.mark.parametrize("purpose", list(Purpose))
def test_numbers_are_uniform(purpose: Purpose) -> None:
    values = numbers(purpose).flatten()
    assert values.dtype == torch.float64
    assert values.min() >= 0 and values.max() < 1
    assert stats.kstest(values.numpy(), "uniform").pvalue > SIGNIFICANCE
    histogram = torch.histc(values.float(), bins=100, min=0, max=1)
    assert stats.chisquare(histogram.numpy()).pvalue > SIGNIFICANCE


def check_uncorrelated(a: Tensor, b: Tensor) -> None:
    """Correlation under 4 standard errors, and a flat joint histogram."""
    a, b = a.flatten(), b.flatten()
    correlation = torch.corrcoef(torch.stack((a, b)))[0, 1].abs().item()
    assert correlation < 4 / len(a) ** 0.5
    cells = ((a * 10).long() * 10 + (b * 10).long()).bincount(minlength=100)
    assert stats.chisquare(cells.numpy()).pvalue > SIGNIFICANCE


@pytest.mark.parametrize(("first", "second"), [(1, 2), (1, 3), (2, 3)])
def test_purposes_share_no_randomness(first: int, second: int) -> None:
    check_uncorrelated(numbers(Purpose(first)), numbers(Purpose(second)))


def test_neighbouring_positions_and_requests_share_no_randomness() -> None:
    values = numbers(Purpose.draft)
    check_uncorrelated(values[:, 1:], values[:, :-1])
    check_uncorrelated(values[1:], values[:-1])


def test_purposes_that_share_a_number_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = sampling.keyed_uniform

    def one_purpose(seed: int, requests: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
        return right(seed, requests, positions, Purpose.draft)

    with planted_fault(monkeypatch, sampling, "keyed_uniform", one_purpose):
        check_uncorrelated(numbers(Purpose.draft), numbers(Purpose.accept))


def test_a_draw_that_hits_zero_probabilities_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def left(sorted_sequence: Tensor, values: Tensor, *, right: bool) -> Tensor:
        return search(sorted_sequence, values, right=False)

    search = torch.searchsorted
    with planted_fault(monkeypatch, torch, "searchsorted", left):
        check_zero_probabilities_are_never_drawn()
