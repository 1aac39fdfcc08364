"""Training runs, from a config to an adapter, against the same run with stock."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback

import poros
from poros.architecture import Architecture
from poros.config import LoraPart, load_config
from poros.engine.adapters import lora_config
from poros.engine.attach import attach
from poros.engine.attention import attention_path
from poros.errors import CheckpointError, DataError, StreamError, UnsupportedError
from poros.hookspecs import hookimpl
from poros.parity.stock import load_stock
from poros.plugins import Plugins, load_plugins
from poros.receipt import read_receipts
from poros.testing.checkpoints import make_checkpoint, make_tokenizer
from poros.training.data import collator, prepare
from poros.training.output import ADAPTER, save_adapter
from poros.training.progress import StepRecord
from poros.training.run import train
from poros.training.trainer import StreamedTrainer, training_arguments

CPU = torch.device("cpu")
TOWNS = ["Paris", "Rome", "Oslo", "Lima", "Cairo", "Tokyo"]


class Listener:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.tasks: list[str] = []
        self.steps: list[StepRecord] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def advance(self, what: str, done: int, total: int) -> None:
        self.tasks.append(what)

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory, families: dict[str, Architecture]) -> tuple[Path, Path]:
    """A tiny model with a tokenizer, and a chat file."""
    root = tmp_path_factory.mktemp("ready")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Where is {town}?"},
                {"role": "assistant", "content": f"In {town} " * n},
            ]
        }
        for n, town in enumerate(TOWNS, 1)
    ]
    data = root / "chat.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows) + "\nnot json\n")
    tokenizer = make_tokenizer([data.read_text()], vocab_size=300)
    make_checkpoint(root / "model", families["qwen2"], {"vocab_size": len(tokenizer)})
    tokenizer.save_pretrained(root / "model")
    return root / "model", data


def settings(ready: tuple[Path, Path], out: Path, **values: Any) -> Any:
    model, data = ready
    return load_config(
        None,
        {
            "model.path": str(model),
            "data.path": str(data),
            "out": str(out),
            "lora.rank": 4,
            "lora.dropout": 0.1,
            "training.steps": 6,
            "training.batch_size": 2,
            "training.accumulation": 2,
            "training.learning_rate": 1e-2,
            **values,
        },
    )


def test_a_run_leaves_an_adapter_a_receipt_a_config_and_a_curve(
    ready: tuple[Path, Path], tmp_path: Path, plugins: Plugins
) -> None:
    listener = Listener()
    result = train(
        settings(ready, tmp_path / "out", **{"data.eval_path": str(ready[1]), "training.eval_every": 2}),
        plugins,
        listener,
    )
    assert {path.name for path in result.out.iterdir()} == {
        "adapter_config.json",
        ADAPTER,
        "README.md",
        "run.yaml",
        "receipt.jsonl",
        "loss.png",
    }
    assert [record.step for record in listener.steps] == list(range(1, 7))
    assert all(record.tokens > 0 and record.seconds > 0 for record in listener.steps)
    assert result.evaluations[-1][1] < result.evaluations[0][1]
    assert [step for step, _ in result.evaluations] == [0, 2, 4, 6]
    (receipt,) = read_receipts(result.out / "receipt.jsonl")
    assert (receipt.kind, receipt.status, receipt.steps) == ("train", "ok", 6)
    assert receipt.losses == [record.loss for record in listener.steps]
    assert receipt.copied_gb_per_step is not None
    assert receipt.copied_gb_per_step > 0
    assert any("1 bad JSON (line 7)" in note for note in listener.notes)
    again = load_config(result.out / "run.yaml", {"out": str(tmp_path / "again")})
    assert train(again, plugins, Listener()).losses == result.losses


def stock_adapter(config: Any, out: Path) -> dict[str, torch.Tensor]:
    """The same run by transformers' own Trainer over a resident model."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    rows = prepare(config.data, tokenizer, vocab_size=len(tokenizer))
    with attention_path(config.training.attention):
        model = load_stock(Path(config.model.path), lora_config(config.lora), config.training.seed, CPU)
        trainer = Trainer(
            model=model,
            args=training_arguments(config, out, on_cpu=True),
            train_dataset=rows.dataset(),
            data_collator=collator(tokenizer, config.data.pad_to_multiple_of),
        )
        trainer.train()
    model.save_pretrained(out)
    return load_file(out / ADAPTER)


ON_HOST = {f"stream.{name}": "host" for name in ("embedding", "head", "optimizer", "gradients", "boundaries")}
"""Everything that can leave the device."""


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"stream.block_size": 2, "training.steps": None, "training.epochs": 2.5},
        {**ON_HOST, "stream.loss_rows": 16},
        {**ON_HOST, "training.accumulation": 2},
    ],
)
def test_a_run_equals_the_same_run_with_stock(
    values: dict[str, Any], ready: tuple[Path, Path], tmp_path: Path, plugins: Plugins
) -> None:
    """Unequal rows, accumulation, a short last window, dropout: the Trainer's loop is stock's, the model is ours."""
    config = settings(ready, tmp_path / "ours", **values)
    train(config, plugins, Listener())
    ours, theirs = load_file(tmp_path / "ours" / ADAPTER), stock_adapter(config, tmp_path / "stock")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_nothing_but_the_loss_leaves_the_model(
    ready: tuple[Path, Path], tmp_path: Path, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate would hold the logits once more, in float32, in training, in an evaluation and in a rehearsal."""
    from poros.training import run

    given: list[dict[str, Any]] = []
    stock_loss = Trainer.compute_loss

    def compute_loss(self: Any, *args: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = stock_loss(self, *args, return_outputs=True, **kwargs)
        given.append(dict(outputs))
        return (loss, outputs) if return_outputs else loss

    monkeypatch.setattr(Trainer, "compute_loss", compute_loss)
    stock_train = Trainer.train

    def rehearse_and_train(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = len(given)
        assert before > 0  # the evaluation
        run.rehearse(self.model, self.rehearsal_step, 2, 16, 2)
        assert len(given) == before + 4  # two micro-batches, of full rows and of padded ones
        return stock_train(self, *args, **kwargs)

    values = {"data.eval_path": str(ready[1]), "training.steps": 2}
    whole = train(settings(ready, tmp_path / "whole", **values), plugins, Listener())
    monkeypatch.setattr(Trainer, "train", rehearse_and_train)
    rehearsed = train(settings(ready, tmp_path / "rehearsed", **values), plugins, Listener())
    assert len(given) > 8
    assert all(set(outputs) == {"loss"} for outputs in given)
    one, other = load_file(whole.out / ADAPTER), load_file(rehearsed.out / ADAPTER)
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_predictions_keep_their_logits(ready: tuple[Path, Path], tmp_path: Path, plugins: Plugins) -> None:
    config = settings(ready, tmp_path / "out")
    model = poros.load(ready[0], lora=lora_config(LoraPart(rank=4)), seed=0, device="cpu", plugins=plugins)
    trainer = StreamedTrainer(model=model, args=training_arguments(config, tmp_path / "out", on_cpu=True))
    ids = torch.arange(8).view(1, -1)
    for loss_only in (True, False):
        loss, logits, _ = trainer.prediction_step(model, {"input_ids": ids, "labels": ids}, loss_only)
        assert loss is not None
        assert (logits is None) == loss_only
    assert logits.shape[:2] == ids.shape


class Stop(TrainerCallback):  # type: ignore[misc]
    """Interrupts after a step, as Ctrl-C would."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            raise KeyboardInterrupt


@pytest.mark.parametrize(("before", "after"), [({}, {}), ({}, ON_HOST), (ON_HOST, {}), (ON_HOST, ON_HOST)])
def test_a_resumed_run_equals_an_uninterrupted_one(
    before: dict[str, Any],
    after: dict[str, Any],
    ready: tuple[Path, Path],
    tmp_path: Path,
    plugins: Plugins,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wherever things lived before, and live now."""
    values = {"training.save_every": 2}
    whole = train(settings(ready, tmp_path / "whole", **values), plugins, Listener())

    from poros.training import trainer

    stock_init = trainer.StreamedTrainer.__init__
    monkeypatch.setattr(
        trainer.StreamedTrainer,
        "__init__",
        lambda self, callbacks, **rest: stock_init(self, callbacks=[*callbacks, Stop(5)], **rest),
    )
    with pytest.raises(KeyboardInterrupt):
        train(settings(ready, tmp_path / "parts", **values, **before), plugins, Listener())
    monkeypatch.undo()
    assert not (tmp_path / "parts" / ADAPTER).exists()
    listener = Listener()
    resumed = train(settings(ready, tmp_path / "parts", resume=True, **values, **after), plugins, listener)
    assert "going on from checkpoint-4" in listener.notes
    one, other = load_file(whole.out / ADAPTER), load_file(resumed.out / ADAPTER)
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert [record.step for record in listener.steps] == [5, 6]


def test_resuming_a_finished_run_changes_nothing(ready: tuple[Path, Path], tmp_path: Path, plugins: Plugins) -> None:
    values = {"training.save_every": 3, "training.schedule": "constant", "stream.slots": 1}
    first = train(settings(ready, tmp_path / "out", **values), plugins, Listener())
    before = load_file(first.out / ADAPTER)
    for _ in range(2):
        listener = Listener()
        again = train(settings(ready, tmp_path / "out", resume=True, **values), plugins, listener)
        assert any("nothing is left to train" in note for note in listener.notes)
        assert not listener.steps
        assert again.losses == first.losses
        after = load_file(first.out / ADAPTER)
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_evaluating_changes_nothing_in_what_is_trained(
    ready: tuple[Path, Path], tmp_path: Path, plugins: Plugins
) -> None:
    one = train(settings(ready, tmp_path / "one"), plugins, Listener())
    values = {"data.eval_path": str(ready[1]), "training.eval_every": 1}
    other = train(settings(ready, tmp_path / "other", **values), plugins, Listener())
    assert len(other.evaluations) == 7
    theirs = load_file(other.out / ADAPTER)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in load_file(one.out / ADAPTER).items())


def test_an_overwriting_run_that_can_not_start_leaves_the_old_one(
    ready: tuple[Path, Path], tmp_path: Path, plugins: Plugins
) -> None:
    out = train(settings(ready, tmp_path / "out", **{"training.steps": 1}), plugins, Listener()).out
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    bad = settings(ready, tmp_path / "out", overwrite=True, **{"lora.targets": ["q_prj"]})
    with pytest.raises(UnsupportedError, match="q_prj"):
        train(bad, plugins, Listener())
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert "overwrite" not in (out / "run.yaml").read_text()


def test_plugins_hear_of_each_step(ready: tuple[Path, Path], tmp_path: Path) -> None:
    class Ears:
        heard: list[StepRecord] = []

        @hookimpl
        def poros_step_end(self, step: StepRecord) -> None:
            self.heard.append(step)

    ears = Ears()
    train(settings(ready, tmp_path / "out", **{"training.steps": 2}), load_plugins([("ears", ears)]), Listener())
    assert [record.step for record in ears.heard] == [1, 2]


# -- refusals and failures --------------------------------------------------------------------------------------------


def test_bad_data_is_refused_before_a_weight_is_read(
    ready: tuple[Path, Path], tmp_path: Path, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr("poros.checkpoint.shards.Shards.read", refuse)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("{}\n")
    with pytest.raises(DataError, match="no row is left"):
        train(settings(ready, tmp_path / "out", **{"data.path": str(empty)}), plugins, Listener())


def test_a_vocabulary_that_is_too_small_is_refused(
    ready: tuple[Path, Path], tmp_path: Path, plugins: Plugins, families: dict[str, Architecture]
) -> None:
    from transformers import AutoTokenizer

    make_checkpoint(tmp_path / "small", families["qwen2"], {"vocab_size": 64})
    AutoTokenizer.from_pretrained(ready[0]).save_pretrained(tmp_path / "small")
    with pytest.raises(DataError, match="line 1"):
        train(settings(ready, tmp_path / "out", **{"model.path": str(tmp_path / "small")}), plugins, Listener())


def test_a_model_without_a_tokenizer_is_refused(
    ready: tuple[Path, Path], checkpoint: Callable[..., Path], tmp_path: Path, plugins: Plugins
) -> None:
    with pytest.raises(CheckpointError, match="no tokenizer"):
        train(settings(ready, tmp_path / "out", **{"model.path": str(checkpoint("qwen2", {}))}), plugins, Listener())


def test_several_processes_are_refused(
    ready: tuple[Path, Path], tmp_path: Path, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UnsupportedError, match="one process"):
        train(settings(ready, tmp_path / "out"), plugins, Listener())


def test_a_loss_that_is_not_finite_stops_the_run_and_leaves_a_receipt(
    ready: tuple[Path, Path], tmp_path: Path, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StreamError, match="the loss is"):
        train(settings(ready, tmp_path / "out", **{"training.learning_rate": 1e30}), plugins, Listener())
    (receipt,) = read_receipts(tmp_path / "out" / "receipt.jsonl")
    assert receipt.status == "error"
    assert receipt.reason is not None
    assert not (tmp_path / "out" / ADAPTER).exists()


def test_adapters_without_a_gradient_stop_the_run(
    ready: tuple[Path, Path], tmp_path: Path, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case O-04, forced: a block whose backward hands back nothing."""
    from poros.engine.executor import Visit

    right = Visit.backward

    def silent(self: Visit, *args: Any, **kwargs: Any) -> Any:
        hidden, gradients = right(self, *args, **kwargs)
        return hidden, [None] * len(gradients) if self._start == 1 else gradients

    monkeypatch.setattr(Visit, "backward", silent)
    with pytest.raises(StreamError, match="14 of 70 adapter tensors got no gradient"):
        train(settings(ready, tmp_path / "out"), plugins, Listener())


# -- other people's trainers ------------------------------------------------------------------------------------------


def test_trl_drives_a_streamed_model_as_a_stock_one(ready: tuple[Path, Path], tmp_path: Path, plugins: Plugins) -> None:
    """TRL casts the adapters of a 4-bit model to bf16 and checkpoints by default; both arms get the same."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoTokenizer

    model_path, data = ready
    rows = [json.loads(line) for line in data.read_text().splitlines() if line.startswith("{")]
    lora = lora_config(LoraPart(rank=4, dropout=0.1))
    found = []
    for make in (
        lambda: load_stock(model_path, lora, 0, CPU),
        lambda: poros.load(model_path, lora=lora, seed=0, device="cpu", plugins=plugins),
        lambda: attach(load_stock(model_path, lora, 0, CPU), plugins=plugins),
    ):
        arguments = trl.SFTConfig(
            output_dir=str(tmp_path / f"trl{len(found)}"),
            max_steps=3,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            use_cpu=True,
            bf16=True,
            report_to=[],
            disable_tqdm=True,
            seed=3,
        )
        trainer = trl.SFTTrainer(
            model=make(),
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(model_path),
        )
        trainer.train()
        trainer.save_model()
        found.append(load_file(Path(arguments.output_dir) / ADAPTER))
    assert len(found[0]) == 70
    for other in found[1:]:
        assert found[0].keys() == other.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in found[0].items())


def test_a_checkpoint_of_the_trainer_loads_back(ready: tuple[Path, Path], tmp_path: Path, plugins: Plugins) -> None:
    from peft import PeftModel

    lora = lora_config(LoraPart(rank=4))
    model = poros.load(ready[0], lora=lora, seed=5, device="cpu", plugins=plugins)
    save_adapter(model, tmp_path / "adapter")
    bare = poros.load(ready[0], device="cpu", plugins=plugins)
    loaded = PeftModel.from_pretrained(bare, tmp_path / "adapter", is_trainable=True)
    mine = {name: p for name, p in model.named_parameters() if p.requires_grad}
    theirs = {name: p for name, p in loaded.named_parameters() if p.requires_grad}
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


def test_the_text_tower_of_a_multimodal_checkpoint_is_trained(
    families: dict[str, Architecture], tmp_path: Path, plugins: Plugins
) -> None:
    """The rows say of every token that it is text, which some versions of transformers ask for."""
    family = families["gemma3_multimodal"]
    values = {"text_config": {**family.tiny_config["text_config"], "vocab_size": 512}}
    directory = make_checkpoint(tmp_path / "model", family, values)
    make_tokenizer(["a few words, and a few more"]).save_pretrained(directory)
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"text": f"a few words {number}"}) + "\n" for number in range(8)))
    config = load_config(
        overrides={
            "model.path": str(directory),
            "data.path": str(data),
            "out": str(tmp_path / "out"),
            "training.steps": 2,
        }
    )
    result = train(config, plugins, Listener())
    assert len(result.losses) == 2
    assert (tmp_path / "out" / ADAPTER).is_file()
