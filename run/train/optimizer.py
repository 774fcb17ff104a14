"""Muon for matrices (momentum made orthogonal, which needs fewer tokens), Adam for everything else."""

from __future__ import annotations

from typing import Any

import torch

from kernels.config import ModelConfig
from run.train.parameters import Parameters, stacked

_MOMENTUM = 0.95
_BETAS = (0.9, 0.98)
_BY_MUON = ("attention", "compressor", "shared expert", "routed experts", "image tower", "aligner", "taps")
_DECAY = 0.02
# Newton-Schulz coefficients that take singular values of (0, 1] to about one in five steps (Jordan, 2024).
_STEPS, _A, _B, _C = 5, 3.4445, -4.7750, 2.0315


def by_muon(name: str, shape: tuple[int, ...], role: str) -> bool:
    """Whether Muon moves a parameter: a matrix of one of these parts, or Engram's."""
    if name.endswith("engram.wkv.weight"):
        return True
    return role in _BY_MUON and len(shape) > 1 and name.endswith("weight")


class Optimizer:
    """Moves `parameters`, which it owns, by their gradients. `fixed` are left alone."""

    def __init__(self, parameters: Parameters, config: ModelConfig, fixed: frozenset[str] = frozenset()) -> None:
        self.parameters = parameters
        known = stacked(config)
        loads = (".gate.bias", ".gate.bias_vl")  # moved by the loads of experts, not by gradients
        self.trained = [name for name in parameters if name not in fixed and not name.endswith(loads)]
        self.muon = {name for name in self.trained if by_muon(name, *known[name][::2])}
        self.rates = {name: _rate(name, known[name][2]) for name in self.trained}
        self.first = {name: torch.zeros_like(parameters[name]) for name in self.trained}
        self.second = {name: torch.zeros_like(parameters[name]) for name in self.trained if name not in self.muon}
        self.num_steps = 0
        for name in self.trained:
            parameters[name].requires_grad_()

    def state(self) -> dict[str, Any]:
        return {"first": self.first, "second": self.second, "num_steps": self.num_steps}

    def load(self, state: dict[str, Any]) -> None:
        self.first, self.second, self.num_steps = state["first"], state["second"], state["num_steps"]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One step at `rate` of the full rates, by gradients of a norm of 1 at most; they are used up. What has none
        stays."""
        self.num_steps += 1
        grads = {name: self.parameters[name].grad for name in self.trained}
        given = {name: grad for name, grad in grads.items() if grad is not None}
        size = float(torch.stack([grad.square().sum() for grad in given.values()]).sum().sqrt())
        shrink = min(1.0, 1.0 / max(size, 1e-9))
        for name, grad in given.items():
            value = self.parameters[name]
            grad = grad * shrink
            if name in self.muon:
                self.first[name].lerp_(grad, 1 - _MOMENTUM)
                direction = _orthogonal(grad.lerp(self.first[name], _MOMENTUM))
                value.mul_(1 - rate * self.rates[name] * _DECAY)
            else:
                direction = self._adam(name, grad)
            value.sub_(direction, alpha=rate * self.rates[name])
            value.grad = None

    def _adam(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        fast, slow = _BETAS
        first, second = self.first[name].lerp_(grad, 1 - fast), self.second[name].lerp_(grad.square(), 1 - slow)
        mean = first / (1 - fast**self.num_steps)
        return mean / (second / (1 - slow**self.num_steps)).sqrt().add_(1e-10)


def _rate(name: str, role: str) -> float:
    if name.endswith("engram.embed.weight"):
        return 2e-2
    if by_muon(name, (1, 1), role):
        return 2e-2
    if name in ("embed.weight", "head.weight"):
        return 8e-3
    return 4e-3


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """The nearest matrix whose singular values are about one, [.., n, k], scaled for tall ones."""
    n, k = matrix.shape[-2:]
    x = matrix.transpose(-1, -2) if n > k else matrix
    x = x / (x.flatten(-2).norm(dim=-1)[..., None, None] + 1e-12)
    for _ in range(_STEPS):
        square = x @ x.transpose(-1, -2)
        x = _A * x + (_B * square + _C * square @ square) @ x
    scaled: torch.Tensor = x * max(1.0, n / k) ** 0.5
    return scaled.transpose(-1, -2) if n > k else scaled
