from __future__ import annotations

import pytest
import torch
from torch import nn

from edge.engine.layers import Linear, PackedLinear, RmsNorm, pack

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 8, 64])
def test_a_packed_linear_computes_the_same(dtype: torch.dtype, bias: bool, num_rows: int) -> None:
    torch.manual_seed(0)
    linear = Linear(48, 80, bias=bias, dtype=dtype, device=CPU)
    for parameter in linear.parameters():
        parameter.copy_(torch.randn_like(parameter))
    x = torch.randn(num_rows, 48).to(dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 0.2
    torch.testing.assert_close(PackedLinear(linear)(x), linear(x), atol=tolerance, rtol=0)


def test_pack_swaps_every_linear_and_nothing_else() -> None:
    model = nn.ModuleDict(
        {
            "a": Linear(4, 4, bias=False, dtype=torch.float32, device=CPU),
            "b": nn.ModuleList([Linear(4, 4, bias=True, dtype=torch.float32, device=CPU)]),
            "c": RmsNorm(4, 1e-5, dtype=torch.float32, device=CPU),
        }
    )
    pack(model)
    assert [type(module) for module in model.modules()] == [
        nn.ModuleDict,
        PackedLinear,
        nn.ModuleList,
        PackedLinear,
        RmsNorm,
    ]
