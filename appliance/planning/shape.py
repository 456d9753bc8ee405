"""What of a model decides its cache: layers by kind, heads and widths. Sizes are in items until a type is known."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention layers of one kind, by their numbers in the model.

    ``kv_heads`` is 0 where a layer keeps one latent of ``width`` items a token, the same on every tensor rank; else a
    token is a key and a value of ``width`` items for each head. ``window_tokens`` is 0 for full attention.
    """

    layers: tuple[int, ...]
    kv_heads: int
    width: int
    window_tokens: int = 0

    @property
    def latent(self) -> bool:
        """Whether the layers keep latents (MLA)."""
        return self.kv_heads == 0

    def token_items(self, tensor: int) -> int:
        """Items of one token in one layer on one rank."""
        return self.width if self.latent else 2 * max(1, self.kv_heads // tensor) * self.width

    def shards(self, tensor: int) -> int:
        """Different parts of a token's items over the tensor ranks."""
        return 1 if self.latent else min(tensor, self.kv_heads)


class StateForm(StrEnum):
    """The kinds of recurrent layer; each has a rule of its own for the type of its state."""

    KDA = "kda"
    GATED_DELTA = "gated_delta"


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Recurrent layers with a convolution's window and a state for each value head, sharded over heads."""

    layers: tuple[int, ...]
    form: StateForm
    key_heads: int
    key_width: int
    value_heads: int
    value_width: int
    convolution: int
    state_dtype: str = ""

    def convolution_items(self, tensor: int) -> int:
        """Items of one layer's convolution window on one rank."""
        channels = 2 * self.key_heads * self.key_width + self.value_heads * self.value_width
        return (self.convolution - 1) * (channels // tensor)

    def state_items(self, tensor: int) -> int:
        """Items of one layer's recurrent state on one rank."""
        return self.value_heads // tensor * self.value_width * self.key_width


@dataclass(frozen=True, slots=True)
class Shape:
    """A model as its cache sees it. ``attention`` holds full attention first, then sliding windows."""

    model_type: str
    dtype: str
    layers: int
    query_heads: int
    attention: tuple[Attention, ...]
    recurrent: Recurrent | None = None
    context_tokens: int = 0
    own_code: bool = False

    @property
    def latent(self) -> bool:
        """Whether its attention is multi-head latent attention."""
        return any(each.latent for each in self.attention)
