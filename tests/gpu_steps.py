"""bf16 training steps at the published setting, ours and by plain autograd over all logits."""

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from hydra import compose, initialize_config_dir
from torch import Tensor

from data.collate import collate
from data.dataset import TrainingRecord, sample_anchors
from data.store import StoreRecord
from models.attention import training_mixer
from models.base import DraftBatch, Drafter
from models.config import register, to_dataclass, typed
from models.dspark import DSpark
from models.eagle3 import Eagle3
from models.flops import num_tokens
from tests.gpu_setting import Setting
from train.config import TrainConfig
from train.metrics import find_peak, peak_memory_gib
from train.parallel import Shared, share
from train.setup import set_up_compute

CONF = Path(__file__).parents[1] / "conf"


def training_config(setting: Setting, kind: str, *, compiled: bool) -> tuple[TrainConfig, Any]:
    """conf/experiment/train/deepspec.yaml with the drafter of that name, small where the setting is."""
    small = ["model.num_draft_tokens=3"] if setting.is_tiny else []
    if setting.is_tiny and kind == "dspark":
        small += ["model.num_layers=2", "model.markov_rank=8"]
    register("train_schema", TrainConfig)
    with initialize_config_dir(str(CONF), version_base=None):
        node = compose(
            "train",
            ["target=qwen3_4b", "experiment=deepspec", f"model={kind}", f"compile={str(compiled).lower()}", *small],
        )
    return to_dataclass(TrainConfig, node, section="train"), typed(node.model, section="model")


def build(setting: Setting, model: Any, layer_ids: tuple[int, ...]) -> Drafter:
    """Random weights, random frozen embedding in bf16."""
    spec = setting.spec
    torch.manual_seed(0)
    with setting.device:
        drafter = model.build(spec, target_layer_ids=layer_ids, mask_token_id=spec.vocab_size - 1)
        table = (0.02 * torch.randn(spec.vocab_size, spec.hidden_size)).bfloat16()
    drafter.bind(table, table)
    drafter.copy_from_bound()
    return drafter


def random_batch(setting: Setting, drafter: Drafter) -> DraftBatch:
    """One packed row of random chats whose last 60 % are answers, on the setting's device."""
    generator, size = torch.Generator().manual_seed(1), setting.spec.hidden_size
    records = []
    for length in setting.lengths:
        mask = torch.arange(length) >= int(0.4 * length)
        record = StoreRecord(
            "",
            torch.randint(setting.spec.vocab_size, (length,), generator=generator),
            mask,
            torch.randn(length, len(drafter.target_layer_ids) * size, generator=generator).bfloat16(),
            (20 * torch.randn(int(mask.sum()), size, generator=generator)).bfloat16(),
        )
        anchors = sample_anchors(mask, setting.num_anchors, generator)
        records.append(TrainingRecord(record, record.features, anchors))
    return collate(records, packing=True).to(setting.device)


def our_step(shared: Shared, batch: DraftBatch) -> Tensor:
    """One optimiser step as the trainer does it; the loss before it."""
    denominators = shared.drafter.denominators(batch)
    with shared.accumulating(is_last=True):
        loss = shared(batch)
        total = torch.stack([value / denominators[term] for term, value in loss.numerators.items()]).sum()
        shared.backward(total)
    shared.update(1.0)
    return total.detach()


def dense_step(shared: Shared, batch: DraftBatch) -> Tensor:
    """The same step by plain autograd over the logits of all slots or positions, as the reference computes it."""
    drafter = shared.drafter
    with shared.accumulating(is_last=True):
        with shared.accelerator.autocast():
            loss = dense_dspark if isinstance(drafter, DSpark) else dense_eagle
            total = loss(drafter, batch)  # type: ignore[arg-type]
        shared.backward(total)
    shared.update(1.0)
    return total.detach()


def dense_dspark(drafter: DSpark, batch: DraftBatch) -> Tensor:
    """Supervised or not; what is not counts with weight zero."""
    states, slots = drafter.block_states(batch), drafter.supervised_slots(batch)
    assert drafter.markov_head is not None and drafter.confidence_head is not None
    length, terms = batch.input_ids.shape[1], drafter.config.loss
    places = torch.arange(drafter.num_draft_tokens, device=states.device)
    label_ids = (batch.anchors[..., None] + 1 + places).clamp(min=1, max=length - 1)
    flat = label_ids.flatten(1)
    labels = batch.input_ids.gather(1, flat).view(label_ids.shape)
    embedded = drafter.markov_head.markov_w1(batch.input_ids.gather(1, flat - 1).view(label_ids.shape))
    teacher = batch.last_hidden[batch.last_hidden_ids.gather(1, flat - 1).view(label_ids.shape)]
    weights = torch.zeros(slots.mask.shape, device=states.device).masked_scatter(slots.mask, slots.weights)
    logits = (states.to(drafter.head.dtype) @ drafter.head.T + drafter.markov_head.markov_w2(embedded)).float()
    with torch.no_grad():
        target = torch.softmax((teacher.to(drafter.head.dtype) @ drafter.head.T).float(), dim=-1)
    hard = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none").view(labels.shape)
    distance = (torch.softmax(logits, dim=-1) - target).abs().sum(-1)
    confidence = drafter.confidence_head(states, embedded)
    bce = F.binary_cross_entropy_with_logits(confidence, 1 - distance.detach() / 2, reduction="none")
    rows = terms.cross_entropy * hard + terms.l1 * distance + drafter.config.confidence_weight * bce
    return (weights * rows).sum() / weights.sum()


def dense_eagle(drafter: Eagle3, batch: DraftBatch) -> Tensor:
    """The chain of every position; the target's distribution once, shared by the steps."""
    fused, length, steps = drafter.fuse(batch.features), batch.input_ids.shape[1], drafter.num_draft_tokens
    tokens = F.pad(batch.input_ids[:, 1:], (0, steps))
    context = drafter.pair_context(tokens[:, :length], fused, batch.position_ids)
    every = torch.arange(length).expand(batch.host.input_ids.shape)
    mix = training_mixer(every, batch.host.document_ids, fused.device, num_slots=1, flex=drafter.flex_attention)
    with torch.no_grad():
        teacher = batch.last_hidden[batch.last_hidden_ids.clamp(min=0)]
        target = F.pad(torch.softmax((teacher @ drafter.head.T).float(), dim=-1), (0, 0, 0, steps))
    supervised, documents = F.pad(batch.loss_mask, (0, steps + 2)), F.pad(batch.document_ids, (0, steps + 2), value=-1)
    hidden, total = fused, torch.zeros((), device=fused.device)
    chain: list[tuple[Tensor, Tensor]] = []
    for s in range(steps):
        hidden = drafter.step(tokens[:, s : s + length], hidden, batch.position_ids + s, chain, context, mix)
        logits = drafter.norm(hidden).to(drafter.head.dtype) @ drafter.head.T
        rows = -(target[:, s + 1 : s + 1 + length] * F.log_softmax(logits.float(), dim=-1)).sum(-1)
        label = slice(s + 2, s + 2 + length)
        weights = (supervised[:, label] & (documents[:, label] == batch.document_ids)).float()
        total = total + drafter.config.step_decay**s * (weights * rows).sum() / weights.sum()
    return total


def check_steps(setting: Setting, kind: str, *, compiled: bool) -> tuple[bool, str, dict[str, Any]]:
    """bf16 steps of a drafter: finite, and the first loss within 2 % of the dense one where that fits into memory."""
    found: dict[str, Any] = {}
    dense = [] if compiled else [("dense", dense_step)]
    for name, step in [("ours", our_step), *dense]:
        shared, batch = prepare(setting, kind, compiled=compiled)
        try:
            found[name] = timed_steps(setting, shared, batch, step)
        except torch.OutOfMemoryError:
            assert name == "dense", "the step itself does not fit"
            found[name] = None
        del shared, batch
        free_memory(setting)
    ours = found["ours"]
    mfu = "" if ours["mfu"] is None else f", MFU {ours['mfu']:.0%}"
    text = (
        f"{ours['seconds']:.3f} s, {ours['tokens_per_second']:.0f} tokens/s, {ours['peak_gib']:.1f} GiB{mfu}, "
        f"{ours['flops'] / 1e12:.4g} TFLOP, loss {ours['first_loss']:.4f} to {ours['last_loss']:.4f}"
    )
    passed = all(torch.tensor([ours["first_loss"], ours["last_loss"]]).isfinite().tolist())
    if dense and found["dense"] is None:
        text += "; dense: out of memory"
    elif dense:
        theirs = found["dense"]
        text += f"; dense {theirs['seconds']:.3f} s, {theirs['peak_gib']:.1f} GiB, loss {theirs['first_loss']:.4f}"
        passed &= abs(ours["first_loss"] / theirs["first_loss"] - 1) < 0.02
    return passed, text, found


def prepare(setting: Setting, kind: str, *, compiled: bool) -> tuple[Shared, DraftBatch]:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=not setting.is_cuda, mixed_precision="bf16")
    config, model = training_config(setting, kind, compiled=compiled)
    drafter = build(setting, model, (1, 9, 17, 25, 33))
    set_up_compute(drafter, config, accelerator)
    return share(drafter, config.optim, accelerator, fsdp=False), random_batch(setting, drafter)


def timed_steps(
    setting: Setting, shared: Shared, batch: DraftBatch, step: Callable[[Shared, DraftBatch], Tensor]
) -> dict[str, Any]:
    """After two that warm up (kernels are compiled, AdamW's state is made)."""
    first = float(step(shared, batch))
    step(shared, batch)
    if setting.is_cuda:
        torch.cuda.reset_peak_memory_stats(setting.device)
    setting.wait()
    began = time.perf_counter()
    losses = [step(shared, batch) for _ in range(setting.num_steps)]
    setting.wait()
    seconds = (time.perf_counter() - began) / setting.num_steps
    flops, peak = shared.drafter.training_flops(batch), find_peak(setting.device)
    return {
        "seconds": seconds,
        "tokens_per_second": num_tokens(batch) / seconds,
        "peak_gib": peak_memory_gib(setting.device),
        "flops": flops,
        "mfu": None if peak is None else flops / seconds / peak,
        "first_loss": first,
        "last_loss": float(losses[-1]),
    }


def free_memory(setting: Setting) -> None:
    gc.collect()
    if setting.is_cuda:
        torch.cuda.empty_cache()
