"""Products with weights that are kept in blocks are torch's own, whatever becomes of the weight."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import packed
from models.packed import MOST_ROWS, Blocks, Linear, keep_blocks, linear
from tests.tiny_families import FAMILIES, build, check_close, random_ids

pytestmark = pytest.mark.skipif(not packed._dtypes(), reason="this processor has no such products")
DTYPES = sorted(packed._dtypes(), key=str)


@pytest.fixture(autouse=True)
def small_weights_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "FEWEST_ELEMENTS", 0)


def check_product(x: Tensor, weight: Tensor, ours: Tensor, bias: Tensor | None = None) -> None:
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert ours.dtype is x.dtype
    error = (ours.double() - exact).abs().max() if ours.numel() else 0.0
    assert error <= 4 * torch.finfo(x.dtype).eps * max(1.0, exact.abs().max().item() if exact.numel() else 0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (5,), (2, 3), (0,), (3, 0), (MOST_ROWS,), (MOST_ROWS + 1,)], ids=str)
def test_a_product_is_the_ordinary_one(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(*size, 48, generator=generator).to(dtype) for size in ((40,), shape))
    layer = Linear(48, 40, dtype=dtype).requires_grad_(False)
    layer.weight.copy_(weight)
    with torch.no_grad():
        check_product(x, weight, linear(x, weight))
        check_product(x, weight, layer(x), layer.bias)
        assert ((layer.blocks is not None) and (weight in packed._shared)) is (0 < x.numel() <= MOST_ROWS * 48)


def test_blocks_are_made_once_and_again_where_the_weight_changes() -> None:
    layer, x = Linear(16, 8, bias=False), torch.ones(2, 16)
    with torch.no_grad():
        layer(x)
        first = layer.blocks
        assert layer(x) is not None and layer.blocks is first
        layer.weight.mul_(2.0)
        check_product(x, layer.weight, layer(x))
        assert layer.blocks is not first
        layer.weight.data = torch.randn(8, 16)
        check_product(x, layer.weight, layer(x))
        layer.weight = nn.Parameter(torch.randn(8, 16))
        check_product(x, layer.weight, layer(x))
        head = torch.randn(8, 16)
        linear(x, head)
        head.add_(1.0)
        check_product(x, head, linear(x, head))
    with torch.inference_mode():
        made = torch.randn(8, 16)  # has no version
        check_product(x, made, linear(x, made))


def test_gradients_flow_as_through_torchs_own() -> None:
    layer, own = Linear(6, 4), nn.Linear(6, 4)
    own.load_state_dict(layer.state_dict())
    x = torch.randn(3, 6)
    for one in (layer, own):
        one(x).pow(2).sum().backward()
    assert layer.blocks is None
    assert torch.equal(layer.weight.grad, own.weight.grad)


def test_autocast_decides_on_types_as_it_does_of_torchs_own() -> None:
    layer, x = Linear(6, 4), torch.randn(3, 6)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype is torch.bfloat16 and linear(x, layer.weight).dtype is torch.bfloat16


def test_copies_conversions_and_state_are_those_of_an_ordinary_layer() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 4))
    keys = list(model.state_dict())
    keep_blocks(model)
    x = torch.randn(2, 6)
    with torch.no_grad():
        expected = model(x)
        assert isinstance(model[0].blocks, Blocks) and list(model.state_dict()) == keys
        other = copy.deepcopy(model)
        assert other[0].blocks is None
        torch.testing.assert_close(other(x), expected)
        torch.testing.assert_close(other.double()(x.double()), expected.double(), rtol=1e-5, atol=1e-6)


def test_layers_of_other_classes_stay_as_they_are() -> None:
    class Own(nn.Linear):
        pass

    model = nn.ModuleList([Own(2, 2), nn.Linear(2, 2), nn.Embedding(2, 2)])
    keep_blocks(model)
    assert [type(child) for child in model] == [Own, Linear, nn.Embedding]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_is_the_same_with_its_weights_in_blocks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, ids = build(family), random_ids(2, 20)
    blocks = target.forward_whole(ids), target.logits(target.forward_whole(ids).hidden)
    assert any(isinstance(m, Linear) and m.blocks is not None for m in target.layers.modules())
    monkeypatch.setattr(packed, "FEWEST_ELEMENTS", 2**60)
    plain = target.forward_whole(ids), target.logits(target.forward_whole(ids).hidden)
    check_close(blocks[0].hidden, plain[0].hidden)
    check_close(blocks[0].features, plain[0].features)
    check_close(blocks[1], plain[1])


def test_small_weights_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "FEWEST_ELEMENTS", 48)
    with torch.no_grad():
        for size, has_blocks in ((5, False), (6, True)):
            layer = Linear(8, size)
            layer(torch.randn(1, 8))
            assert (layer.blocks is not None) is has_blocks
