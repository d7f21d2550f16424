"""Tests of models/eagle3.py in training: the unrolled chain against its definition, supervision, and leaks."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from models import attention, eagle3, masks
from models.base import DraftBatch
from models.eagle3 import Eagle3, find_chains
from models.layers import PairLayer
from models.target import Target, TargetConfig
from tests.chains import SlowEagle3, chain_output, gemma_eagle3, lively_eagle3, supervised_chains
from tests.conftest import planted_fault
from tests.draft_batches import mixed_batch
from tests.planted_faults import blind_to_documents
from tests.training_logits import rows_by_total

# Normed states of order 1 and logits of 1e1 after up to 4 steps, in sums of another order.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "qk_norm": {"qk_norm": True, "num_fused_layers": 2},
    "norm_before_residual": {"norm_before_residual": True, "fc_norm": True},
    "norm_output": {"norm_output": True, "norm_before_fc": True, "num_fused_layers": 1},
    "draft_vocabulary": {"draft_vocab_size": 20},
    "own_head": {"own_head": True, "draft_vocab_size": 20, "qk_norm": True, "norm_output": True},
}


@pytest.fixture
def drafter(tiny_target: Target, tiny_target_config: TargetConfig) -> Eagle3:
    return lively_eagle3(tiny_target, tiny_target_config)


# ---- against the definition


def check_against_definition(drafter: Eagle3) -> None:
    """States, losses and denominators of every supervised step, and gradients of all parameters through the chains."""
    batch = mixed_batch(drafter)
    output, denominators = chain_output(drafter, batch), drafter.denominators(batch)
    sum(value / denominators[term] for term, value in output.loss.numerators.items()).backward()  # type: ignore[union-attr]
    grads = {name: parameter.grad for name, parameter in drafter.named_parameters()}
    drafter.zero_grad()
    slow, chains = SlowEagle3(drafter), supervised_chains(batch, drafter.num_draft_tokens)
    assert sorted(output.states) == chains
    sums = {step: torch.zeros(()) for step in range(drafter.num_draft_tokens)}
    for row, start in sorted({chain[:2] for chain in chains}):
        for step, state in enumerate(slow.states(batch, row, start)):
            if (row, start, step) in output.states:
                torch.testing.assert_close(output.states[row, start, step], state, **CLOSE)
                torch.testing.assert_close(output.logits[row, start, step], slow.own_logits(state).detach(), **CLOSE)
                sums[step] = sums[step] + slow.loss(batch, (row, start, step), state)
    counts = {step: sum(chain[2] == step for chain in chains) for step in sums}
    for step, value in sums.items():
        ours = output.loss.numerators[f"step_{step}"]
        torch.testing.assert_close(ours, drafter.config.step_decay**step * value, **CLOSE)
        assert denominators[f"step_{step}"] == counts[step]
    torch.stack([drafter.config.step_decay**s * value / counts[s] for s, value in sums.items()]).sum().backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name
        scale = parameter.grad.abs().max().item()
        difference = (grads[name] - parameter.grad).abs().max().item()
        assert difference < 1e-4 * scale, f"{name}: gradients of up to {scale} differ by {difference}"


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_training_equals_chains_unrolled_one_by_one(
    tiny_target: Target, tiny_target_config: TargetConfig, changes: dict[str, Any]
) -> None:
    check_against_definition(lively_eagle3(tiny_target, tiny_target_config, **changes))


@pytest.mark.parametrize("changes", [{}, {"own_head": True, "draft_vocab_size": 20}])
def test_a_target_with_scaled_embedding_and_capped_logits_is_followed(
    tiny_target: Target, tiny_target_config: TargetConfig, changes: dict[str, Any]
) -> None:
    check_against_definition(gemma_eagle3(tiny_target, tiny_target_config, **changes))


def sees_its_own_pair_twice(position: Tensor, anchor: Tensor, slot: Tensor, window: int | None) -> Tensor:
    return position <= anchor


RIGHT_FINISH = PairLayer.finish


def stops_the_gradient(layer: PairLayer, residual: Tensor, mixed: Tensor) -> Tensor:
    return RIGHT_FINISH(layer, residual.detach(), mixed)


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (masks, "sees_context", sees_its_own_pair_twice),
        (PairLayer, "finish", stops_the_gradient),
        (attention, "context_spans", blind_to_documents),
    ],
    ids=["mask", "detached", "documents"],
)
def test_a_wrong_chain_is_noticed(
    monkeypatch: pytest.MonkeyPatch, drafter: Eagle3, owner: Any, name: str, fault: Any
) -> None:
    with planted_fault(monkeypatch, owner, name, fault):
        check_against_definition(drafter)


# ---- supervision


@pytest.mark.parametrize("num_steps", [1, 4, 9])
def test_chains_equal_a_double_loop(drafter: Eagle3, num_steps: int) -> None:
    batch = mixed_batch(drafter)
    starts, supervised = find_chains(batch, num_steps)
    found = [
        (row, start, step)
        for row, places in enumerate(starts.tolist())
        for place, start in enumerate(places)
        for step in supervised[row, place].nonzero().flatten().tolist()
    ]
    assert found == supervised_chains(batch, num_steps)
    used = [[start for start in row if start >= 0] for row in starts.tolist()]
    assert used == [sorted({chain[1] for chain in found if chain[0] == row}) for row in range(3)]
    assert not supervised[starts < 0].any()


def test_denominators_are_the_supervised_positions_of_each_step(drafter: Eagle3) -> None:
    """Not of the first step, not the batch's size: a late step has fewer, as it runs into the document's end."""
    batch = mixed_batch(drafter)
    chains = supervised_chains(batch, 4)
    counts = [sum(chain[2] == step for chain in chains) for step in range(4)]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[3]
    assert drafter.denominators(batch) == {f"step_{step}": count for step, count in enumerate(counts)}
    assert chain_output(drafter, batch).loss.metrics["accept_rate"][1].tolist() == counts


@pytest.mark.parametrize("draft_vocab_size", [None, 20])
def test_metrics_are_sums_over_each_steps_supervised_positions(
    tiny_target: Target, tiny_target_config: TargetConfig, draft_vocab_size: int | None
) -> None:
    """Out of the whole vocabulary: what the draft cannot say counts as a miss."""
    drafter = lively_eagle3(tiny_target, tiny_target_config, draft_vocab_size=draft_vocab_size)
    batch, slow = mixed_batch(drafter, seed=1), SlowEagle3(drafter)
    output = chain_output(drafter, batch)
    ids = torch.arange(55) if drafter.draft_ids is None else drafter.draft_ids
    accepted, agreed = torch.zeros(4), torch.zeros(4)
    for (row, start, step), logits in output.logits.items():
        target = slow.capped(drafter.head @ batch.last_hidden[batch.last_hidden_ids[row, start + 1 + step]])
        draft = torch.zeros(55).index_copy(0, ids, logits.softmax(0))
        accepted[step] += torch.minimum(draft, target.softmax(0)).sum()
        agreed[step] += ids[logits.argmax()] == target.argmax()
    metrics = output.loss.metrics
    torch.testing.assert_close(metrics["accept_rate"][0].float(), accepted, **CLOSE)
    assert metrics["top1_agreement"][0].tolist() == agreed.tolist() and agreed.any()
    if draft_vocab_size is None:  # no row without a loss
        decays = torch.tensor([drafter.config.step_decay**step for step in range(4)])
        terms = torch.stack(list(output.loss.numerators.values())).detach()
        torch.testing.assert_close(metrics["cross_entropy"][0].float() * decays, terms, **CLOSE)
    for name in ("accept_rate", "top1_agreement", "cross_entropy"):
        assert torch.equal(metrics[name][1], torch.stack(list(drafter.denominators(batch).values())))


def short_batch(drafter: Eagle3, loss_mask: list[int]) -> DraftBatch:
    """One row of six tokens; row i of last_hidden predicts the token at i + 1."""
    batch, length = mixed_batch(drafter), len(loss_mask)
    return DraftBatch(
        input_ids=batch.input_ids[:1, :length],
        position_ids=torch.arange(length)[None],
        document_ids=torch.zeros(1, length, dtype=torch.int64),
        loss_mask=torch.tensor([loss_mask]).bool(),
        features=batch.features[:1, :length],
        last_hidden=batch.last_hidden[:length],
        last_hidden_ids=torch.arange(length)[None],
        anchors=torch.empty(1, 0, dtype=torch.int64),
    )


def check_labels(drafter: Eagle3) -> None:
    """Answer tokens 3, 4 and 5: the first of them is predicted, and no prompt token is."""
    batch = short_batch(drafter, [0, 0, 0, 1, 1, 1])
    with mock.patch.object(eagle3, "vocab_loss", wraps=eagle3.vocab_loss) as spy:
        loss = drafter(batch)
    trained = set()
    for step, (_, teacher) in enumerate(rows for call in spy.call_args_list for rows in rows_by_total(call)):
        # which prediction a row is, told by the target's state that it is compared with
        rows = [(batch.last_hidden == row).all(1).nonzero().item() for row in teacher]
        assert rows == sorted(rows)
        trained |= {(int(row) + 1, step) for row in rows}
    # labels t + 2 + s: token 3 has chains at 1 and 0, token 4 at 2, 1 and 0, token 5 one more
    assert trained == {(label, step) for label in (3, 4, 5) for step in range(label - 1)}
    hidden = spy.call_args.args[0]
    (gradient,) = torch.autograd.grad(torch.stack(list(loss.numerators.values())).sum(), hidden)
    assert gradient.any(-1).all()


def test_exactly_the_answer_tokens_have_a_gradient_at_their_logits(drafter: Eagle3) -> None:
    check_labels(drafter)


def test_a_loss_mask_that_is_not_moved_to_the_label_is_noticed(
    monkeypatch: pytest.MonkeyPatch, drafter: Eagle3
) -> None:
    """The reference asks for the mask two tokens before the label."""

    def unshifted(batch: DraftBatch, num_steps: int) -> tuple[Tensor, Tensor]:
        return find_chains(replace(batch, loss_mask=batch.loss_mask.roll(2, dims=1)), num_steps)

    with planted_fault(monkeypatch, eagle3, "find_chains", unshifted):
        check_labels(drafter)


def test_only_the_targets_states_for_answer_tokens_matter(drafter: Eagle3) -> None:
    batch = short_batch(drafter, [0, 0, 0, 1, 1, 1])
    before = drafter(batch).numerators
    for row in range(6):
        teacher = batch.last_hidden.clone()
        teacher[row] = 1 - teacher[row]
        after = drafter(replace(batch, last_hidden=teacher)).numerators
        moved = any(bool(after[term] != before[term]) for term in before)
        assert moved == (row + 1 in (3, 4, 5)), f"the target's prediction of token {row + 1}"


def test_a_batch_without_supervision_has_no_loss_and_zero_gradients(drafter: Eagle3) -> None:
    batch = mixed_batch(drafter)
    batch.loss_mask = torch.zeros_like(batch.loss_mask)
    loss = drafter(batch)
    total = torch.stack(list(loss.numerators.values())).sum()
    assert total == 0
    assert all(count == 0 for count in drafter.denominators(batch).values())
    total.backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name  # NaN would be "any"


def test_a_supervised_token_without_a_stored_state_is_an_error(drafter: Eagle3) -> None:
    batch = mixed_batch(drafter)
    batch.last_hidden_ids[0, 4] = -1
    with pytest.raises(AssertionError, match="no stored last hidden state"):
        drafter(batch)


def test_the_tokens_fed_are_the_true_ones_whatever_the_draft_says(
    tiny_target: Target, tiny_target_config: TargetConfig
) -> None:
    drafter = lively_eagle3(tiny_target, tiny_target_config, own_head=True)
    assert drafter.lm_head is not None
    batch, outputs = mixed_batch(drafter), []
    for _ in range(2):
        outputs.append(chain_output(drafter, batch))
        torch.nn.init.normal_(drafter.lm_head.weight, generator=torch.Generator().manual_seed(9))
    first, second = outputs
    chains = [chain for chain in first.states if chain[2] < 3]
    drafted = [{c: int(output.logits[c].argmax()) for c in chains} for output in outputs]
    assert any(drafted[0][c] != drafted[1][c] for c in chains)  # the heads do draft other tokens
    assert any(drafted[0][row, t, s] != batch.input_ids[row, t + 2 + s] for row, t, s in chains)  # than the true ones
    assert all(torch.equal(first.states[chain], second.states[chain]) for chain in first.states)


# ---- leaks


@torch.no_grad()
def states_of(drafter: Eagle3, batch: DraftBatch) -> dict[Any, Tensor]:
    return chain_output(drafter, batch).states


def check_no_leak_of_features(drafter: Eagle3) -> None:
    """Exactly equal, not close: what is masked must not enter any sum with a weight but zero."""
    batch = mixed_batch(drafter)
    before = states_of(drafter, batch)
    for row, position in [(row, position) for row in range(3) for position in range(24)]:
        features = batch.features.clone()
        features[row, position] = -7.0 * features[row, position] + 3.0
        after = states_of(drafter, replace(batch, features=features))
        for chain, state in before.items():
            same_document = batch.document_ids[chain[0], chain[1]] == batch.document_ids[row, position]
            sees = chain[0] == row and position <= chain[1] and bool(same_document)
            assert torch.equal(state, after[chain]) != sees, f"features at {row, position} and chain {chain}"


def check_no_leak_of_tokens(drafter: Eagle3) -> None:
    """Step s of the chain at t knows tokens up to t + 1 + s; a document's first token is in no pair."""
    batch = mixed_batch(drafter)
    before = states_of(drafter, batch)
    for row, position in [(row, position) for row in range(3) for position in range(24)]:
        tokens = batch.input_ids.clone()
        tokens[row, position] = (tokens[row, position] + 1) % drafter.spec.vocab_size
        after = states_of(drafter, replace(batch, input_ids=tokens))
        for chain, state in before.items():
            document = batch.document_ids[row].tolist()
            sees = chain[0] == row and position <= chain[1] + 1 + chain[2]
            sees = sees and document[position] == document[chain[1]] and position > document.index(document[position])
            assert torch.equal(state, after[chain]) != sees, f"token at {row, position} and chain {chain}"


def test_a_chain_sees_its_documents_features_up_to_its_start(drafter: Eagle3) -> None:
    check_no_leak_of_features(drafter)


def test_a_step_sees_its_documents_tokens_up_to_the_one_it_consumes(drafter: Eagle3) -> None:
    check_no_leak_of_tokens(drafter)


@pytest.mark.parametrize("check", [check_no_leak_of_features, check_no_leak_of_tokens])
def test_a_leaking_mask_is_noticed(monkeypatch: pytest.MonkeyPatch, drafter: Eagle3, check: Any) -> None:
    def one_too_many(position: Tensor, anchor: Tensor, slot: Tensor, window: int | None) -> Tensor:
        return position <= anchor + 1

    with planted_fault(monkeypatch, masks, "sees_context", one_too_many):
        check(drafter)


def test_unused_chains_and_padding_contribute_nothing(drafter: Eagle3) -> None:
    """A row by itself, with shorter padding, has the sums that it adds to a batch."""
    batch = mixed_batch(drafter)
    together = drafter(batch).numerators
    alone = []
    for row, length in enumerate([24, 20, 17]):
        part = {name: value[row : row + 1, :length] for name, value in batch.tensors().items() if name != "last_hidden"}
        alone.append(drafter(DraftBatch(**part, last_hidden=batch.last_hidden)).numerators)
    for term, value in together.items():
        torch.testing.assert_close(value, torch.stack([parts[term] for parts in alone]).sum(), rtol=1e-5, atol=1e-5)
