"""Poros: exact QLoRA with VRAM as a dial.

    import poros
    from peft import LoraConfig

    model = poros.load("path/to/checkpoint", lora=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))

The model is an ordinary `PeftModel`: use it in your own loop, with `transformers.Trainer` or with TRL. Its frozen base
lives in host memory and streams through the device block by block. `poros.attach(peft_model)` does the same to a model
that you have already built, and `poros.close(model)` gives the memory back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from poros.architecture import Architecture, ParityCase, PublishedShape, Unsupported
from poros.dimensions import LayerDimensions, ModelDimensions, gated_layer, uniform_model, windows_of
from poros.errors import PorosError
from poros.hookspecs import hookimpl

if TYPE_CHECKING:
    from poros.engine.attach import attach, close
    from poros.engine.load import load
    from poros.engine.optimizer import HostAdamW

__version__ = "0.1.0"

__all__ = [
    "Architecture",
    "HostAdamW",
    "LayerDimensions",
    "ModelDimensions",
    "ParityCase",
    "PorosError",
    "PublishedShape",
    "Unsupported",
    "__version__",
    "attach",
    "close",
    "gated_layer",
    "hookimpl",
    "load",
    "uniform_model",
    "windows_of",
]


def __getattr__(name: str) -> Any:
    # `load` and `attach` need torch; importing them on first use keeps `import poros` and `poros --help` quick.
    if name in ("attach", "close"):
        from poros.engine import attach as module

        return getattr(module, name)
    if name == "load":
        from poros.engine.load import load

        return load
    if name == "HostAdamW":
        from poros.engine.optimizer import HostAdamW

        return HostAdamW
    raise AttributeError(f"module 'poros' has no attribute {name!r}")
