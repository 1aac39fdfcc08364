"""Tiny checkpoints: stock models with random weights, made so that every tensor matters.

Run as a module it writes one, with a tokenizer, for a first try of the command line:

    python -m poros.testing.checkpoints OUT --family qwen2
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from poros.architecture import Architecture
from poros.plugins import load_plugins

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_checkpoint(
    directory: Path,
    architecture: Architecture,
    config: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    max_shard_size: str = "5GB",
) -> Path:
    """Write a stock checkpoint of a family's tiny config.

    Weights come from transformers' own initialisation with a large spread, and every one-dimensional tensor (norms,
    biases, persistent buffers) is moved away from its neutral value, so that leaving one out changes the result.

    Args:
        directory: Where to write; made if missing.
        architecture: The family.
        config: Values that differ from the family's tiny config.
        dtype: dtype of the files.
        seed: Of the weights.
        max_shard_size: A small value makes a sharded checkpoint.

    Returns:
        The directory.
    """
    values = {**architecture.tiny_config, "initializer_range": 0.1, **(config or {})}
    made = AutoConfig.for_model(**values)
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    with torch.no_grad():
        stored = model.state_dict()
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.dim() <= 1 and tensor.is_floating_point() and name in stored:
                tensor.add_(torch.randn_like(tensor), alpha=0.1)
    torch.set_rng_state(state)
    model.to(dtype).save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def make_tokenizer(texts: Sequence[str], vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on a few texts, with a ChatML template, as Qwen's is."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHATML
    return fast


def main() -> None:
    """Write a tiny checkpoint with a tokenizer."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--family", default="qwen2")
    parser.add_argument("--text", type=Path, help="a file to train the tokenizer on")
    arguments = parser.parse_args()
    architecture = next((a for a in load_plugins().architectures() if a.family == arguments.family), None)
    if architecture is None:
        parser.error(f"no installed plugin brings the family {arguments.family!r}")
    texts = [arguments.text.read_text(encoding="utf-8")] if arguments.text else ["the quick brown fox"]
    tokenizer = make_tokenizer(texts)
    make_checkpoint(arguments.directory, architecture, {"vocab_size": len(tokenizer)})
    tokenizer.save_pretrained(arguments.directory)
    print(arguments.directory)


if __name__ == "__main__":
    main()
