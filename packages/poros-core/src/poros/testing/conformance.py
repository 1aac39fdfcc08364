"""The proof of a family: a pytest class that an architecture package inherits.

    from poros.testing.conformance import ArchitectureConformance
    from poros_arch_mine import MINE

    class TestMine(ArchitectureConformance):
        architecture = MINE

It needs nothing but the `Architecture`, and runs on a CPU in tens of seconds. A test may be overridden only to say why
it can't pass yet: by a method that is marked `pytest.mark.xfail(reason=...)` and begins by calling the original.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

import poros
from poros.architecture import Architecture, ParityCase, PublishedShape
from poros.checkpoint.frozen import frozen_tensors
from poros.checkpoint.locate import find_prefix
from poros.checkpoint.packing import Packing
from poros.checkpoint.reader import make_packings, plan_reading
from poros.checkpoint.shards import Shards
from poros.checkpoint.skeleton import build_skeleton, read_model_config
from poros.config import LoraPart
from poros.dimensions import aligned
from poros.engine.adapters import lora_config, narrowed
from poros.engine.attention import attention_path
from poros.engine.engine import engine_of
from poros.engine.parts import DecoderParts, causal_lm, text_marks
from poros.errors import UnsupportedError
from poros.parity.gate import corrupt
from poros.parity.resident import random_resident
from poros.parity.stock import Work, load_stock, make_adapters_count, train
from poros.parity.surfaces import SURFACES, Comparison, compare
from poros.plan.fit import dimensions_of
from poros.plugins import Plugins, load_plugins
from poros.testing.checkpoints import make_checkpoint
from poros.testing.layers import byte_that_counts, outer_elements, plain_attributes, restored_fields
from poros.testing.models import all_tensors, evaluated, lora, marks, text_part
from poros.testing.overrides import check_overrides

CPU = torch.device("cpu")

Checkpoint = Callable[[ParityCase], Path]


class ArchitectureConformance:
    """What must hold for every family.

    Attributes:
        architecture: The family.
        text_only: Of a multimodal family, the family of its text tower alone. One whose text tower has no class of its
            own says so in an override of the test that fails without it.
    """

    architecture: ClassVar[Architecture]
    text_only: ClassVar[Architecture | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_overrides(cls, ArchitectureConformance)

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """One run of a test per parity case, quirk or published shape."""
        check_overrides(type(self), ArchitectureConformance)  # again: decorators mark a class after it is made
        lots: dict[str, list[Any]] = {
            "case": list(self.architecture.parity_cases),
            "quirk": [case for case in self.architecture.parity_cases if case.quirk],
            "shape": list(self.architecture.published),
        }
        for name, values in lots.items():
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values, ids=[getattr(value, "name", None) or value.id for value in values])

    @pytest.fixture(scope="class")
    def plugins(self) -> Plugins:
        return load_plugins()

    @pytest.fixture(scope="class")
    def checkpoint(self, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
        """case -> a directory with a tiny stock checkpoint, made once; don't write to it."""
        made: dict[str, Path] = {}

        def make(case: ParityCase) -> Path:
            if case.name not in made:
                directory = tmp_path_factory.mktemp(case.name)
                made[case.name] = make_checkpoint(directory, self.architecture, case.config)
            return made[case.name]

        return make

    @pytest.fixture(autouse=True, scope="class")
    def one_thread(self) -> Iterator[None]:
        """The models are tiny: threads cost more than they give."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)

    @pytest.fixture(autouse=True)
    def random_state(self) -> Iterator[None]:
        """Each test begins with the state that torch had before."""
        state = torch.get_rng_state()
        yield
        torch.set_rng_state(state)

    # -- the data -----------------------------------------------------------------------------------------------------

    def test_the_family_is_found_by_its_model_types(self, plugins: Plugins) -> None:
        for model_type in self.architecture.model_types:
            assert plugins.architecture_for(model_type) == self.architecture

    def test_every_checkpoint_tensor_is_claimed_exactly_once(self, case: ParityCase, checkpoint: Checkpoint) -> None:
        with Shards.open(checkpoint(case)) as shards:
            config = read_model_config(checkpoint(case), self.architecture)
            prefix = find_prefix(
                shards.names,
                self.architecture.checkpoint_prefixes,
                f"{self.architecture.embedding}.weight",
                self.architecture.layers,
            )
            skeleton = build_skeleton(config, self.architecture, CPU, None, checkpoint(case))
            plan = plan_reading(skeleton, shards, prefix, self.architecture.layer_kinds(config.get_text_config()))
            claimed = Counter(plan.outside.values())
            for layer_prefix, places in zip(plan.layer_prefixes, skeleton.layers, strict=True):
                claimed.update(layer_prefix + place.name for place in places if not place.part)
            assert set(claimed.values()) == {1}
            absent = [f"{path.rpartition('.')[2]}." for path in self.architecture.absent]
            assert set(claimed) == {name for name in shards.names if not any(part in name for part in absent)}

    def test_every_tensor_equals_stocks(self, case: ParityCase, checkpoint: Checkpoint, plugins: Plugins) -> None:
        """Parameters and buffers, non-persistent ones too; the layers' tensors are looked for in their slabs."""
        stock = causal_lm(self.stock(checkpoint(case), 0.0))
        streamed = poros.load(checkpoint(case), device="cpu", plugins=plugins)
        engine = engine_of(streamed)
        inside = f"{self.architecture.decoder}.{self.architecture.layers}."
        mine = {name.replace(".base_layer.", "."): tensor for name, tensor in all_tensors(streamed)}
        theirs = {
            name.replace(".base_layer.", "."): tensor for name, tensor in all_tensors(stock) if "lora_" not in name
        }
        absent = tuple(f"{path}." for path in self.architecture.absent)
        theirs = {name: tensor for name, tensor in theirs.items() if not name.startswith(absent)}
        assert set(mine) == set(theirs)
        outside = [name for name in theirs if not name.startswith(inside)]
        assert outside
        for name in outside:
            assert mine[name].dtype == theirs[name].dtype, name
            assert torch.equal(mine[name], theirs[name]), name
        for index, layer in enumerate(DecoderParts.of(stock, self.architecture).layers):
            views = engine.packings[index].views(engine.store.slab(index), 0)
            places = frozen_tensors(layer)
            assert [place.name for place in places] == [field.name for field in engine.packings[index].fields]
            for place, view in zip(places, views, strict=True):
                assert view.dtype == place.get().dtype, place.name
                assert torch.equal(view, place.get()), f"layer {index}: {place.name}"

    def test_layers_that_differ_share_nothing(self, case: ParityCase, checkpoint: Checkpoint, plugins: Plugins) -> None:
        """Layers of one kind are alike in layout and in all that isn't a tensor; every layer's bytes are its own."""
        streamed = poros.load(checkpoint(case), lora=lora(0.0), seed=0, device="cpu", plugins=plugins)
        engine = engine_of(streamed)
        config = causal_lm(streamed).config.get_text_config()
        kinds = self.architecture.layer_kinds(config)
        assert len(kinds) == config.num_hidden_layers
        layers = DecoderParts.of(streamed, self.architecture).layers
        for (one, other), (mine, theirs) in zip(
            itertools.combinations(range(len(layers)), 2), itertools.combinations(layers, 2), strict=True
        ):
            if kinds[one] == kinds[other]:
                assert engine.packings[one] is engine.packings[other]
                alike = [plain_attributes(layer, self.architecture.inert) for layer in (mine, theirs)]
                assert alike[0] == alike[1], f"layers {one} and {other}"
            slabs = engine.store.slab(one), engine.store.slab(other)
            assert slabs[0].data_ptr() != slabs[1].data_ptr()
            assert slabs[0].shape != slabs[1].shape or not torch.equal(*slabs)
            assert {id(p) for p in mine.parameters()}.isdisjoint(id(p) for p in theirs.parameters())

    def test_published_shapes_have_the_published_number_of_parameters(self, shape: PublishedShape) -> None:
        config = AutoConfig.for_model(**shape.config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters
        text = config.get_text_config()
        assert len(self.architecture.layer_kinds(text)) == text.num_hidden_layers
        assert self.architecture.refusal(config) is None

    def test_published_shapes_can_be_planned(self, shape: PublishedShape) -> None:
        """From their own values alone: what they leave out has no default there, for what is refused neither."""
        dimensions = dimensions_of(self.architecture, shape.config)
        assert dimensions.parameters == shape.parameters
        assert len(dimensions.layers) == shape.config["num_hidden_layers"]

    def test_the_dimensions_are_the_models(self, case: ParityCase, checkpoint: Checkpoint) -> None:
        """What a plan is made of, from `config.json` alone, against what is built."""
        if self.architecture.dimensions is None:
            pytest.skip("the family has no `dimensions`, so its models can't be planned")
        directory = checkpoint(case)
        dimensions = dimensions_of(self.architecture, json.loads((directory / "config.json").read_text("utf-8")))
        config = read_model_config(directory, self.architecture)
        text = config.get_text_config()
        skeleton = build_skeleton(config, self.architecture, CPU, None, directory)
        kinds = self.architecture.layer_kinds(text)
        packings = make_packings(skeleton.layers, kinds)
        assert [dimensions.layers.index(layer) for layer in dimensions.layers] == [kinds.index(kind) for kind in kinds]
        assert {layer.window for layer in dimensions.layers} <= {None, getattr(text, "sliding_window", None)}
        assert [layer.nbytes for layer in dimensions.layers] == [packing.nbytes for packing in packings]
        assert [layer.restored_bytes for layer in dimensions.layers] == [
            sum(aligned(2 * math.prod(linear or field.shape)) for field, linear in restored_fields(places, packing))
            for places, packing in zip(skeleton.layers, packings, strict=True)
        ]
        assert [{f"{name}.weight" for name in layer.linears} for layer in dimensions.layers] == [
            {field.name for field, linear in restored_fields(places, packing) if linear}
            for places, packing in zip(skeleton.layers, packings, strict=True)
        ]
        assert dimensions.hidden == text.hidden_size
        assert dimensions.vocabulary == text.vocab_size
        assert dimensions.tied == config.tie_word_embeddings
        assert dimensions.has_softcap == (self.architecture.final_softcap(text) is not None)
        assert dimensions.shares == self.architecture.has_side_outputs(text)
        outer = dimensions.parameters - sum(layer.parameters for layer in dimensions.layers)
        assert outer_elements(skeleton, dimensions.outer_linears, dimensions.tied) == outer

    def test_a_model_with_random_weights_computes_something(self, case: ParityCase) -> None:
        """Published shapes are checked and timed with random weights, and NaN is equal to nothing."""
        base = random_resident(self.architecture, {**self.architecture.tiny_config, **case.config}, torch.device("cpu"))
        for name, tensor in all_tensors(base):
            assert not tensor.is_floating_point() or bool(torch.isfinite(tensor).all()), name
        ids = torch.arange(3, 19)[None]
        marks = dict.fromkeys(text_marks(base), torch.zeros_like(ids))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert bool(torch.isfinite(base.train()(input_ids=ids, labels=ids, **marks).loss))

    def test_what_is_refused_is_refused_by_name(self, plugins: Plugins, tmp_path: Path) -> None:
        """Before a weight is read, by `load` and by plans; of a multimodal model, its text part."""
        for item in self.architecture.unsupported:
            values: dict[str, Any] = dict(self.architecture.tiny_config)
            text = values.get("text_config")
            values |= {"text_config": {**text, **item.example}} if text else item.example
            (tmp_path / "config.json").write_text(json.dumps(values))
            with pytest.raises(UnsupportedError, match=item.name):
                poros.load(tmp_path, device="cpu", plugins=plugins)
            with pytest.raises(UnsupportedError, match=item.name):
                dimensions_of(self.architecture, values)

    def test_parity_cases_have_names_of_their_own(self) -> None:
        names = [case.name for case in self.architecture.parity_cases]
        assert 0 < len(names) == len(set(names))

    # -- the proof ----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("padded", [True, False], ids=["padded", "unpadded"])
    @pytest.mark.parametrize("block_size", [1, 3])
    def test_every_surface(
        self, case: ParityCase, padded: bool, block_size: int, checkpoint: Checkpoint, plugins: Plugins
    ) -> None:
        work = Work(steps=3, length=case.sequence_length, padded=padded, accumulation=2, learning_rate=1e-2)
        result = self.compared(checkpoint(case), checkpoint(case), work, plugins, block_size=block_size)
        assert result.identical, str(result.difference)
        assert result.surfaces == dict.fromkeys(SURFACES, True)

    @pytest.mark.parametrize("attention", ["math", "default"])
    def test_every_surface_on_other_attention_paths(
        self, case: ParityCase, attention: Any, checkpoint: Checkpoint, plugins: Plugins
    ) -> None:
        work = Work(steps=2, length=case.sequence_length, accumulation=1, learning_rate=1e-2)
        result = self.compared(checkpoint(case), checkpoint(case), work, plugins, attention=attention)
        assert result.identical, str(result.difference)

    def test_kept_activations(self, case: ParityCase, checkpoint: Checkpoint, plugins: Plugins) -> None:
        work = Work(steps=2, length=case.sequence_length, accumulation=1, learning_rate=1e-2)
        result = self.compared(checkpoint(case), checkpoint(case), work, plugins, resident=2, recompute=False)
        assert result.identical, str(result.difference)

    def test_a_flipped_quirk_breaks_parity(
        self, quirk: ParityCase, checkpoint: Checkpoint, tmp_path: Path, plugins: Plugins
    ) -> None:
        """A proof that passes without the quirk proves nothing about it."""
        flipped = tmp_path / "flipped"
        shutil.copytree(checkpoint(quirk), flipped)
        values = json.loads((flipped / "config.json").read_text())
        (flipped / "config.json").write_text(json.dumps({**values, **quirk.quirk}))
        work = Work(steps=1, length=quirk.sequence_length, accumulation=1)
        assert not self.compared(checkpoint(quirk), flipped, work, plugins).identical

    def test_a_changed_byte_is_found(self, checkpoint: Checkpoint, plugins: Plugins) -> None:
        """The control: of every field of each kind of layer in each layout, one byte is changed in the store, and the
        logits must tell."""
        seen: set[tuple[str, Packing]] = set()
        for case in self.architecture.parity_cases:
            model = poros.load(checkpoint(case), lora=lora(0.0), seed=0, device="cpu", plugins=plugins)
            make_adapters_count(model, 0)
            engine = engine_of(model)
            right = evaluated(model, case)
            kinds = self.architecture.layer_kinds(causal_lm(model).config.get_text_config())
            for layer, (kind, packing) in enumerate(zip(kinds, engine.packings, strict=True)):
                for field in packing.fields if (kind, packing) not in seen else ():
                    if field.name.endswith(".quant_map"):
                        continue  # bitsandbytes' kernels have these sixteen values built in and read no table
                    byte = byte_that_counts(field, packing, engine.store.slab(layer))
                    corrupt(engine, layer, field.name, byte)
                    assert not torch.equal(evaluated(model, case), right), f"{case.name}: {kind}: {field.name}"
                    corrupt(engine, layer, field.name, byte)
                seen.add((kind, packing))
            assert torch.equal(evaluated(model, case), right)
        assert seen

    def test_evaluation_equals_stock(self, case: ParityCase, checkpoint: Checkpoint, plugins: Plugins) -> None:
        """Without gradients, in the mode of training: no dropout, and the kernels of training."""
        models = self.models(checkpoint(case), checkpoint(case), plugins, dropout=0.0)
        assert torch.equal(*(evaluated(model, case) for model in models))

    def test_text_only_and_multimodal_class_agree(
        self, case: ParityCase, checkpoint: Checkpoint, tmp_path: Path, plugins: Plugins
    ) -> None:
        """One decoder under two classes: the same logits, loss and gradients."""
        if self.text_only is None:
            config = read_model_config(checkpoint(case), self.architecture)
            assert config.get_text_config() is config, "name the family of its text tower as text_only"
            pytest.skip("the family has one class")
        text_part(checkpoint(case), tmp_path, self.architecture)
        assert plugins.architecture_for(json.loads((tmp_path / "config.json").read_text())["model_type"]) == (
            self.text_only
        )
        ids = torch.arange(3, 3 + case.sequence_length)[None] % 64
        found = []
        for directory in (checkpoint(case), tmp_path):
            model = poros.load(directory, lora=lora(0.0), seed=0, device="cpu", plugins=plugins)
            make_adapters_count(model, 0)
            with attention_path("fused"):
                output = model.train()(input_ids=ids, labels=ids, use_cache=False, **marks(model, ids))
            output.loss.backward()
            found.append([output.logits, output.loss, *(p.grad for p in model.parameters() if p.requires_grad)])
        assert len(found[0]) == len(found[1]) > 2
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))

    def test_a_saved_adapter_loads_in_stock_and_counts(
        self, case: ParityCase, checkpoint: Checkpoint, tmp_path: Path, plugins: Plugins
    ) -> None:
        stock, streamed = self.models(checkpoint(case), checkpoint(case), plugins, dropout=0.0)
        streamed.save_pretrained(tmp_path)
        base = causal_lm(stock)
        stock.unload()
        without = evaluated(base, case)
        within = evaluated(PeftModel.from_pretrained(base, tmp_path), case)
        assert torch.equal(within, evaluated(streamed, case))
        assert not torch.equal(within, without)

    def test_adapters_stay_in_the_text_decoder(
        self, case: ParityCase, checkpoint: Checkpoint, plugins: Plugins
    ) -> None:
        for targets in ("all-linear", ["q_proj", "down_proj"]):
            part = lora_config(LoraPart(rank=2, targets=targets))
            streamed = poros.load(checkpoint(case), lora=part, seed=0, device="cpu", plugins=plugins)
            inside = f"{self.architecture.decoder}.{self.architecture.layers}."
            base = causal_lm(streamed)
            trained = [name for name, parameter in base.named_parameters() if parameter.requires_grad]
            assert trained
            assert all(name.startswith(inside) for name in trained)

    # -- what the tests are made of -----------------------------------------------------------------------------------

    def stock(self, directory: Path, dropout: float) -> Any:
        """The resident peft model of a checkpoint."""
        config = AutoConfig.from_pretrained(directory).get_text_config()
        return load_stock(directory, narrowed(lora(dropout), self.architecture, config), 0, CPU)

    def models(
        self, stock: Path, streamed: Path, plugins: Plugins, dropout: float = 0.1, **options: Any
    ) -> tuple[Any, Any]:
        """A stock model of one checkpoint and a streamed one of another, with the same adapters."""
        other = poros.load(streamed, lora=lora(dropout), seed=0, device="cpu", plugins=plugins, **options)
        made = (self.stock(stock, dropout), other)
        for model in made:
            make_adapters_count(model, 0)
        return made

    def compared(
        self, stock: Path, streamed: Path, work: Work, plugins: Plugins, attention: Any = "fused", **options: Any
    ) -> Comparison:
        """Train both and compare them on every surface."""
        models = self.models(stock, streamed, plugins, **options)
        engine = engine_of(models[1])
        layers = [DecoderParts.of(model, self.architecture).layers for model in models]
        with attention_path(attention):
            one = train(models[0], layers[0], work, CPU)
            other = train(models[1], layers[1], work, CPU, accumulate=engine.accumulate)
        return compare(one, other, engine.blocks)
