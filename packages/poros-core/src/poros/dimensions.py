"""The sizes of a model's tensors, from the values of its `config.json` alone: enough to plan a run. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

Values = Mapping[str, Any]
"""Values of the text part of a `config.json`."""

ALIGNMENT = 256
"""Bytes; every tensor of a slab begins at a multiple, which is what the CUDA allocator itself aligns to."""


def aligned(nbytes: int) -> int:
    """A number of bytes, rounded up."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def four_bit_bytes(elements: int) -> int:
    """Bytes of a weight in NF4 with double quantisation: codes, scales, scales of the scales, two code tables, offset.

    Block sizes 64 and 256, as bitsandbytes lays it out.
    """
    scales = -(-elements // 64)
    parts = (-(-elements // 2), scales, 4 * -(-scales // 256), 4 * 16, 4 * 256, 4)
    return sum(map(aligned, parts))


@dataclass(frozen=True, kw_only=True)
class LayerDimensions:
    """One decoder layer.

    Attributes:
        linears: Name of each linear layer -> (out, in). They are in 4 bit.
        vectors: Name of each norm and bias -> elements. They are in 16 bit, as are
        buffers: Persistent buffers: name -> elements. They don't count as parameters.
        query: Width of all query heads together.
        key_value: Width of all key heads together.
        window: Tokens that a query sees at most; None if it sees all before it.
    """

    linears: Mapping[str, tuple[int, int]]
    vectors: Mapping[str, int]
    query: int
    key_value: int
    buffers: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    window: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the layer's slab."""
        weights = sum(four_bit_bytes(rows * columns) for rows, columns in self.linears.values())
        return weights + self._small_bytes

    @property
    def restored_bytes(self) -> int:
        """Bytes of the layer when its weights are restored to bf16."""
        weights = sum(aligned(2 * rows * columns) for rows, columns in self.linears.values())
        return weights + self._small_bytes

    @property
    def _small_bytes(self) -> int:
        return sum(aligned(2 * elements) for elements in (*self.vectors.values(), *self.buffers.values()))

    @property
    def parameters(self) -> int:
        """Elements of its weights and vectors."""
        return sum(rows * columns for rows, columns in self.linears.values()) + sum(self.vectors.values())

    def adapter_parameters(self, ranks: Mapping[str, int]) -> int:
        """Elements of LoRA adapters.

        Args:
            ranks: Name of each adapted linear -> rank.
        """
        return sum(ranks.get(name, 0) * (rows + columns) for name, (rows, columns) in self.linears.items())


@dataclass(frozen=True, kw_only=True)
class ModelDimensions:
    """A text model.

    Attributes:
        layers: Its decoder layers.
        hidden: Width of the hidden states.
        vocabulary: Tokens of the head.
        tied: Whether head and embedding are one matrix.
        tables: Further embeddings beside the main one: name -> (rows, width).
        outer_linears: Linear layers outside the decoder layers, the head apart: name -> (out, in). In 4 bit.
        outer_vectors: Elements of everything else outside the layers: norms.
        has_softcap: Whether the final logits are capped.
        path: Of the decoder layers in the stock model, before their numbers.
        shares: Whether layers leave tensors for later ones, which makes every visit an eager one.
    """

    layers: Sequence[LayerDimensions]
    hidden: int
    vocabulary: int
    tied: bool
    tables: Mapping[str, tuple[int, int]] = field(default_factory=lambda: MappingProxyType({}))
    outer_linears: Mapping[str, tuple[int, int]] = field(default_factory=lambda: MappingProxyType({}))
    outer_vectors: int = 0
    has_softcap: bool = False
    shares: bool = False
    path: str = "model.layers"

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the head, and of the embedding, in bf16."""
        return 2 * self.vocabulary * self.hidden

    @property
    def table_bytes(self) -> int:
        """Bytes of the further embeddings in bf16."""
        return sum(2 * rows * width for rows, width in self.tables.values())

    @property
    def outer_bytes(self) -> int:
        """Bytes of what always stays on the device."""
        return sum(four_bit_bytes(rows * columns) for rows, columns in self.outer_linears.values()) + (
            2 * self.outer_vectors
        )

    @property
    def parameters(self) -> int:
        """Elements of the whole model; a tied matrix counts once."""
        outside = sum(rows * columns for rows, columns in (*self.tables.values(), *self.outer_linears.values()))
        matrices = (1 if self.tied else 2) * self.vocabulary * self.hidden
        return sum(layer.parameters for layer in self.layers) + matrices + outside + self.outer_vectors


def text_values(config: Values) -> Values:
    """The text part of a `config.json`: all of it, or one part of a multimodal model's.

    Whether head and embedding are tied is said by the model around it, whose class ties them; what the text part says
    doesn't count.
    """
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return config
    inner = {name: value for name, value in text.items() if name not in _OUTER}
    return {**inner, **{name: config[name] for name in _OUTER if name in config}}


_OUTER = ("tie_word_embeddings",)


def gated_layer(
    *,
    hidden: int,
    inner: int,
    query: int,
    key_value: int,
    norms: int = 2,
    head_norm: int = 0,
    biases: Sequence[str] = (),
    without: Sequence[str] = (),
) -> LayerDimensions:
    """A layer as most families have it: attention with q, k, v and o, and a gated MLP.

    Args:
        hidden: Width of the hidden states.
        inner: Width inside the MLP.
        query: Width of all query heads together.
        key_value: Width of all key heads together.
        norms: Norms over the hidden states.
        head_norm: Size of a norm over each query and each key; 0 for none.
        biases: Which of the linears have one: "q_proj" and so on.
        without: Linears that are absent.
    """
    linears = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key_value, hidden),
        "self_attn.v_proj": (key_value, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    linears = {name: shape for name, shape in linears.items() if name.rpartition(".")[2] not in without}
    vectors = {f"norm_{number}": hidden for number in range(norms)}
    vectors |= {f"{name}.bias": shape[0] for name, shape in linears.items() if name.rpartition(".")[2] in biases}
    if head_norm:
        vectors["self_attn.q_norm"] = head_norm
        if "k_proj" not in without:
            vectors["self_attn.k_norm"] = head_norm
    return LayerDimensions(linears=linears, vectors=vectors, query=query, key_value=key_value)


def windows_of(values: Values, *, window: int, is_sliding: Callable[[int], bool]) -> list[int | None]:
    """How far each layer looks back, as `LayerDimensions.window` has it.

    Args:
        values: Of the text part of a `config.json`.
        window: Of the layers that have one, where the values don't say.
        is_sliding: Layer -> whether it has one, where the values have no `layer_types`.
    """
    width = values.get("sliding_window", window)
    kinds = values.get("layer_types")
    layers = range(values["num_hidden_layers"])
    slides = [is_sliding(layer) if kinds is None else kinds[layer] == "sliding_attention" for layer in layers]
    return [width if one else None for one in slides]


def uniform_model(
    layer: LayerDimensions,
    values: Values,
    *,
    vocabulary: int,
    tied: bool,
    has_softcap: bool = False,
    windows: Sequence[int | None] | None = None,
) -> ModelDimensions:
    """A model whose layers all have the same sizes, with one norm behind them.

    Args:
        layer: Each of its layers.
        values: Of the text part of a `config.json`.
        vocabulary: Tokens, where the values don't say.
        tied: Whether head and embedding are one, where the values don't say.
        has_softcap: Whether the final logits are capped.
        windows: How far each layer looks back; by default as far as `layer` does.
    """
    if windows is None:
        windows = (layer.window,) * values["num_hidden_layers"]
    of_window = {window: dataclasses.replace(layer, window=window) for window in windows}
    return ModelDimensions(
        layers=tuple(of_window[window] for window in windows),
        hidden=values["hidden_size"],
        vocabulary=values.get("vocab_size", vocabulary),
        tied=values.get("tie_word_embeddings", tied),
        outer_vectors=values["hidden_size"],
        has_softcap=has_softcap,
    )
