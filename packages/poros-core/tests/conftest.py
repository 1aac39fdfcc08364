"""Fixtures: installed plugins, tiny checkpoints (made once a session), and no network."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
import torch
import transformers

from poros.architecture import Architecture
from poros.config import hash_of
from poros.plugins import Plugins, load_plugins
from poros.testing.checkpoints import make_checkpoint

FAMILIES = ("qwen2", "gemma3")

transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)  # the models are tiny, and xdist uses the cores


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that reaches for the network fails."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"a test reached for the network: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(autouse=True)
def torch_settings() -> Iterator[None]:
    """No test leaves torch's switches or its random state to the next one."""
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.fixture(scope="session")
def plugins() -> Plugins:
    return load_plugins()


@pytest.fixture(scope="session")
def families(plugins: Plugins) -> dict[str, Architecture]:
    return {architecture.family: architecture for architecture in plugins.architectures()}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, families: dict[str, Architecture]) -> Callable[..., Path]:
    """checkpoint(family, **config) -> a directory with a tiny stock checkpoint; don't write to it."""
    made: dict[str, Path] = {}

    def make(family: str, config: Mapping[str, Any] | None = None, **options: Any) -> Path:
        key = hash_of([family, config, {k: str(v) for k, v in options.items()}])
        if key not in made:
            directory = tmp_path_factory.mktemp(family)
            made[key] = make_checkpoint(directory, families[family], config, **options)
        return made[key]

    return make
