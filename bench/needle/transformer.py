"""The model in PyTorch, for training alone: what mlx_lm's llama computes, over a flat row of tokens.

Everything but attention sees (N, hidden) with N the same at every sequence length, so that what is compiled
is compiled once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.needle import circuit


@dataclass(frozen=True)
class Shape:
    """As in config.json."""

    vocab_size: int
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 64
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e10
    """So large that half of each head's channels hardly turn within the context: they match contents at any
    distance, the others places."""

    def config(self) -> dict[str, float | int]:
        return asdict(self)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(N, H, D) by (N, 1, D / 2) angles, the halves of a head paired."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        s = self.shape = shape
        width, kv_width = s.num_attention_heads * s.head_dim, s.num_key_value_heads * s.head_dim
        self.input_norm, self.post_norm = (nn.Parameter(torch.ones(s.hidden_size)) for _ in range(2))
        self.q, self.k, self.v, self.o, self.gate, self.up, self.down = (
            nn.Parameter(torch.randn(n_out, n_in) * n_in**-0.5 * gain)
            for n_out, n_in, gain in (
                (width, s.hidden_size, 1.0),
                (kv_width, s.hidden_size, 1.0),
                (kv_width, s.hidden_size, 1.0),
                (s.hidden_size, width, 0.1),
                (s.intermediate_size, s.hidden_size, 1.0),
                (s.intermediate_size, s.hidden_size, 1.0),
                (s.hidden_size, s.intermediate_size, 0.1),
            )
        )
        self._mimic()

    @torch.no_grad()
    def _mimic(self) -> None:
        """Let heads begin by matching like with like, and by passing on what they see."""
        s, group = self.shape, self.shape.num_attention_heads // self.shape.num_key_value_heads
        k, v = (
            w.unflatten(0, (s.num_key_value_heads, s.head_dim)).repeat_interleave(group, 0).flatten(0, 1)
            for w in (self.k, self.v)
        )
        self.q.mul_(0.7).add_(0.7 * k)
        self.o.add_(0.5 * v.T * s.num_attention_heads**-0.5)

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (N, heads, head_dim) of x (N, hidden)."""
        h = norm(x, self.input_norm, self.shape.rms_norm_eps)
        q, k, v = (F.linear(h, w).unflatten(-1, (-1, self.shape.head_dim)) for w in (self.q, self.k, self.v))
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + F.linear(attended.flatten(-2), self.o)
        h = norm(x, self.post_norm, self.shape.rms_norm_eps)
        return x + F.linear(F.silu(F.linear(h, self.gate)) * F.linear(h, self.up), self.down)


class Transformer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        rows = torch.randn(shape.vocab_size, shape.hidden_size) * 0.5
        rows[:, circuit.NUM_WORD_CHANNELS :] = 0
        rows[:, circuit.ANY_WORD] = circuit.ANY_WORD_SIZE
        self.embed = nn.Parameter(rows)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        circuit.build(self.layers, shape.rope_theta)
        # The embedding is the head too; a small last norm keeps its first logits near a code's.
        self.norm = nn.Parameter(torch.full((shape.hidden_size,), 0.125))
        self.before: Callable[..., tuple[Tensor, Tensor, Tensor]] = Layer.before
        self.after: Callable[..., Tensor] = Layer.after

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (N, 1, head_dim / 2) of positions (N,)."""
        half = self.shape.head_dim // 2
        exponents = torch.arange(half, device=positions.device, dtype=torch.float64) / half
        turns = positions.double()[:, None] * self.shape.rope_theta**-exponents
        return turns.cos().float()[:, None], turns.sin().float()[:, None]

    def forward(self, ids: Tensor, positions: Tensor, learned: Tensor) -> Tensor:
        """(B, T) ids and positions → logits (n, vocab) at the flat indices `learned`."""
        x = F.embedding(ids.flatten(), self.embed)
        cos, sin = self.angles(positions.flatten())
        for layer in self.layers:
            q, k, v = self.before(layer, x, cos, sin)
            q, k, v = (t.unflatten(0, ids.shape).transpose(1, 2) for t in (q, k, v))
            x = self.after(layer, x, attend(q, k, v).transpose(1, 2).flatten(0, 1))
        return self.head(x.index_select(0, learned))

    def head(self, x: Tensor) -> Tensor:
        return F.linear(norm(x, self.norm, self.shape.rms_norm_eps), self.embed).float()

    def weights(self) -> dict[str, Tensor]:
        """Float32 copies under the names that mlx_lm gives them."""
        return {name: p.detach().float().cpu().contiguous() for name, p in self._named().items()}

    @torch.no_grad()
    def load_weights(self, weights: dict[str, Tensor]) -> None:
        for name, parameter in self._named().items():
            parameter.copy_(weights[name])

    def _named(self) -> dict[str, Tensor]:
        named = {"model.embed_tokens.weight": self.embed, "model.norm.weight": self.norm}
        for i, layer in enumerate(self.layers):
            for ours, theirs in _MLX_NAMES.items():
                named[f"model.layers.{i}.{theirs}.weight"] = getattr(layer, ours)
        return named


_MLX_NAMES = {
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
    **{x: f"self_attn.{x}_proj" for x in "qkvo"},
    **{x: f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}

FASTEST_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of (B, H, T, D) queries to (B, H_kv, T, D) keys and values."""
    group = q.shape[1] // k.shape[1]
    if q.device.type == "cpu":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    with sdpa_kernel(FASTEST_FIRST, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
