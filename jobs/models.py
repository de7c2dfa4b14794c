"""What a worker says about the model that it serves."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ModelCard(BaseModel):
    model_config = ConfigDict(protected_namespaces=())

    id: str
    architecture: str
    context_tokens: int
    """Prompt and output together may not exceed it."""
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    kv_format: str
    kv_bytes_per_token: float
    weights_bytes: int
    fingerprint: str
    """Identity of weights, tokenizer, chat template, KV format and rope: the root of snapshot keys."""
    device: str
    """Such as `cpu` or `gpu (Apple M2 Ultra)`."""
    memory_bytes: int | None = None
    """What model and requests may take of the device's memory."""
    peak_points: list[tuple[int, int]] = []
    """(tokens of prompt and answer, predicted peak of one request in bytes), weights included."""
    can_think: bool | None = None
    """Whether its chat template reacts to `thinking`; None where the worker does not say."""
