"""`python -m bench.decode` on a tiny target: every method runs, the figures are what they say, pages are drawn."""

import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.smollm2_fixture import assert_same_text, tiny, transformers
from tests.test_demo import tiny_model
from tests.test_trained_drafters import flashspec

from bench import _decode_peers, _decode_quality, decode  # isort: skip
from bench._decode_costs import measured_costs, predictions  # isort: skip
from bench._decode_method import Method, Result  # isort: skip
from bench._decode_methods import GENERATE, PLAIN, make_methods  # isort: skip
from bench._decode_peers import FLASHSPEC_LOOKUP, VLLM, VLLM_LOOKUP  # isort: skip
from specdec_kernels import SamplingTensors  # isort: skip
from specdec_kernels.decoding import EagleModel, PackedForward  # isort: skip


@pytest.mark.model
def test_every_method(tmp_path, capsys):
    target = tiny_model(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    EagleModel(model, taps=(0,), draft_ids=range(0, 4000)).save(tmp_path / "parts" / "eagle")
    flashspec(model, list(range(0, 4000))).save(tmp_path / "parts" / "flashspec")
    model.save_pretrained(tmp_path / "parts" / "draft-model")
    output = tmp_path / "decode.json"
    options = ["--target", target, "--parts", str(tmp_path / "parts"), "--output", str(output), "--tokens", "6"]
    options += ["--rounds", "1", "--prompts", "1", "--classes", "code", "--quality-rows", "3"]
    decode.main([*options, "--batch", "2", "--methods", "lookup tree", "flashspec", "--temperatures", "0.8"])
    batch = json.loads(output.read_text())["cells"][0]["methods"]
    assert set(batch) == {GENERATE, PLAIN, "lookup tree", "flashspec"} and batch["flashspec"]["kind"] == "blocks"
    others = [FLASHSPEC_LOOKUP] if importlib.util.find_spec("flashspec") else []
    every = [
        *others,
        "generate, prompt lookup",
        "generate, assisted",
        "lookup",
        "lookup tree",
        "eagle tree",
        "eagle chain",
    ]
    every += ["eagle chain, auto", "flashspec", "flashspec, no blocks", "flashspec, no blocks, auto", "draft model"]
    decode.main([*options, "--batch", "1", "--methods", *every, "draft model, auto"])
    document = json.loads(output.read_text())
    assert [(c["batch"], c["temperature"]) for c in document["cells"]] == [(1, 0.0), (1, 0.8)]
    ours = {
        "lookup", "lookup tree", "eagle tree", "eagle chain", "eagle chain, auto", "flashspec", "flashspec, no blocks",
        "flashspec, no blocks, auto", "draft model", "draft model, auto",
    }  # fmt: skip
    one = {GENERATE, PLAIN, "generate, prompt lookup", "generate, assisted", *others} | ours
    for cell in document["cells"]:
        assert set(cell["methods"]) == one
        assert cell["methods"][GENERATE]["speedup"] == 1.0
        agrees = cell["methods"]["draft model"]  # it is the target
        assert agrees["tokens_per_call"] > 4 and agrees["acceptance_by_position"][0] == 1.0
        assert agrees["predicted"] > 0 and cell["methods"]["lookup"]["predicted"] is None
        assert sum(agrees["time"].values()) == pytest.approx(1.0)
    assert set(document["quality"]) == {PLAIN} | ours
    assert all(0 <= document["quality"][name]["ks_p"] <= 1 for name in ours)
    text = capsys.readouterr().out
    assert "acceptance by position" in text and "over plain" in text
    pytest.importorskip("matplotlib")
    assert [p.name for p in decode_pages(output)] == ["decode_1.svg"]


def decode_pages(output):
    from bench._decode_plots import draw

    pages = draw(output)
    assert all(p.read_text().startswith("<?xml") for p in pages)
    return pages


def test_counting_forwards_leaves_the_fast_path(tmp_path):
    """A hook on the target that stayed would keep the packed forward from being used, and everything would be slow."""
    model = tiny("llama")
    methods = make_methods(model, None, ["lookup"], tmp_path, 3, 4)
    ids = torch.tensor([[1, 2, 3]])
    for method in (*methods, methods[1]):
        assert method.run(ids, torch.ones_like(ids), 0.0, 4, 0).calls > 0
    forward = methods[1].decoder.forward
    forward.refresh()
    assert isinstance(forward, PackedForward) and forward.fits


def test_lookup_of_pypi_flashspec(tmp_path):
    """It says what plain greedy decoding says, and its target forwards are counted."""
    pytest.importorskip("flashspec")
    model = tiny("llama", scale=0.3)
    (method,) = _decode_peers.peers(model, None, 3, [FLASHSPEC_LOOKUP])
    ids = torch.tensor([[5, 6, 7, 5, 6]])
    got = method.run(ids, torch.ones_like(ids), 0.0, 12, 0)
    methods = make_methods(model, None, [], tmp_path, 3, 4)
    want = methods[1].run(ids, torch.ones_like(ids), 0.0, 12, 0)
    assert_same_text(model, ids[0].tolist(), got.tokens[0], want.tokens[0], SamplingTensors.create(temperature=0.0), 0)
    assert 1 <= got.calls <= len(got.tokens[0]) + 1
    assert len(method.run(ids, torch.ones_like(ids), 0.8, 6, 1).tokens[0]) <= 6


def test_vllm_is_counted_by_what_it_accepted(tmp_path, monkeypatch):
    """Against an engine that says what vLLM does: requests one by one, and forwards are tokens less accepted drafts."""
    asked = []

    class LLM:
        def __init__(self, **options):
            self.options, self.accepted = options, 0

        def get_metrics(self):
            return [SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens", value=self.accepted)]

        def generate(self, prompts, params, use_tqdm):
            asked.append((prompts, params))
            self.accepted += 6
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=(1, 2, 3, 4))]) for _ in prompts]

    fake = SimpleNamespace(LLM=LLM, SamplingParams=lambda **options: options, __spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm", fake)
    model = tiny("llama")
    tokenizer = SimpleNamespace(save_pretrained=lambda folder: None)
    plain, ngram = _decode_peers.peers(model, tokenizer, 5, [VLLM, VLLM_LOOKUP])
    assert (plain.name, ngram.name) == (VLLM, VLLM_LOOKUP)
    ids, mask = torch.tensor([[0, 7, 8], [4, 5, 6]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    result = ngram.run(ids, mask, 0.8, 4, 11)
    assert result.tokens == [[1, 2, 3, 4]] * 2 and result.calls == 1
    prompts, params = asked[0]
    assert [p["prompt_token_ids"] for p in prompts] == [[7, 8], [4, 5, 6]]
    assert [p["seed"] for p in params] == [11, 12] and params[0]["max_tokens"] == 4


def test_prediction_by_hand():
    run = {"kind": "chain", "acceptance_by_position": [0.8, 0.4]}
    costs = {"forward": {1: 2.0, 2: 2.0, 3: 2.5, 4: 6.0}, "draft": {"x": {1: 0.3, 2: 0.5}}}
    got = predictions(run, costs, "x", 2, 9)
    want = {1: (1 + 0.8) / (1.0 + 0.15), 2: (1 + 0.8 + 0.4) / (1.25 + 0.25), 3: (1 + 0.8 + 0.4 + 0.2) / (3.0 + 0.35)}
    assert got == {
        "predicted": pytest.approx(want[2]), "best_draft": 1, "best_predicted": pytest.approx(max(want.values()))
    }  # fmt: skip
    costs["draft"]["x"] = {1: 3.0, 2: 3.0}
    assert predictions(run, costs, "x", 2, 9) == {
        "predicted": pytest.approx(2.2 / 2.75), "best_draft": 0, "best_predicted": 1.0
    }  # fmt: skip
    # A tree's nodes are as many at any depth, and its levels cost.
    run["kind"], costs["draft"]["x"] = "tree", {1: 0.1, 2: 0.2}
    got = predictions(run, costs, "x", 2, 2)
    assert got["predicted"] == pytest.approx(2.2 / (1.25 + 0.1))
    tokens = [1.0, 1.8, 2.2, 2.4, 2.5, 2.55]
    assert got["best_draft"] == max(range(1, 6), key=lambda d: tokens[d] / (1.25 + 0.05 * d))
    run["kind"] = "blocks"
    assert set(predictions(run, costs, "x", 2, 9).values()) == {None}


def test_costs_are_measured_by_length(tmp_path):
    """A proposal of more drafts costs more of a model that drafts one by one, and the decoder is left as it was."""
    model = tiny("llama")
    model.save_pretrained(tmp_path / "draft-model")
    methods = make_methods(model, None, ["draft model", "lookup"], tmp_path, 6, 8)
    ids = torch.tensor([[1, 2, 3]])
    costs = measured_costs(methods, ids, torch.ones_like(ids), 6, 8)
    assert set(costs["forward"]) == set(range(1, 10)) and set(costs["draft"]) == {"draft model"}
    assert costs["draft"]["draft model"][6] > 1.5 * costs["draft"]["draft model"][1] > 0
    assert all(m.decoder.num_draft == 6 for m in methods if m.name == "draft model")


def test_two_sample_sees_another_law():
    """Texts of the same law pass, texts of another temperature do not."""

    class Model:
        def __call__(self, ids):
            logits = torch.linspace(0, 3, 8).expand(*ids.shape, 8)
            return type("Out", (), {"logits": logits})

    def method(name, temperature):
        def run(ids, mask, _temperature, tokens, seed):
            generator = torch.Generator().manual_seed(seed)
            p = (torch.linspace(0, 3, 8) / temperature).softmax(-1).expand(len(ids), 8)
            return Result([t.tolist() for t in torch.multinomial(p, tokens, True, generator=generator)], 1)

        return Method(name, run)

    plain, same, other = method("plain", 0.8), method("same", 0.8), method("other", 1.6)
    prompt = torch.zeros(1, 3, dtype=torch.int64)
    out = _decode_quality.two_sample(Model(), [same, other], plain, prompt, rows=200, tokens=6, seed=1)
    assert out["same"]["ks_p"] > 1e-3 and out["same"]["tokens_p"] > 0.01
    assert out["other"]["ks_p"] < 1e-6 and out["other"]["tokens_p"] < 0.01
    assert out["other"]["perplexity"] > 1.2 * out["plain"]["perplexity"]
