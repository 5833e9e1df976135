"""`target_to_draft_from_d2t`: a reduced draft vocabulary, from a checkpoint's table to exact verification."""

import pytest
import torch
from scipy.stats import chisquare

import specdec_kernels as sk
from tests.cases import create, generator, offsets


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_both_tables_say_the_same(dtype):
    ids = torch.randperm(1000, generator=generator("d2t"))[:300].sort().values
    got = sk.target_to_draft_from_d2t((ids - torch.arange(300)).to(dtype), 1000, offsets=True)
    assert got.dtype == torch.int32 and torch.equal(
        got, sk.target_to_draft_from_d2t(ids.to(dtype), 1000, offsets=False)
    )
    assert torch.equal(got[ids].long(), torch.arange(300)) and int((got >= 0).sum()) == 300


@pytest.mark.parametrize("rule", ["token", "block"])
def test_reduced_vocabulary_is_exact(rule, compiled):
    """Drafts of a head over 5 of 12 ids, sampled, verified on the saved nucleus of its rows: the first token is p's."""
    n = 300 if compiled == "triton" else 20_000
    table = sk.target_to_draft_from_d2t(torch.tensor([1, 2, 2, 5, 6]), 12, offsets=True)
    p, q = torch.randn(2, 12, generator=generator("reduced"))
    q = q[:5]
    params = create(0.9, n=n)
    saved = {"target_to_draft": table, "return_nucleus": True, "stream": 0, "backend": compiled}
    drafts = sk.sample(q.expand(n, 5), params, ids=torch.zeros(n, dtype=torch.int64), **saved)
    assert set(drafts.tokens.tolist()) == {1, 3, 4, 8, 10}
    out = sk.verify_chain(
        p.expand(2 * n, 12), drafts.tokens, offsets([1] * n), params, rule=rule, draft_logits=q.expand(n, 5),
        draft_nucleus=drafts.nucleus, draft_params=params, target_to_draft=table, max_draft=1, backend=compiled,
    )  # fmt: skip
    counts = torch.bincount(out.tokens[:, 0].long(), minlength=12).double()
    assert chisquare(counts.numpy(), ((p / 0.9).double().softmax(0) * n).numpy()).pvalue > 1e-3
    assert 0.2 < float(out.num_accepted.double().mean()) < 0.95


@pytest.mark.parametrize(
    ("table", "given", "message"),
    [
        (
            torch.tensor([0, 5]),
            {"offsets": True},
            r"draft_to_target must be target ids in \[0, 6\), got 6 for column 1",
        ),
        (torch.tensor([0, -1]), {"offsets": False}, "got -1 for column 1"),
        (torch.tensor([3, 2]), {"offsets": True}, "one column per target id, got several for id 3"),
        (torch.tensor([1.0]), {"offsets": True}, r"int32 or int64 \[Vd>=1\]"),
        ([1], {"offsets": True}, r"int32 or int64 \[Vd\], got list"),
        (torch.tensor([0]), {"offsets": True, "vocab_size": 0}, "vocab_size must be an int >= 1, got int 0"),
        (torch.tensor([0]), {"offsets": True, "vocab_size": True}, "vocab_size must be an int >= 1, got bool True"),
        (torch.tensor([0]), {"offsets": None}, "offsets must be True or False, got NoneType None"),
    ],
)
def test_errors_name_the_argument(table, given, message):
    with pytest.raises(ValueError, match=message):
        sk.target_to_draft_from_d2t(table, **{"vocab_size": 6, **given})
