"""How a store keeps hidden states: as they are, as 8-bit floats, or as 4-bit codes.

A codec turns vectors [N, G, D] (G layers side by side) into named tensors with N rows each, so that a record is read by
slices, and back. Scales belong to one vector or to a part of one: rounding never mixes tokens or layers.

bf16, float32   the values themselves
fp8             e4m3 of each vector divided by (its largest value / 448); the scale is float32
nf4             the 16 levels of NormalFloat (Dettmers et al. 2023, appendix E) in blocks of 16 values, two codes a
                byte, the first in its high half; the scale of a block is its largest value as e4m3, relative to that of
                the vector's largest block / 448, which is float32
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
BLOCK_SIZE = 16
NORMAL_FLOAT = torch.tensor(
    [
        *(-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0),
        *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
    ]
)


class Codec(Protocol):
    @property
    def scale_dtype(self) -> str | None: ...

    @property
    def tolerance(self) -> float:
        """Bound of a value's rounding error, as a share of the largest value of its vector."""
        ...

    @property
    def median_tolerance(self) -> float:
        """Bound of the median of a vector's rounding errors, each as a share of its value."""
        ...

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Names of the stored tensors behind the name of the values; the first is empty."""
        ...

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        """[N, G, D] of any float type -> tensors of N rows by suffix."""
        ...

    def decode(self, stored: Mapping[str, Tensor], num_vectors: int) -> Tensor:
        """Inverse of `encode` up to rounding, [N, G*D]: float32 for the codec of that name, else bfloat16."""
        ...


@dataclass(frozen=True)
class Plain:
    dtype: torch.dtype
    tolerance: float
    median_tolerance: float
    scale_dtype: str | None = None
    suffixes: tuple[str, ...] = ("",)

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        return {"": values.to(self.dtype).flatten(1)}

    def decode(self, stored: Mapping[str, Tensor], num_vectors: int) -> Tensor:  # noqa: ARG002
        return stored[""]


@dataclass(frozen=True)
class Fp8:
    scale_dtype: str | None = "float32"
    tolerance: float = 0.045  # half a step at the top of the range is 16 of 448; what is read back is rounded again
    median_tolerance: float = 0.06
    suffixes: tuple[str, ...] = ("", ".scale")

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        values = values.float()
        scale = _nonzero(values.abs().amax(-1) / E4M3_MAX)  # [N, G]
        return {"": (values / scale[..., None]).to(E4M3).flatten(1), ".scale": scale}

    def decode(self, stored: Mapping[str, Tensor], num_vectors: int) -> Tensor:
        codes = stored[""].unflatten(1, (num_vectors, -1))
        return (codes.float() * stored[".scale"][..., None]).to(torch.bfloat16).flatten(1)


@dataclass(frozen=True)
class Nf4:
    scale_dtype: str | None = "float8_e4m3fn"
    tolerance: float = 0.2  # half the widest gap between levels is 0.152; a block's scale is off by up to 1/16
    median_tolerance: float = 0.3
    suffixes: tuple[str, ...] = ("", ".scale", ".row_scale")

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        blocks = values.float().unflatten(-1, (-1, BLOCK_SIZE))  # [N, G, D/16, 16]
        largest = blocks.abs().amax(-1)
        row_scale = _nonzero(largest.amax(-1) / E4M3_MAX)  # [N, G]
        scale = (largest / row_scale[..., None]).to(E4M3)  # [N, G, D/16]
        unit = _nonzero(scale.float() * row_scale[..., None])
        levels = NORMAL_FLOAT.to(values.device)
        borders = (levels[1:] + levels[:-1]) / 2
        codes = torch.bucketize(blocks / unit[..., None], borders).to(torch.uint8).flatten(1)  # [N, G*D]
        return {"": codes[:, 0::2] << 4 | codes[:, 1::2], ".scale": scale.flatten(1), ".row_scale": row_scale}

    def decode(self, stored: Mapping[str, Tensor], num_vectors: int) -> Tensor:
        packed = stored[""]
        codes = torch.stack((packed >> 4, packed & 15), dim=-1).flatten(1)  # [N, G*D]
        scale = stored[".scale"].float().unflatten(1, (num_vectors, -1)) * stored[".row_scale"][..., None]
        blocks = NORMAL_FLOAT.to(packed.device)[codes.int()].unflatten(1, (-1, BLOCK_SIZE))
        return (blocks * scale.flatten(1)[..., None]).to(torch.bfloat16).flatten(1)


def _nonzero(scale: Tensor) -> Tensor:
    """Zero vectors divide by one."""
    return torch.where(scale > 0, scale, 1.0)


CODECS: dict[str, Codec] = {
    "float32": Plain(torch.float32, tolerance=0.0, median_tolerance=0.0),
    "bf16": Plain(torch.bfloat16, tolerance=2**-8, median_tolerance=2**-8),
    "fp8": Fp8(),
    "nf4": Nf4(),
}


def find_codec(name: str, option: str) -> Codec:
    """Raises ValueError that names the option and the choices."""
    if name not in CODECS:
        raise ValueError(f"{option}={name} is unknown; choose one of {', '.join(CODECS)}")
    return CODECS[name]


def encode(name: str, values: Tensor, codec: Codec, hidden_size: int) -> dict[str, Tensor]:
    """Stored tensors of values [N, G*D] under `name`, on the CPU."""
    encoded = codec.encode(values.unflatten(-1, (-1, hidden_size)))
    return {name + suffix: tensor.to("cpu").contiguous() for suffix, tensor in encoded.items()}


def decode(name: str, read: Callable[[str], Tensor], codec: Codec, num_vectors: int) -> Tensor:
    """Inverse of `encode` up to rounding; `read` gives one record's rows of a stored tensor."""
    return codec.decode({suffix: read(name + suffix) for suffix in codec.suffixes}, num_vectors)


def bytes_per_vector(codec: Codec, hidden_size: int) -> int:
    """What one vector [D] takes."""
    return sum(tensor.nbytes for tensor in codec.encode(torch.zeros(1, 1, hidden_size)).values())


def round_trip(values: Tensor, codec: Codec, hidden_size: int) -> Tensor:
    """Values [..., G*D] as training would read them from a store of this codec."""
    flat = values.reshape(-1, values.shape[-1])
    stored = codec.encode(flat.unflatten(-1, (-1, hidden_size)))
    return codec.decode(stored, values.shape[-1] // hidden_size).view(values.shape)
