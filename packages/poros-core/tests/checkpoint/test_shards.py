"""Reading a checkpoint: what is refused and what the refusal says, and that what is read is what was written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants, split_torch_state_dict_into_shards
from safetensors.torch import save_file

from poros.checkpoint.headers import DTYPES, TensorInfo
from poros.checkpoint.locate import find_prefix, read_config, resolve
from poros.checkpoint.shards import INDEX, SINGLE, Shards
from poros.errors import CheckpointError

A, B, C = (f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))


def tensors() -> dict[str, dict[str, torch.Tensor]]:
    """Three shards' tensors, with the dtypes a checkpoint has and two shapes that are easy to get wrong."""
    generator = torch.Generator().manual_seed(0)
    return {
        A: {"model.embed_tokens.weight": torch.randn(32, 8, generator=generator)},
        B: {
            "model.layers.0.mlp.weight": torch.randn(16, 8, generator=generator).bfloat16(),
            "model.layers.0.norm.weight": torch.randn(8, generator=generator).half(),
            "model.layers.0.scalar": torch.tensor(2.5),
        },
        C: {
            "lm_head.weight": torch.randn(32, 8, generator=generator).to(torch.float8_e4m3fn),
            "model.ids": torch.arange(5),
            "model.none": torch.empty(0, 4),
        },
    }


def all_tensors() -> dict[str, torch.Tensor]:
    return {name: tensor for shard in tensors().values() for name, tensor in shard.items()}


def write_index(directory: Path, **changes: str | None) -> None:
    """Write the index of `tensors()`; a change moves a tensor to another file name, None takes it out."""
    weight_map: dict[str, str | None] = {name: file for file, shard in tensors().items() for name in shard}
    weight_map |= changes
    weight_map = {name: file for name, file in weight_map.items() if file is not None}
    # The total is wrong on purpose: published ones are, and it must not matter.
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    for file, shard in tensors().items():
        save_file(shard, directory / file, metadata={"format": "pt"})
    write_index(directory)
    return directory


def write_raw(file: Path, header: Any, data: bytes) -> int:
    """Write a safetensors file by hand; returns its size in bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(begin: int, end: int, shape: list[Any] | None = None, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


# Each damage changes the sharded checkpoint and returns what the error must contain.
Damage = Callable[[Path], list[str]]


def missing(directory: Path) -> list[str]:
    (directory / A).unlink()
    (directory / C).unlink()
    return [f"2 of 3 shards are missing: {A}, {C}", f"fetch {A}, {C} again"]


def broken_link(directory: Path) -> list[str]:
    (directory / A).unlink()
    (directory / A).symlink_to(directory / "gone")
    return [f"1 of 3 shards is missing: {A}"]


def truncated(directory: Path) -> list[str]:
    content = (directory / A).read_bytes()
    (directory / A).write_bytes(content[:-100])
    return [A, "cut short", f"expected {len(content)} bytes, found {len(content) - 100} bytes", f"fetch {A} again"]


def truncated_in_header(directory: Path) -> list[str]:
    content = (directory / A).read_bytes()
    (directory / A).write_bytes(content[:20])
    length = int.from_bytes(content[:8], "little")
    return [A, f"expected a header of {length} bytes after the first 8, found 20 bytes"]


def empty(directory: Path) -> list[str]:
    (directory / A).write_bytes(b"")
    return [f"{A} is empty: expected at least 10 bytes, found 0 bytes"]


def tiny(directory: Path) -> list[str]:
    (directory / A).write_bytes(b"\x02\0\0")
    return [f"{A} is too short: expected at least 10 bytes, found 3 bytes"]


def pointer(directory: Path) -> list[str]:
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4932112345\n"
    (directory / A).write_text(text)
    return [A, "git-lfs pointer", "git lfs pull", f"expected 4932112345 bytes, found {len(text)} bytes"]


def header_too_long(directory: Path) -> list[str]:
    content = (directory / A).read_bytes()
    (directory / A).write_bytes((len(content)).to_bytes(8, "little") + content[8:])
    return [A, f"expected a header of {len(content)} bytes after the first 8, found {len(content)} bytes"]


def header_over_limit(directory: Path) -> list[str]:
    with (directory / A).open("wb") as stream:  # sparse: takes no room on the disk
        stream.write((100_000_001).to_bytes(8, "little"))
        stream.truncate(100_000_100)
    return [A, "expected a header of 100000001 bytes after the first 8, found 100000100 bytes"]


def web_page(directory: Path) -> list[str]:
    (directory / A).write_text("<!DOCTYPE html><html>Not found</html>")
    return [A, "not safetensors", "found 37 bytes"]


def header_not_json(directory: Path) -> list[str]:
    write_raw(directory / A, b"{'a': 1}", b"")
    return [f"{A} has a damaged header: "]


def header_not_utf8(directory: Path) -> list[str]:
    write_raw(directory / A, b'{"\xff": 1}', b"")
    return [f"{A} has a damaged header: "]


def header_not_object(directory: Path) -> list[str]:
    write_raw(directory / A, [1], b"")
    return [f"{A} has a damaged header: "]


def header_too_deep(directory: Path) -> list[str]:
    write_raw(directory / A, b"[" * 100_000, b"")
    return [f"{A} has a damaged header: "]


def entry_without_offsets(directory: Path) -> list[str]:
    write_raw(directory / A, {"x": {"dtype": "U8", "shape": [1]}}, b"a")
    return [f"{A} has a damaged header: x is described as "]


def negative_shape(directory: Path) -> list[str]:
    write_raw(directory / A, {"x": entry(0, 1, [-1, -1])}, b"a")  # the product is right
    return [f"{A} has a damaged header: x is described as "]


def shape_of_truths(directory: Path) -> list[str]:
    write_raw(directory / A, {"x": entry(0, 1, [True])}, b"a")
    return [f"{A} has a damaged header: x is described as "]


def wrong_offsets(directory: Path) -> list[str]:
    write_raw(directory / A, {"x": entry(0, 10, [2, 3], "BF16"), "y": entry(10, 14)}, bytes(14))
    return [A, "x, BF16 of shape [2, 3], expected 12 bytes, found offsets 0 to 10, 10 bytes"]


def overlap(directory: Path) -> list[str]:
    write_raw(directory / A, {"x": entry(0, 8), "y": entry(4, 12)}, bytes(12))
    return [A, "y overlaps the tensor before it: expected offset 8, found 4"]


def gap(directory: Path) -> list[str]:
    write_raw(directory / A, {"x": entry(0, 8), "y": entry(9, 12)}, bytes(12))
    return [A, "y leaves a gap before it: expected offset 8, found 9"]


def trailing(directory: Path) -> list[str]:
    size = (directory / A).stat().st_size
    with (directory / A).open("ab") as stream:
        stream.write(bytes(64))
    return [f"{A} goes on after its last tensor: expected {size} bytes, found {size + 64} bytes"]


def unknown_dtype(directory: Path) -> list[str]:
    write_raw(directory / A, {"x": entry(0, 16, [1], "I128")}, bytes(16))
    return [f"{A} holds x as I128", "BF16"]


def no_tensors(directory: Path) -> list[str]:
    write_raw(directory / A, {"__metadata__": {"format": "pt"}}, b"")
    return [f"{A} holds no tensors"]


def absent_from_shard(directory: Path) -> list[str]:
    write_index(directory, **{"model.ghost": B})
    return [f"{B} doesn't hold model.ghost, which {INDEX} puts there", f"fetch {B}, {INDEX} again"]


def absent_from_index(directory: Path) -> list[str]:
    write_index(directory, **{"model.ids": None})
    return [f"{C} holds model.ids, which {INDEX} doesn't list"]


def in_other_shard(directory: Path) -> list[str]:
    write_index(directory, **{"model.ids": B})
    return [f"{C} holds model.ids, which {INDEX} puts in {B}"]


def duplicate(directory: Path) -> list[str]:
    save_file(tensors()[A] | {"model.ids": torch.arange(5)}, directory / A)
    return [f"model.ids is in 2 shards: {A}, {C}"]


def escapes(name: str) -> Damage:
    def damage(directory: Path) -> list[str]:
        outside = directory / name  # the file is there and whole: that is no excuse
        outside.parent.mkdir(exist_ok=True)
        save_file({"model.out": torch.zeros(1)}, outside)
        write_index(directory, **{"model.out": name})
        return [f"{INDEX} names the shard {name!r}"]

    return damage


def names_nothing(name: str) -> Damage:
    def damage(directory: Path) -> list[str]:
        write_index(directory, **{"model.out": name})
        return [f"{INDEX} names the shard {name!r}"]

    return damage


DAMAGES: dict[str, Damage] = {
    damage.__name__: damage
    for damage in (
        missing,
        broken_link,
        truncated,
        truncated_in_header,
        empty,
        tiny,
        pointer,
        header_too_long,
        header_over_limit,
        web_page,
        header_not_json,
        header_not_utf8,
        header_not_object,
        header_too_deep,
        entry_without_offsets,
        negative_shape,
        shape_of_truths,
        wrong_offsets,
        overlap,
        gap,
        trailing,
        unknown_dtype,
        no_tensors,
        absent_from_shard,
        absent_from_index,
        in_other_shard,
        duplicate,
    )
}
DAMAGES |= {f"escapes to {name}": escapes(name) for name in ("../x.safetensors", "sub/x.safetensors")}
DAMAGES |= {
    f"names {name!r}": names_nothing(name)
    for name in ("/etc/passwd", "..", ".", "", "a\\b.safetensors", "C:x.safetensors")
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_checkpoint_is_refused(sharded: Path, damage: Damage) -> None:
    fragments = damage(sharded)
    with pytest.raises(CheckpointError) as caught:
        Shards.open(sharded)
    assert fragments
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert str(sharded) in caught.value.message


def test_one_damage_is_one_problem(sharded: Path) -> None:
    """A shard that can't be read doesn't also complain that its tensors are not there."""
    for damage in (missing, truncated, pointer):
        for file, shard in tensors().items():
            save_file(shard, sharded / file)
        damage(sharded)
        with pytest.raises(CheckpointError, match=r"^1 problem with"):
            Shards.open(sharded)


def test_all_problems_are_listed_at_once(sharded: Path) -> None:
    size = (sharded / B).stat().st_size
    (sharded / A).unlink()
    (sharded / B).write_bytes((sharded / B).read_bytes()[:-3])
    write_index(sharded, **{"model.ghost": C, "model.out": "../x.safetensors"})
    with pytest.raises(CheckpointError) as caught:
        Shards.open(sharded)
    assert caught.value.message.startswith("4 problems with")
    for fragment in (A, f"expected {size} bytes, found {size - 3} bytes", "model.ghost", "'../x.safetensors'"):
        assert fragment in caught.value.message
    assert f"fetch {A}, {B}, {C}, {INDEX} again" in caught.value.hint


def test_a_long_list_of_problems_is_cut_and_counted(sharded: Path) -> None:
    write_index(sharded, **{f"model.ghost.{number}": A for number in range(25)})
    with pytest.raises(CheckpointError) as caught:
        Shards.open(sharded)
    assert caught.value.message.startswith("25 problems with")
    assert caught.value.message.count("model.ghost") == 10
    assert caught.value.message.endswith("and 15 more")


def test_a_file_that_can_not_be_opened_is_a_problem_too(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: Path) -> None:
        raise PermissionError(f"Permission denied: {file.name}")

    monkeypatch.setattr("poros.checkpoint.shards.read_header", refuse)
    with pytest.raises(CheckpointError, match=f"{A} can't be read: Permission denied"):
        Shards.open(sharded)


def test_what_safetensors_itself_refuses_names_the_file(tmp_path: Path) -> None:
    write_raw(tmp_path / SINGLE, {"__metadata__": {"a": 1}, "x": entry(0, 1)}, b"a")
    with pytest.raises(CheckpointError, match=f"can't open .*{SINGLE}"):
        Shards.open(tmp_path)


def test_the_hint_for_a_snapshot_in_the_hubs_cache_is_the_whole_command(sharded: Path) -> None:
    snapshot = sharded / "models--org--some-model" / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (snapshot / SINGLE).touch()
    with pytest.raises(CheckpointError) as caught:
        Shards.open(snapshot)
    assert f"`hf download org/some-model {SINGLE} --revision 0123abc --force-download`" in caught.value.hint


@pytest.mark.parametrize("text", ["", "nonsense", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"x": 1}}'])
def test_a_damaged_index_is_refused(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=INDEX):
        Shards.open(sharded)


@pytest.mark.parametrize(
    ("files", "message", "hint"),
    [
        ([], "no safetensors files; it holds nothing", "Hugging Face format"),
        (["pytorch_model.bin", "config.json"], "it holds config.json, pytorch_model.bin", "save_pretrained"),
        (["model.gguf", "._x.safetensors"], "no safetensors files; it holds ._x.safetensors, model.gguf", "weights as"),
        ([A, B], f"parts of a checkpoint but no {INDEX}: {A}, {B}", f"fetch {INDEX} again"),
        ([B], f"parts of a checkpoint but no {INDEX}: {B}", f"fetch {INDEX} again"),
        ([f"{n:02}.json" for n in range(12)], "09.json and 2 more", "Hugging Face format"),
    ],
)
def test_a_directory_without_a_whole_checkpoint_is_refused(
    tmp_path: Path, files: list[str], message: str, hint: str
) -> None:
    for file in files:
        (tmp_path / file).write_bytes(b"x" * 100)
    with pytest.raises(CheckpointError) as caught:
        Shards.open(tmp_path)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint directory"):
        Shards.open(tmp_path / "gone")


def test_two_checkpoints_in_one_directory_are_refused(sharded: Path) -> None:
    save_file({"x": torch.zeros(1)}, sharded / SINGLE)
    with pytest.raises(CheckpointError, match="holds two checkpoints"):
        Shards.open(sharded)


def test_sharded_tensors_read_as_written(sharded: Path) -> None:
    expected = all_tensors()
    with Shards.open(sharded) as shards:
        assert shards.names == tuple(sorted(expected)) == tuple(shards)
        assert len(shards) == len(expected)
        assert shards.total_bytes == sum(tensor.nbytes for tensor in expected.values())
        for name, tensor in expected.items():
            read = shards.read(name)
            assert (read.dtype, read.shape, read.device.type) == (tensor.dtype, tensor.shape, "cpu")
            assert torch.equal(read.view(torch.uint8), tensor.view(torch.uint8)) if tensor.ndim else read == tensor
    assert "model.ids" in shards
    assert "ids" not in shards
    assert shards.info("model.ids") == TensorInfo("model.ids", torch.int64, (5,), sharded / C, 40)
    assert shards.info("model.layers.0.scalar").shape == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("file", [SINGLE, "weights.safetensors", "model-00001-of-00001.safetensors"])
def test_a_single_file_reads_as_written(tmp_path: Path, dtype: torch.dtype, file: str) -> None:
    expected = {"a.weight": torch.randn(3, 5).to(dtype), "b.weight": torch.randn(7).to(dtype)}
    save_file(expected, tmp_path / file)
    with Shards.open(tmp_path) as shards:
        assert shards.names == ("a.weight", "b.weight")
        for name, tensor in expected.items():
            assert torch.equal(shards.read(name), tensor)
            assert shards.read(name).dtype == dtype


def test_model_safetensors_goes_before_other_files(tmp_path: Path) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / SINGLE)
    save_file({"y": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    with Shards.open(tmp_path) as shards:
        assert shards.names == ("x",)


def test_an_index_may_name_the_single_file(tmp_path: Path) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / SINGLE)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": SINGLE}}))
    with Shards.open(tmp_path) as shards:
        assert shards.names == ("x",)


def test_what_the_hub_library_splits_is_read(tmp_path: Path) -> None:
    expected = {f"layers.{number}.weight": torch.randn(16, 16) for number in range(5)}
    split = split_torch_state_dict_into_shards(expected, max_shard_size=2100)
    assert split.is_sharded
    for file, names in split.filename_to_tensors.items():
        save_file({name: expected[name] for name in names}, tmp_path / file)
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    (tmp_path / INDEX).write_text(json.dumps(index))
    with Shards.open(tmp_path) as shards:
        assert set(shards) == set(expected)
        assert all(torch.equal(shards.read(name), tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("code", DTYPES)
def test_every_known_dtype_is_what_safetensors_reads(tmp_path: Path, code: str) -> None:
    nbytes = 3 * DTYPES[code].itemsize
    write_raw(tmp_path / SINGLE, {"x": entry(0, nbytes, [3], code)}, bytes(nbytes))
    with Shards.open(tmp_path) as shards:
        assert shards.read("x").dtype == shards.info("x").dtype == DTYPES[code]


def test_links_are_followed_as_in_the_hubs_cache(sharded: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for number, file in enumerate((A, B, C, INDEX)):
        blob = (sharded / file).rename(tmp_path / f"blob{number}")
        (snapshot / file).symlink_to(Path("..") / blob.name)
    with Shards.open(snapshot) as shards:
        assert torch.equal(shards.read("model.ids"), torch.arange(5))
        assert shards.info("model.ids").file == snapshot / C


def test_closing_ends_reading_but_not_the_tensors(sharded: Path) -> None:
    shards = Shards.open(sharded)
    ids = shards.read("model.ids")
    shards.close()
    shards.close()
    assert torch.equal(ids, torch.arange(5))
    assert "model.ids" in shards
    with pytest.raises(CheckpointError, match=r"the shards of .* are closed"):
        shards.read("model.ids")


def test_a_missing_tensor_is_named_with_those_like_it(sharded: Path) -> None:
    with Shards.open(sharded) as shards, pytest.raises(CheckpointError) as caught:
        shards.read("model.layers.0.mlp.weigth")
    assert "no tensor model.layers.0.mlp.weigth" in caught.value.message
    assert "model.layers.0.mlp.weight" in caught.value.hint
    with pytest.raises(CheckpointError) as caught:
        shards.info("zzz")
    assert "7 tensors" in caught.value.hint


def test_reading_the_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "hidden_size": 8}')
    assert read_config(tmp_path) == {"model_type": "qwen2", "hidden_size": 8}


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", '{"model_type": 1}', '{"model_type": ""}', "[" * 100_000])
def test_a_config_that_says_nothing_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / "config.json"))):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["model.embed_tokens.weight", "lm_head.weight"], "model."),
        (["model.language_model.embed_tokens.weight", "model.vision_tower.x"], "model.language_model."),
        (["embed_tokens.weight", "norm.weight"], ""),
        (["model.layers.0.mlp.weight"], "model."),
        (["model.layers.01.mlp.weight", "layers.0.x"], ""),
    ],
)
def test_the_prefix_is_found(names: list[str], expected: str) -> None:
    assert find_prefix(iter(names), ["model.language_model.", "model.", ""], "embed_tokens.weight") == expected


def test_no_prefix_lists_the_paths_there_are() -> None:
    with pytest.raises(CheckpointError) as caught:
        find_prefix(["gpt.h.0.w", "gpt.h.1.w", "head.weight"], ["model.", ""], "embed_tokens.weight")
    assert "'model.', '' before embed_tokens.weight; their names start with: gpt.h, head.weight" in caught.value.message


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the hub was asked for; it answers nothing."""
    asked: list[dict[str, Any]] = []

    def download(repo_id: str, **options: Any) -> str:
        asked.append({"repo_id": repo_id, **options})
        raise OSError("401 Client Error.\n\nRepository Not Found")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return asked


def test_a_local_directory_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: list[dict[str, Any]]
) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve(str(tmp_path)) == tmp_path
    assert resolve("org/name") == Path("org/name")
    assert resolve("~/org") == tmp_path / "org"
    assert not hub


@pytest.mark.parametrize(
    "path",
    ["./gone", "../gone", "/gone/model", "~/gone", "a/b/c", "org/name/", "a b", "~nobody/x", "/" + "x" * 300],
)
def test_what_is_written_like_a_path_never_reaches_the_hub(path: str, hub: list[dict[str, Any]]) -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve(path)
    assert path in caught.value.message
    assert not hub


def test_a_file_is_not_a_checkpoint(tmp_path: Path, hub: list[dict[str, Any]]) -> None:
    (tmp_path / SINGLE).touch()
    with pytest.raises(CheckpointError) as caught:
        resolve(str(tmp_path / SINGLE))
    assert "is a file" in caught.value.message
    assert str(tmp_path) in caught.value.hint
    assert not hub


@pytest.mark.parametrize("offline", [False, True])
def test_a_hub_that_does_not_give_it_is_an_error_that_says_what_was_tried(
    hub: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, offline: bool
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    with pytest.raises(CheckpointError) as caught:
        resolve("org/name", revision="v1")
    assert "org/name is not a directory here" in caught.value.message
    assert "at revision v1" in caught.value.message
    assert "OSError: 401 Client Error. Repository Not Found" in caught.value.message
    assert ("HF_HUB_OFFLINE" in caught.value.hint) is offline
    assert [(call["repo_id"], call["revision"], call["local_files_only"]) for call in hub] == [
        ("org/name", "v1", offline)
    ]
    assert "*.safetensors" in hub[0]["allow_patterns"]


def test_a_download_is_where_the_hub_library_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    assert resolve("gpt2") == tmp_path
