"""Building the drafter that a run trains: sizes from the target, frozen tensors bound, optional warm start."""

from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from models.base import Drafter
from models.target import TargetConfig, choose_mask_token, feature_layer_ids, load_frozen, load_spec, read_tensors


def build_drafter(
    model: Any,
    target: TargetConfig,
    tokenizer: PreTrainedTokenizerBase,
    accelerator: Accelerator,
    warm_start: bool,
) -> Drafter:
    """`model` is the drafter's typed config. Only embedding and head of the target are read, not the whole model."""
    spec = load_spec(target)
    drafter: Drafter = model.build(
        spec,
        target_layer_ids=feature_layer_ids(target, spec),
        mask_token_id=choose_mask_token(target, spec, tokenizer),
    )
    if warm_start:
        start_from_target(drafter, target)
    embedding, head = (tensor.to(accelerator.device) for tensor in load_frozen(target, spec))
    return drafter.bind(embedding, head)


def start_from_target(drafter: Drafter, target: TargetConfig) -> None:
    """Copy the target's last decoder layers and its final norm into the drafter's, by Hugging Face names.

    Parameters that the target lacks (q/k norms, say) keep their initial value. Raises ValueError where nothing fits.
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
    found = read_tensors(target, tuple(names))
    misshaped = [name for name, tensor in found.items() if tensor.shape != names[name].shape]
    if not found or misshaped:
        raise ValueError(
            f"warm_start=true: target.path={target.path} has no tensors of the drafter's shapes {misshaped}"
        )
    for name, tensor in found.items():
        names[name].data.copy_(tensor)
