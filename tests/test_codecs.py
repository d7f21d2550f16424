"""Codecs: rounding bounded per vector, sizes as promised, and nothing of a vector in another's scale."""

from typing import Any

import pytest
import torch
from torch import Tensor

import data.codecs as codecs_module
from data.codecs import BLOCK_SIZE, CODECS, NORMAL_FLOAT, bytes_per_vector, decode, encode, find_codec, round_trip
from tests.conftest import planted_fault

D, G = 64, 3
ROUNDING = ["bf16", "fp8", "nf4"]


def hidden_states(num_tokens: int = 200) -> Tensor:
    """[N, G*D] with outlier channels and vectors of very different sizes, as targets have them."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(num_tokens, G, D, generator=generator)
    values[:, :, 5] *= 40
    values *= 10 ** torch.empty(num_tokens, G, 1).uniform_(-3, 4, generator=generator)
    return values.flatten(1)


def stored(values: Tensor, name: str) -> dict[str, Tensor]:
    return encode("x", values, CODECS[name], D)


def restored(tensors: dict[str, Tensor], name: str) -> Tensor:
    return decode("x", lambda key: tensors[key], CODECS[name], G)


@pytest.mark.parametrize("name", CODECS)
def test_every_value_comes_back_within_the_stated_share_of_its_vectors_largest(name: str) -> None:
    values = hidden_states()
    back = restored(stored(values, name), name).float()
    largest = values.unflatten(1, (G, D)).abs().amax(-1, keepdim=True)
    error = (back - values).unflatten(1, (G, D)).abs() / largest
    assert error.max() <= CODECS[name].tolerance
    if name != "float32":
        assert error.max() > CODECS[name].tolerance / 4, "a bound that nothing comes near says nothing"


def test_the_bounds_notice_a_scale_that_vectors_share(monkeypatch: pytest.MonkeyPatch) -> None:
    right = CODECS["fp8"].encode

    def shared(_codec: Any, values: Tensor) -> dict[str, Tensor]:
        return right(values) | {".scale": right(values)[".scale"].amax().expand(values.shape[:2])}

    with planted_fault(monkeypatch, codecs_module.Fp8, "encode", shared):
        test_every_value_comes_back_within_the_stated_share_of_its_vectors_largest("fp8")


@pytest.mark.parametrize("name", ROUNDING)
def test_rounding_a_second_time_changes_nothing(name: str) -> None:
    """Up to one step of bfloat16: what was read may be stored again, and a resumed run compares equal."""
    once = round_trip(hidden_states(), CODECS[name], D)
    torch.testing.assert_close(round_trip(once, CODECS[name], D), once, atol=0, rtol=2**-7)


@pytest.mark.parametrize("name", CODECS)
def test_a_vector_is_stored_alike_whatever_stands_beside_it(name: str) -> None:
    values = hidden_states()
    whole = stored(values, name)
    for key, tensor in stored(values[7:9], name).items():
        assert torch.equal(tensor.view(torch.uint8), whole[key][7:9].contiguous().view(torch.uint8)), key


@pytest.mark.parametrize("name", CODECS)
def test_zero_vectors_come_back_as_zeros(name: str) -> None:
    assert not restored(stored(torch.zeros(2, G * D), name), name).any()


@pytest.mark.parametrize(("name", "share"), [("bf16", 1.0), ("fp8", 0.5035), ("nf4", 0.2847)])
def test_a_vector_takes_the_bytes_that_the_estimate_says(name: str, share: float) -> None:
    """Shares of bfloat16 at the embedded target's hidden size."""
    values = torch.randn(5, 576)
    taken = sum(tensor.nbytes for tensor in encode("x", values, CODECS[name], 576).values()) / 5
    assert taken == bytes_per_vector(CODECS[name], 576)
    assert taken / (2 * 576) == pytest.approx(share, abs=1e-4)


def test_four_bit_codes_are_the_nearest_levels() -> None:
    """Against a search over all sixteen, in blocks whose scale is exact."""
    generator = torch.Generator().manual_seed(1)
    values = torch.rand(50, BLOCK_SIZE, generator=generator) * 2 - 1
    values[:, 0] = 1.0
    back = round_trip(values, CODECS["nf4"], BLOCK_SIZE).float()
    nearest = NORMAL_FLOAT[(values[..., None] - NORMAL_FLOAT).abs().argmin(-1)]
    torch.testing.assert_close(back, nearest, atol=0, rtol=2**-8)


def test_an_unknown_codec_is_named_with_the_choices() -> None:
    with pytest.raises(ValueError, match="feature_dtype=int3 is unknown; choose one of float32, bf16, fp8, nf4"):
        find_codec("int3", "feature_dtype")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CODECS)
def test_rounding_on_a_gpu_is_that_of_the_cpu(name: str) -> None:
    values = hidden_states()
    here, there = stored(values, name), encode("x", values.cuda(), CODECS[name], D)
    for key, tensor in here.items():
        assert torch.equal(tensor.view(torch.uint8), there[key].view(torch.uint8)), key
    assert torch.equal(round_trip(values.cuda(), CODECS[name], D).cpu(), round_trip(values, CODECS[name], D))
