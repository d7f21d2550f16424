"""Looking at a finished store: is it whole, is it what the target computes, and what does it hold."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.codecs import find_codec
from data.estimate import show_bytes
from data.extract import ExtractConfig, open_chats
from data.preview import preview
from data.store import FeatureStore, damages, read_manifest, refuse_damages, supervised_rows
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
    """Raises ValueError that names every damaged shard, another target, or states that it does not compute."""
    folder = Path(config.store)
    if accelerator.is_main_process:
        refuse_damages(folder, damages(folder, read_manifest(folder), checksums=True))
    store = FeatureStore(folder)
    num_shards = len(store.manifest.shards)
    text = f"{store.name}: {len(store)} chats in {num_shards} shards, every checksum is right\n"
    if config.verify_records == 0:
        return text
    store.check_target(target_identity(target_config), store.header.layer_ids)
    mesh = TargetGroup(target_config, accelerator).mesh
    target = load_target(target_config, accelerator.device, layer_ids=store.header.layer_ids, mesh=mesh)
    found = compare_with_target(store, target, config.verify_records)
    features, last_hidden = found["features"], found["last_hidden"]
    return text + (
        f"{min(config.verify_records, len(store))} chats computed again: features within {features.worst:.2g}, last "
        f"hidden states within {last_hidden.worst:.2g} of each vector's largest value, half of all values within "
        f"{features.median:.2g} and {last_hidden.median:.2g} of their own ({store.header.feature_dtype} and "
        f"{store.header.last_hidden_dtype} rounding included)\n"
    )


INSPECTIONS: dict[str, Inspection] = {"preview": show_preview, "stats": show_stats, "verify": verify}
"""Options of extract.py that look instead of extracting."""


def inspect(config: ExtractConfig, target: TargetConfig, accelerator: Accelerator) -> str | None:
    """What the inspections that are asked for say; None where there are none."""
    if config.preview < 0 or config.verify_records < 0:
        raise ValueError(
            f"preview and verify_records must be 0 or more, got {config.preview} and {config.verify_records}"
        )
    asked = [option for option in INSPECTIONS if getattr(config, option)]
    if asked and config.repair:
        raise ValueError(f"repair=true changes a store and {'=, '.join(asked)}= only look: run one after the other")
    return "\n".join(INSPECTIONS[option](config, target, accelerator) for option in asked) if asked else None


class Deviation(NamedTuple):
    """How far stored values are from the target's own; vectors of one outlier would hide in the first measure alone."""

    worst: float  # largest error of a vector over its largest value
    median: float  # over values: error over the value itself, of the worst chat

    def joined(self, other: "Deviation") -> "Deviation":
        return Deviation(max(self.worst, other.worst), max(self.median, other.median))


def compare_with_target(store: FeatureStore, target: Target, num_records: int) -> dict[str, Deviation]:
    """Compute `num_records` chats again, spread evenly, each alone; deviations of features and last hidden states.

    Raises ValueError where rounding cannot explain them.
    """
    header = store.header
    found = {"features": Deviation(0.0, 0.0), "last_hidden": Deviation(0.0, 0.0)}
    step = max(1, len(store) // num_records)
    for index in list(range(0, len(store), step))[:num_records]:
        record = store[index]
        output = target.forward_whole(record.input_ids.long()[None].to(target.device))
        rows = supervised_rows(record.loss_mask).to(target.device)
        for name, stored, own in (
            ("features", record.features, output.features[0].cpu()),
            ("last_hidden", record.last_hidden, output.hidden[0, rows].cpu()),
        ):
            found[name] = found[name].joined(deviation(stored, own, header.hidden_size))
    for name, dtype in (("features", header.feature_dtype), ("last_hidden", header.last_hidden_dtype)):
        codec = find_codec(dtype, name)
        # Sums are taken in another order in another batch or on another device.
        noise = 1e-4 if target.head.dtype == torch.float32 else 0.05
        allowed = Deviation(codec.tolerance + noise, codec.median_tolerance + 4 * noise)
        if found[name].worst > allowed.worst or found[name].median > allowed.median:
            raise ValueError(
                f"store={store.name}: {name} deviate from the target's own by {found[name].worst:.2g} of a vector's "
                f"largest value and by {found[name].median:.2g} of half of the values, {dtype} explains "
                f"{allowed.worst:.2g} and {allowed.median:.2g}: it was made by other code or damaged before it was "
                "hashed; remove it and run extract.py again"
            )
    return found


def deviation(stored: Tensor, own: Tensor, hidden_size: int) -> Deviation:
    """Of [N, G*D] values; a layer at a time, the worst counts."""
    stored, own = (x.float().unflatten(-1, (-1, hidden_size)) for x in (stored, own))
    if not own.numel():
        return Deviation(0.0, 0.0)
    error = (stored - own).abs().nan_to_num(nan=float("inf"))
    worst = (error.amax(-1) / own.abs().amax(-1).clamp(min=1e-20)).max()
    relative = (error / own.abs().clamp(min=1e-20)).transpose(0, 1).flatten(1)  # [G, N*D]
    return Deviation(float(worst), float(relative.median(dim=1).values.max()))


def describe(store: FeatureStore, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> str:
    """Counts, lengths, supervised share, bytes, the most frequent supervised tokens, and a histogram of lengths."""
    manifest, header = store.manifest, store.header
    size, reference = sum(shard.bytes for shard in manifest.shards), reference_bytes(store)
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


def reference_bytes(store: FeatureStore) -> int:
    """What a token takes where all states of all tokens are kept in bf16, with its id and masks."""
    return 2 * (len(store.header.layer_ids) + 1) * store.header.hidden_size + 6


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
