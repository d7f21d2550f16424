"""What a training run will take, from its config and the target's config.json: memory, operations, hours, disk.

Memory of one process is the sum of what is held where a forward pass ends, its peak: all that the backward pass needs
is there, and the loss works on its chunks. P trained parameters, N processes, b bytes of the type that products take (2
under bf16, else 4):

    weights      DDP 4P, and 2P of copies under bf16; FSDP2 4P/N; ZeRO-2 bP, ZeRO-3 bP/N, and 4P/N of masters. What is
                 gathered comes on top: FSDP2 two layers and all outside of layers, ZeRO-3 1e9 parameters, b each
    gradients    DDP 4P; the others 4P/N and, b each, FSDP2 one layer and all outside of layers, ZeRO a bucket of 5e8.
                 FSDP2 sums the micro-batches of a step before it shares them: 4P where there are several
    adamw        8P, or 8P/N
    embedding    and head: frozen, in the target's type, once where they are tied
    batch        features and supervised last hidden states, in the type that the store gives back
    activations  each of the rows that pass a layer (`Drafter.layer_rows`): (4D + 3q + 3k + 4I) b + (4D + q + k) 4
                 bytes with q and k the widths of all query and of all key heads, I the MLP's; dense attention adds its
                 H (S + K) probabilities of 4 bytes (bf16: 6), S tokens a chat. Each token: (L D + 3D + 4k a layer) b
    loss         four chunks of `CHUNK_BYTES` (models/vocab_loss.py) or less; 12 D bytes a row; the gradient, 4 bytes
                 each, of a trained head over the vocabulary, once a step of a chain

Compiled layers keep less. Memory that a caching allocator loses to fragments comes on top.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from data.codecs import find_codec
from data.collate import collate
from data.dataset import TrainingRecord, sample_anchors
from data.estimate import show_bytes, show_hours, stored_bytes
from data.store import MANIFEST, Manifest, StoreHeader, StoreRecord, read_manifest
from models.base import DraftBatch, Drafter
from models.flops import num_tokens
from models.losses import sample_vocabulary, tokens_of
from models.spec import TargetSpec
from models.target import TargetConfig, TargetIdentity, dtype_of, feature_layer_ids, load_spec
from models.vocab_loss import CHUNK_BYTES
from train.config import ONLINE, AttentionBackend, TrainConfig, check_ranges
from train.metrics import PEAK_TFLOPS

GPU, ASSUMED_MFU = "H100", 0.4
WORLDS = (1, 2, 8)
NUM_CHUNKS = 4  # that exist at once in the loss
MAX_LIVE_PARAMETERS, REDUCE_BUCKET = 10**9, 5 * 10**8  # DeepSpeed's own
GIB = 2**30


@dataclass(frozen=True)
class Corpus:
    """What is trained on."""

    num_chats: int
    tokens_per_chat: float
    supervised_share: float
    stored: Manifest | None  # None: assumed, as published (DeepSpec's caches)


PUBLISHED = Corpus(num_chats=1_350_000, tokens_per_chat=916, supervised_share=0.6, stored=None)


@dataclass(frozen=True)
class Sharing:
    """What a launcher divides among its processes."""

    name: str
    divides_weights: bool
    divides_rest: bool  # gradients and optimiser
    has_masters: bool  # float32 copies beside the weights, divided


LAUNCHERS = (
    Sharing("DDP", divides_weights=False, divides_rest=False, has_masters=False),
    Sharing("FSDP2", divides_weights=True, divides_rest=True, has_masters=False),
    Sharing("ZeRO-2", divides_weights=False, divides_rest=True, has_masters=True),
    Sharing("ZeRO-3", divides_weights=True, divides_rest=True, has_masters=True),
)


@dataclass(frozen=True)
class Memory:
    """Bytes of one process, by part."""

    weights: float
    gradients: float
    adamw: float
    embedding: float
    batch: float
    activations: float
    loss: float

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def show_estimate(config: TrainConfig, model: Any, target: TargetConfig, accelerator: Accelerator) -> str:
    """The whole estimate as text; reads no weights. `model` is the drafter's typed config."""
    check_ranges(config)
    spec = load_spec(target)
    drafter = sized_drafter(config, model, target, spec)
    corpus = find_corpus(config)
    narrow = accelerator.mixed_precision == "bf16"
    lines = [*show_sizes(drafter, target, corpus), *show_work(config, drafter, corpus), ""]
    lines += show_memory(config, drafter, target, corpus, narrow=narrow)
    lines += ["", show_store(config, target, drafter, corpus)]
    if config.probe.every is not None:
        lines.append("probe      from its first on the main process holds the target, too: its weights come on top")
    return "\n".join(lines) + "\n"


def sized_drafter(config: TrainConfig, model: Any, target: TargetConfig, spec: TargetSpec) -> Drafter:
    """The drafter without memory for its weights. Which token is the mask changes no size, so that no tokenizer is
    needed to find one."""
    mask = 0 if target.mask_token_id is None else target.mask_token_id
    with torch.device("meta"):
        drafter = model.build(spec, target_layer_ids=feature_layer_ids(target, spec), mask_token_id=mask)
    drafter.flex_attention = config.attention is not AttentionBackend.dense
    return drafter


def find_corpus(config: TrainConfig) -> Corpus:
    """That of the store where there is one, else the published one."""
    if config.store == ONLINE or not (Path(config.store) / MANIFEST).is_file():
        return PUBLISHED
    stored = read_manifest(Path(config.store))
    return Corpus(
        num_chats=stored.num_records,
        tokens_per_chat=stored.num_tokens / stored.num_records,
        supervised_share=stored.num_supervised_tokens / stored.num_tokens,
        stored=stored,
    )


def middling_batch(config: TrainConfig, drafter: Drafter, corpus: Corpus, num_processes: int) -> DraftBatch:
    """Chats of middling length as one process packs them into one pass, whole chats only; states have no memory."""
    length, generator = max(4, round(corpus.tokens_per_chat)), torch.Generator().manual_seed(config.seed)
    mask = torch.arange(length) >= min(length - 2, round(length * (1 - corpus.supervised_share)))
    mask[0] = False
    size, dtype = drafter.spec.hidden_size, feature_dtype(config, corpus)
    features = torch.empty(length, len(drafter.target_layer_ids) * size, dtype=dtype, device="meta")
    last_hidden = torch.empty(int(mask.sum()), size, dtype=dtype, device="meta")
    records = []
    for _ in range(max(1, min(config.tokens_per_batch // length, config.batch_size // num_processes))):
        tokens = torch.randint(drafter.spec.vocab_size, (length,), generator=generator)
        record = StoreRecord("", tokens, mask, features, last_hidden)
        records.append(TrainingRecord(record, features, sample_anchors(mask, config.num_anchors, generator)))
    batch = collate(records, packing=config.packing)
    if drafter.sampled_vocabulary is not None:
        tokens = tokens_of([batch], drafter.spec.vocab_size)
        batch.vocabulary = sample_vocabulary(tokens, drafter.sampled_vocabulary, generator)
    return batch


def feature_dtype(config: TrainConfig, corpus: Corpus) -> torch.dtype:
    """That in which features reach the drafter."""
    name = config.online.feature_dtype if corpus.stored is None else corpus.stored.header.feature_dtype
    find_codec(name, "feature_dtype")
    return torch.float32 if name == "float32" else torch.bfloat16


def step_flops(config: TrainConfig, drafter: Drafter, corpus: Corpus) -> float:
    """Of one optimiser step, over all processes."""
    batch = middling_batch(config, drafter, corpus, num_processes=1)
    return drafter.training_flops(batch) * config.batch_size * corpus.tokens_per_chat / num_tokens(batch)


def count_steps(config: TrainConfig, corpus: Corpus) -> int:
    if config.num_steps is not None:
        return config.num_steps
    return int(config.num_epochs * (corpus.num_chats // config.batch_size))


def memory_of(
    config: TrainConfig,
    drafter: Drafter,
    target: TargetConfig,
    corpus: Corpus,
    sharing: Sharing,
    num_processes: int,
    *,
    narrow: bool,
) -> Memory:
    """`narrow`: products take bf16. One process shares nothing, whatever the launcher."""
    itemsize = 2 if narrow else 4
    layers = drafter.sharded_layers or ()
    of_layer = max((sum(p.numel() for p in layer.parameters()) for layer in layers), default=0)
    count = sum(p.numel() for p in drafter.parameters())
    outside = count - len(layers) * of_layer
    part = count / num_processes
    share = config.batch_size * corpus.tokens_per_chat / num_processes
    is_accumulated = share > config.tokens_per_batch
    weights = 4 * (part if sharing.divides_weights else count)
    gradients = 4 * (part if sharing.divides_rest else count)
    if sharing.has_masters:
        gathered = min(count, MAX_LIVE_PARAMETERS) if sharing.divides_weights else 0
        weights = itemsize * ((part if sharing.divides_weights else count) + gathered) + 4 * part
        gradients += itemsize * REDUCE_BUCKET
    elif sharing.divides_weights:
        weights += itemsize * (outside + min(2, len(layers)) * of_layer)
        gradients += 4 * count if is_accumulated else itemsize * (outside + of_layer)
    elif narrow:
        weights += 2 * count
    spec, batch = drafter.spec, middling_batch(config, drafter, corpus, num_processes)
    tables = spec.vocab_size * spec.hidden_size * dtype_of(target.dtype).itemsize
    scale = max(1.0, min(config.tokens_per_batch, share) / num_tokens(batch))
    return Memory(
        weights=weights,
        gradients=gradients,
        adamw=8 * (part if sharing.divides_rest else count),
        embedding=tables * (1 if spec.tie_embeddings else 2),
        batch=scale * (batch.features.nbytes + batch.last_hidden.nbytes),
        activations=scale * activation_bytes(drafter, batch, itemsize),
        loss=loss_bytes(drafter, batch),
    )


def activation_bytes(drafter: Drafter, batch: DraftBatch, itemsize: int) -> float:
    """What a forward pass before the loss keeps for the backward pass (the module says by which formula)."""
    spec, rows = drafter.spec, drafter.layer_rows(batch)
    size, width = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    of_row = itemsize * (4 * size + 3 * queries + 3 * keys + 4 * width) + 4 * (4 * size + queries + keys)
    of_row += drafter.extra_row_bytes
    if not drafter.flex_attention:
        of_score = 4 if itemsize == 4 else 4 + itemsize  # a probability is kept before and after it is narrowed
        of_row += of_score * spec.num_heads * (int(batch.host.position_ids.max()) + 1 + drafter.num_draft_tokens)
    num_layers = len(drafter.sharded_layers or [None])
    of_token = (len(drafter.target_layer_ids) + 3) * size + 4 * keys * num_layers
    return float(rows) * of_row + float(batch.input_ids.numel()) * itemsize * of_token


def loss_bytes(drafter: Drafter, batch: DraftBatch) -> float:
    """Chunks, float32 gradients and copies of the rows that reach the vocabulary, gradients of heads over it. A chain
    with a head of its own holds one such gradient a step."""
    spec = drafter.spec
    num_rows = drafter.num_draft_tokens * int(batch.host.loss_mask.sum())
    if drafter.slot_layout is not None:
        num_rows = drafter.num_draft_tokens * int((batch.host.anchors >= 0).sum())
    chunk = min(CHUNK_BYTES, 4 * num_rows * spec.vocab_size)
    passes = drafter.num_draft_tokens if drafter.slot_layout is None else 1
    widths = (spec.vocab_size, drafter.draft_vocab_size)
    heads = [m for m in drafter.modules() if isinstance(m, nn.Linear) and m.out_features in widths]
    of_heads = 4.0 * passes * sum(head.weight.numel() for head in heads)
    return NUM_CHUNKS * chunk + 12.0 * num_rows * spec.hidden_size + of_heads


def show_sizes(drafter: Drafter, target: TargetConfig, corpus: Corpus) -> list[str]:
    spec = drafter.spec
    trained = sum(p.numel() for p in drafter.parameters())
    frozen = spec.vocab_size * spec.hidden_size * (1 if spec.tie_embeddings else 2)
    tied = "embedding, which is the head too" if spec.tie_embeddings else "embedding and head"
    origin = "assumed, as published: there is no store" if corpus.stored is None else "of the store"
    return [
        f"drafter    {type(drafter).__name__} for {target.name}: {trained:,} trained parameters; {frozen:,} of the "
        f"target's {tied} frozen",
        f"chats      {corpus.num_chats:,} of {corpus.tokens_per_chat:.0f} tokens, {corpus.supervised_share:.0%} "
        f"supervised ({origin})",
    ]


def show_work(config: TrainConfig, drafter: Drafter, corpus: Corpus) -> list[str]:
    flops, steps = step_flops(config, drafter, corpus), count_steps(config, corpus)
    hours = steps * flops / (ASSUMED_MFU * 1e12 * PEAK_TFLOPS[GPU]) / 3600
    return [
        f"work       {steps:,} steps of {config.batch_size} chats, {flops / 1e12:.4g} TFLOP each, "
        f"{steps * flops:.3g} FLOP in all",
        f"time       {show_hours(hours)} on one {GPU}, {show_hours(hours / 8)} on eight, where they reach "
        f"{ASSUMED_MFU:.0%} of {PEAK_TFLOPS[GPU]:.0f} dense bf16 TFLOP/s (an assumption: see the metric mfu)",
    ]


def show_memory(
    config: TrainConfig, drafter: Drafter, target: TargetConfig, corpus: Corpus, *, narrow: bool
) -> list[str]:
    parts = [field.name for field in fields(Memory)]
    attention = "FlexAttention" if drafter.flex_attention else "dense attention"
    products = "bf16" if narrow else "float32"
    lines = [
        f"memory     of one process in GiB, passes of {config.tokens_per_batch} tokens, {products}, {attention}:",
        "".join(f"{name:>12}" for name in ("launcher", "processes", *parts, "total")),
    ]
    for world in WORLDS:
        for sharing in LAUNCHERS[:1] if world == 1 else LAUNCHERS:
            memory = memory_of(config, drafter, target, corpus, sharing, world, narrow=narrow)
            values = [getattr(memory, part) / GIB for part in parts] + [memory.total / GIB]
            name = "none" if world == 1 else sharing.name
            lines.append(f"{name:>12}{world:>12}" + "".join(f"{value:12.2f}" for value in values))
    return lines


def show_store(config: TrainConfig, target: TargetConfig, drafter: Drafter, corpus: Corpus) -> str:
    if config.store == ONLINE:
        return "store      none: the target runs in the training process, and its work and memory come on top"
    if corpus.stored is not None:
        return f"store      {config.store} holds {show_bytes(sum(shard.bytes for shard in corpus.stored.shards))}"
    layer_ids, tokens = feature_layer_ids(target, drafter.spec), corpus.num_chats * corpus.tokens_per_chat
    shown = []
    for features, last_hidden in (("bf16", "bf16"), ("fp8", "fp8"), ("nf4", "fp8")):
        header = StoreHeader(
            target=TargetIdentity(target.name, "", ""),
            layer_ids=layer_ids,
            hidden_size=drafter.spec.hidden_size,
            feature_dtype=features,
            last_hidden_dtype=last_hidden,
            chat_template_sha256="",
            chats={},
            records_per_shard=1,
        )
        stored = show_bytes(stored_bytes(header, tokens, tokens * corpus.supervised_share))
        shown.append(f"{stored} as feature_dtype={features} last_hidden_dtype={last_hidden}")
    return f"store      of {len(layer_ids)} layers: " + ", ".join(shown)
