"""Graphics cards: what a plan needs to know of one.

The H200's speeds were measured there. Those of the others are their makers', scaled by what the H200 reaches of its
own; a plan for them is an estimate. In a run the link is measured first. What a process takes beside torch's memory was
0.78 to 0.83 GB on an H200; that it is the same elsewhere is an assumption.
"""

from __future__ import annotations

from dataclasses import dataclass

from poros.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Card:
    """One card in its slot. GB = 1e9 bytes.

    Attributes:
        id: Name on the command line.
        name: Its maker's name for it.
        vram_gb: Its memory.
        link_gb_s: What pinned copies to it reach.
        tflops: bf16 matrix products, as reached on a decoder layer at 512 tokens.
        memory_gb_s: Its own memory, as reached by elementwise kernels.
        kernel_us: Time of a small kernel in a recorded graph.
        context_gb: What a process takes of it beside torch's own memory and recorded graphs: context, kernels.
        graph_mb: What the driver takes for a recorded graph, of a block and one direction.
        workspace_gb: cuBLAS's workspaces: for the stream that computes and that which records, one each for the thread
            of the forward and that of the backward pass; see `validation/peaks.py`.
        pages_gb: What torch's allocator holds in pages that are half in use, between tensors that came and went: 0.21
            to 0.40 GB on an H200.
    """

    id: str
    name: str
    vram_gb: float
    link_gb_s: float
    tflops: float
    memory_gb_s: float
    kernel_us: float = 1.84
    context_gb: float = 0.8
    graph_mb: float = 0.45
    workspace_gb: float = 4 * 33_554_432 / 1e9
    pages_gb: float = 0.3


_REACHED = {"link": 55.4 / 64, "tflops": 734 / 989, "memory": 3850 / 4800}
"""Reached on the H200 over its maker's figures: PCIe 5.0 x16 (validation/cells_h200.jsonl); dense bf16 and HBM3e of
early probes, which left no receipt."""


def _card(name: str, vram_gb: float, link: float, tflops: float, memory: float) -> Card:
    """A card by its maker's figures: GB, GB/s of its PCIe link, dense bf16 TFLOP/s, GB/s of its memory."""
    return Card(
        id=name.lower().replace(" ", "-"),
        name=name,
        vram_gb=vram_gb,
        link_gb_s=link * _REACHED["link"],
        tflops=tflops * _REACHED["tflops"],
        memory_gb_s=memory * _REACHED["memory"],
    )


CARDS = {
    card.id: card
    for card in (
        _card("H200", 150.1, 64, 989, 4800),
        _card("H100", 85.0, 64, 989, 3350),
        _card("A100 80GB", 85.0, 32, 312, 2039),
        _card("A100 40GB", 42.4, 32, 312, 1555),
        _card("L40S", 48.3, 32, 362, 864),
        _card("L4", 24.1, 32, 121, 300),
        _card("A10G", 24.1, 32, 70, 600),
        _card("RTX 5090", 34.2, 64, 210, 1792),
        _card("RTX 5080", 17.1, 64, 113, 960),
        _card("RTX 5070 Ti", 17.1, 64, 88, 896),
        _card("RTX 5060 Ti 16GB", 17.1, 32, 47, 448),
        _card("RTX 4090", 25.7, 32, 165, 1008),
        _card("RTX 4080", 17.1, 32, 97, 717),
        _card("RTX 4070", 12.8, 32, 58, 504),
        _card("RTX 4060 Ti 16GB", 17.1, 16, 44, 288),
        _card("RTX 4060", 8.6, 16, 30, 272),
        _card("RTX 3090", 25.7, 32, 71, 936),
        _card("RTX 3080", 10.7, 32, 60, 760),
        _card("RTX 3060", 12.8, 32, 26, 360),
    )
}


def find_card(name: str) -> Card:
    """A card by its id.

    Raises:
        ConfigError: there is none of that name; names those that there are.
    """
    card = CARDS.get(name.lower().replace(" ", "-").removeprefix("nvidia-"))
    if card is None:
        raise ConfigError(f"no card is called {name}", f"known are: {', '.join(CARDS)}")
    return card


def card_named(name: str) -> Card | None:
    """The card that a driver's name means ("NVIDIA A100-SXM4-80GB"), or None: none of the known ones, or a laptop's."""
    words = set(name.upper().replace("-", " ").split())
    if "LAPTOP" in words:
        return None

    def means(card: Card) -> bool:
        own = set(card.name.upper().split())
        sizes = {word for word in own if word.endswith("GB")}
        if words & _VARIANTS != own & _VARIANTS or not own - sizes <= words:
            return False
        return sizes <= words or not any(word.endswith("GB") for word in words)

    return next(filter(means, CARDS.values()), None)


_VARIANTS = {"TI", "SUPER", "D"}
"""Words that make another card of a name."""
