"""Parts of a layer with gradients: the values of the kernels, the gradients of autograd."""

from __future__ import annotations

import numpy as np
import torch

from kernels.ops import mix as kernel_mix
from kernels.ops.quant import fp8_qdq
from kernels.ops.rope import Rotation, frequencies, rotate_
from run.train.layers import Mix, Turn, collapse, expand, product, rotate, rounded_inputs, sinkhorn, straight_through


def test_sinkhorn_has_the_values_of_the_kernel() -> None:
    logits = torch.randn(50, 4, 4) * 2
    want = kernel_mix.sinkhorn(logits.numpy().copy(), 1e-6, 20)
    assert np.allclose(sinkhorn(logits, 1e-6, 20).numpy(), want, atol=2e-6)


def test_sinkhorn_has_the_gradient_of_its_divisions() -> None:
    torch.manual_seed(1)
    logits = (torch.randn(200, 4, 4) + 1.5 * torch.eye(4)).double().requires_grad_()
    weights = torch.randn(200, 4, 4).double()
    values = torch.softmax(logits, 2) + 1e-6
    for number in range(39):
        values = values / (values.sum(1 + number % 2, keepdim=True) + 1e-6)
    (want,) = torch.autograd.grad((values * weights).sum(), logits)
    (found,) = torch.autograd.grad((sinkhorn(logits, 1e-6, 20) * weights).sum(), logits)
    assert (found - want).norm() < 0.01 * want.norm()
    assert abs(float(found.sum())) < 1e-4  # a constant added to all logits changes nothing


def test_what_is_rounded_keeps_its_gradient() -> None:
    x = torch.randn(4, 32, requires_grad=True)
    out = straight_through(x, fp8_qdq)
    assert torch.equal(out, fp8_qdq(x.detach().clone())) and not torch.equal(out, x)
    (3 * out).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 3))


def test_products_read_rounded_inputs_only_where_asked() -> None:
    x, weight = torch.randn(4, 32), torch.randn(8, 32)
    with rounded_inputs():
        rounded = product(x, weight)
    assert torch.equal(product(x, weight), x @ weight.T)
    assert torch.equal(rounded, fp8_qdq(x.clone()) @ weight.T) and not torch.equal(rounded, x @ weight.T)


def test_rotation_is_that_of_the_kernel_and_turns_back() -> None:
    freqs, positions = frequencies(16, 10000.0, None), torch.arange(40, 50)
    x = torch.randn(10, 3, 64)
    turn = Turn.at(positions.unsqueeze(0), freqs)
    found = rotate(x.unsqueeze(0), turn)
    assert torch.allclose(found[0], rotate_(x.clone(), Rotation.at(positions, freqs)), atol=1e-6)
    assert torch.allclose(rotate(found, turn.back())[0], x, atol=1e-5)


def test_streams_are_collapsed_and_expanded_as_by_the_kernel() -> None:
    streams, y, pre, post, comb = (torch.randn(6, *shape) for shape in ((4, 32), (32,), (4,), (4,), (4, 4)))
    assert torch.allclose(collapse(streams, pre), kernel_mix.collapse(streams, pre, lambda x: x), atol=1e-5)
    want = kernel_mix.expand(y, streams, kernel_mix.Mix(pre, post, comb), lambda x: x)
    assert torch.allclose(expand(y, streams, Mix(pre, post, comb)), want, atol=1e-5)
