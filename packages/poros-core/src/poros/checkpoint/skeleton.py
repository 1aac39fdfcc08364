"""The skeleton: the stock model, built by transformers and bitsandbytes, whose decoder layers hold no weights yet.

Every frozen tensor of a layer is a *placeholder* of the right dtype and shape that takes no memory: one element,
expanded. Float placeholders are NaN, so that a weight used outside its visit (a merge, a forgotten binding) turns the
result into NaN and can't pass for a number. Placeholders lie on the model's device and not on meta, because peft draws
the adapters' first values on the device of the base and a meta base would make meta adapters.

What lies outside the layers (embedding, final norm, head, rotary tables) is real. Non-persistent buffers are filled by
the model's own `_init_weights`, as `from_pretrained` does it, so none of their formulas is repeated here.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, GenerationConfig, PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer

from poros.architecture import Architecture
from poros.checkpoint.frozen import QUANT_STATE_TENSORS, FrozenTensor, frozen_tensors, packed_layout
from poros.errors import CheckpointError, UnsupportedError

COMPUTE_DTYPE = torch.bfloat16
"""The dtype of everything that isn't quantised, and of the computation."""


def quantization_config() -> BitsAndBytesConfig:
    """What the reference run is loaded with: NF4, double quantisation, bf16 compute."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=COMPUTE_DTYPE,
    )


def attention_of(config: Any) -> Any:
    """The attention to ask transformers for: sdpa in the text decoder, whatever it likes in towers beside it.

    An audio tower can't do sdpa, and a single word would be asked of every part.
    """
    return "sdpa" if config.get_text_config() is config else {"text_config": "sdpa"}


@dataclass(frozen=True)
class Skeleton:
    """A model without the weights of its layers.

    Attributes:
        model: The stock causal-LM class.
        decoder: Its text decoder.
        layers: The frozen places of each decoder layer.
        architecture: Its family.
    """

    model: PreTrainedModel
    decoder: nn.Module
    layers: tuple[list[FrozenTensor], ...]
    architecture: Architecture


def read_model_config(directory: Path, architecture: Architecture) -> Any:
    """The transformers config of a checkpoint, checked for what the family can't do.

    Raises:
        UnsupportedError: the architecture refuses this kind of checkpoint by name.
        CheckpointError: transformers can't read the config.
    """
    try:
        config = AutoConfig.from_pretrained(directory)
    except Exception as error:
        raise CheckpointError(f"transformers can't read {directory / 'config.json'}: {error}") from error
    _check_quantisation(getattr(config, "quantization_config", None), directory)
    refusal = architecture.refusal(config)
    if refusal is not None:
        raise UnsupportedError(f"{directory}: {refusal.name} is not supported ({config.model_type})", refusal.hint)
    return config


def cut_layers(config: Any, num_layers: int | None) -> Any:
    """Cut a model's config to its first layers, in place; returns it. None leaves it as it is."""
    text = config.get_text_config()
    if num_layers is not None and num_layers < text.num_hidden_layers:
        if getattr(text, "num_kv_shared_layers", None):
            # They are counted from the last layer: those that keep keys and values of their own stay the same ones.
            first_shared = text.num_hidden_layers - text.num_kv_shared_layers
            text.num_kv_shared_layers = max(0, num_layers - first_shared)
        text.num_hidden_layers = num_layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:num_layers]
    return config


def _check_quantisation(settings: Any, directory: Path) -> None:
    """Refuse by name every way of being quantised but NF4 with double quantisation by bitsandbytes."""
    if settings is None:
        return
    values = settings if isinstance(settings, dict) else settings.to_dict()
    method = str(values.get("quant_method", "bitsandbytes")).rpartition(".")[2].lower()
    if method not in ("bitsandbytes", "bits_and_bytes"):
        kind = method.upper()
    elif not (values.get("load_in_4bit") or values.get("_load_in_4bit")):
        kind = "8-bit bitsandbytes"
    elif values.get("bnb_4bit_quant_type", "fp4") != "nf4":
        kind = "FP4"
    elif not values.get("bnb_4bit_use_double_quant", False):
        kind = "NF4 without double quantisation"
    else:
        return
    raise UnsupportedError(
        f"{directory} is quantised as {kind}", "use the 16-bit checkpoint, or one in NF4 with double quantisation"
    )


def build_skeleton(
    config: Any,
    architecture: Architecture,
    device: torch.device,
    quantised: Collection[str] | None = None,
    directory: Path | None = None,
) -> Skeleton:
    """Build the model a config describes, with placeholders in its layers and nothing yet in the rest.

    Args:
        config: A transformers config; it is copied.
        architecture: The family.
        device: Where the model will run.
        quantised: For a pre-quantised checkpoint, the names of the model's 4-bit weights, as the *files* have them; the
            list of exceptions in `config.json` often names modules by paths of another transformers version. None:
            quantise what transformers would quantise.
        directory: Where the generation config is, if there is one.

    Returns:
        The skeleton, in eval mode as `from_pretrained` returns it, every parameter frozen.
    """
    config = copy.deepcopy(config)
    settings = getattr(config, "quantization_config", None)
    if settings is not None:
        del config.quantization_config
        settings = BitsAndBytesConfig.from_dict(settings) if isinstance(settings, dict) else settings
    else:
        settings = quantization_config()
    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(
                config, dtype=COMPUTE_DTYPE, attn_implementation=attention_of(config)
            )
        except Exception as error:
            raise CheckpointError(
                f"transformers can't build the model of this config.json: {type(error).__name__}: {error}"
            ) from error
    quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=quantised is not None)
    with _default_dtype(COMPUTE_DTYPE):  # bitsandbytes makes the biases of its layers in the default dtype
        quantizer.preprocess_model(model=model, device_map={"": str(device)})
    for path in architecture.absent:
        parent, _, name = path.rpartition(".")
        if getattr(model.get_submodule(parent), name, None) is not None:  # a config may leave it out
            model.set_submodule(path, Absent(path))
    decoder = model.get_submodule(architecture.decoder)
    layers = decoder.get_submodule(architecture.layers)
    if quantised is not None:
        with _default_dtype(COMPUTE_DTYPE):
            _follow_files(model, settings, quantised)
    for layer in layers:
        _fill_with_placeholders(layer, device)
    _fill_buffers(model, device)
    model.hf_quantizer = quantizer
    quantizer.postprocess_model(model)
    if directory is not None and (directory / "generation_config.json").is_file():
        try:
            model.generation_config = GenerationConfig.from_pretrained(directory)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"transformers can't read {directory / 'generation_config.json'}: {error}") from error
    model.requires_grad_(False)
    model.eval()
    return Skeleton(model, decoder, tuple(frozen_tensors(layer) for layer in layers), architecture)


class Absent(nn.Module):
    """Stands in for a part of a model that text never reaches.

    Args:
        path: Where it would be.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            f"{self._path} is not loaded: Poros trains on text", "leave images and sounds out of the inputs"
        )


def placeholder(dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """A tensor of any shape in the memory of one element: NaN for floats, zero otherwise. Not to be written to."""
    value = float("nan") if dtype.is_floating_point else 0
    return torch.full((), value, dtype=dtype, device=device).expand(shape)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _follow_files(model: nn.Module, settings: BitsAndBytesConfig, quantised: Collection[str]) -> None:
    """Make exactly those linear layers 4-bit whose weights are 4-bit in the files."""
    for name, module in list(model.named_modules()):
        wanted = f"{name}.weight" in quantised
        if isinstance(module, bnb.nn.Linear4bit) and not wanted:
            with torch.device("meta"):
                plain = nn.Linear(module.in_features, module.out_features, module.bias is not None, dtype=COMPUTE_DTYPE)
            model.set_submodule(name, plain)
        elif type(module) is nn.Linear and wanted:
            four_bit = bnb.nn.Linear4bit(
                module.in_features,
                module.out_features,
                module.bias is not None,
                settings.bnb_4bit_compute_dtype,
                compress_statistics=settings.bnb_4bit_use_double_quant,
                quant_type=settings.bnb_4bit_quant_type,
                quant_storage=settings.bnb_4bit_quant_storage,
                device="meta",
            )
            model.set_submodule(name, four_bit)


def _fill_with_placeholders(layer: nn.Module, device: torch.device) -> None:
    for module in layer.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if isinstance(module, bnb.nn.Linear4bit) and name == "weight":
                module.weight = _four_bit_placeholder(module, device)
            else:
                empty = placeholder(parameter.dtype, tuple(parameter.shape), device)
                module._parameters[name] = nn.Parameter(empty, requires_grad=False)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and name not in module._non_persistent_buffers_set:
                module._buffers[name] = placeholder(buffer.dtype, tuple(buffer.shape), device)


def _four_bit_placeholder(module: bnb.nn.Linear4bit, device: torch.device) -> bnb.nn.Params4bit:
    shape = (module.out_features, module.in_features)
    layout = packed_layout(shape, module.quant_storage)
    parts = {part: placeholder(dtype, size, device) for part, (dtype, size) in layout.items()}
    state = bnb.functional.QuantState(
        absmax=parts["absmax"],
        shape=torch.Size(shape),
        code=parts["quant_map"],
        blocksize=64,
        quant_type="nf4",
        dtype=COMPUTE_DTYPE,
        offset=parts["nested_offset"],
        state2=bnb.functional.QuantState(
            absmax=parts["nested_absmax"],
            code=parts["nested_quant_map"],
            blocksize=256,
            dtype=torch.float32,
        ),
    )
    assert set(parts) - {""} == set(QUANT_STATE_TENSORS)
    # bitsandbytes repacks a weight in place when a layer in eval mode meets a CPU with AVX512-BF16. A weight that is a
    # view of a slot must stay as it is, so the layer is told that the instructions aren't there.
    module.support_avx512bf16_for_cpu = False
    module.quant_state = state
    return bnb.nn.Params4bit(
        parts[""],
        requires_grad=False,
        quant_state=state,
        blocksize=64,
        compress_statistics=True,
        quant_type="nf4",
        quant_storage=module.quant_storage,
        module=module,
        bnb_quantized=True,
    )


def _fill_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute the non-persistent buffers as `from_pretrained` does: by the model's own initialisation, on the CPU."""
    for module in model.modules():
        names = [
            name
            for name in module._non_persistent_buffers_set
            if module._buffers.get(name) is not None and module._buffers[name].device.type == "meta"
        ]
        if not names:
            continue
        for name in names:
            module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")
        with torch.no_grad():
            model._init_weights(module)
        for name in names:
            module._buffers[name] = module._buffers[name].to(device)
