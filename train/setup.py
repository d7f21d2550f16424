"""Building the drafter that a run trains: sizes from the target, frozen tensors bound, optional warm start."""

import logging
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from transformers import PreTrainedTokenizerBase

from data.extract import open_chats, store_header
from data.online import OnlineStore
from data.store import FeatureSource, FeatureStore
from data.vocab import choose_draft_vocabulary
from models.base import Drafter
from models.checkpoint import load_drafter, load_weights
from models.drafter_files import resolve_folder
from models.layers import GatedMLP, RMSNorm
from models.target import (
    TargetConfig,
    TargetIdentity,
    choose_mask_token,
    feature_layer_ids,
    load_spec,
    load_target,
)
from models.target_files import decoder_tensors, load_frozen
from train.config import ONLINE, AttentionBackend, TrainConfig

log = logging.getLogger(__name__)


def open_features(
    config: TrainConfig,
    target: TargetConfig,
    tokenizer: PreTrainedTokenizerBase,
    identity: TargetIdentity,
    accelerator: Accelerator,
) -> FeatureSource:
    """The store, or with `store=online` the target itself."""
    if config.store != ONLINE:
        return FeatureStore(Path(config.store))
    if config.num_workers:
        raise ValueError(
            f"store=online runs the target in the training process: set num_workers=0, got {config.num_workers}"
        )
    online = config.online
    responses = open_chats(online.responses, config.chats, target, tokenizer, records_per_shard=1)
    header = store_header(target, tokenizer, identity, responses, online.feature_dtype, online.last_hidden_dtype)
    return OnlineStore(
        responses, load_target(target, accelerator.device), header, tokens_per_batch=online.tokens_per_batch
    )


def build_drafter(
    config: TrainConfig,
    model: Any,
    target: TargetConfig,
    tokenizer: PreTrainedTokenizerBase,
    store: FeatureSource,
    accelerator: Accelerator,
) -> Drafter:
    """`model` is the drafter's typed config. Only embedding and head of the target are read, not the whole model.

    Weights of an `init` folder come later: a run that resumes has its own.
    """
    spec = load_spec(target)
    drafter: Drafter = model.build(
        spec,
        target_layer_ids=feature_layer_ids(target, spec),
        mask_token_id=choose_mask_token(target, spec, tokenizer),
    )
    if config.init is not None and config.warm_start:
        raise ValueError(
            f"init={config.init} and warm_start=true exclude each other: choose where the weights come from"
        )
    if config.warm_start:
        start_from_target(drafter, target)
    embedding, head = (tensor.to(accelerator.device) for tensor in load_frozen(target, spec))
    drafter.bind(embedding, head)
    if drafter.draft_vocab_size is not None:
        set_draft_vocabulary(drafter, drafter.draft_vocab_size, store)
    drafter.copy_from_bound()
    return drafter


def start_from_folder(drafter: Drafter, init: str, *, allow_pickle: bool) -> None:
    """Take the weights of a drafter of any known format, from a folder or the hub.

    Raises ValueError that names every option to change where it is another one than the config describes.
    """
    folder = resolve_folder(init, option="init", allow_pickle=allow_pickle)
    found = load_drafter(folder, target=drafter.spec, allow_pickle=allow_pickle).drafter
    ours, theirs = ({**described(d), **d.native_config()} for d in (drafter, found))
    differing = [
        f"{key} is {theirs.get(key)} there, {ours.get(key)} here"
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key) != theirs.get(key) and key not in drafter.training_options
    ]
    if differing:
        raise ValueError(
            f"init={folder} holds another drafter: {'; '.join(differing)}. Set model.* and target.* as there"
        )
    load_weights(drafter, found.state_dict(), folder)
    log.info("train: starts from the weights of %s", folder)


def described(drafter: Drafter) -> dict[str, Any]:
    """What weights were trained with beside a drafter's own options: shapes do not tell."""
    names = ("rope_parameters", "rms_norm_eps", "hidden_act", "logit_softcap", "embedding_scale", "num_heads")
    return {"drafter": type(drafter).__name__.lower()} | {
        f"target {name}": getattr(drafter.spec, name) for name in names
    }


def set_up_compute(drafter: Drafter, config: TrainConfig, accelerator: Accelerator) -> None:
    """Attention backend and torch.compile of a drafter that is about to be trained.

    Raises ValueError where FlexAttention is asked for and cannot be trained with.
    """
    device, backend = accelerator.device, config.attention
    if backend is AttentionBackend.flex and device.type != "cuda":
        raise ValueError(f"attention=flex trains on CUDA only (torch has no backward of it on {device.type}); use auto")
    drafter.flex_attention = device.type == "cuda" and backend is not AttentionBackend.dense
    drafter.compiled = config.compile and compile_works(device)
    if drafter.compiled and accelerator.distributed_type is not DistributedType.DEEPSPEED:  # whose hooks it would break
        for module in drafter.modules():
            if isinstance(module, RMSNorm | GatedMLP):
                module.compile(dynamic=True)


def compile_works(device: torch.device) -> bool:
    """Whether torch.compile can make a kernel here; says why not in one line."""
    try:
        torch.compile(lambda x: (x * 2 + 1).sum())(torch.ones(8, device=device))
    except Exception as error:  # whatever the compiler, its toolchain or the driver lacks
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        log.warning("train: compile=true has no effect, torch.compile does not work here: %s", reason)
        return False
    return True


def set_draft_vocabulary(drafter: Drafter, size: int, store: FeatureSource) -> None:
    """Counted anew from the run's own store each time: nothing that could belong to other data or another size."""
    counts = store.count_supervised_tokens(drafter.spec.vocab_size)
    token_ids = choose_draft_vocabulary(counts, size, drafter.spec.eos_token_ids)
    drafter.use_draft_vocabulary(token_ids)
    covered = float(counts[token_ids].sum() / counts.sum())
    log.info("train: the draft vocabulary of %d tokens covers %.2f %% of supervised tokens", size, 100 * covered)


def start_from_target(drafter: Drafter, target: TargetConfig) -> None:
    """Copy the target's last decoder layers and its final norm into the drafter's, by Hugging Face names.

    Parameters that the target lacks (q/k norms, say) keep their initial value. Raises ValueError where nothing fits,
    and where the target's layers hold more than the drafter's: then equal names need not mean the same (Gemma's
    post_attention_layernorm stands elsewhere, and its norms add one).
    """
    layers = drafter.warm_start_layers()
    if layers is None:
        raise ValueError("warm_start=true: this drafter has no layers of the target's shape; use warm_start=false")
    first = drafter.spec.num_layers - len(layers)
    names = {
        f"layers.{first + index}.{name}": parameter
        for index, layer in enumerate(layers)
        for name, parameter in layer.named_parameters()
    }
    names["norm.weight"] = drafter.get_parameter("norm.weight")
    roots = tuple(f"layers.{first + index}." for index in range(len(layers)))
    stored = {
        name: tensor
        for name, tensor in decoder_tensors(target).items()
        if name in names or (name.startswith(roots) and not name.endswith(".inv_freq"))  # old files keep that buffer
    }
    if unknown := sorted({name.split(".", 2)[2] for name in stored if name not in names}):
        raise ValueError(
            f"warm_start=true: layers of target.path={target.path} hold {', '.join(unknown)}, which the drafter's "
            "layers do not have; use warm_start=false"
        )
    found = {name: tensor.read() for name, tensor in stored.items()}
    misshaped = [name for name, tensor in found.items() if tensor.shape != names[name].shape]
    if not found or misshaped:
        raise ValueError(
            f"warm_start=true: target.path={target.path} has no tensors of the drafter's shapes {misshaped}"
        )
    for name, tensor in found.items():
        names[name].data.copy_(tensor)
