"""Muon for matrices (a public design), AdamW for the embedding and the norms, in one optimiser."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from bench.needle.transformer import Transformer

STATES = ("muon", "adam")
"""The parts of the optimiser's state, each small enough for a file of its own."""


def orthogonalized(g: Tensor, num_steps: int = 5) -> Tensor:
    """For each matrix of (n, rows, columns) one with the same spaces and singular values near 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16() if g.is_cuda else g
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(num_steps):
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return (x.mT if tall else x).float()


class Optimizer:
    """Owns the moments; `state` and `load` let a run go on where another stopped."""

    def __init__(self, model: Transformer, matrix_rate: float, vector_rate: float, decay: float) -> None:
        self._rates, self._decay = (matrix_rate, vector_rate), decay
        groups: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for parameter in model.layers.parameters():
            if parameter.ndim == 2:
                groups[tuple(parameter.shape)].append(parameter)
        self._groups = list(groups.values())
        self._moments = [torch.zeros_like(torch.stack(list(group))) for group in self._groups]
        others = [p for p in model.parameters() if p.ndim == 1]
        self._adam = torch.optim.AdamW(
            [{"params": [model.embed], "lr": vector_rate}, {"params": others, "lr": vector_rate}],
            betas=(0.9, 0.95),
            eps=1e-10,
            weight_decay=0.0,
            fused=model.embed.is_cuda,
        )

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Move by the gradients that the parameters hold, at `scale` of the full rates, and drop them."""
        rate = self._rates[0] * scale
        for group, moment in zip(self._groups, self._moments, strict=True):
            g = torch.stack([p.grad for p in group])
            moment.lerp_(g, 0.05)
            move = orthogonalized(g.lerp(moment, 0.95))
            size = max(1.0, move.shape[1] / move.shape[2]) ** 0.5
            for parameter, m in zip(group, move, strict=True):
                parameter.mul_(1 - rate * self._decay).add_(m, alpha=-rate * size)
                parameter.grad = None
        for group in self._adam.param_groups:
            group["lr"] = self._rates[1] * scale
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Copies of the moments: of each of `STATES`, its tensors by name."""
        muon = {str(i): moment.cpu() for i, moment in enumerate(self._moments)}
        adam = {
            f"{i}.{name}": value.detach().cpu()
            for i, kept in self._adam.state_dict()["state"].items()
            for name, value in kept.items()
        }
        return {"muon": muon, "adam": adam}

    def load(self, state: dict[str, dict[str, Tensor]]) -> None:
        for i, moment in enumerate(self._moments):
            moment.copy_(state["muon"][str(i)])
        whole = self._adam.state_dict()
        for name, value in state["adam"].items():
            number, field = name.split(".")
            whole["state"].setdefault(int(number), {})[field] = value
        self._adam.load_state_dict(whole)
