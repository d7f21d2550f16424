"""Features of the target over every answered chat, written shard by shard by any number of processes.

Processes need not know of each other: each claims shards on the file system, and whichever finds all of them finished
publishes the store. So any number of processes, of one launcher or several, can resume the work of any other.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from data.capture import CapturedFeatures, exact_headers
from data.claims import CLAIMS, JOB, Claims
from data.estimate import check_disk, estimate
from data.extraction import Extraction
from data.responses import ChatOptions, Responses
from data.run import StopRequest
from data.shards import forget_damaged, header_sha256, remove_working_files, reopen
from data.store import MANIFEST, FeatureStore, StoreHeader, read_manifest
from data.tensor_parallel import TargetGroup
from models.files import sha256_text
from models.target import (
    Target,
    TargetConfig,
    TargetIdentity,
    feature_layer_ids,
    load_spec,
    load_target,
    load_tokenizer,
    target_identity,
)

log = logging.getLogger(__name__)


@dataclass
class ExtractConfig:
    """Options of extract.py; conf/extract.yaml lists every value with a remark."""

    name: str
    output_dir: str
    responses: str
    captured: str
    store: str
    target: Any
    chats: ChatOptions
    feature_dtype: str
    last_hidden_dtype: str
    records_per_shard: int
    tokens_per_batch: int
    repair: bool
    verify: bool
    verify_records: int
    stats: bool
    preview: int


def extract(
    config: ExtractConfig,
    target_config: TargetConfig,
    accelerator: Accelerator,
    load: Callable[..., Target] = load_target,
) -> None:
    """Fill the store that `config.store` names; returns at once when it is finished and made of the same.

    A SIGTERM ends it after the shard in progress; the same command goes on, with any number of processes. Raises
    ValueError on responses that cannot be used, on a store made of something else, and when the disk is too small.
    """
    if config.tokens_per_batch < 1:
        raise ValueError(f"tokens_per_batch must be at least 1, got {config.tokens_per_batch}")
    folder, group = Path(config.store), TargetGroup(target_config, accelerator)
    tokenizer, identity = load_tokenizer(target_config), target_identity(target_config)
    responses = open_chats(
        config.responses, config.chats, target_config, tokenizer, records_per_shard=config.records_per_shard
    )
    header = store_header(target_config, tokenizer, identity, responses, config.feature_dtype, config.last_hidden_dtype)
    if config.repair and folder.is_dir():
        repair(folder, header, accelerator)
    if group.agree(int((folder / MANIFEST).is_file())):
        return check_finished(folder, header, responses.records.fingerprint())
    captured = CapturedFeatures(Path(config.captured), exact_headers(identity, header, target_config.dtype))
    target = load(target_config, accelerator.device, mesh=group.mesh)
    job = Extraction(folder, header, responses, target, captured, config.tokens_per_batch, group)
    num_left = group.agree(len(job.unfinished()))
    log.info("extract: %d records in %d shards, %d to do", len(responses.records), responses.num_shards, num_left)
    if num_left:
        expected = estimate(responses, header, target, captured, config.tokens_per_batch)
        expected = expected.scaled(num_left / responses.num_shards, num_processes=group.num_groups)
        log.info("extract: %s to go", expected)
        check_disk(folder, expected)
    stop = StopRequest()
    if not group.is_leader:
        return job.follow()
    with Claims(folder) as claims:
        claims.join(f"{header_sha256(header)} {responses.records.fingerprint()}")
        if not job.run(claims, stop, show=accelerator.is_main_process):
            num_left = len(job.unfinished())
            log.info("extract: asked to stop, %d shards left; the same command goes on from there", num_left)
            return
        job.publish(claims)
    log.info("extract: this process: %s", job.work)
    log.info("extract: %s is finished", folder)


def open_chats(
    source: str,
    options: ChatOptions,
    target: TargetConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    records_per_shard: int,
) -> Responses:
    return Responses(
        source,
        tokenizer,
        options,
        thinking=target.thinking,
        context=load_spec(target).max_position_embeddings,
        records_per_shard=records_per_shard,
    )


def store_header(
    target: TargetConfig,
    tokenizer: PreTrainedTokenizerBase,
    identity: TargetIdentity,
    responses: Responses,
    feature_dtype: str,
    last_hidden_dtype: str,
) -> StoreHeader:
    spec = load_spec(target)
    return StoreHeader(
        target=identity,
        layer_ids=feature_layer_ids(target, spec),
        hidden_size=spec.hidden_size,
        feature_dtype=feature_dtype,
        last_hidden_dtype=last_hidden_dtype,
        chat_template_sha256=sha256_text(str(tokenizer.chat_template)),
        chats=responses.describe(),
        records_per_shard=responses.records_per_shard,
    )


def repair(folder: Path, header: StoreHeader, accelerator: Accelerator) -> None:
    """Have damaged shards of a store, finished or not, made again, and those of other records.

    One process looks while the others wait. Raises ValueError while another job works on the store.
    """
    is_finished = (folder / MANIFEST).is_file()
    if is_finished:
        check_header(folder, read_manifest(folder).header, header)
    with Claims(folder) as claims:
        if accelerator.is_main_process and not claims.take(JOB):
            raise ValueError(f"store={folder}: other processes work on it now; let them end before repair=true")
        accelerator.wait_for_everyone()  # for the others to find it taken
        if not accelerator.is_main_process:
            return claims.wait_for_job()
        found = reopen(folder) if is_finished else forget_damaged(folder, header)
        log.info("extract: %s is open again: %s", folder, "; ".join(found) or "no shard is damaged")


def check_finished(folder: Path, header: StoreHeader, responses_sha256: str) -> None:
    """Raises ValueError when the finished store at `folder` is damaged or not the one that was asked for."""
    manifest = FeatureStore(folder).manifest
    check_header(folder, manifest.header, header)
    if manifest.responses_sha256 != responses_sha256:
        raise ValueError(
            f"store={folder} was made from other responses: `repair=true` makes the shards that differ again;"
            " or choose another name"
        )
    if any(folder.glob("shard-*.json")) or (folder / CLAIMS).exists():  # of a run that was killed after its manifest
        with suppress(ValueError), Claims(folder) as claims:  # a store that cannot be written to may keep them
            if claims.take(JOB) and (folder / MANIFEST).is_file():
                remove_working_files(folder)
    log.info("extract: %s is finished", folder)


def check_header(folder: Path, existing: StoreHeader, asked: StoreHeader) -> None:
    ours, theirs = asdict(asked), asdict(existing)
    if differing := [f"{key}={theirs[key]} (asked for: {ours[key]})" for key in ours if ours[key] != theirs[key]]:
        raise ValueError(
            f"store={folder} exists with another {', '.join(differing)}: give the options that it was made with, or "
            "choose another store="
        )
