"""`verify_tree` under torch.compile, and what it says of bad arguments."""

import pytest
import torch

import specdec_kernels as sk
from tests.cases import FILTERS, assert_same_bits, make_params, offsets
from tests.conftest import available
from tests.tree_cases import make_tree_call


@pytest.mark.parametrize("name", ["native", "eager"])
def test_compiles(name):
    backend = available(name)
    call = make_tree_call("normal", 64, rule="recursive", replacement=False, filters=FILTERS[:3])

    def step(target, q, position):
        out = sk.verify_tree(
            target * 1.0, call.drafts, call.parents, call.cu, call.params, position, rule="recursive", replacement=False,
            draft_logits=q, draft_rows=call.options["draft_rows"], draft_params=call.params, max_depth=4, backend=backend,
        )  # fmt: skip
        return out.tokens + 0, out.path + 1

    arguments = (call.target, call.options["draft_logits"], call.position)
    assert_same_bits(torch.compile(step, fullgraph=True)(*arguments), step(*arguments))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rule": "typical"}, r"rule must be one of \('target_only', .*got 'typical'"),
        ({"rule": "recursive"}, "replacement must be True or False for rule 'recursive' .*got NoneType None"),
        ({"replacement": True}, "replacement must be None for rule 'target_only', got bool True"),
        ({"rule": "traversal", "replacement": True}, "draft_logits must be given for rule 'traversal', got None"),
        ({"draft_logits": torch.zeros(4, 20)}, "draft_logits must be None for rule 'target_only'"),
        ({"parents": torch.zeros(3, dtype=torch.int64)}, r"parents must be int32 or int64 \[D>=4\].*got int64 \[3\]"),
        ({"parents": torch.zeros(4)}, "parents must be int32 or int64"),
        ({"max_depth": -1}, "max_depth must be an int >= 0, got int -1"),
        ({"logprobs": 2}, "logprobs must be 0 or 1"),
        ({"out": torch.zeros(2)}, "out must be a TreeOutput"),
        ({"params": make_params(FILTERS[:4])}, r"params.temperature must be float32 \[B=2\]"),
        ({"target_probs": torch.zeros(6, 20)}, "target_logits must be given, or target_probs instead of it, got both"),
    ],
)
def test_errors_name_the_argument(change, message):
    arguments = {
        "target_logits": torch.zeros(6, 20), "draft_tokens": torch.tensor([1, 2, 3, 4]), "parents": torch.tensor([0, 0, 0, 1]),
        "cu_num_draft": offsets([2, 2]), "params": make_params(FILTERS[:2]),
    }  # fmt: skip
    with pytest.raises((ValueError, sk.BackendUnavailable), match=message):
        sk.verify_tree(**{**arguments, **change})
