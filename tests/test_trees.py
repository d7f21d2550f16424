"""Draft trees: how they grow, how the target reads them, and that verifying one draws from the target alone."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import models.target as target_module
from eval.decode import DecodeConfig, decode
from eval.schedule import Schedule, ScheduleName
from eval.verify import Rule, verify
from models.base import Proposal
from models.eagle3 import Eagle3, Unrolled
from models.ngram import NgramDrafter
from models.sampling import Purpose
from models.target import Target, TargetConfig
from models.trees import TreePolicy, ancestors, depths, grow_tree
from tests.chains import lively_eagle3
from tests.conftest import planted_fault
from tests.draft_batches import mixed_batch
from tests.test_decode import CONTEXT, GREEDY, SAMPLED, config_of, of_short_context, stopping_at, texts
from tests.test_verify import EXACT
from tests.tiny_families import FAMILIES, build

POLICY = TreePolicy(top_k=3, depth=4, num_nodes=12)


@st.composite
def forests(draw: st.DrawFn) -> list[list[int]]:
    num_nodes = draw(st.integers(1, 9))
    row = st.tuples(*(st.integers(-1, node - 1) for node in range(num_nodes))).map(list)
    return draw(st.lists(row, min_size=1, max_size=3))


def path_to(parents: list[int], node: int) -> list[int]:
    """Nodes from the root's child down to `node`."""
    path = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


@given(forests())
def test_ancestors_are_those_of_a_walk_to_the_root(rows: list[list[int]]) -> None:
    found, depth = ancestors(torch.tensor(rows)), depths(torch.tensor(rows))
    for row, parents in enumerate(rows):
        for node in range(len(parents)):
            assert found[row, node].nonzero().flatten().tolist() == sorted(path_to(parents, node))
            assert depth[row, node] == len(path_to(parents, node))


# ---- growth


TABLE = torch.randn(7, 7, generator=torch.Generator().manual_seed(4))


def best_tree(start: int, policy: TreePolicy) -> set[tuple[int, ...]]:
    """The policy over a bigram language, path by path."""
    log_probs = TABLE.log_softmax(-1)
    level, candidates = {(): 0.0}, {}
    for _ in range(policy.depth):
        children = {}
        for path, score in level.items():
            newest = path[-1] if path else start
            for token in log_probs[newest].topk(policy.top_k).indices.tolist():
                children[(*path, token)] = score + float(log_probs[newest, token])
        candidates |= children
        level = dict(sorted(children.items(), key=lambda item: -item[1])[: policy.top_k])
    return set(sorted(candidates, key=lambda path: -candidates[path])[: policy.num_nodes])


def paths_of(proposal: Proposal, row: int) -> list[tuple[int, ...]]:
    assert proposal.parents is not None
    tokens, parents = proposal.tokens[row].tolist(), proposal.parents[row].tolist()
    return [tuple(tokens[node] for node in path_to(parents, index)) for index in range(len(tokens))]


@pytest.mark.parametrize("policy", [POLICY, TreePolicy(1, 3, 3), TreePolicy(4, 2, 9), TreePolicy(3, 3, 21)])
def test_a_tree_holds_the_likeliest_nodes_of_the_policy(policy: TreePolicy) -> None:
    last = torch.arange(7)

    def logits_behind(tokens: Tensor, behind: Tensor | None) -> Tensor:
        return TABLE[tokens]

    proposal = grow_tree(policy, last, logits_behind, None)
    for row in range(7):
        paths = paths_of(proposal, row)
        assert len(set(paths)) == len(paths) == policy.num_nodes
        assert set(paths) == best_tree(row, policy)
        assert all(path[:-1] in [(), *paths[:place]] for place, path in enumerate(paths)), "parents first"


@pytest.mark.parametrize(
    "options", [{}, {"norm_output": True}, {"own_head": True}, {"draft_vocab_size": 30, "own_head": True}]
)
def test_a_node_of_a_tree_is_as_likely_as_at_the_end_of_its_own_chain(
    tiny_target: Target, tiny_target_config: TargetConfig, options: dict[str, Any]
) -> None:
    drafter = lively_eagle3(tiny_target, tiny_target_config, **options)
    batch = mixed_batch(drafter)
    counts, last = torch.tensor([20, 9, 15]), torch.tensor([7, 8, 9])
    state = drafter.start(batch.input_ids, batch.features, counts, 64)
    unrolled, seen = Unrolled(drafter, state), []

    def logits_behind(tokens: Tensor, behind: Tensor | None) -> Tensor:
        seen.append((tokens, behind, unrolled.logits(tokens, behind)))
        return seen[-1][2]

    with torch.no_grad():
        grow_tree(POLICY, last, logits_behind, None if drafter.draft_ids is None else drafter.draft_ids)
        for row in range(3):
            paths: list[list[int]] = [[]]
            for tokens, behind, logits in seen:
                order = range(1) if behind is None else behind[row].tolist()
                paths = [[*paths[place], token] for place, token in zip(order, tokens[row].tolist(), strict=True)]
                for place, path in enumerate(paths):
                    alone = Unrolled(drafter, state)
                    for token in path:
                        expected = alone.logits(torch.full((3, 1), token))
                    torch.testing.assert_close(logits[row, place], expected[row, 0], rtol=1e-4, atol=1e-5)


# ---- the target's reading


@torch.inference_mode()
def check_reading(target: Target) -> None:
    """Every node's state is that of its path as plain text, in rows of unequal length."""
    generator = torch.Generator().manual_seed(1)
    parents = torch.tensor([[-1, -1, 0, 0, 2, 1, 5], [-1, 0, 1, 2, 3, 4, 5]])
    prompts = [torch.randint(50, (n,), generator=generator).tolist() for n in (9, 14)]
    width = max(len(prompt) for prompt in prompts)
    cache = target.new_cache(2, 40)
    target.forward(torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts]), cache)
    cache.advance(torch.tensor([9, 14]))
    fed = torch.randint(50, (2, 8), generator=generator)
    found = target.forward(fed, cache, parents=parents)
    for row in range(2):
        for node in range(-1, 7):
            path = [fed[row, 0].item(), *(fed[row, 1 + n].item() for n in path_to(parents[row].tolist(), node))]
            alone = target.forward_whole(torch.tensor([prompts[row] + path]))
            torch.testing.assert_close(found.hidden[row, node + 1], alone.hidden[0, -1], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(found.features[row, node + 1], alone.features[0, -1], rtol=1e-4, atol=1e-5)
    # and a path that is kept is read as text from then on
    paths, counts = torch.tensor([[0, 1, 3, 5], [0, 1, 2, 0]]), torch.tensor([4, 3])
    cache.keep_path(paths, counts)
    after = target.forward(torch.tensor([[3, 4], [5, 6]]), cache)
    for row, nodes in enumerate(([0, 1, 3, 5], [0, 1, 2])):
        text = prompts[row] + [fed[row, node].item() for node in nodes] + [[3, 4], [5, 6]][row]
        alone = target.forward_whole(torch.tensor([text]))
        torch.testing.assert_close(after.hidden[row], alone.hidden[0, -2:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_is_read_path_by_path(family: str) -> None:
    check_reading(build(family))


def test_a_node_that_sees_its_sibling_is_noticed(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def causal(parents: Tensor) -> Tensor:
        return torch.ones(*parents.shape, parents.shape[1], dtype=torch.bool).tril()

    with planted_fault(monkeypatch, target_module, "ancestors", causal):
        check_reading(tiny_target)


# ---- verification


@dataclass
class Given:
    """A sampler whose draws are given."""

    samples: Tensor  # [B, N+1]

    def draw(self, probs: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
        assert purpose is Purpose.target and probs.shape[:2] == positions.shape == self.samples.shape
        return self.samples


TREES = {
    "siblings": ([(0,), (1,)], 3),
    "chain": ([(2,), (2, 0), (2, 0, 1)], 3),
    "bushy": ([(0,), (2,), (0, 1), (0, 2), (2, 0), (0, 1, 1)], 3),
    "everything": ([(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)], 2),
}


def emitted(nodes: list[tuple[int, ...]], vocab_size: int, length: int) -> tuple[dict, Callable[..., float]]:
    """Distribution over `length` tokens that `verify` implements for a tree, every draw enumerated; rest by target."""
    generator, table = torch.Generator().manual_seed(len(nodes)), {}
    for size in range(length):
        for prefix in itertools.product(range(vocab_size), repeat=size):
            values = torch.rand(vocab_size, generator=generator, dtype=torch.float64) ** 2
            values[sum(prefix) % vocab_size] *= len(prefix) % 2  # some tokens are excluded
            table[prefix] = values / values.sum()

    def chance(tokens: tuple[int, ...], start: int = 0) -> float:
        product = 1.0
        for place in range(start, len(tokens)):
            product *= float(table[tokens[:place]][tokens[place]])
        return product

    samples = list(itertools.product(range(vocab_size), repeat=len(nodes) + 1))
    parents = torch.tensor([nodes.index(node[:-1]) if len(node) > 1 else -1 for node in nodes])
    tokens = torch.tensor([node[-1] for node in nodes]).expand(len(samples), -1)
    proposal = Proposal(
        tokens, torch.ones(*tokens.shape, 1), torch.full((len(samples),), len(nodes)), tokens[..., None]
    )
    proposal.parents = parents.expand(len(samples), -1)
    contexts = [(), *nodes]
    probs = torch.stack([table[context] for context in contexts]).expand(len(samples), -1, -1)
    verdict = verify(
        Rule.ratio, proposal, probs, torch.zeros(len(samples), dtype=torch.int64), Given(torch.tensor(samples))
    )  # type: ignore[arg-type]
    found = dict.fromkeys(itertools.product(range(vocab_size), repeat=length), 0.0)
    assert verdict.path is not None
    for row, drawn in enumerate(samples):
        weight = 1.0
        for context, token in zip(contexts, drawn, strict=True):
            weight *= float(table[context][token])
        count = int(verdict.num_accepted[row])
        path = verdict.path[row, :count].tolist()
        start = (*(int(tokens[row, node]) for node in path), int(verdict.next_token[row]))
        if weight:
            for rest in itertools.product(range(vocab_size), repeat=length - len(start)):
                found[start + rest] += weight * chance(start + rest, len(start))
    return found, chance


@pytest.mark.parametrize("name", TREES)
def test_a_verified_tree_emits_exactly_the_target_distribution(name: str) -> None:
    nodes, vocab_size = TREES[name]
    found, chance = emitted(nodes, vocab_size, 1 + max(len(node) for node in nodes))
    for tokens, mass in found.items():
        assert mass == pytest.approx(chance(tokens), abs=EXACT)


def test_nodes_beyond_the_length_are_not_accepted() -> None:
    tokens, parents = torch.tensor([[1, 2, 3]] * 4), torch.tensor([[-1, 0, 1]] * 4)
    probs = torch.full((4, 4, 5), 0.2)
    proposal = Proposal(tokens, torch.ones(4, 3, 1), torch.arange(4), tokens[..., None], parents=parents)
    sampler = Given(torch.tensor([[1, 2, 3, 4]] * 4))
    verdict = verify(Rule.match, proposal, probs, torch.zeros(4, dtype=torch.int64), sampler)  # type: ignore[arg-type]
    assert verdict.num_accepted.tolist() == [0, 1, 2, 3]
    assert verdict.next_token.tolist() == [1, 2, 3, 4]


# ---- the whole loop


@pytest.fixture(scope="module")
def eagle3(tiny_target: Target, tiny_target_config: TargetConfig) -> Eagle3:
    return lively_eagle3(tiny_target, tiny_target_config)


def tree_config(policy: TreePolicy = POLICY, **changes: Any) -> DecodeConfig:
    return config_of(num_draft_tokens=policy.depth, tree=policy, **changes)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("policy", [POLICY, TreePolicy(2, 2, 3), TreePolicy(8, 3, 30)], ids=str)
def test_a_tree_gives_the_vanilla_sample(
    tiny_target: Target, eagle3: Eagle3, tiny_prompts: list[list[int]], policy: TreePolicy, sampling: Any
) -> None:
    """The noise of a position decides, whatever stood in the tree; in batches of 3 and 12."""
    vanilla = decode(tiny_target, None, tiny_prompts, config_of(sampling=sampling, max_new_tokens=20)).generations
    for batch_size in (3, 12):
        config = tree_config(policy, sampling=sampling, max_new_tokens=20, batch_size=batch_size)
        found = decode(tiny_target, eagle3, tiny_prompts, config).generations
        assert texts(found) == texts(vanilla)
    accepted = [r.accepted for g in found for r in g.rounds]
    assert max(accepted) >= min(2, policy.top_k - 1) and {r.proposed for g in found for r in g.rounds} <= {
        *range(1, policy.depth + 1)
    }


@pytest.mark.parametrize("limit", range(1, 12))
def test_limits_and_stops_inside_a_tree_end_like_plain_decoding(
    tiny_target: Target, eagle3: Eagle3, tiny_prompts: list[list[int]], limit: int
) -> None:
    free = stopping_at(tiny_target)
    plain = decode(free, None, tiny_prompts, config_of(max_new_tokens=12)).generations
    for target in (free, stopping_at(tiny_target, plain[0].tokens[limit])):
        vanilla = decode(target, None, tiny_prompts, config_of(max_new_tokens=limit + 1)).generations
        found = decode(target, eagle3, tiny_prompts, tree_config(max_new_tokens=limit + 1)).generations
        assert texts(found) == texts(vanilla)


@pytest.mark.parametrize("room", range(1, 8))
def test_a_tree_at_the_end_of_the_context(tiny_target: Target, eagle3: Eagle3, room: int) -> None:
    target = of_short_context(stopping_at(tiny_target))
    prompts = [[1 + index % 50 for index in range(CONTEXT - room)], [3, 4, 5]]
    vanilla = decode(target, None, prompts, config_of()).generations
    assert texts(decode(target, eagle3, prompts, tree_config()).generations) == texts(vanilla)


def test_a_tree_is_refused_where_it_cannot_be(
    tiny_target: Target, eagle3: Eagle3, tiny_prompts: list[list[int]]
) -> None:
    with pytest.raises(ValueError, match="a draft tree is verified whole: use schedule=fixed, got confidence"):
        tree_config(schedule=Schedule(ScheduleName.confidence, 0.5))
    with pytest.raises(ValueError, match=r"needs a drafter that grows one .* got NgramDrafter"):
        decode(tiny_target, NgramDrafter(4), tiny_prompts, tree_config())
    for changes, message in (
        ({"top_k": 0}, r"tree\.top_k must be at least 1, got 0"),
        ({"num_nodes": 3}, r"tree\.num_nodes=3 cannot reach tree\.depth=4"),
        ({"num_nodes": 31}, r"tree\.num_nodes=31 is more than the 30 that top_k=3 and depth=4 can grow"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(POLICY, **changes)
