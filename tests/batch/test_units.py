"""Ways to count a batch, from its tensors."""

import torch

from stoker.batch.units import units

LABELS = torch.tensor([[5, 6, -100], [7, -100, -100]])


def counted(batch: object) -> dict[str, float]:
    return {unit.code: unit.count(batch) for unit in units(batch)}


def test_labels_that_are_not_ignored_come_first() -> None:
    batch = {"ids": torch.tensor([[5, 6, 0], [7, 0, 0]]), "labels": LABELS}
    assert list(counted(batch).items())[:2] == [
        ("lambda batch: (batch['labels'] != -100).sum()", 3),
        ("lambda batch: (batch['labels'][:, 1:] != -100).sum()", 1),
    ]
    assert counted(batch)["lambda batch: (batch['ids'] != 0).sum()"] == 3


def test_masks_weights_and_lengths() -> None:
    mask = LABELS >= 0
    batch = (mask, mask.float() * 0.5, torch.tensor([2, 1]))
    found = counted(batch)
    assert found["lambda batch: batch[0].sum()"] == 3
    assert found["lambda batch: (~batch[0]).sum()"] == 3
    assert found["lambda batch: batch[1].sum()"] == 1.5
    assert found["lambda batch: (batch[1] != 0).sum()"] == 3
    assert found["lambda batch: batch[2].sum()"] == 3
    assert found["lambda batch: (batch[2] - 1).sum()"] == 1


def test_padding_by_another_token_is_what_most_texts_end_with() -> None:
    batch = torch.tensor([[5, 6, 9], [7, 9, 9], [5, 5, 5]])
    assert counted(batch)["lambda batch: (batch != 9).sum()"] == 6
    assert counted(torch.tensor([[1, 2], [3, 4]])) == {}


def test_the_code_is_the_count() -> None:
    batch = {"labels": LABELS, "mask": LABELS >= 0}
    for unit in units(batch):
        assert float(eval(unit.code)(batch)) == unit.count(batch)


def test_images_have_nothing_to_count() -> None:
    assert counted((torch.zeros(2, 3, 4, 4),)) == {}
