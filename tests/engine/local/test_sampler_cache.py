"""The cache that is written in place: what it returns, when it moves, which rows it keeps."""

from itertools import pairwise

import torch
from transformers import PreTrainedModel

from stoker.engine.local.cache import abilities_of, preallocated_cache
from stoker.engine.local.decoder import make_decoder


def test_long_answers_equal_a_plain_forward_while_rows_come_and_go(tiny_llama: PreTrainedModel) -> None:
    prompts = [(1, 2, 3), (4, 5, 6, 7, 8), (9,)]
    tokens = torch.randint(0, 256, (4, 150), generator=torch.Generator().manual_seed(0))
    members, keep = [0, 1, 1, 2], [3, 1]
    with torch.no_grad():
        decoder = make_decoder(tiny_llama, abilities_of(tiny_llama), max_new_tokens=151)
        decoder.enter([prompts[member] for member in members])
        for place in range(100):
            decoder.step(tokens[:, place])
        decoder.keep(keep, None)
        for place in range(100, 150):
            logits = decoder.step(tokens[keep, place])
        for row, member in enumerate(keep):
            ids = torch.tensor([[*prompts[members[member]], *tokens[member].tolist()]])
            torch.testing.assert_close(logits[row], tiny_llama(input_ids=ids).logits[0, -1], atol=1e-4, rtol=0)


def test_a_token_is_written_without_moving_the_past(tiny_llama: PreTrainedModel) -> None:
    cache = preallocated_cache(tiny_llama.config, length=400)
    layer = cache.layers[0]
    step = torch.ones(2, 2, 1, 8)
    layer.update(torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8))
    layer.reorder_cache(torch.tensor([0, 0]))
    addresses = []
    for length in range(6, 401):
        keys, values = layer.update(step, 2 * step)
        assert keys.shape == values.shape == (2, 2, length, 8)
        assert cache.get_seq_length() == length
        addresses.append(keys.data_ptr())
    assert keys[:, :, :5].count_nonzero() == 0
    assert (keys[:, :, 5:] == 1).all()
    assert (values[:, :, 5:] == 2).all()
    moves = sum(a != b for a, b in pairwise(addresses))
    assert moves <= 5
    assert layer.keys is not None
    assert layer.keys.shape[2] == 400, "never more room than the longest answer"
