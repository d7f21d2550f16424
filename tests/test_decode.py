"""The decoding loop on a tiny target: equal to plain decoding wherever a stop or a limit falls, and batch by batch."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import eval.decode as decode_module
from eval.decode import DecodeConfig, decode
from eval.rounds import Generation, Round
from eval.schedule import Schedule, ScheduleName
from eval.verify import Rule, Verdict
from models.base import Proposal
from models.dspark import DSpark
from models.independent import IndependentDrafter
from models.ngram import NgramDrafter
from models.sampling import Sampler, SamplingConfig
from models.target import Target, TargetConfig, TargetOutput, load_tokenizer
from tests.chains import lively_eagle3
from tests.conftest import planted_fault
from tests.draft_batches import lively_dspark

K = 4
LENGTH = 12
CONTEXT = 64
GREEDY = SamplingConfig(0.0, 0, 1.0, 0.0, 0)
SAMPLED = SamplingConfig(1.0, 0, 1.0, 0.0, 3)
FIXED = Schedule(ScheduleName.fixed, 0.0)


def config_of(**changes: Any) -> DecodeConfig:
    return replace(DecodeConfig(LENGTH, 12, K, Rule.ratio, FIXED, GREEDY), **changes)


def stopping_at(target: Target, *ids: int) -> Target:
    """The same weights with other stop tokens."""
    other = copy.copy(target)
    other.spec = replace(target.spec, eos_token_ids=ids)
    return other


def of_short_context(target: Target) -> Target:
    """The same weights, saying that they know positions below CONTEXT only."""
    other = copy.copy(target)
    other.spec = replace(target.spec, max_position_embeddings=CONTEXT)
    return other


def guarded(target: Target) -> Target:
    """Fails where a token is computed at a position that the target does not have."""
    other = copy.copy(target)

    def run(with_features: bool, ids: Tensor, positions: Tensor, *rest: Any) -> TargetOutput:
        assert int(positions.max()) < target.spec.max_position_embeddings
        return target._run_cached(with_features, ids, positions, *rest)

    vars(other)["_run_cached"] = run
    return other


def texts(generations: Sequence[Generation]) -> list[tuple[list[int], str]]:
    return [(generation.tokens, generation.finish_reason) for generation in generations]


@dataclass
class OracleState:
    chains: list[list[int]]  # prompt and its greedy continuation
    lengths: Tensor

    def select(self, rows: Tensor) -> None:
        self.chains, self.lengths = [self.chains[row] for row in rows.tolist()], self.lengths[rows]

    def put(self, rows: Tensor, other: "OracleState") -> None:
        for row, chain in zip(rows.tolist(), other.chains, strict=True):
            self.chains[row] = chain
        self.lengths = self.lengths.index_copy(0, rows, other.lengths)


class Oracle:
    """Proposes the target's own greedy continuation, but for one slot of every block where `wrong_slot` says so."""

    needs_features = False
    num_draft_tokens = K

    def __init__(self, chains: Sequence[list[int]], *, wrong_slot: int | None = None) -> None:
        self.chains, self.wrong_slot = chains, wrong_slot

    def start(self, tokens: Tensor, features: Tensor, counts: Tensor, capacity: int) -> OracleState:
        prompts = [row[:count] for row, count in zip(tokens.tolist(), counts.tolist(), strict=True)]
        chains = [next(chain for chain in self.chains if chain[: len(prompt)] == prompt) for prompt in prompts]
        return OracleState(chains, counts.clone())

    def propose(self, state: OracleState, last: Tensor, sampler: Sampler, num_draft_tokens: int) -> Proposal:
        rows = []
        for chain, length, newest in zip(state.chains, state.lengths.tolist(), last.tolist(), strict=True):
            assert chain[length] == newest, "the newest token sits at position lengths"
            rows.append((chain + [0] * K)[length + 1 : length + 1 + num_draft_tokens])
        tokens = torch.tensor(rows)
        if self.wrong_slot is not None and self.wrong_slot < num_draft_tokens:
            tokens[:, self.wrong_slot] = (tokens[:, self.wrong_slot] + 1) % 50
        return Proposal(
            tokens, torch.ones(*tokens.shape, 1), torch.full_like(last, num_draft_tokens), tokens[..., None]
        )

    def advance(self, state: OracleState, tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        state.lengths = state.lengths + counts


@pytest.fixture(scope="module")
def chains(tiny_target: Target, tiny_prompts: list[list[int]]) -> list[list[int]]:
    """Each prompt with 40 greedy tokens, stop tokens passed over."""
    free = stopping_at(tiny_target)
    generations = decode(free, None, tiny_prompts, config_of(max_new_tokens=40)).generations
    return [prompt + generation.tokens for prompt, generation in zip(tiny_prompts, generations, strict=True)]


@pytest.fixture(scope="module")
def varied(tiny_prompts: list[list[int]], chains: list[list[int]]) -> tuple[list[int], list[int]]:
    """The prompt whose continuation repeats itself latest, so that a stop token can be put at any offset."""

    def distinct(index: int) -> int:
        new = chains[index][len(tiny_prompts[index]) :]
        return next((i for i in range(len(new)) if new[i] in new[:i]), len(new))

    best = max(range(len(chains)), key=distinct)
    assert distinct(best) > K + 2, "needs a continuation without repeats of more than a block"
    return tiny_prompts[best], chains[best][len(tiny_prompts[best]) :]


def drafters_of(chains: list[list[int]], dspark: DSpark) -> Iterator[tuple[Any, int]]:
    for num_drafts in (1, 2, K):
        yield dspark, num_drafts
        yield Oracle(chains), num_drafts
        for wrong_slot in range(num_drafts):
            yield Oracle(chains, wrong_slot=wrong_slot), num_drafts


@pytest.mark.parametrize("offset", range(K + 3))
def test_a_stop_token_at_every_offset_ends_like_plain_decoding(
    tiny_target: Target, tiny_dspark: DSpark, chains: list[list[int]], varied: tuple[list[int], list[int]], offset: int
) -> None:
    prompt, new = varied
    target = stopping_at(tiny_target, new[offset])
    vanilla = decode(target, None, [prompt], config_of()).generations[0]
    assert (vanilla.tokens, vanilla.finish_reason) == (new[: offset + 1], "stop")
    for drafter, num_drafts in drafters_of(chains, tiny_dspark):
        found = decode(target, drafter, [prompt], config_of(num_draft_tokens=num_drafts)).generations[0]
        assert (found.tokens, found.finish_reason) == (vanilla.tokens, "stop")


@pytest.mark.parametrize("limit", range(1, 2 * K + 4))
def test_a_limit_at_every_offset_ends_like_plain_decoding(
    tiny_target: Target, tiny_dspark: DSpark, chains: list[list[int]], tiny_prompts: list[list[int]], limit: int
) -> None:
    target, prompts = stopping_at(tiny_target), tiny_prompts[:3]
    vanilla = decode(target, None, prompts, config_of(max_new_tokens=limit)).generations
    assert [(len(g.tokens), g.finish_reason) for g in vanilla] == [(limit, "length")] * 3
    for drafter, num_drafts in drafters_of(chains, tiny_dspark):
        config = config_of(max_new_tokens=limit, num_draft_tokens=num_drafts)
        assert texts(decode(target, drafter, prompts, config).generations) == texts(vanilla)


def first_with(text: str, tokens: list[int], tokenizer: Any) -> int | None:
    return next((n for n in range(1, len(tokens) + 1) if text in tokenizer.decode(tokens[:n])), None)


@pytest.mark.parametrize("offset", range(K + 3))
def test_a_stop_string_at_every_offset_ends_like_plain_decoding(
    tiny_target: Target,
    tiny_target_config: TargetConfig,
    tiny_dspark: DSpark,
    chains: list[list[int]],
    tiny_prompts: list[list[int]],
    offset: int,
) -> None:
    """Strings that begin inside one token and end inside the next, which a search token by token would miss."""
    tokenizer, target = load_tokenizer(tiny_target_config), stopping_at(tiny_target)
    new = chains[0][len(tiny_prompts[0]) :]
    before, after = (tokenizer.decode(new[:n]) for n in (offset + 1, offset + 2))
    string = after[max(0, len(before) - 2) : len(before) + 2]
    assert len(string) > 2 and string not in before
    config = config_of(stop_strings=("never said", string), max_new_tokens=20)
    vanilla = decode(target, None, tiny_prompts, config, tokenizer=tokenizer).generations
    for prompt, chain, generation in zip(tiny_prompts, chains, vanilla, strict=True):
        plain = chain[len(prompt) :][:20]
        end = first_with(string, plain, tokenizer)
        assert generation.tokens == plain[:end]
        assert generation.finish_reason == ("length" if end is None else "stop")
    for drafter in (tiny_dspark, Oracle(chains), Oracle(chains, wrong_slot=1)):
        speculative = replace(config, num_draft_tokens=K, batch_size=5)
        found = decode(target, drafter, tiny_prompts, speculative, tokenizer=tokenizer).generations
        assert texts(found) == texts(vanilla)


def test_a_stop_string_needs_text_and_a_tokenizer(tiny_target: Target, tiny_target_config: TargetConfig) -> None:
    for strings, tokenizer in ((("a",), None), (("",), load_tokenizer(tiny_target_config))):
        with pytest.raises(ValueError, match=r"stop strings .* must have text, and need the target's tokenizer"):
            decode(tiny_target, None, [[1]], config_of(stop_strings=strings), tokenizer=tokenizer)


def test_a_lossy_threshold_accepts_what_the_target_finds_likely_enough(
    tiny_target: Target, tiny_dspark: DSpark, tiny_prompts: list[list[int]]
) -> None:
    accepted = []
    for threshold in (1.0, 0.05, 0.01):
        config = config_of(sampling=SAMPLED, max_new_tokens=24, rule=Rule.lossy_threshold, lossy_threshold=threshold)
        rounds = [r for g in decode(tiny_target, tiny_dspark, tiny_prompts, config).generations for r in g.rounds]
        accepted.append(sum(r.accepted for r in rounds) / len(rounds))
    lossless = decode(
        tiny_target, tiny_dspark, tiny_prompts, config_of(sampling=SAMPLED, max_new_tokens=24)
    ).generations
    rounds = [r for g in lossless for r in g.rounds]
    assert accepted[0] == sum(r.accepted for r in rounds) / len(rounds)
    assert accepted[0] < accepted[1] < accepted[2]
    with pytest.raises(ValueError, match=r"lossy_threshold must be in \(0, 1\], got 0"):
        config_of(lossy_threshold=0.0)


def test_a_stop_token_at_the_limit_is_a_stop(tiny_target: Target, varied: tuple[list[int], list[int]]) -> None:
    prompt, new = varied
    for drafter, num_drafts in ((None, 0), (Oracle([prompt + new]), K)):
        config = config_of(max_new_tokens=4, num_draft_tokens=num_drafts)
        found = decode(stopping_at(tiny_target, new[3]), drafter, [prompt], config).generations[0]
        assert (found.tokens, found.finish_reason) == (new[:4], "stop")


@pytest.mark.parametrize("offset", range(K + 3))
def test_a_round_ended_by_an_accepted_stop_counts_neither_bonus_nor_what_follows(
    tiny_target: Target, chains: list[list[int]], varied: tuple[list[int], list[int]], offset: int
) -> None:
    prompt, new = varied
    rounds = decode(stopping_at(tiny_target, new[offset]), Oracle(chains), [prompt], config_of()).generations[0].rounds
    full = Round(K, K, bonus=True)
    if offset == 0:  # the first token belongs to no round
        assert rounds == []
        return
    whole, slot = divmod(offset - 1, K + 1)
    last = full if slot == K else Round(slot + 1, slot + 1, bonus=False)
    assert rounds == [full] * whole + [last]


def test_an_oracle_scores_whole_blocks_and_the_overshoot_of_the_last_round(
    tiny_target: Target, chains: list[list[int]], tiny_prompts: list[list[int]]
) -> None:
    for limit in range(2, 2 * K + 5):
        config = config_of(max_new_tokens=limit)
        for generation in decode(stopping_at(tiny_target), Oracle(chains), tiny_prompts, config).generations:
            assert len(generation.tokens) == limit
            assert generation.rounds == [Round(K, K, bonus=True)] * -(-(limit - 1) // (K + 1))


@pytest.mark.parametrize("wrong_slot", range(K))
def test_a_wrong_draft_is_corrected_and_ends_its_round(
    tiny_target: Target, chains: list[list[int]], tiny_prompts: list[list[int]], wrong_slot: int
) -> None:
    drafter, config = Oracle(chains, wrong_slot=wrong_slot), config_of()
    for generation in decode(stopping_at(tiny_target), drafter, tiny_prompts, config).generations:
        assert generation.rounds == [Round(K, wrong_slot, bonus=True)] * -(-(LENGTH - 1) // (wrong_slot + 1))


def test_vanilla_rounds_propose_nothing(tiny_target: Target, tiny_prompts: list[list[int]]) -> None:
    for generation in decode(tiny_target, None, tiny_prompts, config_of()).generations:
        assert generation.rounds == [Round(0, 0, bonus=True)] * (len(generation.tokens) - 1)


@pytest.mark.parametrize("rule", [Rule.ratio, Rule.match])
def test_greedy_speculation_equals_plain_decoding_in_batches_of_1_3_and_12(
    tiny_target: Target, tiny_dspark: DSpark, tiny_prompts: list[list[int]], rule: Rule
) -> None:
    vanilla = decode(tiny_target, None, tiny_prompts, config_of(max_new_tokens=16)).generations
    assert {generation.finish_reason for generation in vanilla} == {"stop", "length"}
    runs = []
    for batch_size in (1, 3, 12):
        config = config_of(max_new_tokens=16, batch_size=batch_size, rule=rule)
        runs.append(decode(tiny_target, tiny_dspark, tiny_prompts, config).generations)
        assert texts(runs[-1]) == texts(vanilla)
    assert runs[0] == runs[1] == runs[2]
    lengths = {round_.accepted for generation in runs[0] for round_ in generation.rounds}
    assert len(lengths) > 3, "rounds of many lengths are needed for this to say anything"


def test_a_misplaced_cache_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tiny_target: Target, tiny_dspark: DSpark, tiny_prompts: list[list[int]]
) -> None:
    def accepts_one_more(*arguments: Any, **options: Any) -> Verdict:
        verdict = verify(*arguments, **options)
        proposal = arguments[1]
        return Verdict((verdict.num_accepted + 1).clamp(max=proposal.lengths), verdict.next_token)

    verify = decode_module.verify
    with planted_fault(monkeypatch, decode_module, "verify", accepts_one_more):
        test_greedy_speculation_equals_plain_decoding_in_batches_of_1_3_and_12(
            tiny_target, tiny_dspark, tiny_prompts, Rule.ratio
        )


def test_sampled_outputs_do_not_depend_on_neighbours_or_order(
    tiny_target: Target, tiny_dspark: DSpark, tiny_prompts: list[list[int]]
) -> None:
    config, ids = config_of(sampling=SAMPLED, max_new_tokens=24), [7 * index for index in range(12)]
    together = decode(tiny_target, tiny_dspark, tiny_prompts, config, request_ids=ids).generations
    backwards = decode(tiny_target, tiny_dspark, tiny_prompts[::-1], config, request_ids=ids[::-1]).generations
    assert backwards[::-1] == together
    for index in range(12):
        alone = decode(tiny_target, tiny_dspark, [tiny_prompts[index]], config, request_ids=[ids[index]])
        assert alone.generations == [together[index]]
    other = decode(tiny_target, tiny_dspark, tiny_prompts, config, request_ids=[i + 1 for i in ids]).generations
    assert [g.tokens for g in other] != [g.tokens for g in together], "request ids key the draws"


@pytest.mark.parametrize("kind", ["dspark", "eagle3", "ngram", "independent"])
def test_requests_that_take_over_a_row_decode_as_alone(
    tiny_target: Target, tiny_target_config: TargetConfig, tiny_prompts: list[list[int]], kind: str
) -> None:
    """Every request but the first ones begins in a row that another has left, some with a first token that ends it."""
    drafter: Any = {
        "dspark": lambda: lively_dspark(tiny_target, tiny_target_config),
        "eagle3": lambda: lively_eagle3(tiny_target, tiny_target_config),
        "ngram": lambda: NgramDrafter(K),
        "independent": lambda: IndependentDrafter(tiny_target, K, tiny_target.spec.vocab_size),
    }[kind]()
    penalised = SamplingConfig(1.0, 0, 1.0, 0.0, 3, repetition_penalty=1.3, presence_penalty=0.5)
    prompts = tiny_prompts[:8]
    for sampling, batch_sizes in ((SAMPLED, (1, 3)), (penalised, (2,))):
        config = config_of(sampling=sampling, max_new_tokens=14)
        alone = [
            decode(tiny_target, drafter, [prompt], config, request_ids=[index]).generations[0]
            for index, prompt in enumerate(prompts)
        ]
        assert len({len(generation.tokens) for generation in alone}) > 2
        for batch_size in batch_sizes:
            together = decode(tiny_target, drafter, prompts, replace(config, batch_size=batch_size)).generations
            assert together == alone


def test_match_gives_the_vanilla_sample_under_every_schedule_and_length(
    tiny_target: Target, tiny_dspark: DSpark, chains: list[list[int]], tiny_prompts: list[list[int]]
) -> None:
    base = config_of(sampling=SAMPLED, rule=Rule.match, max_new_tokens=24)
    vanilla = decode(tiny_target, None, tiny_prompts, base).generations
    assert len({len(generation.tokens) for generation in vanilla}) > 2
    for num_drafts in range(1, K + 1):
        for schedule in (FIXED, Schedule(ScheduleName.confidence, 0.3), Schedule(ScheduleName.confidence, 0.8)):
            config = replace(base, num_draft_tokens=num_drafts, schedule=schedule)
            assert texts(decode(tiny_target, tiny_dspark, tiny_prompts, config).generations) == texts(vanilla)


def test_a_confidence_schedule_cuts_rounds_and_keeps_greedy_outputs(
    tiny_target: Target, tiny_dspark: DSpark, tiny_prompts: list[list[int]]
) -> None:
    vanilla = decode(tiny_target, None, tiny_prompts, config_of()).generations
    config = config_of(schedule=Schedule(ScheduleName.confidence, 0.7))
    cut = decode(tiny_target, tiny_dspark, tiny_prompts, config).generations
    assert texts(cut) == texts(vanilla)
    assert len({round_.proposed for generation in cut for round_ in generation.rounds}) > 2


def test_a_request_after_a_longer_one_equals_a_fresh_run(
    tiny_target: Target, tiny_dspark: DSpark, tiny_prompts: list[list[int]]
) -> None:
    long, short = max(tiny_prompts, key=len), min(tiny_prompts, key=len)
    config = config_of(batch_size=1, max_new_tokens=24)
    decode(tiny_target, tiny_dspark, [long], config)
    after = decode(tiny_target, tiny_dspark, [long, short], config).generations[1]
    fresh = decode(tiny_target, tiny_dspark, [short], config).generations[0]
    assert texts([after]) == texts([fresh]) and after.rounds == fresh.rounds


def test_greedy_outputs_equal_those_of_transformers(
    tiny_target_config: TargetConfig, tiny_target: Target, tiny_dspark: DSpark, tiny_prompts: list[list[int]]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target_config.path, dtype=torch.float32).eval()
    generations = decode(tiny_target, tiny_dspark, tiny_prompts[:5], config_of(max_new_tokens=30)).generations
    for prompt, generation in zip(tiny_prompts, generations, strict=False):
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=30)
        assert output[0, len(prompt) :].tolist() == generation.tokens


def test_results_are_in_the_order_of_the_prompts_and_reported_when_finished(
    tiny_target: Target, tiny_dspark: DSpark, tiny_prompts: list[list[int]]
) -> None:
    seen: list[Generation] = []
    prompts = tiny_prompts[::-1]
    result = decode(tiny_target, tiny_dspark, prompts, config_of(batch_size=5), on_finish=seen.append)
    assert [generation.request_id for generation in result.generations] == list(range(12))
    assert sorted(seen, key=lambda generation: generation.request_id) == result.generations
    assert result.num_tokens == sum(len(generation.tokens) for generation in seen)
    assert 0 < result.draft_seconds + result.verify_seconds < result.seconds


@pytest.mark.parametrize(
    ("prompts", "changes", "message"),
    [
        ([[1, 2], []], {}, "prompt 1 has no tokens"),
        ([[1] * 512], {}, r"prompt 0 of 512 tokens fills the target's context of 512"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
    ],
)
def test_requests_that_cannot_be_decoded_are_refused(
    tiny_target: Target, prompts: list[list[int]], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        decode(tiny_target, None, prompts, config_of(**changes))


@pytest.mark.parametrize("room", range(1, 2 * K + 4))
def test_the_end_of_the_context_at_every_offset_ends_like_plain_decoding(
    tiny_target: Target, tiny_dspark: DSpark, room: int
) -> None:
    """No token is fed at a position that the target does not have, in a batch with one that is not near the end."""
    target = guarded(of_short_context(stopping_at(tiny_target)))
    prompts = [[1 + index % 50 for index in range(CONTEXT - room)], [3, 4, 5]]
    vanilla = decode(target, None, prompts, config_of()).generations
    assert [len(g.tokens) for g in vanilla] == [min(LENGTH, room), LENGTH]
    assert {g.finish_reason for g in vanilla} == {"length"}
    chains = [prompt + g.tokens for prompt, g in zip(prompts, vanilla, strict=True)]
    for drafter, num_drafts in drafters_of(chains, tiny_dspark):
        found = decode(target, drafter, prompts, config_of(num_draft_tokens=num_drafts)).generations
        assert texts(found) == texts(vanilla)


def test_a_schedule_that_needs_confidences_refuses_a_drafter_without(
    tiny_target: Target, chains: list[list[int]], tiny_prompts: list[list[int]]
) -> None:
    with pytest.raises(ValueError, match="needs a drafter with a confidence head"):
        decode(
            tiny_target,
            Oracle(chains),
            tiny_prompts,
            config_of(schedule=Schedule(ScheduleName.confidence, 0.5)),
        )
