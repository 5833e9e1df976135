"""`specdec_kernels.lossy` as registered ops, under torch.compile, and what it says of bad arguments."""

import pytest
import torch

import specdec_kernels as sk
from specdec_kernels import _backends, _schemas
from tests.cases import FILTERS, assert_same_bits, create, make_params, offsets, tensors_of
from tests.test_contract import op_arguments
from tests.tree_cases import make_tree_call

RULES = _schemas.LOSSY_RULES


@pytest.mark.parametrize("rule", RULES)
def test_opcheck(rule, backend):
    op = _backends.op("verify_tree", backend)
    names = [argument.name for argument in op._schema.arguments]
    arguments = list(op_arguments("verify_tree", True))
    arguments[names.index("rule")] = len(_schemas.TREE_RULES) + RULES.index(rule)
    arguments[names.index("draft")] = None
    torch.library.opcheck(op, tuple(arguments))


def test_compiles(native):
    """All three in one graph, chains without parents among them."""
    call = make_tree_call("normal", 64, rule="typical", trees=[[0, 1], [], [0, 1, 2]], filters=FILTERS[:3])

    def step(target, drafts, cu, rates):
        given = (target * 1.0, drafts, cu, call.params, call.position)
        more = {"max_depth": 3, "backend": native}
        a = sk.lossy.typical(*given, delta=0.2, **more)
        b = sk.lossy.threshold(*given, parents=call.parents, threshold_acc=0.5, **more)
        c = sk.lossy.synthetic(*given, rates=rates, **more)
        return a.tokens + 0, b.path + 1, c.tokens * 2

    arguments = (call.target, call.drafts, call.cu, torch.tensor([0.7, 0.5]))
    assert_same_bits(torch.compile(step, fullgraph=True)(*arguments), step(*arguments))


@pytest.mark.parametrize("rule", RULES)
def test_fake_tensors_give_shapes(rule, backend):
    """Chains without parents too: nothing on the way reads a value."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        f32, i64 = torch.empty(4), torch.empty(8, dtype=torch.int64)
        params = sk.SamplingTensors(f32, f32, f32.int(), f32, i64[:4])
        out = getattr(sk.lossy, rule)(
            torch.empty(12, 50), i64, torch.empty(5, dtype=torch.int32), params, max_depth=2, backend=backend,
            **({"rates": torch.empty(3)} if rule == "synthetic" else {}),
        )  # fmt: skip
        assert out.tokens.shape == (4, 3) and out.path.shape == (4, 2)


ERRORS = [
    ("typical", {"epsilon": 0.0}, r"lossy.typical: epsilon must be in \(0, 1\], got float 0.0"),
    ("typical", {"epsilon": 1.01}, "lossy.typical: epsilon must be in"),
    ("typical", {"epsilon": torch.tensor(0.1)}, "lossy.typical: epsilon must be in .*got float32"),
    ("typical", {"delta": -0.1}, "lossy.typical: delta must be finite and >= 0, got float -0.1"),
    ("typical", {"delta": torch.nan}, "lossy.typical: delta must be finite and >= 0, got float nan"),
    ("typical", {"delta": torch.inf}, "lossy.typical: delta must be finite and >= 0, got float inf"),
    ("threshold", {"threshold_single": 0}, r"lossy.threshold: threshold_single must be in \[2\^-126, 1\], got int 0"),
    ("threshold", {"threshold_acc": 2.0}, r"lossy.threshold: threshold_acc must be in \[2\^-126, 1\], got float 2.0"),
    ("threshold", {"threshold_single": 1e-46}, "lossy.threshold: threshold_single must be in .*got float 1e-46"),
    ("threshold", {"threshold_acc": True}, "lossy.threshold: threshold_acc must be in .*got bool True"),
    ("synthetic", {"rates": [0.5]}, r"lossy.synthetic: rates must be float32 \[n\], got list"),
    ("synthetic", {"rates": torch.ones(2, dtype=torch.float64)}, r"lossy.synthetic: rates must be float32 \[n\].*got float64"),
    ("synthetic", {"rates": torch.ones(2, 2)}, r"lossy.synthetic: rates must be float32 \[n\]"),
    ("synthetic", {"rates": torch.ones(2, device="meta")}, "lossy.synthetic: rates must be .*on cpu, got .*on meta"),
    *(
        (rule, change, f"^lossy.{rule}: {message}")
        for rule in RULES
        for change, message in (
            ({"parents": torch.zeros(3, dtype=torch.int64)}, r"parents must be int32 or int64 \[D>=4\].*got int64 \[3\]"),
            ({"draft_tokens": torch.zeros(2, 2)}, r"draft_tokens must be \[D\], request-major"),
            ({"cu_num_draft": offsets([2])}, r"cu_num_draft must be int32 \[B \+ 1=3\], a prefix sum that starts at 0"),
            ({"params": None}, "params must be a SamplingTensors"),
            ({"max_depth": -1}, "max_depth must be an int >= 0, got int -1"),
            ({"logprobs": 2}, "logprobs must be 0 or 1"),
            ({"filter_order": "x"}, "filter_order must be one of"),
            ({"out": torch.zeros(2)}, "out must be a TreeOutput"),
            ({"target_probs": torch.zeros(6, 20)}, "target_logits must be given, or target_probs instead of it, got both"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "change", "message"), ERRORS)
def test_errors_name_the_argument(rule, change, message):
    """<function>: <argument> must be <requirement>, got <what it got>; nothing is written."""
    arguments = {
        "target_logits": torch.zeros(6, 20), "draft_tokens": torch.tensor([1, 2, 3, 4]), "cu_num_draft": offsets([2, 2]),
        "params": make_params(FILTERS[:2]), **({"rates": torch.ones(2)} if rule == "synthetic" else {}),
    }  # fmt: skip
    ask = getattr(sk.lossy, rule)
    out = ask(**arguments)
    for t in tensors_of(out):
        t.fill_(5)
    with pytest.raises(ValueError, match=message):
        ask(**{**arguments, "out": out, **change})
    assert all((t == 5).all() for t in tensors_of(out))


def test_no_name_at_the_top():
    """Whoever writes `specdec_kernels.lossy.typical` says that it is lossy; verify_tree does not know these rules."""
    assert not set(RULES) & set(dir(sk)) and not set(RULES) & set(_schemas.TREE_RULES)
    for rule in RULES:
        with pytest.raises(ValueError, match=r"verify_tree: rule must be one of \('target_only'"):
            sk.verify_tree(
                torch.zeros(2, 5), torch.tensor([3]), torch.tensor([0]), offsets([1]), create(1.0), rule=rule
            )
