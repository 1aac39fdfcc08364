"""Memory for the base: page-locked where it can be had, and all of it given back."""

from __future__ import annotations

import gc
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from poros.errors import StreamError
from poros.store import tiers
from poros.store.tiers import PageableStore, PinnedStore, make_store, parse_processors, processors_near

CUDA = torch.device("cuda", 0)


class Driver:
    """Stands in for the CUDA runtime: locks memory until there is none left."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.locked: dict[int, int] = {}
        self.errors_cleared = 0
        self.locked_when_waited: list[int] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if sum(self.locked.values()) + size > self.room:
            return 2
        assert address not in self.locked
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver(room=1000)

    def clear(device: torch.device) -> None:
        driver.errors_cleared += 1

    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: driver.locked_when_waited.append(len(driver.locked)))
    monkeypatch.setattr(tiers, "_clear_error", clear)
    monkeypatch.setattr(tiers, "_work_near", lambda device: None)
    return driver


def test_exactly_what_is_needed_is_locked_and_unlocked(driver: Driver) -> None:
    store = make_store([100, 7, 333], "auto", CUDA)
    assert store.tier == "pinned"
    assert store.nbytes == 440
    assert driver.locked == {store.slab(i).data_ptr(): size for i, size in enumerate((100, 7, 333))}
    store.close()
    assert driver.locked == {}
    assert driver.locked_when_waited == [3]  # a copy may have been under way until then
    store.close()


def test_a_store_that_is_dropped_unlocks(driver: Driver) -> None:
    store = make_store([100], "pinned", CUDA)
    assert driver.locked
    del store
    gc.collect()
    assert driver.locked == {}


def test_no_room_falls_back_with_one_warning(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        store = make_store([400, 400, 400, 400], "auto", CUDA)
    assert isinstance(store, PageableStore)
    assert store.tier == "pageable"
    assert driver.locked == {}
    assert driver.errors_cleared == 2  # once for each refusal, in the thread that got it
    assert len(caplog.records) == 1
    assert "refused to pin host memory (error 2)" in caplog.text
    assert "going on with pageable memory" in caplog.text


def test_a_sandbox_that_forbids_affinities_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(room=1000)

    def forbidden(*args: Any) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: driver.locked_when_waited.append(len(driver.locked)))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(tiers, "processors_near", lambda device: {0})
    monkeypatch.setattr(tiers.os, "sched_setaffinity", forbidden)
    store = make_store([64], "pinned", CUDA)
    assert driver.locked
    store.close()


def test_pinned_memory_that_was_asked_for_is_not_replaced(driver: Driver) -> None:
    with pytest.raises(StreamError, match="refused to pin") as caught:
        make_store([2000], "pinned", CUDA)
    assert "ulimit -l" in caught.value.hint
    assert driver.locked == {}


def test_a_cpu_needs_no_pinning(driver: Driver) -> None:
    cpu = torch.device("cpu")
    assert make_store([8], "auto", cpu).tier == "pageable"
    with pytest.raises(StreamError, match="needs a CUDA device"):
        make_store([8], "pinned", cpu)
    assert not isinstance(make_store([8], "pageable", CUDA), PinnedStore)


@pytest.mark.parametrize(
    ("text", "processors"), [("0-3\n", {0, 1, 2, 3}), ("5", {5}), ("0-1,4,6-7", {0, 1, 4, 6, 7}), ("\n", set())]
)
def test_lists_of_processors(text: str, processors: set[int]) -> None:
    assert parse_processors(text) == processors


def test_processors_near_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    properties: Any = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(tiers, "PCI_DEVICES", tmp_path)
    assert processors_near(CUDA) == set()
    mine = sorted(os.sched_getaffinity(0))
    (tmp_path / "0000:1b:00.0").mkdir()
    (tmp_path / "0000:1b:00.0" / "local_cpulist").write_text(f"{mine[0]},100000-100003\n")
    assert processors_near(CUDA) == {mine[0]}
    (tmp_path / "0000:1b:00.0" / "local_cpulist").write_text("nonsense")
    assert processors_near(CUDA) == set()
