"""The benches run, write what they promise, and refuse to time a wrong kernel."""

import json

import pytest
import torch

import specdec_kernels
from bench import __main__ as bench
from bench import _gpu_checks, _inputs, _peers, gpu_check
from bench._environment import SCHEMA
from bench._gate import GateError, check_chain, check_support
from bench._timing import Remote, Settings, Spread, paired, summary

QUICK = ["--quick", "--rounds", "1", "--peer-rounds", "1"]
SPREAD = {"median", "min", "p25", "p75"}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("op", bench.BENCHES)
def test_quick_run_writes_the_schema(op, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv(_peers.VLLM_PYTHON, raising=False)
    assert bench.main([*QUICK, "--cpu-time", "--output", str(tmp_path), op]) == 0
    result = json.loads((tmp_path / f"{op}.json").read_text())
    assert result["schema"] == SCHEMA and result["bench"] == op
    assert {"cpu", "isa", "threads", "torch", "triton", "transformers", "commit", "dirty", "date"} <= set(
        result["environment"]
    )
    assert result["settings"]["clock"] == "process CPU time"
    kinds = {case["kind"] for case in result["cases"]}
    only = {
        "verify_tree": {"reading"}, "markov_step": {"drafting"}, "kv_compact": {"moving"}, "kv_rollback": {"bookkeeping"}
    }  # fmt: skip
    assert kinds == only.get(op, kinds | {"reading", "peers"})
    for case in result["cases"]:
        assert case["gate"]["checked"] > case["gate"]["undecided"]
        assert op in case["ms"] and op not in case["ratio"]
        for spread in [*case["ms"].values(), *case["ratio"].values()]:
            assert set(spread) == SPREAD and spread["min"] <= spread["p25"] <= spread["median"] <= spread["p75"]
        if case["kind"] == "reading":
            assert {"amax", "softmax", "copy"} <= set(case["ms"]) and case["gb_per_s"] > 0
    printed = capsys.readouterr().out
    shown = {"markov_step": "/ torch", "kv_compact": "/ copy", "kv_rollback": "/ crop"}
    assert shown.get(op, "/ amax") in printed
    if op == "verify_chain":
        assert "vllm: not installed" in printed


def test_quick_run_writes_nothing_by_default(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "write", lambda *_: pytest.fail("a quick run wrote results"))
    assert bench.main([*QUICK, "--no-peers", "nucleus"]) == 0


def wrong_verify(*args, **options):
    out = real_verify(*args, **options)
    return out._replace(tokens=out.tokens ^ 1)


def wrong_tree(*args, **options):
    out = real_tree(*args, **options)
    return out._replace(tokens=out.tokens ^ 1)


def wrong_sample(logits, params, position=None, **options):
    return real_sample(logits, params, position + 1, **options)


def wrong_markov(*args, **options):
    out = real_markov(*args, **options)
    return out._replace(tokens=out.tokens ^ 1)


def wrong_nucleus(logits, params, **options):
    out = real_nucleus(logits, params, **options)
    return out._replace(log_mass=out.log_mass + 0.01)


def wrong_probs(logits, params, **options):
    return real_probs(logits, params, **options).roll(1, 1)


def wrong_compact(caches, path, seq_lens, **options):
    return real_compact(caches, path + 1, seq_lens, **options)


def wrong_rollback(*args, num_rejected, **options):
    return real_rollback(*args, num_rejected=num_rejected + 1, **options)


real_rollback = specdec_kernels.kv_rollback
real_compact = specdec_kernels.kv_compact
real_verify, real_sample = specdec_kernels.verify_chain, specdec_kernels.sample
real_markov = specdec_kernels.markov_step
real_tree = specdec_kernels.verify_tree
real_nucleus, real_probs = specdec_kernels.nucleus, specdec_kernels.filter_probs
WRONG = {
    "verify_chain": wrong_verify,
    "verify_tree": wrong_tree,
    "sample": wrong_sample,
    "markov_step": wrong_markov,
    "nucleus": wrong_nucleus,
    "filter_probs": wrong_probs,
    "kv_compact": wrong_compact,
    "kv_rollback": wrong_rollback,
}


@pytest.mark.parametrize("op", bench.BENCHES)
def test_wrong_kernel_is_not_timed(op, monkeypatch, tmp_path):
    monkeypatch.setattr(specdec_kernels, op, WRONG[op])
    with pytest.raises(GateError, match=op):
        bench.main([*QUICK, "--no-peers", "--output", str(tmp_path), op])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("variant", _inputs.VARIANTS)
def test_gate_passes_every_variant(variant):
    rows = _inputs.normal_rows(3.0, batch=3, num_draft=2, vocab=999)
    case = _inputs.chain_case(rows, torch.bfloat16, variant)
    output = case()
    assert check_chain(case, output, [0, 1, 2])["checked"] == 3
    assert (output.status == 0).all()
    if "all accepted" in variant:
        assert (output.num_accepted == 2).all()
        assert case.needed_bytes(output.num_accepted) == case.num_bytes


def test_peers_emit_what_the_target_can():
    pytest.importorskip("transformers")
    rows = _inputs.normal_rows(2.0, batch=2, num_draft=2, vocab=200)
    case = _inputs.chain_case(rows, torch.float32, "natural acceptance")
    q = _peers.sort_filtered(case.draft, *_peers.row_params(case, 2))
    peers = {
        "sort": _peers.sorted_torch(case),
        "sort, q ready made": _peers.sorted_torch(case, q),
        "transformers": _peers.transformers_loop(case, warped_draft=False),
        "transformers, q ready made": _peers.transformers_loop(case, warped_draft=True),
    }
    for name, peer in peers.items():
        for _ in range(20):
            check_support(case, peer(), [0, 1], name)


def test_support_check_goes_red():
    case = _inputs.chain_case(
        _inputs.normal_rows(3.0, batch=2, num_draft=2, vocab=999), torch.float32, "natural acceptance"
    )
    least = int(case.target[0].argmin())
    with pytest.raises(GateError, match="cannot"):
        check_support(case, torch.tensor([[least, -1, -1]]), [0], "peer")
    with pytest.raises(GateError, match="for drafts"):
        check_support(case, torch.tensor([[least, least, -1]]), [0], "peer")


def test_rounds_are_interleaved_and_ratios_paired():
    order = []
    calls = {name: Remote(lambda _, name=name: order.append(name) or (1.0 if name == "a" else 2.0)) for name in "ab"}
    samples = paired(calls, 3, Settings())
    assert order[-6:] == list("ababab")
    assert samples == {"a": [1.0] * 3, "b": [2.0] * 3}
    assert summary(samples, "a")["ratio"]["b"]["median"] == 0.5
    # Each round's own ratio is 2, whatever the rounds' own speed.
    drifting = summary({"a": [1.0, 10.0, 4.0], "b": [0.5, 5.0, 2.0]}, "a")
    assert drifting["ratio"]["b"] == Spread(2.0, 2.0, 2.0, 2.0).as_dict()


def test_unknown_op_and_threaded_cpu_time_are_refused(capsys):
    for arguments in (["nonsense"], ["--cpu-time", "--threads", "2"]):
        with pytest.raises(SystemExit):
            bench.main(arguments)
    assert "nonsense" in capsys.readouterr().err


def test_gpu_check_without_a_gpu(capsys):
    """Skips to its end; with --rehearse everything that the interpreter can run passes, and nothing is written."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu_check.main([]) == 0
    assert "skipped" in capsys.readouterr().out
    before = set(gpu_check.RESULTS.iterdir())
    assert gpu_check.main(["--rehearse"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("passed") == 9 and shown.count("skipped") >= 4 and "failed" not in shown
    assert set(gpu_check.RESULTS.iterdir()) == before


def test_gpu_check_fails_on_a_wrong_kernel(monkeypatch, capsys):
    def wrong(device, backend, quick):
        raise AssertionError("not the oracle's token")

    monkeypatch.setattr(_gpu_checks, "CHECKS", (wrong,))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--rehearse", "--checks-only"]) == 1
    assert "not the oracle's token" in capsys.readouterr().out
