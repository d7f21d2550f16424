"""Training steps at a vocabulary of 151,936 against dense logits and against bare matrix products: `make bench`.

More rows are of extraction (tests/bench_extract.py), decoding (tests/bench_decoding.py) and packing
(tests/bench_packing.py).

dense: the same drafter and batch, but one plain autograd pass over the logits of every slot (EAGLE-3: every position),
as the reference computes them, without metrics. floor: only the products that no way around exists for, forward and
backward, of the supervised rows (target's head for draft and teacher, Markov head).

Seconds are the fastest of several rounds in which the three take turns, float32, two threads. Memory is the peak
resident set of a step above what weights and gradients hold. Writes outputs/bench.json.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from models.attention import cache_mixer
from models.base import DraftBatch, Drafter
from models.dspark import DSpark
from models.eagle3 import Eagle3, Eagle3Config
from models.layer_styles import LayerStyle
from models.losses import LossWeights
from models.vocab_loss import vocab_loss
from tests import bench_decoding, bench_extract, bench_packing
from tests.bench_setting import HIDDEN_SIZE, LAYER_IDS, SPEC, VOCAB_SIZE, dspark_config, fastest

NUM_TOKENS, NUM_DRAFTS, ROUNDS = 512, 7, 5


def dspark(num_anchors: int = 64, num_rows: int = 1) -> tuple[DSpark, DraftBatch]:
    drafter = dspark_config(256).build(SPEC, target_layer_ids=LAYER_IDS, mask_token_id=1)
    return drafter, batch_of(drafter, num_supervised=384, num_anchors=num_anchors, num_rows=num_rows)


def eagle(num_rows: int = 1) -> tuple[Eagle3, DraftBatch]:
    config = Eagle3Config(
        num_draft_tokens=NUM_DRAFTS,
        num_fused_layers=None,
        step_decay=0.8,
        loss=LossWeights(soft_cross_entropy=1.0),
        layer_style=LayerStyle.qwen3,
        qk_norm=True,
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
        draft_vocab_size=None,
        own_head=False,
        sampled_vocabulary=None,
    )
    drafter = config.build(SPEC, target_layer_ids=LAYER_IDS, mask_token_id=None)
    return drafter, batch_of(drafter, num_supervised=NUM_TOKENS // 2, num_anchors=1, num_rows=num_rows)


def batch_of(drafter: Drafter, *, num_supervised: int, num_anchors: int, num_rows: int) -> DraftBatch:
    """Rows of 512 random tokens, the last `num_supervised` of them an answer."""
    torch.manual_seed(0)
    head = 0.05 * torch.randn(VOCAB_SIZE, HIDDEN_SIZE)
    drafter.bind(head, head)
    first, shape = NUM_TOKENS - num_supervised, (num_rows, NUM_TOKENS)
    anchors = first + torch.randperm(num_supervised - 1)[:num_anchors].sort().values
    ids = torch.full(shape, -1)
    ids[:, first - 1 : -1] = torch.arange(num_rows * num_supervised).view(num_rows, -1)
    return DraftBatch(
        input_ids=torch.randint(VOCAB_SIZE, shape),
        position_ids=torch.arange(NUM_TOKENS).expand(shape),
        document_ids=torch.zeros(shape, dtype=torch.int64),
        loss_mask=(torch.arange(NUM_TOKENS) >= first).expand(shape),
        features=torch.randn(*shape, len(LAYER_IDS) * HIDDEN_SIZE),
        last_hidden=20 * torch.randn(num_rows * num_supervised, HIDDEN_SIZE),
        last_hidden_ids=ids,
        anchors=anchors.expand(num_rows, -1),
    )


def step(drafter: Drafter, batch: DraftBatch) -> None:
    """Forward and backward as the trainer does; gradients are added to those that are there."""
    denominators, loss = drafter.denominators(batch), drafter(batch)
    torch.stack([value / denominators[term] for term, value in loss.numerators.items()]).sum().backward()


def dense_dspark(drafter: DSpark, batch: DraftBatch) -> None:
    """Logits of all slots at once, supervised or not; what is not counts with weight zero."""
    states, slots = drafter.block_states(batch), drafter.supervised_slots(batch)
    assert drafter.markov_head is not None and drafter.confidence_head is not None
    label_ids = (batch.anchors[..., None] + 1 + torch.arange(NUM_DRAFTS)).clamp(max=NUM_TOKENS - 1)
    flat = label_ids.flatten(1)
    labels = batch.input_ids.gather(1, flat).view(label_ids.shape)
    embedded = drafter.markov_head.markov_w1(batch.input_ids.gather(1, flat - 1).view(label_ids.shape))
    teacher = batch.last_hidden[batch.last_hidden_ids.gather(1, flat - 1).view(label_ids.shape)]
    weights = torch.zeros(slots.mask.shape).masked_scatter(slots.mask, slots.weights)
    logits = states @ drafter.head.T + drafter.markov_head.markov_w2(embedded)
    with torch.no_grad():
        target = torch.softmax(teacher @ drafter.head.T, dim=-1)
    hard = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none").view(labels.shape)
    distance = (torch.softmax(logits, dim=-1) - target).abs().sum(-1)
    confidence = drafter.confidence_head(states, embedded)
    bce = F.binary_cross_entropy_with_logits(confidence, (1 - distance.detach() / 2), reduction="none")
    ((weights * (0.1 * hard + 0.9 * distance + bce)).sum() / weights.sum()).backward()


def dense_eagle(drafter: Eagle3, batch: DraftBatch) -> None:
    """The chain of every position; the target's distribution once, shared by the steps."""
    fused = drafter.fuse(batch.features)
    tokens = F.pad(batch.input_ids[:, 1:], (0, NUM_DRAFTS))
    context = drafter.pair_context(tokens[:, :NUM_TOKENS], fused, batch.position_ids)
    hidden, chain = fused, []
    mix = cache_mixer((torch.arange(NUM_TOKENS) < batch.position_ids[..., None])[:, :, None])
    with torch.no_grad():
        teacher = batch.last_hidden[batch.last_hidden_ids.clamp(min=0)]
        target = F.pad(torch.softmax(teacher @ drafter.head.T, dim=-1), (0, 0, 0, NUM_DRAFTS))
    supervised = F.pad(batch.loss_mask[:, 1:], (0, NUM_DRAFTS + 1)).float()
    total = torch.zeros(())
    for s in range(NUM_DRAFTS):
        hidden = drafter.step(tokens[:, s : s + NUM_TOKENS], hidden, batch.position_ids + s, chain, context, mix)
        logs = F.log_softmax(drafter.norm(hidden) @ drafter.head.T, dim=-1)
        rows = -(target[:, s + 1 : s + 1 + NUM_TOKENS] * logs).sum(-1)
        weights = supervised[:, s + 1 : s + 1 + NUM_TOKENS]
        total = total + 0.8**s * (weights * rows).sum() / weights.sum()
    total.backward()


def floor_dspark(drafter: DSpark, batch: DraftBatch) -> Callable[[], None]:
    assert drafter.markov_head is not None
    num_rows, w2 = int(drafter.supervised_slots(batch).mask.sum()), drafter.markov_head.markov_w2.weight.detach()
    x, latent, gradient = (
        torch.randn(num_rows, HIDDEN_SIZE),
        torch.randn(num_rows, 256),
        torch.randn(num_rows, VOCAB_SIZE),
    )

    def products() -> None:
        for forward, weight in ((x, drafter.head), (x, drafter.head), (latent, w2)):
            torch.mm(forward, weight.T, out=out)
        torch.mm(gradient, drafter.head), torch.mm(gradient, w2), torch.mm(gradient.T, latent)

    out = torch.empty(num_rows, VOCAB_SIZE)
    return products


def floor_eagle(drafter: Eagle3, batch: DraftBatch) -> Callable[[], None]:
    counts = [int(count) for count in drafter.denominators(batch).values()]
    x = [torch.randn(count, HIDDEN_SIZE) for count in counts]
    gradient, out = torch.randn(max(counts), VOCAB_SIZE), torch.empty(max(counts), VOCAB_SIZE)

    def products() -> None:
        torch.mm(x[0], drafter.head.T, out=out[: counts[0]])  # the teacher, shared by the steps
        for rows in x:
            torch.mm(rows, drafter.head.T, out=out[: len(rows)])
            torch.mm(gradient[: len(rows)], drafter.head)

    return products


def peak_mb(work: Callable[[], Any]) -> float:
    """Peak resident memory of `work` above what is held before it (weights and gradients, from an earlier run)."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status_mb("VmRSS")
    work()
    return status_mb("VmHWM") - before


def status_mb(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) / 1024


def measure(
    name: str, made: tuple[Any, DraftBatch], dense: Callable[..., None], floor: Callable[..., Any]
) -> dict[str, Any]:
    drafter, batch = made
    works = {
        "ours": lambda: step(drafter, batch),
        "dense": lambda: dense(drafter, batch),
        "floor": floor(drafter, batch),
    }
    seconds = fastest(works, ROUNDS)
    return {
        "name": name,
        **{f"{key}_s": value for key, value in seconds.items()},
        **{f"{key}_peak_mb": peak_mb(works[key]) for key in ("ours", "dense")},
    }


def more_rows(name: str, made: tuple[Any, DraftBatch]) -> dict[str, Any]:
    """Memory only: what the dense pass would need is out of many machines' reach."""
    drafter, batch = made
    step(drafter, batch)
    return memory_row(name, lambda: step(drafter, batch))


def loss_alone(name: str, num_rows: int) -> dict[str, Any]:
    """Memory of DSpark's loss without its layers, whose own memory grows with the rows."""
    torch.manual_seed(0)
    head, bias_head = (0.05 * torch.randn(VOCAB_SIZE, HIDDEN_SIZE) for _ in range(2))
    hidden, latent = (torch.randn(num_rows, HIDDEN_SIZE).requires_grad_() for _ in range(2))
    options: dict[str, Any] = {
        "head": head,
        "weights": torch.ones(num_rows),
        "terms": LossWeights(cross_entropy=0.1, l1=0.9),
        "labels": torch.randint(VOCAB_SIZE, (num_rows,)),
        "bias_input": latent,
        "bias_head": bias_head.requires_grad_(),
    }
    teacher = 20 * torch.randn(num_rows, HIDDEN_SIZE)
    vocab_loss(hidden, teacher, **options).total.backward()
    return memory_row(name, lambda: vocab_loss(hidden, teacher, **options).total.backward())


def memory_row(name: str, work: Callable[[], Any]) -> dict[str, Any]:
    return {
        "name": name,
        **dict.fromkeys(("ours_s", "dense_s", "floor_s", "dense_peak_mb")),
        "ours_peak_mb": peak_mb(work),
    }


def main() -> None:
    torch.set_num_threads(2)
    extraction, lengths = bench_extract.measure()
    decoding, decoding_lines = bench_decoding.measure()
    packing, more_lines = bench_packing.packing_row(SPEC)
    lines = [*lengths, *decoding_lines, *more_lines, *growth_lines(bench_packing.growth(SPEC))]
    results = [
        extraction,
        *decoding,
        packing,
        measure("dspark", dspark(), dense_dspark, floor_dspark),
        more_rows("dspark, 4x rows", dspark(num_rows=4)),
        measure("eagle3", eagle(), dense_eagle, floor_eagle),
        more_rows("eagle3, 4x rows", eagle(num_rows=4)),
        loss_alone("loss, 448 rows", 448),
        loss_alone("loss, 1792 rows", 4 * 448),
    ]
    print("\n".join(lines))  # noqa: T201
    path = Path(__file__).parents[1] / "outputs" / "bench.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n")
    print(f"{'step':<18}{'ours':>9}{'dense':>9}{'floor':>9}{'/dense':>9}{'/floor':>9}{'ours MB':>10}{'dense MB':>10}")  # noqa: T201
    for row in results:
        print(f"{row['name']:<18}" + "".join(cells(row)))  # noqa: T201


def growth_lines(rows: list[dict[str, Any]]) -> list[str]:
    """The cost of one of each thing, beside that of the first row of its kind."""
    first = {row["name"][1:]: row["ms_each"] for row in reversed(rows)}
    return [
        f"{row['name']:<12}{row['count']:>6}{row['seconds']:9.2f}s{row['ms_each']:9.3f} ms each, "
        f"{row['ms_each'] / first[row['name'][1:]]:.2f} of 1x"
        for row in rows
    ]


def cells(row: dict[str, Any]) -> list[str]:
    ours, dense, floor = row["ours_s"], row["dense_s"], row["floor_s"]
    times = [f"{x:8.2f}s" if x else " " * 9 for x in (ours, dense, floor)]
    ratios = [f"{ours / x:9.2f}" if ours and x else " " * 9 for x in (dense, floor)]
    return times + ratios + [f"{x:10.0f}" if x else " " * 10 for x in (row["ours_peak_mb"], row["dense_peak_mb"])]


if __name__ == "__main__":
    main()
