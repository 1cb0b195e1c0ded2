"""ZeRO-3's linear function takes a weight that is a vector."""

import pytest
import torch
from torch.nn import functional


def gradients(weight, bias=None):
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    functional.linear(x, weight, bias).square().sum().backward()
    return x.grad


@pytest.mark.parametrize("shape", [(3,), (2, 3)])
def test_vectors_and_matrices_give_torchs_gradients(monkeypatch, shape):
    from deepspeed.runtime.zero.linear import zero3_linear_wrap
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses

    from engine.zero.linear import guard_linear

    weight, plain = torch.randn(shape, generator=torch.Generator().manual_seed(1)), torch._C._nn.linear
    monkeypatch.setattr(functional, "linear", plain)
    expected = gradients(weight)
    guard_linear()
    assert functional.linear is plain  # DeepSpeed has not replaced it
    for _ in range(2):  # two engines, one after the other; DeepSpeed keeps what it finds
        monkeypatch.setattr(InsertPostInitMethodToModuleSubClasses, "linear_bk", functional.linear, raising=False)
        monkeypatch.setattr(functional, "linear", zero3_linear_wrap)
        guard_linear()
        assert functional.linear is not zero3_linear_wrap
        torch.testing.assert_close(gradients(weight), expected)
