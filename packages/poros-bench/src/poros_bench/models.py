"""The checkpoints that cells train: a directory as it is, or a published shape with random weights, made once."""

from __future__ import annotations

import sys
from pathlib import Path

from poros.config import hash_of
from poros.plugins import Plugins
from poros_bench.config import Case


def has_random_weights(case: Case, plugins: Plugins) -> bool:
    """Whether a case's model is a published shape, and no path."""
    return not Path(case.model).exists() and plugins.published(case.model) is not None


def name_of(case: Case, plugins: Plugins) -> str:
    """The model's name in receipts."""
    if not has_random_weights(case, plugins):
        return case.model
    cut = "" if case.layers is None else f", first {case.layers} layers"
    return f"{case.model} (random weights{cut})"


def directory_of(case: Case, plugins: Plugins, models: Path) -> Path:
    """Where a case's checkpoint is, or will be."""
    if not has_random_weights(case, plugins):
        return Path(case.model)  # or a hub id, until it was fetched
    return models / f"{case.model}-{hash_of([case.model, case.layers, 'random', 1])[:8]}"


def make(shape_id: str, layers: int | None, directory: Path) -> None:
    """Write a published shape with random weights as a checkpoint that is quantised already, with a tokenizer of words.

    All methods load the same bytes. The weights are drawn from a seed; time and memory don't depend on them.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from poros.engine.load import default_device
    from poros.parity.resident import random_resident, save_resident
    from poros.plugins import load_plugins

    found = load_plugins().published(shape_id)
    assert found is not None
    unfinished = directory.with_name(directory.name + ".part")
    save_resident(random_resident(found[0], found[1].config, default_device(), layers), unfinished)
    words = ["<unk>", "<s>", "</s>", "<pad>", *(f"t{number}" for number in range(1000))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(unfinished)
    unfinished.rename(directory)


if __name__ == "__main__":
    make(sys.argv[1], int(sys.argv[2]) if sys.argv[2] != "all" else None, Path(sys.argv[3]))
