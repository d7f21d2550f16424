"""Looking at a finished store: is it whole, is it what the target computes, and what does it hold."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.codecs import find_codec
from data.estimate import show_bytes
from data.extract import ExtractConfig, open_chats
from data.preview import preview
from data.store import FeatureStore, supervised_rows
from data.tensor_parallel import TargetGroup
from models.target import Target, TargetConfig, load_spec, load_target, load_tokenizer, target_identity

Inspection = Callable[[ExtractConfig, TargetConfig, Accelerator], str]
NUM_BINS, BAR_WIDTH, NUM_TOP_TOKENS = 16, 48, 20


def show_preview(config: ExtractConfig, target: TargetConfig, _accelerator: Accelerator) -> str:
    """The first `config.preview` records with what is supervised, in colour on a terminal."""
    tokenizer = load_tokenizer(target)
    responses = open_chats(config.responses, config.chats, target, tokenizer, records_per_shard=1)
    shown = range(min(config.preview, len(responses.records)))
    chats = [record.chat for index in shown for record in responses.render(index)]
    return preview(tokenizer, chats, colour=sys.stdout.isatty())


def show_stats(config: ExtractConfig, target: TargetConfig, _accelerator: Accelerator) -> str:
    return describe(FeatureStore(Path(config.store)), load_tokenizer(target), load_spec(target).vocab_size)


def verify(config: ExtractConfig, target_config: TargetConfig, accelerator: Accelerator) -> str:
    """Raises ValueError that names each damaged shard, another target, or states that it does not compute."""
    store = FeatureStore(Path(config.store))
    store.verify()
    shards = store.manifest.shards
    text = f"{store.name}: {len(store)} chats in {len(shards)} shards, every checksum is right\n"
    if config.verify_records == 0:
        return text
    store.check_target(target_identity(target_config), store.header.layer_ids)
    mesh = TargetGroup(target_config, accelerator).mesh
    target = load_target(target_config, accelerator.device, layer_ids=store.header.layer_ids, mesh=mesh)
    worst = compare_with_target(store, target, config.verify_records)
    return text + (
        f"{min(config.verify_records, len(store))} chats computed again: features within {worst['features']:.2g}, last "
        f"hidden states within {worst['last_hidden']:.2g} of each vector's largest value "
        f"({store.header.feature_dtype} and {store.header.last_hidden_dtype} rounding included)\n"
    )


INSPECTIONS: dict[str, Inspection] = {"preview": show_preview, "stats": show_stats, "verify": verify}
"""Options of extract.py that look instead of extracting."""


def compare_with_target(store: FeatureStore, target: Target, num_records: int) -> dict[str, float]:
    """Compute `num_records` chats again, spread evenly, each alone; the largest deviation of features and last hidden
    states, as a share of each vector's largest value. Raises ValueError where rounding cannot explain it.
    """
    header, worst = store.header, {"features": 0.0, "last_hidden": 0.0}
    step = max(1, len(store) // num_records)
    for index in list(range(0, len(store), step))[:num_records]:
        record = store[index]
        output = target.forward_whole(record.input_ids.long()[None].to(target.device))
        rows = supervised_rows(record.loss_mask)
        for name, found, own in (
            ("features", record.features, output.features[0].cpu()),
            ("last_hidden", record.last_hidden, output.hidden[0, rows.to(target.device)].cpu()),
        ):
            worst[name] = max(worst[name], deviation(found, own, header.hidden_size))
    for name, dtype in (("features", header.feature_dtype), ("last_hidden", header.last_hidden_dtype)):
        # Sums are taken in another order in another batch or on another device.
        allowed = find_codec(dtype, name).tolerance + (1e-4 if target.head.dtype == torch.float32 else 0.05)
        if worst[name] > allowed:
            raise ValueError(
                f"store={store.name}: {name} deviate from the target's own by {worst[name]:.2g} of a vector's largest "
                f"value, {dtype} explains {allowed:.2g}: it was made by other code or damaged before it was hashed; "
                "remove it and run extract.py again"
            )
    return worst


def deviation(found: Tensor, own: Tensor, hidden_size: int) -> float:
    """Largest |found - own| over the largest |own| of each vector; both [N, G*D]."""
    found, own = (x.float().unflatten(-1, (-1, hidden_size)) for x in (found, own))
    if not own.numel():
        return 0.0
    error = (found - own).abs().amax(-1) / own.abs().amax(-1).clamp(min=1e-20)
    return float(error.nan_to_num(nan=float("inf")).max())


def describe(store: FeatureStore, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> str:
    """Counts, lengths, supervised share, bytes, the most frequent supervised tokens, and a histogram of lengths."""
    manifest, header = store.manifest, store.header
    size = sum(shard.bytes for shard in manifest.shards)
    reference = 2 * (len(header.layer_ids) + 1) * header.hidden_size + 6
    per_token = size / manifest.num_tokens
    quantiles = torch.quantile(store.lengths.double(), torch.tensor([0, 0.25, 0.5, 0.75, 1.0], dtype=torch.float64))
    counts = store.count_supervised_tokens(vocab_size)
    lines = [
        f"store        {store.name}",
        f"target       {header.target.name}, layers {list(header.layer_ids)}, hidden size {header.hidden_size}",
        f"types        features {header.feature_dtype}, last hidden {header.last_hidden_dtype}",
        f"chats        {manifest.num_records} in {len(manifest.shards)} shards",
        f"tokens       {manifest.num_tokens}, {manifest.num_supervised_tokens} supervised "
        f"({100 * manifest.num_supervised_tokens / manifest.num_tokens:.1f} %)",
        f"bytes        {show_bytes(size)}, {per_token:.0f} a token: {per_token / reference:.3f} of all states of all "
        f"tokens in bf16 ({reference})",
        "lengths      min, quarter, median, three quarters, max: " + ", ".join(f"{q:.0f}" for q in quantiles),
        f"top tokens   {top_tokens(counts, tokenizer)}",
        "",
        *histogram(store.lengths.tolist(), "tokens a chat"),
        "",
        *histogram(store.num_supervised.tolist(), "supervised tokens a chat"),
    ]
    return "\n".join(lines) + "\n"


def top_tokens(counts: Tensor, tokenizer: PreTrainedTokenizerBase) -> str:
    share, ids = (counts.double() / counts.sum()).topk(min(NUM_TOP_TOKENS, int((counts > 0).sum())))
    pairs = zip(share.tolist(), ids.tolist(), strict=True)
    return ", ".join(f"{tokenizer.decode([id])!r} {100 * part:.1f} %" for part, id in pairs)


def histogram(values: Sequence[int], title: str) -> list[str]:
    """Lines of a bar chart over equal ranges of the values."""
    low, high = min(values), max(values)
    width = max(1, -(-(high - low + 1) // NUM_BINS))
    counts = [0] * (1 + (high - low) // width)
    for value in values:
        counts[(value - low) // width] += 1
    lines = [title]
    for index, count in enumerate(counts):
        bar = "█" * round(BAR_WIDTH * count / max(counts)) or ("▏" if count else "")
        first = low + index * width
        lines.append(f"{first:>7} – {first + width - 1:<7} {bar} {count}")
    return lines
