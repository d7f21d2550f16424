"""Where `tests/gpu_check.py` runs and how large: Qwen3-4B's sizes on a GPU, or small ones."""

from dataclasses import dataclass, replace

import torch

from models.spec import TargetSpec

QWEN3_4B = TargetSpec(
    model_type="qwen3",
    vocab_size=151_936,
    hidden_size=2560,
    intermediate_size=9728,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    global_head_dim=128,
    num_global_kv_heads=8,
    keys_are_values=False,
    hidden_act="silu",
    rms_norm_eps=1e-6,
    max_position_embeddings=40_960,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    logit_softcap=None,
    embedding_scale=1.0,
    tie_embeddings=True,
    initializer_range=0.02,
    bos_token_id=None,
    eos_token_ids=(151_645,),
    pad_token_id=None,
)
SMALL = replace(
    QWEN3_4B, vocab_size=499, hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, head_dim=32,
    eos_token_ids=(7,),
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """Where and how large."""

    device: torch.device
    spec: TargetSpec
    lengths: tuple[int, ...]  # tokens of the chats of a packed row
    num_anchors: int  # of a chat
    num_steps: int  # timed ones
    is_tiny: bool

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)


FULL_LENGTHS = (1250, 1050, 920, 876)  # 4096 in all, as the published setting packs them
TINY_LENGTHS = (41, 30, 25)


def setting_of(device: str, *, tiny: bool) -> Setting:
    """Raises ValueError where the device is not there, or is a CPU and the sizes are a GPU's."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda: torch sees no GPU here; --device cpu --tiny runs the same code small")
    if device == "cpu" and not tiny:
        raise ValueError("device=cpu: the full sizes are for a GPU; add --tiny")
    if tiny:
        return Setting(torch.device(device), SMALL, TINY_LENGTHS, num_anchors=6, num_steps=1, is_tiny=True)
    return Setting(torch.device(device), QWEN3_4B, FULL_LENGTHS, num_anchors=512, num_steps=5, is_tiny=False)
