"""Writes a published shape with random weights as a pre-quantised checkpoint, with a token tokenizer, for other trainers.

    python validation/make_checkpoint.py qwen2.5-32b /tmp/qwen2.5-32b
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from poros.engine.load import default_device
from poros.parity.resident import random_resident, save_resident
from poros.parity.source import find_published
from poros.plugins import load_plugins


def main() -> None:
    """Make one checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int)
    arguments = parser.parse_args()
    found = find_published(arguments.shape, load_plugins())
    if found is None:
        parser.error(f"no published shape is called {arguments.shape}")
    base = random_resident(found[0], found[1].config, default_device(), arguments.layers)
    save_resident(base, arguments.directory)
    words = ["<unk>", "<s>", "</s>", "<pad>", *(f"t{number}" for number in range(1000))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(arguments.directory)


if __name__ == "__main__":
    main()
