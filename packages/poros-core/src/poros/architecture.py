"""What an architecture package contributes: one frozen `Architecture` value per model family.

A family is data plus a proof. The data says where things are in the stock transformers model and which layers are
alike; the proof is a set of parity cases, tiny configs in which each quirk of the family is made visible. Nothing here
imports torch or transformers, so that listing the families costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from poros.dimensions import ModelDimensions, Values

Config = Any
"""A transformers text config: attribute access to the values of `config.json`."""


@dataclass(frozen=True, kw_only=True)
class Unsupported:
    """A kind of checkpoint that has the family's model type but can't be run.

    Attributes:
        name: What it is, as a user would call it ("mixture of experts").
        applies: Whether a text config describes such a checkpoint. Plans ask it too, of what `config.json` says
            alone: it must bear that any value is missing.
        hint: What to do instead.
        example: Values of a tiny text config that it applies to, by which the refusal is tested.
    """

    name: str
    applies: Callable[[Config], bool]
    hint: str = ""
    example: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ParityCase:
    """A tiny config on which streamed must equal stock, made so that one quirk of the family shows.

    Attributes:
        name: Short and unique within the family.
        config: Values of the tiny `config.json` that differ from the family's tiny base config.
        sequence_length: Tokens per row, long enough for the quirk (more than a sliding window, say).
        quirk: Values that switch the quirk off; they must break parity with the case itself. Empty: no quirk.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    sequence_length: int = 16
    quirk: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, kw_only=True)
class PublishedShape:
    """The `config.json` values of a released size, enough to plan and to benchmark without a download.

    Attributes:
        id: Lower-case name used on the command line ("qwen2.5-32b").
        display_name: The name on tables ("Qwen2.5-32B").
        config: Values of `config.json`.
        parameters: Published number of parameters of the text model, tied matrices counted once.
    """

    id: str
    display_name: str
    config: Mapping[str, Any]
    parameters: int


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One model family.

    Attributes:
        family: Name of the family ("qwen2"), unique among the installed plugins.
        model_types: The `model_type` values of `config.json` that belong to it.
        decoder: Path of the text decoder inside the stock causal-LM class.
        layers, norm, embedding: Names inside the decoder.
        head: Path of the vocabulary projection inside the causal-LM class.
        checkpoint_prefixes: What the decoder's tensors may be called in a checkpoint; the first that is found counts.
        layer_kinds: Config -> the layer kind of each layer. Layers of one kind share module structure, byte layout
            and call signature.
        dimensions: Values of the text part of a `config.json` -> the sizes of all tensors, by which runs are planned.
            Values that are absent have transformers' defaults. None: the family can't be planned.
        final_softcap: Config -> the cap on the final logits, or None.
        inert: Attributes of modules by which layers of one kind may differ without computing anything else.
        side_output: Keyword argument of a layer: a dict in which some layers leave tensors for later ones (shared
            keys and values); empty if there is none.
        has_side_outputs: Config -> whether later layers do read what is left there.
        has_outer_linears: Config -> whether there are linear layers outside the decoder layers, the head apart, that
            adapters on "all-linear" would reach.
        absent: Paths of parts of the causal-LM class that text never reaches (a vision tower). They are not loaded.
        unsupported: What is refused, by name.
        refused_model_types: Model types that are close to the family and refused by name: type -> what it is.
        tiny_config: Values of a tiny `config.json` of the family, the base of every parity case.
        parity_cases: The proof.
        published: Released sizes.
    """

    family: str
    model_types: Sequence[str]
    decoder: str = "model"
    layers: str = "layers"
    norm: str = "norm"
    embedding: str = "embed_tokens"
    head: str = "lm_head"
    checkpoint_prefixes: Sequence[str] = ("model.",)
    layer_kinds: Callable[[Config], Sequence[str]]
    dimensions: Callable[[Values], ModelDimensions] | None = None
    final_softcap: Callable[[Config], float | None] = lambda config: None
    inert: Sequence[str] = ()
    side_output: str = ""
    has_side_outputs: Callable[[Config], bool] = lambda config: False
    has_outer_linears: Callable[[Config], bool] = lambda config: False
    absent: Sequence[str] = ()
    unsupported: Sequence[Unsupported] = ()
    refused_model_types: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    tiny_config: Mapping[str, Any]
    parity_cases: Sequence[ParityCase]
    published: Sequence[PublishedShape] = ()

    def refusal(self, config: Config) -> Unsupported | None:
        """The first entry of `unsupported` that applies to a config, or None when the config can be run.

        Args:
            config: Of the text model, or of a multimodal one around it.
        """
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        return next((item for item in self.unsupported if item.applies(text)), None)
