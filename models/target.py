"""The frozen target: found by name or folder, run with preallocated caches, and read out as features and logits.

Generation, extraction and the runtime all go through `Target`. Features are caught by hooks on the decoder layers'
outputs, never by position in `hidden_states`, whose last entry is normed while the others are not.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.cache_utils import Cache
from transformers.quantizers.auto import AutoQuantizationConfig

from models.cache import KVCache
from models.cached_attention import ATTENTION, CacheLayer, spread
from models.files import sha256_file, sha256_text
from models.graphs import Replay
from models.packed import keep_blocks, linear
from models.spec import TargetSpec, spread_layer_ids
from models.trees import ancestors


@dataclass(frozen=True)
class TargetConfig:
    """Which target, and what a drafter takes from it; conf/target/*.yaml list every value with a remark."""

    name: str
    path: str
    layer_ids: tuple[int, ...] | None
    mask_token_id: int | None
    dtype: str
    package: str | None
    gguf_file: str | None
    thinking: bool | None
    tp_size: int
    quantization: dict[str, Any] | None  # as transformers reads it from a config: quant_method and its options


@dataclass(frozen=True)
class TargetOutput:
    """What one forward of the backbone yields."""

    hidden: Tensor  # [B, Q, D] last hidden state after the final norm
    features: Tensor  # [B, Q, L*D] outputs of the captured layers, ascending
    tokens: Tensor | None = None  # [B, Q] bool: what was computed; None = everything, the rest is zero


@dataclass(frozen=True)
class TargetIdentity:
    """Names a target so that a store or a drafter of another one is refused."""

    name: str
    config_sha256: str
    weights_sha256: str


class Target:
    """A frozen causal LM. Greedy and float32 results do not depend on how rows are batched or padded."""

    def __init__(self, model: nn.Module, spec: TargetSpec, layer_ids: tuple[int, ...]) -> None:
        self.spec, self.layer_ids = spec, layer_ids
        self.round_features: Callable[[Tensor], Tensor] | None = None
        self.model = model.eval().requires_grad_(False)
        model.set_attn_implementation(ATTENTION)  # type: ignore[operator]
        keep_blocks(model)
        self.backbone = model.get_decoder()  # type: ignore[operator]
        self.layers: nn.ModuleList = self.backbone.layers
        assert len(self.layers) == spec.num_layers, f"{len(self.layers)} layers found, config says {spec.num_layers}"
        self.head: Tensor = _whole(model.get_output_embeddings().weight)  # type: ignore[operator]
        self.embedding: Tensor = _whole(model.get_input_embeddings().weight)  # type: ignore[operator]
        config = self.backbone.config.to_dict()  # families without windows have neither key
        window = config.get("sliding_window")
        # Without layer types (Mistral, Phi-3) a window holds in every layer, and the backbone takes one mask for all.
        self.one_mask = not config.get("layer_types")
        everywhere = "full_attention" if window is None else "sliding_attention"
        self.layer_types = {everywhere} if self.one_mask else set(config["layer_types"])
        self.sliding_window: int | None = window if "sliding_attention" in self.layer_types else None
        if unknown := self.layer_types - {"full_attention", "sliding_attention"}:
            raise ValueError(f"target has {sorted(unknown)} layers, whose state cannot be rolled back; not supported")
        for index in layer_ids:
            if not 0 <= index < spec.num_layers:
                raise ValueError(f"target.layer_ids must be in 0..{spec.num_layers - 1}, got {list(layer_ids)}")

    @property
    def device(self) -> torch.device:
        return self.head.device

    def capturing(
        self, layer_ids: tuple[int, ...], round_features: Callable[[Tensor], Tensor] | None = None
    ) -> "Target":
        """The same weights, read out at other layers, with features [..., L*D] passed through `round_features`."""
        other = copy.copy(self)
        other.layer_ids, other.round_features = layer_ids, round_features
        return other

    def new_cache(self, batch_size: int, capacity: int, *, is_static: bool = False) -> KVCache:
        return KVCache(len(self.layers), batch_size, capacity, self.device, is_static=is_static)

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        cache: KVCache,
        *,
        with_features: bool = True,
        parents: Tensor | None = None,
        counts: Tensor | None = None,
        replay: bool = False,
    ) -> TargetOutput:
        """Run input_ids [B, Q] behind each row's committed slots. Rows commit with `cache.advance(counts)`.

        Rows with fewer than Q tokens are padded at the end with any id; their surplus is simply not committed, and with
        `counts` [B] not computed either. With `parents` [B, Q - 1] all but the first are nodes of a tree behind it, and
        a path is committed by `cache.keep_path`. `replay`: as a CUDA graph of a static cache, recorded at the first
        step of its shape; the next step overwrites the output.
        """
        tokens = None
        if counts is not None:
            tokens = torch.arange(input_ids.shape[1], device=counts.device) < counts[:, None]
        slots = positions = cache.begin(input_ids.shape[1], tokens)
        if replay and tokens is None and parents is None:
            key = (tuple(input_ids.shape), with_features, self.layer_ids)
            if key not in cache.replays:
                cache.replays[key] = Replay(partial(self._step, cache, with_features), input_ids, slots)
            return TargetOutput(*cache.replays[key](input_ids, slots))
        reach = None
        if parents is not None:
            reach = ancestors(torch.cat((torch.full_like(parents[:, :1], -1), parents + 1), dim=1))
            positions = slots[:, :1] + reach.sum(-1) - 1
        masks = self._masks(cache.visible(reach), positions, slots)
        if tokens is None:
            return self._run_cached(with_features, input_ids, positions, masks, cache)
        output = self._run_cached(with_features, input_ids[tokens][None], positions[tokens][None], masks, cache)
        return TargetOutput(spread(output.hidden[0], tokens), spread(output.features[0], tokens), tokens)

    def _step(self, cache: KVCache, with_features: bool, input_ids: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """`forward` as a function of tensors [B, Q] alone."""
        cache.open(slots)
        output = self._run_cached(with_features, input_ids, slots, self._masks(cache.visible(), slots, slots), cache)
        return output.hidden, output.features

    def _run_cached(
        self, with_features: bool, input_ids: Tensor, positions: Tensor, masks: Any, cache: KVCache
    ) -> TargetOutput:
        layers = Cache(layers=[CacheLayer(cache, index) for index in range(len(self.layers))])
        inputs = {"input_ids": input_ids, "position_ids": positions, "attention_mask": masks}
        return self._run(with_features, **inputs, cache=layers, use_cache=True)

    @torch.inference_mode()
    def forward_whole(self, input_ids: Tensor) -> TargetOutput:
        """Run right-padded sequences [B, S] from position 0 without a cache (causality hides padding that follows)."""
        return self._run(True, input_ids=input_ids, use_cache=False)

    def logits(self, hidden: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Float32 logits [..., V] of final-normed states [..., D], soft-capped where the target does so. With `tokens`
        [...] bool zero elsewhere, and not computed."""
        if tokens is not None:
            return spread(self.logits(hidden[tokens]), tokens)
        logits = linear(hidden.to(self.head.dtype), self.head).float()
        cap = self.spec.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _run(self, with_features: bool, **inputs: Any) -> TargetOutput:
        with _capture(self.layers, self.layer_ids if with_features else ()) as captured:
            hidden = self.backbone(**inputs).last_hidden_state
        features = torch.cat([captured[i] for i in self.layer_ids], dim=-1) if captured else hidden[..., :0]
        if captured and self.round_features is not None:
            features = self.round_features(features)
        return TargetOutput(hidden=hidden, features=features)

    def _masks(self, visible: Tensor, positions: Tensor, slots: Tensor) -> Tensor | dict[str, Tensor]:
        """`positions` [B, Q] of the step's queries, which stand in `slots` [B, Q]; they differ in a tree."""
        if self.sliding_window is None:
            return visible
        places = torch.arange(visible.shape[-1], device=visible.device).expand(len(slots), -1)
        places = places.scatter(1, slots, positions)
        recent = (places[:, None] > positions[..., None] - self.sliding_window)[:, None]
        windowed = visible & recent
        return windowed if self.one_mask else {"full_attention": visible, "sliding_attention": windowed}


def _whole(weight: Tensor) -> Tensor:
    """Gathered where processes share the target: the layers are what does not fit on one device."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight.detach()


def pad_rows(rows: Sequence[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Right-padded ids [B, S] and counts [B]; the padding is never looked at."""
    counts = torch.tensor([len(row) for row in rows], device=device)
    width = int(counts.max())
    return torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device), counts


@contextmanager
def _capture(layers: nn.ModuleList, layer_ids: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
    captured: dict[int, Tensor] = {}

    def hook_for(index: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Tensor | tuple[Tensor, ...]) -> None:
            captured[index] = output if isinstance(output, Tensor) else output[0]

        return hook

    handles = [layers[index].register_forward_hook(hook_for(index)) for index in layer_ids]
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()


def load_target(
    config: TargetConfig,
    device: torch.device,
    *,
    layer_ids: tuple[int, ...] | None = None,
    mesh: DeviceMesh | None = None,
) -> Target:
    """Load weights by Hugging Face name or local folder. `layer_ids` overrides the config's; the `tp_size` processes of
    `mesh` share one copy by the plan that transformers has for the model.

    Raises ValueError where the model treats embedding or logits in a way that a drafter would not follow, and where it
    cannot be shared.
    """
    spec = load_spec(config)
    check_sharing(config, spec, mesh)
    model = load_model(config, device, mesh)
    if mesh is not None and not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError(
            f"target.tp_size={config.tp_size}: transformers has no tensor-parallel plan for {spec.model_type}; "
            "use target.tp_size=1"
        )
    if layer_ids is None:
        layer_ids = feature_layer_ids(config, spec)
    target = Target(model, spec, layer_ids)
    _check_conventions(target, config)
    return target


def load_model(config: TargetConfig, device: torch.device, mesh: DeviceMesh | None = None) -> nn.Module:
    """The target as transformers loads it."""
    options: dict[str, Any] = {} if mesh is None else {"tp_plan": "auto", "device_mesh": mesh}
    if config.quantization is not None:
        options["quantization_config"] = _quantization_config(config.quantization)
    is_quantised = quantization_of(config) is not None  # then it is made on its device, and stays there
    if is_quantised:
        options["device_map"] = {"": device}
    model: nn.Module = AutoModelForCausalLM.from_pretrained(config.path, dtype=dtype_of(config.dtype), **options)
    if not is_quantised:
        model.to(device)  # pyright: ignore[reportArgumentType] (a decorator hides the method's signature)
    return model


def check_sharing(config: TargetConfig, spec: TargetSpec, mesh: DeviceMesh | None) -> None:
    if config.tp_size > 1 and mesh is None:
        raise ValueError(
            f"target.tp_size={config.tp_size}: only extract.py shares a target between processes; use target.tp_size=1"
        )
    if spec.num_heads % config.tp_size or spec.num_kv_heads % config.tp_size:
        raise ValueError(
            f"target.tp_size={config.tp_size} does not divide the target's {spec.num_heads} heads and "
            f"{spec.num_kv_heads} key/value heads"
        )


def _check_conventions(target: Target, config: TargetConfig) -> None:
    """A few tokens through the whole model: a drafter knows of it embedding, scale, head and soft-cap only."""
    ids = torch.arange(8, device=target.device)[None] % target.spec.vocab_size
    seen: list[Tensor] = []
    with torch.inference_mode():
        with target.layers[0].register_forward_pre_hook(lambda _layer, inputs: seen.append(inputs[0])):
            logits = target.model(input_ids=ids, use_cache=False).logits
        embedded = target.embedding[ids] * target.spec.embedding_scale
        pairs = {
            f"embedding * {target.spec.embedding_scale:g} is not the first layer's input": (embedded, seen[0]),
            "head and soft-cap do not give its logits": (target.logits(target.forward_whole(ids).hidden), logits),
        }
    differing = []
    for what, (ours, own) in pairs.items():
        error, largest = (ours.float() - own.float()).abs().max().item(), own.abs().max().item()
        # bfloat16 rounds scale, logits and cap one by one: up to three roundings of 0.4 %.
        if not error <= max(1e-4, 4 * torch.finfo(own.dtype).eps) * largest:
            differing.append(f"{what} (off by {error:.2g} of {largest:.2g})")
    if differing:
        raise ValueError(
            f"target {config.name} ({target.spec.model_type}): {'; '.join(differing)}. It has a multiplier, a logit "
            "scale or a head bias that drafters do not know of; not supported"
        )


def load_hf_config(config: TargetConfig) -> Any:
    _check_folder(config)
    try:
        return AutoConfig.from_pretrained(config.path)
    except OSError as error:
        raise ValueError(f"target.path={config.path}: no such folder or Hugging Face name ({error})") from error


def quantization_of(config: TargetConfig) -> dict[str, Any] | None:
    """How its weights are quantised, as asked for or as its files are; None where they are not."""
    return config.quantization or load_hf_config(config).to_dict().get("quantization_config")


def quantization_name(config: TargetConfig) -> str | None:
    """In words, for reports."""
    found = quantization_of(config)
    if found is None:
        return None
    options = {name: value for name, value in found.items() if name != "quant_method" and value and name[0] != "_"}
    return f"{found.get('quant_method')} ({', '.join(f'{name}={value}' for name, value in options.items())})"


def _quantization_config(options: dict[str, Any]) -> Any:
    """Raises ValueError on what transformers does not know, or a method whose package is not there."""
    try:
        return AutoQuantizationConfig.from_dict(dict(options))
    except (ValueError, TypeError, KeyError, ImportError, AssertionError) as error:
        raise ValueError(f"target.quantization={options}: {error}") from error


def load_spec(config: TargetConfig) -> TargetSpec:
    """The target's sizes and stop ids without its weights."""
    spec = TargetSpec.from_config(load_hf_config(config))
    return replace(spec, eos_token_ids=stop_token_ids(config, spec))


def load_tokenizer(config: TargetConfig) -> PreTrainedTokenizerBase:
    _check_folder(config)
    return AutoTokenizer.from_pretrained(config.path)


def stop_token_ids(config: TargetConfig, spec: TargetSpec) -> tuple[int, ...]:
    """generation_config's list where there is one (it may hold an end-of-turn id that config.json lacks)."""
    from transformers import GenerationConfig

    try:
        eos = GenerationConfig.from_pretrained(config.path).eos_token_id
    except OSError:
        return spec.eos_token_ids
    if eos is None:
        return spec.eos_token_ids
    return tuple(eos) if isinstance(eos, list) else (eos,)


def feature_layer_ids(config: TargetConfig, spec: TargetSpec) -> tuple[int, ...]:
    """The config's layer ids, or five from the second to the third-to-last layer (DFlash paper, section 3)."""
    if config.layer_ids is not None:
        return tuple(config.layer_ids)
    return spread_layer_ids(spec.num_layers, min(5, max(1, spec.num_layers - 4)))


def choose_mask_token(config: TargetConfig, spec: TargetSpec, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The config's id, else the first embedding row that no token uses, else None (a block drafter refuses that)."""
    if config.mask_token_id is not None:
        return config.mask_token_id
    return len(tokenizer) if len(tokenizer) < spec.vocab_size else None


def target_identity(config: TargetConfig) -> TargetIdentity:
    """Hashes of config and weights of a local folder; of the config only where weights are not local files."""
    hf_config = load_hf_config(config)
    text = hf_config.to_json_string(use_diff=False)
    # where the folder lies and which version read it do not make another target
    stable = "\n".join(x for x in text.splitlines() if not x.strip().startswith(('"_name_or_path"', '"transformers_v')))
    folder = Path(config.path)
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    weights = sha256_text("\n".join(sha256_file(path) for path in files)) if files else ""
    return TargetIdentity(config.name, sha256_text(stable), weights)


def _check_folder(config: TargetConfig) -> None:
    looks_local = config.path.startswith((".", "/", "~", "outputs/")) or config.path.count("/") > 1
    if looks_local and not (Path(config.path) / "config.json").is_file():
        raise ValueError(f"target.path={config.path}: no config.json there; give a folder of a Hugging Face model")


def dtype_of(name: str) -> torch.dtype:
    """Raises ValueError on a name that no target can be run in."""
    choices = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in choices:
        raise ValueError(f"dtype must be one of {', '.join(choices)}, got {name}")
    return choices[name]
