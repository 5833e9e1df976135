"""`SamplingTensors`, `ragged_from_padded`: what they make of scalars, lists and tensors, and what they refuse."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import specdec_kernels as sk

INF, NAN = float("inf"), float("nan")


def test_create_from_scalars_lists_and_tensors():
    p = sk.SamplingTensors.create(
        0.5, [0.9, 1.0, 0.1], torch.tensor(7), torch.tensor([0, 0.1, 2.0]), seed=torch.tensor([1, 2, 3])
    )
    assert [getattr(p, f).dtype for f in ("temperature", "top_p", "top_k", "min_p", "seed")] == [
        torch.float32, torch.float32, torch.int32, torch.float32, torch.int64,
    ]  # fmt: skip
    assert p.temperature.tolist() == [0.5] * 3 and p.top_k.tolist() == [7] * 3 and p.seed.tolist() == [1, 2, 3]
    assert p.min_p.tolist() == pytest.approx([0, 0.1, 2.0])
    assert sk.SamplingTensors.create(batch_size=4).temperature.shape == (4,)
    n = sk.SamplingTensors.create(np.float32(0.5), top_k=np.int64(3), seed=np.int64(5))
    assert n.temperature.item() == 0.5 and n.top_k.item() == 3
    assert torch.equal(n.seed, sk.SamplingTensors.create(seed=5).seed)
    assert sk.SamplingTensors.create(top_k=[2**40, -7]).top_k.tolist() == [2**31 - 1, -1]
    assert sk.SamplingTensors.create(seed=[2**64 - 1, -1, 2**63]).seed.tolist() == [-1, -1, -(2**63)]


def test_scalar_seed_is_spread():
    """Equal prompts differ, the result depends on (seed, row) alone, and None is fresh every time."""
    a = sk.SamplingTensors.create(seed=5, batch_size=100).seed
    assert a.unique().numel() == 100
    assert torch.equal(sk.SamplingTensors.create(seed=5, batch_size=40).seed, a[:40])
    assert not (sk.SamplingTensors.create(seed=6, batch_size=100).seed == a).any()
    assert not torch.equal(sk.SamplingTensors.create(batch_size=4).seed, sk.SamplingTensors.create(batch_size=4).seed)
    torch.manual_seed(0)
    b = sk.SamplingTensors.create(batch_size=4).seed
    torch.manual_seed(0)
    assert torch.equal(sk.SamplingTensors.create(batch_size=4).seed, b)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"temperature": -0.1}, "temperature must be finite and >= 0, got -0.1"),
        ({"temperature": [1.0, NAN]}, "temperature must be finite and >= 0, got nan"),
        ({"temperature": INF}, "temperature must be finite and >= 0, got inf"),
        ({"top_p": NAN}, "top_p must be a number, got nan"),
        ({"min_p": [0.0, NAN]}, "min_p must be a number, got nan"),
        (
            {"temperature": [1.0, 1.0], "top_p": [0.9] * 3},
            r"temperature must have one element per request \[3\], got 2",
        ),
        ({"top_p": [0.9], "batch_size": 2}, r"top_p must have one element per request \[2\], got 1"),
        ({"top_p": torch.ones(2, 2)}, r"top_p must (be a scalar or \[B\]|have one element)"),
        ({"seed": torch.ones(2)}, r"seed must be int32 or int64 \[B\], got float32 \[2\]"),
        ({"seed": 1.5}, "seed must be"),
        ({"temperature": None}, "temperature must be"),
    ],
    ids=str,
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        sk.SamplingTensors.create(**arguments)


def test_from_generation_config():
    config = SimpleNamespace(do_sample=True, temperature=0.7, top_p=0.9, top_k=None, min_p=None)
    p = sk.SamplingTensors.from_generation_config(config, batch_size=2, seed=1)
    assert (
        p.temperature.tolist() == pytest.approx([0.7] * 2) and p.top_k.tolist() == [0, 0] and p.min_p.tolist() == [0, 0]
    )
    config.do_sample = False
    assert sk.SamplingTensors.from_generation_config(config).temperature.tolist() == [0.0]


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ragged_from_padded(dtype, counted):
    padded = torch.tensor([[5, 6, -1, 8], [-1, 1, 2, 3], [7, 8, 9, 4], [3, -1, -1, -1]], dtype=dtype)
    lengths = [2, 0, 4, 1]
    ragged = sk.ragged_from_padded(padded, torch.tensor(lengths) if counted else None)
    D = sum(lengths)
    assert ragged.cu_num_draft.tolist() == [0, 2, 2, 6, 7] and ragged.cu_num_draft.dtype == torch.int32
    assert ragged.draft_tokens.tolist() == [5, 6, 7, 8, 9, 4, 3] + [-1] * 9
    assert ragged.draft_tokens.dtype == dtype
    assert torch.equal(padded.flatten()[ragged.draft_rows[:D]], ragged.draft_tokens[:D])
    assert (ragged.draft_rows[D:] == 0).all()


def test_ragged_from_padded_clamps_and_refuses():
    ragged = sk.ragged_from_padded(torch.tensor([[1, 2], [3, 4]]), torch.tensor([-5, 9]))
    assert ragged.cu_num_draft.tolist() == [0, 0, 2]
    assert sk.ragged_from_padded(torch.zeros(0, 3, dtype=torch.int64)).cu_num_draft.tolist() == [0]
    assert sk.ragged_from_padded(torch.zeros(2, 0, dtype=torch.int64)).cu_num_draft.tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match=r"draft_tokens must be int32 or int64 \[B, K\], got float32 \[2\]"):
        sk.ragged_from_padded(torch.zeros(2))
    with pytest.raises(ValueError, match=r"num_draft must be int32 or int64 \[B=2\]"):
        sk.ragged_from_padded(torch.zeros(2, 2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))


def test_ragged_rows_of_a_slot_table():
    drafts = torch.tensor([[5, 6, -1], [7, 8, 9]])
    ragged = sk.ragged_from_padded(drafts, slots=torch.tensor([4, 1]))
    assert ragged.draft_rows.tolist() == [12, 13, 3, 4, 5, 0]
