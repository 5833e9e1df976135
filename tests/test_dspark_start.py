"""Where the training of a DSpark drafter starts: what its first layer reads."""

import copy

import pytest
import torch

from tests.smollm2_fixture import tiny

from specdec_kernels.decoding import DSparkPart  # isort: skip
from specdec_kernels.training.dspark import DSparkTraining  # isort: skip
from specdec_kernels.training.dspark_start import start_attention  # isort: skip
from specdec_kernels.training.features import FeatureBatch  # isort: skip

SLOTS, LENGTH = 6, 40


def target():
    """Its embeddings have a common direction, as those of trained models do."""
    model = copy.deepcopy(tiny("llama"))
    with torch.no_grad():
        model.get_input_embeddings().weight[:, :2].add_(2.0)
    return model


def batches(seed=0, count=12):
    """States of random texts, two taps, the last with a common direction."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(count):
        tokens = torch.randint(63, (3, LENGTH), generator=generator)
        states = torch.randn(3, LENGTH, 64, generator=generator)
        states[..., 32:36] += 3.0
        lengths = torch.tensor([LENGTH, LENGTH, 30])
        out.append(FeatureBatch(tokens, lengths, torch.ones(3, dtype=torch.int64), states, states[..., 32:], [0, 1, 2]))
    return out


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (1, 1)])
def test_slots_read_the_last_token_and_the_anchor(heads, kv_heads):
    torch.manual_seed(0)
    keys = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 16}
    part = DSparkPart(
        target(), mask_token_id=63, block_size=SLOTS, markov_rank=4, target_layer_ids=[0, 1], num_layers=2, **keys
    )
    model, data = part.model, batches()
    second = copy.deepcopy(model.layers[1].state_dict())
    start_attention(model, data)

    batch, end = data[5], 25
    seen = {}
    attention = model.layers[0].self_attn
    model.config.backbone._attn_implementation = "eager"  # gives its weights
    attention.register_forward_hook(lambda module, args, out: seen.update(out=out[0], weights=out[1]))
    with torch.no_grad():
        model.forward_blocks(batch.states[:2, :end], batch.tokens[:2], torch.full((2, 1), end))
        context = model.context(batch.states[:2, :end])
    weights = seen["weights"]  # [B, heads, SLOTS, context + SLOTS]
    anchors = kv_heads // 4 * (heads // kv_heads)
    recent = weights[:, : heads - anchors]
    # Of each slot: the last token has most of the weight, those before it nearly all of the rest.
    assert bool((recent[..., end - 1] > 0.6).all()), recent[..., end - 1]
    assert bool((recent[..., end:].sum(-1) < 0.05).all())
    if anchors:
        assert bool((weights[:, heads - anchors :, :, end] > 0.9).all())
    # As many of the state's values as the heads for it are wide arrive where they were.
    carried = min(32, (kv_heads - kv_heads // 4) * 16)
    got, state = seen["out"][..., :carried], context[:, -1:, :carried]
    assert float(torch.cosine_similarity(got, state.expand_as(got), dim=-1).mean()) > 0.8
    assert float(got.norm() / state.expand_as(got).norm()) == pytest.approx(1.0, abs=0.15)
    for name, tensor in model.layers[1].state_dict().items():
        assert torch.equal(tensor, second[name]), f"{name}: only the first layer is set"


def test_padding_is_not_read():
    """The same texts with other ids and states behind their ends give the same drafter."""
    made = []
    for value in (40.0, -7.0):
        torch.manual_seed(0)
        part = DSparkPart(target(), mask_token_id=63, block_size=SLOTS, markov_rank=4, target_layer_ids=[0, 1])
        data = batches()
        for batch in data:
            batch.states[2, 30:], batch.tokens[2, 30:] = value, int(abs(value))
        start_attention(part.model, data)
        made.append(part.tensors())
    for name, tensor in made[0].items():
        assert torch.equal(tensor, made[1][name]), name


@torch.no_grad()
def test_normalisers_are_those_of_each_text():
    """Kept from when a text was first seen, whatever batch and order it comes in; as without keeping."""
    model = tiny("llama")
    torch.manual_seed(0)
    part = DSparkPart(
        model, draft_ids=range(0, 40), mask_token_id=63, block_size=4, markov_rank=4, target_layer_ids=[0]
    )
    with pytest.raises(ValueError, match="train dspark: blocks must be >= 1, got 0"):
        DSparkTraining(part, blocks=0)
    kept = DSparkTraining(part).eval()
    for chosen in ([0, 1, 2], [2, 0], [3, 1]):
        batch = text_batch(chosen)
        place = torch.arange(batch.tokens.shape[1])
        wanted = (place + 1 >= batch.starts[:, None]) & (place < batch.lengths[:, None])
        got = kept._log_norm(batch, wanted)
        want = model.lm_head(batch.last).logsumexp(-1)
        torch.testing.assert_close(got[wanted], want[wanted], atol=1e-5, rtol=1e-5)
        fresh = DSparkTraining(part).eval()(batch)
        for name, value in kept(batch).items():
            torch.testing.assert_close(value, fresh[name], msg=name)


def text_batch(chosen):
    """Texts of these numbers, each of its own length, start and states."""
    lengths, starts = torch.tensor([20 + 3 * i for i in chosen]), torch.tensor([1 + 2 * i for i in chosen])
    tokens, states = torch.zeros(len(chosen), 32, dtype=torch.int64), torch.zeros(len(chosen), 32, 64)
    for row, i in enumerate(chosen):
        generator = torch.Generator().manual_seed(i)
        tokens[row] = torch.randint(63, (32,), generator=generator)
        states[row] = torch.randn(32, 64, generator=generator)
    return FeatureBatch(tokens, lengths, starts, states[..., :32], states[..., 32:], chosen)
