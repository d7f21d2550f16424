"""Wrong versions of product functions, as public reports describe them; test_known_faults.py plants them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import data.chat as chat_module
import eval.verify as verify_module
import models.attention as attention_module
import models.eagle3 as eagle3_module
import models.layers as layers_module
import models.masks as masks_module
import models.target as target_module
import models.vocab_loss as losses_module
import train.optim as optim_module
import train.resume as resume_module
import train.setup as training_setup
from eval.schedule import allocate, best_capacity
from models.base import DraftBatch, Drafter
from models.block import BlockDrafter, SupervisedSlots
from models.cache import KVCache
from models.dspark import DSpark
from models.eagle3 import Eagle3
from models.layers import PairLayer
from models.sampling import Sampler
from models.target import Target, TargetOutput


def runs_to_the_end(loss_mask: list[bool], *rest: Any, right: Any = chat_module._supervise) -> None:
    right(loss_mask, *rest)
    first = loss_mask.index(True)
    loss_mask[first:] = [True] * (len(loss_mask) - first)


def supervises_all(loss_mask: list[bool], *_rest: Any) -> None:
    loss_mask[:] = [True] * len(loss_mask)


def unguarded(run: Any, batches: list[DraftBatch]) -> dict[str, Tensor]:
    local = [run.drafter.denominators(batch) for batch in batches]
    return {term: sum(part[term] for part in local) for term in local[0]}


def per_micro_batch(run: Any, batches: list[DraftBatch]) -> dict[str, Tensor]:
    return {term: (v * len(batches)).float() for term, v in run.drafter.denominators(batches[0]).items()}


def mask_at_the_input(
    batch: DraftBatch, num_steps: int, right: Any = eagle3_module.find_chains
) -> tuple[Tensor, Tensor]:
    return right(replace(batch, loss_mask=batch.loss_mask.roll(2, dims=1)), num_steps)


def shifted_twice(
    drafter: BlockDrafter, batch: DraftBatch, right: Any = BlockDrafter.supervised_slots
) -> SupervisedSlots:
    slots = right(drafter, batch)
    return replace(slots, labels=(slots.labels + 1) % drafter.spec.vocab_size)


def teacher_one_late(
    drafter: BlockDrafter, batch: DraftBatch, right: Any = BlockDrafter.supervised_slots
) -> SupervisedSlots:
    """Labels of a drafter that predicts the next token, for one that fills its own slot."""
    slots = right(drafter, batch)
    return replace(slots, teacher_rows=(slots.teacher_rows + 1) % len(batch.last_hidden))


def sees_one_more(position: Tensor, anchor: Tensor, slot: Tensor, window: int | None) -> Tensor:
    return position <= anchor


def causal_in_decoding(
    queries: Tensor, block: Any, context: Any, mask: Tensor, right: Any = attention_module.attend_blocks
) -> Tensor:
    """Decoding has one block a row, training many."""
    if queries.shape[1] > 1:
        return right(queries, block, context, mask)
    slots = [
        right(queries[:, :, [j]], tuple(x[:, :, : j + 1] for x in block), context, mask)
        for j in range(queries.shape[2])
    ]
    return torch.cat(slots, dim=2)


def blind_to_documents(
    anchors: Tensor, document_ids: Tensor, right: Any = masks_module.context_spans, **options: Any
) -> list[masks_module.Span]:
    return right(anchors, torch.zeros_like(document_ids), **options)


def without_norm(target: Target, input_ids: Tensor, right: Any = Target.forward_whole) -> TargetOutput:
    last = len(target.layers) - 1
    with target_module._capture(target.layers, (last,)) as captured:
        output = right(target, input_ids)
    return replace(output, hidden=captured[last])


@contextmanager
def layer_inputs(layers: nn.ModuleList, layer_ids: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
    captured: dict[int, Tensor] = {}
    hooks = [
        layers[i].register_forward_pre_hook(lambda _module, inputs, i=i: captured.__setitem__(i, inputs[0]))
        for i in layer_ids
    ]
    yield captured
    for hook in hooks:
        hook.remove()


def stretched(rotary: Any, position_ids: Tensor, right: Any = layers_module.Rotary.__call__) -> tuple[Tensor, Tensor]:
    cos, sin = right(rotary, position_ids)
    return cos, 1.2 * sin


def one_early(
    drafter: BlockDrafter, first: Tensor, positions: Tensor, *rest: Any, right: Any = BlockDrafter._run_blocks
) -> Tensor:
    return right(drafter, first, positions - 1, *rest)


def skips_slot_0(*arguments: Any, right: Any = BlockDrafter.slot_metrics) -> dict[str, tuple[Tensor, Tensor]]:
    metrics = right(*arguments)
    hits, counts = metrics["top1_agreement"]
    return metrics | {"top1_agreement": (hits * (torch.arange(len(hits)) > 0), counts)}


def feeds_its_own_tokens(
    drafter: Eagle3, tokens: Tensor, hidden: Tensor, *rest: Any, right: Any = Eagle3.step
) -> Tensor:
    chain = rest[1]
    if chain:  # a later step: what the draft itself would say from the state before it
        own = drafter.draft_head()
        tokens = (drafter.norm(hidden) @ (drafter.head if own is None else own.weight).T).argmax(-1)
    return right(drafter, tokens, hidden, *rest)


def counts_rows_out_of_reach(logits: Tensor, target: Any, *rest: Any, right: Any = losses_module._compare) -> Any:
    return right(logits, replace(target, inside=torch.ones_like(target.inside)), *rest)


def loads_what_fits(drafter: Drafter, tensors: dict[str, Tensor], path: Path) -> None:
    own = drafter.state_dict()
    drafter.load_state_dict({n: t for n, t in tensors.items() if n in own and own[n].shape == t.shape}, strict=False)


def normed_residual(
    layer: PairLayer, embedded: Tensor, hidden: Tensor, right: Any = PairLayer.pair
) -> tuple[Tensor, Tensor]:
    pair, _ = right(layer, embedded, hidden)
    return pair, layer.hidden_norm(hidden)


CACHED: dict[str, Tensor] = {}


def cached_vocabulary(
    counts: Tensor, size: int, stops: Any, right: Any = training_setup.choose_draft_vocabulary
) -> Tensor:
    """Kept under a name that knows neither size nor data."""
    return CACHED.setdefault("vocabulary", right(counts, size, stops))


def restarts_the_schedule(*arguments: Any, right: Any = resume_module.read_progress, **options: Any) -> Any:
    """From the step that a run is resumed at, as if it were the first."""
    found = right(*arguments, **options)
    progress = found.progress
    schedule = replace(progress.schedule, first_step=progress.step)
    return replace(found, progress=replace(progress, schedule=schedule))


def stays_at_zero(step: int, schedule: Any, config: Any, right: Any = optim_module.learning_rate) -> float:
    """What a cosine that has come to its end gives to the steps after it."""
    return 0.0 if schedule.first_step else right(step, schedule, config)


def neighbours_rows(target: Target, input_ids: Tensor, right: Any = Target.forward_whole) -> TargetOutput:
    output = right(target, input_ids)
    return replace(output, features=output.features.roll(1, dims=0))


# ---- sampling, verification, state


def drawn_by_a_rounded_sum(drafter: Any, probs: Tensor) -> Tensor:
    """A running sum in bfloat16, while float32 probabilities are reported."""
    sums, total = [], torch.zeros_like(probs[:, 0], dtype=torch.bfloat16)
    for column in probs.bfloat16().unbind(1):
        sums.append(total := total + column)
    return torch.stack(sums, dim=1).float().diff(dim=1, prepend=torch.zeros_like(probs[:, :1]))


def drawn_greedily(drafter: Any, probs: Tensor) -> Tensor:
    return torch.zeros_like(probs).scatter_(1, probs.argmax(1, keepdim=True), 1.0)


def forgets_what_was_drafted(
    sampler: Sampler, logits: Tensor, drafted: Any = None, right: Any = Sampler.probs, **options: Any
) -> Tensor:
    past = None if drafted is None else drafted[:, :0]
    return right(sampler, logits, past, columns=options.get("columns"))


def takes_a_sibling(proposal: Any, parents: Tensor, *rest: Any, right: Any = verify_module._verify_tree) -> Any:
    """Where the target drew none of the root's children, it takes the first one all the same."""
    verdict = right(proposal, parents, *rest)
    refused = verdict.num_accepted == 0
    path = verdict.path.masked_fill(refused[:, None], 0)
    return replace(verdict, num_accepted=verdict.num_accepted.clamp(min=1), path=path)


def commits_the_whole_step(cache: KVCache, counts: Tensor) -> None:
    cache.lengths = cache.lengths + torch.full_like(counts, cache._slots.shape[1])


def looks_at_the_last_token_only(ends: Any, tokens: list[int], new: list[int]) -> int | None:
    return len(new) - 1 if new[-1] in ends.token_ids else None


def leaves_the_bonus_out(rounds: Any) -> float:
    return sum(r.accepted for r in rounds) / len(rounds)


def never_writes_the_last_draft(drafter: Any, state: Any, tokens: Tensor, features: Tensor, counts: Tensor) -> None:
    state.cache.lengths, state.written = state.cache.lengths + counts, 0


def takes_over_without_keys(cache: KVCache, rows: Tensor, other: KVCache) -> None:
    cache.lengths = cache.lengths.index_copy(0, rows, other.lengths)


def costs_nothing_more(table: Any, num_requests: int, num_tokens: float) -> float:
    return table.verify[0][0]


def proposes_nothing(drafter: Any, state: Any, last: Tensor, *rest: Any, right: Any = DSpark.propose) -> Any:
    proposal = right(drafter, state, last, *rest)
    proposal.lengths = torch.zeros_like(proposal.lengths)
    return proposal


def looks_back_from_the_whole_curve(survival: list[list[float]], speed: Callable[[int], float]) -> list[int]:
    return allocate(survival, best_capacity(survival, lambda n: 1 / speed(n))[0] - len(survival))
