"""Batch sizes that are usual by scenario: for orientation, with a word where one lies far outside. No torch here.

What is usual is no proof: the sweep and the noise scale decide. Sources, as of 2026: ImageNet with 256 to 8192 examples
globally (Goyal et al. 2017, arXiv 1706.02677); detection with 16 globally on 8 devices (He et al. 2017, arXiv
1703.06870) to 256 (Peng et al. 2017, MegDet, arXiv 1711.07240); fine-tuning BERT with 16 or 32 (Devlin et al. 2018,
arXiv 1810.04805); pre-training language models with 0.5 to 3.2 million tokens in sequences of 2048 (Brown et al. 2020,
arXiv 2005.14165) and 4 million in sequences of 4096 (Touvron et al. 2023, arXiv 2307.09288), so some 240 to 1600
sequences; click-through rates with 1024, and with care 131072 (Zheng et al. 2022, CowClip, arXiv 2204.06240). No paper
gives a range: where these are, and beyond what they give, practice.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from stoker.errors import ConfigError

__all__ = ["FAR", "SCENARIOS", "Range", "outside", "remarks"]

FAR = 4
"""So many times outside a range is worth a word."""
Span = tuple[int, int]


@dataclass(frozen=True)
class Range:
    """Usual sizes of one kind of training."""

    what: str
    unit: str
    per_device: Span | None = None
    """One device's share of an update."""
    all_devices: Span | None = None
    """An update: per device x accumulation x devices."""


SCENARIOS = {
    "classification": Range("image classification at 224 pixels", "examples", (64, 256), (512, 4096)),
    "detection": Range("object detection", "images", (8, 32)),
    "nlp": Range("text classification and labelling", "examples", (16, 64)),
    "pretraining": Range("pre-training a language model", "sequences", all_devices=(512, 2048)),
    "finetuning": Range("fine-tuning a language model, LoRA included", "sequences", all_devices=(16, 32)),
    "ctr": Range("click-through rates from tables", "examples", (1024, 16384)),
}


def remarks(scenario: str, *, per_device: int | None = None, all_devices: int | None = None) -> Iterator[str]:
    """A sentence for each size more than `FAR` times outside what is usual. ConfigError for an unknown scenario."""
    if scenario not in SCENARIOS:
        raise ConfigError(f"scenario '{scenario}' is not known; there is: {', '.join(SCENARIOS)}")
    usual = SCENARIOS[scenario]
    for size, span, scope in ((per_device, usual.per_device, "per device"), (all_devices, usual.all_devices, "in all")):
        if size is not None and span is not None and outside(size, span):
            side = "below" if size < span[0] else "above"
            yield (
                f"{size:,} {usual.unit} {scope} is more than {FAR}x {side} the {span[0]:,} to {span[1]:,} usual for "
                f"{usual.what}; if it is meant, let the learning rate follow"
            )


def outside(size: int, span: Span) -> bool:
    """More than `FAR` times below or above."""
    return not span[0] / FAR <= size <= span[1] * FAR
