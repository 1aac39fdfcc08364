"""The command line as a user meets it: exit codes, messages, JSON, and a help that is quick."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from poros.cli import app
from poros.config import LoraPart, StreamConfig
from poros.plan.cards import CARDS
from poros.plugins import load_plugins
from poros.receipt import read_receipts
from poros.testing.checkpoints import make_tokenizer


@pytest.fixture
def poros(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """poros(*arguments) -> (exit code, stdout, stderr), in this process."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["poros", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            app.main()
        out, err = capsys.readouterr()
        code = caught.value.code
        return (code if isinstance(code, int) else 0 if code is None else 1), out, err

    return call


def in_a_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False)


def test_help_imports_no_torch_and_is_quick() -> None:
    code = (
        "import sys; sys.argv = ['poros', '--help']\n"
        "from poros.cli.app import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'peft', 'bitsandbytes', 'datasets', 'matplotlib'} & set(sys.modules)))"
    )
    began = time.perf_counter()
    done = in_a_process("-c", code)
    took = time.perf_counter() - began
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    for verb in ("train", "plan", "check", "doctor", "plugins"):
        assert verb in done.stdout
    # Importing torch alone takes longer than this; the sum is generous to a busy machine.
    assert took < 5


@pytest.mark.parametrize("verb", ["train", "plan", "check", "doctor", "plugins"])
def test_every_verb_has_help_with_an_example(verb: str, poros: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = poros(verb, "--help")
    assert code == 0
    assert f"poros {verb}" in out.split("Example:")[1]


def test_version(poros: Callable[..., tuple[int, str, str]]) -> None:
    from poros import __version__

    assert poros("--version")[:2] == (0, __version__ + "\n")


def test_plugins(poros: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = poros("plugins", "--json")
    assert code == 0
    found = {info["name"]: info for info in json.loads(out)}
    assert found["qwen"]["distribution"] == "poros-arch-qwen"
    assert found["qwen"]["model_types"] == ["qwen2", "qwen3"]
    assert found["gemma"]["families"] == ["gemma3", "gemma3_multimodal", "gemma4", "gemma4_multimodal"]
    assert found["bench"]["hooks"] == ["poros_bench_methods", "poros_commands"]
    assert all(info["version"] for info in found.values())
    code, out, _ = poros("plugins")
    assert code == 0
    assert "poros-arch-gemma" in out


def test_doctor(poros: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = poros("doctor", "--json")
    findings = {finding["what"]: finding for finding in json.loads(out)}
    assert code == (1 if any(f["state"] == "error" for f in findings.values()) else 0)
    for what in (
        "python",
        "torch",
        "transformers",
        "peft",
        "bitsandbytes",
        "NF4",
        "RAM",
        "pinned memory",
        "disk",
        "families",
    ):
        assert findings[what]["found"]
        assert findings[what]["state"] in ("ok", "warning", "error")
    assert findings["NF4"]["state"] == "ok"
    assert "qwen2" in findings["families"]["found"]
    code, out, _ = poros("doctor")
    assert "bitsandbytes" in out


def test_check_says_identical(
    checkpoint: Callable[..., Path], poros: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    directory = checkpoint("qwen2", {})
    code, out, err = poros("check", directory, "--steps", 1, "--length", 16, "--out", tmp_path / "r.jsonl")
    assert code == 0, err
    assert out.rstrip().endswith("identical")
    assert "control arm" in out
    code, out, _ = poros("check", directory, "--steps", 1, "--length", 16, "--json")
    assert code == 0
    receipt = json.loads(out)
    assert receipt["schema"] == 1
    assert receipt["kind"] == "check"
    assert receipt["parity"] == dict.fromkeys(receipt["parity"], True)
    assert len(read_receipts(tmp_path / "r.jsonl")) == 1


def test_check_exits_with_1_when_the_answer_is_no(
    checkpoint: Callable[..., Path], poros: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poros.parity.gate.corrupt", lambda engine, block: "nothing")
    code, out, _ = poros("check", checkpoint("qwen2", {}), "--steps", 1, "--length", 16)
    assert code == 1
    assert "control arm not caught" in out
    assert "NOT told apart" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "no/such/dir"], "no checkpoint directory"),
        (["check", "."], "config.json"),
        (["check", "x", "--attention", "magic"], "attention"),
        (["check", "x", "--tier", "tape"], "stream.tier"),
        (["check", "x", "--steps", "0"], "--steps"),
        (["train"], "model: is required"),
        (["train", "missing.yaml"], "can't read the config file"),
        (["train", "--model", "m", "--data", "d", "--out", "o", "--set", "lora.rnk=3"], "lora.rnk: is not a known key"),
        (["train", "--model", "m", "--data", "d", "--out", "o", "--set", "nonsense"], "expected a.b=value"),
        (["no-such-verb"], "No such command"),
        (["check", "x", "--out", "."], "is a folder"),
        (["plan", "qwen9-1t"], "qwen2.5-32b"),
        (["plan", "qwen2.5-32b", "--gpu", "abacus"], "rtx-4090"),
        (["plan", "qwen2.5-32b", "--vram", "much"], "--vram"),
        (["plan", "qwen2.5-32b", "--plot", "curve.doc"], ".png"),
        (["plan", "qwen2.5-32b", "--set", "slots=0"], "stream.slots"),
        (["plan", "qwen2.5-32b", "--set", "vram=8GB"], "use --vram"),
        (["plan", "qwen2.5-32b", "--set", "tokens=64"], "use --seq and --batch"),
        (["plan", "."], "config.json"),
        (["train", "--model", "x", "--data", "y", "--out", "z", "--vram", "much"], "stream.vram"),
        (["check", "x", "--vram", "much"], "stream.vram"),
        (["check", "x", "--set", "moon=host"], "stream.moon"),
    ],
)
def test_wrong_calls_exit_with_2_and_no_traceback(
    arguments: list[str],
    words: str,
    poros: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = poros(*arguments)
    assert code == 2
    assert words in err
    assert "Traceback" not in out + err


def test_train_and_its_refusals(
    checkpoint: Callable[..., Path], poros: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    import shutil

    model = tmp_path / "model"
    shutil.copytree(checkpoint("qwen2", {"vocab_size": 300}), model)
    make_tokenizer(["some text to learn from"], vocab_size=300).save_pretrained(model)
    data = tmp_path / "text.jsonl"
    data.write_text("\n".join(json.dumps({"text": f"some text {n}"}) for n in range(8)))
    arguments = (
        "train",
        "--model",
        model,
        "--data",
        data,
        "--out",
        tmp_path / "out",
        "--steps",
        2,
        "--set",
        "lora.rank=2",
    )
    code, out, err = poros(*arguments)
    assert code == 0, err
    for name in ("adapter", "receipt", "loss curve"):
        assert name in out
    code, _, err = poros(*arguments)
    assert code == 2
    assert "not empty" in err
    assert "--overwrite" in err
    assert poros(*arguments, "--overwrite")[0] == 0


def test_a_defect_does_not_look_like_a_no(
    poros: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("made up")

    monkeypatch.setattr("poros.parity.gate.check", fail)
    code, _, err = poros("check", "x")
    assert code == 3
    assert "made up" in err
    assert "please report" in err


def test_a_model_whose_loss_is_nan_is_refused(
    checkpoint: Callable[..., Path], poros: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    model = tmp_path / "model"
    shutil.copytree(checkpoint("qwen2", {}), model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    code, _, err = poros("check", model, "--steps", 1, "--length", 8)
    assert code == 2
    assert "not finite" in err


def test_an_interrupted_run_exits_with_130(
    poros: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("poros.training.run.train", interrupt)
    code, _, err = poros("train", "--model", "m", "--data", "d", "--out", tmp_path / "out")
    assert code == 130
    assert "interrupted" in err


def test_plan_of_a_published_shape(poros: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    picture = tmp_path / "curve.png"
    code, out, err = poros("plan", "qwen2.5-32b", "--vram", "11GB", "--gpu", "h200", "--seq", 512, "--plot", picture)
    assert code == 0, err
    for words in ("whole process", "on the GPU for good", "stock resident", "bound by link"):
        assert words in out
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_plan_as_json_is_the_contract(poros: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = poros("plan", "qwen2.5-32b", "--vram", "11GB", "--gpu", "h200", "--seq", 512, "--json")
    assert code == 0, err
    plan = json.loads(out)
    contract = "vram_budget_gb predicted_vram_gb predicted_host_gb predicted_s_step bound_by components placements"
    assert set(contract.split()) <= set(plan)
    assert plan["vram_budget_gb"] == 11
    assert plan["predicted_vram_gb"] <= 11
    assert sum(plan["components"].values()) == pytest.approx(plan["predicted_vram_gb"])


@pytest.mark.parametrize("unpadded", [False, True])
def test_plan_is_of_the_job_that_the_options_say(unpadded: bool, poros: Callable[..., tuple[int, str, str]]) -> None:
    """Padding, dropout, rank, rows: by default the same as `poros train` plans for."""
    from poros.plan.fit import dimensions_of, fit, make_job

    architecture, shape = load_plugins().published("qwen2.5-7b") or pytest.fail("no such shape")
    options = "--vram 16GB --seq 512 --batch 2 --accumulate 3 --rank 8 --dropout 0.1 --set slots=3 --gpu h200 --json"
    code, out, err = poros("plan", "qwen2.5-7b", *options.split(), *(["--unpadded"] if unpadded else []))
    assert code == 0, err
    stream, lora = StreamConfig(slots=3), LoraPart(rank=8, dropout=0.1)
    job = make_job(dimensions_of(architecture, shape.config), lora, 1024, 3, stream, True, 2, not unpadded)
    assert job.dropout
    plan = fit(job, CARDS["h200"], 16 * 10**9, stream).to_json()
    assert {name: json.loads(out)[name] for name in plan} == json.loads(json.dumps(plan))


def test_plan_of_a_directory_and_with_settings_that_stay(
    checkpoint: Callable[..., Path], poros: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = poros(
        "plan", checkpoint("gemma4", {}), "--gpu", "rtx-3060", "--set", "slots=3", "--set", "resident=1", "--json"
    )
    assert code == 0, err
    assert json.loads(out)["placements"]["slots"] == 3
    assert json.loads(out)["placements"]["resident"] == 1


def test_a_plan_that_does_not_fit_is_a_no(poros: Callable[..., tuple[int, str, str]]) -> None:
    arguments = ("plan", "qwen2.5-72b", "--vram", "3GB", "--gpu", "rtx-3060")
    code, out, err = poros(*arguments)
    assert code == 1
    assert "at least" in err
    assert "what helps" in err
    code, out, err = poros(*arguments, "--json")
    assert code == 1
    answer = json.loads(out)
    assert answer["fits"] is False
    assert answer["smallest"]["predicted_vram_gb"] > 3
    code, _, err = poros("plan", "qwen2.5-72b", "--gpu", "h200", "--host-ram", "16GB")
    assert code == 1
    assert "host memory" in err


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
            {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
        ),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, {"PYTORCH_ALLOC_CONF": "backend:native"}),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="torch has it there only")
def test_torchs_memory_can_grow_unless_the_user_says_otherwise(
    before: dict[str, str],
    after: dict[str, str],
    poros: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ})
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        os.environ.pop(name, None)
    os.environ.update(before)
    poros("--version")
    assert {name: value for name, value in os.environ.items() if "ALLOC_CONF" in name} == after


def test_plan_imports_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['poros', 'plan', 'qwen2.5-7b', '--gpu', 'rtx-3060']\n"
        "from poros.cli.app import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'peft', 'bitsandbytes'} & set(sys.modules)))"
    )
    done = in_a_process("-c", code)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_train_within_a_budget(
    checkpoint: Callable[..., Path], poros: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    import shutil

    model = tmp_path / "model"
    shutil.copytree(checkpoint("qwen2", {"vocab_size": 300}), model)
    make_tokenizer(["some text to learn from"], vocab_size=300).save_pretrained(model)
    data = tmp_path / "text.jsonl"
    data.write_text("\n".join(json.dumps({"text": f"some text {n}"}) for n in range(8)))
    out = tmp_path / "out"
    arguments = ("train", "--model", model, "--data", data, "--out", out, "--steps", 2, "--set", "lora.rank=2")
    code, _, err = poros(*arguments, "--vram", "0.1MB")
    assert code == 2
    assert "at least" in err
    assert not (out / "adapter_model.safetensors").exists()
    code, shown, err = poros(*arguments, "--vram", "0.6MB", "--set", "stream.optimizer=host")
    assert code == 0, err
    assert "plan: " in shown + err
    receipt = read_receipts(out / "receipt.jsonl")[-1]
    assert receipt.plan is not None
    assert receipt.plan["measured_components"]["adapters"] == receipt.plan["components"]["adapters"]
    assert receipt.plan["placements"]["optimizer"] == "host"
