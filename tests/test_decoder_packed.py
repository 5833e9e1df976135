"""The packed forward follows its model: weights that change, hooks that come and go, and threads that share it."""

import contextlib
import copy
import logging
import threading

import pytest
import torch
from torch import nn

from tests.smollm2_fixture import assert_same_text, tiny

from specdec_kernels import SamplingTensors  # isort: skip
from specdec_kernels.decoding import PackedForward, SpeculativeDecoder, packed  # isort: skip

PROMPT = torch.tensor([[5, 9, 2, 7, 30]])


def text(decoder, new=16):
    greedy = SamplingTensors.create(temperature=0.0)
    return decoder.generate(PROMPT, params=greedy, max_new_tokens=new, eos=[]).tokens[0]


def reverse_head(model):
    model.lm_head.weight.copy_(model.lm_head.weight.flip(0))


def other_projection(model):
    model.model.layers[1].self_attn.q_proj.weight = nn.Parameter(torch.randn(32, 32) * 0.3)


def other_storage(model):
    model.model.layers[0].mlp.down_proj.weight.data = torch.randn(32, 48) * 0.3


def one_layer_less(model):
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1


def another_norm(model):
    model.model.norm = copy.deepcopy(model.model.norm)
    model.model.norm.weight.copy_(torch.randn(32))


def norm_in_place(model):
    model.model.layers[0].input_layernorm.weight.copy_(torch.randn(32))


def other_epsilon(model):
    model.model.norm.variance_epsilon = 30.0
    model.model.layers[0].post_attention_layernorm.variance_epsilon = 30.0


CHANGES = [reverse_head, other_projection, other_storage, one_layer_less, another_norm, norm_in_place, other_epsilon]


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_seen(change):
    model = copy.deepcopy(tiny("llama"))
    decoder = SpeculativeDecoder(model, packed=True)
    before = text(decoder)
    with torch.no_grad():
        torch.manual_seed(0)
        change(model)
    expected = text(SpeculativeDecoder(model, packed=False))
    assert expected != before, "a change that shows"
    assert_same_text(model, PROMPT[0].tolist(), text(decoder), expected)
    assert decoder.forward._fits, "packed again, not given up"


def test_nothing_is_packed_again_without_a_change(monkeypatch):
    decoder = SpeculativeDecoder(copy.deepcopy(tiny("llama")), packed=True)
    monkeypatch.setattr(PackedForward, "repack", lambda self: pytest.fail("repacked"))
    assert text(decoder) == text(decoder)


def test_values_written_through_data_need_repack():
    model = copy.deepcopy(tiny("llama"))
    decoder = SpeculativeDecoder(model, packed=True)
    model.lm_head.weight.data.copy_(model.lm_head.weight.data.flip(0))
    decoder.forward.repack()
    expected = text(SpeculativeDecoder(model, packed=False))
    assert_same_text(model, PROMPT[0].tolist(), text(decoder), expected)


def negated(module, args, output=None):
    return -output if output is not None else (-args[0],)


def hooked(module, kind):
    """Makes `module` negate its input or output; a function that takes it back."""
    if kind == "hook":
        return module.register_forward_hook(negated).remove
    if kind == "pre-hook":
        return module.register_forward_pre_hook(negated).remove
    original = module.forward
    module.forward = lambda x: -original(x)
    return lambda: delattr(module, "forward")


@pytest.mark.parametrize("kind", ["hook", "pre-hook", "instance forward"])
@pytest.mark.parametrize("where", ["lm_head", "model.layers.1.mlp.down_proj", "model.layers.0.mlp"])
def test_hooks_are_obeyed(kind, where):
    model = copy.deepcopy(tiny("llama"))
    decoder = SpeculativeDecoder(model, packed=True)
    before = text(decoder)
    undo = hooked(model.get_submodule(where), kind)
    expected = text(SpeculativeDecoder(model, packed=False))
    assert expected != before, "a hook that shows"
    assert text(decoder) == expected
    with pytest.raises(ValueError, match="hooks"):
        SpeculativeDecoder(model, packed=True)
    assert PackedForward.build(model) is None
    undo()
    assert text(decoder) == before and decoder.forward._fits


def test_weights_that_no_longer_fit_fall_back(caplog):
    model = copy.deepcopy(tiny("llama"))
    decoder = SpeculativeDecoder(model, packed=True)
    model.to(torch.bfloat16)
    with caplog.at_level(logging.INFO):
        assert text(decoder) == text(SpeculativeDecoder(model, packed=False))
    assert "float32" in caplog.text


@pytest.mark.parametrize("wrong", [n for n in packed.COMPARED if n <= 8 or n >= 16])
def test_row_counts_are_compared(wrong, monkeypatch):
    right = packed.PackedLinear.__call__
    monkeypatch.setattr(packed.PackedLinear, "__call__", lambda m, x: right(m, x) * (1.5 if len(x) == wrong else 1))
    with pytest.raises(ArithmeticError, match=f"^{wrong} tokens: logits differ"):
        PackedForward(tiny("llama"))


@pytest.mark.parametrize("kind", ["generic", "packed"])
def test_decoders_in_threads_share_a_model(kind):
    """Two decoders in the model at once would each gather the other's rows in front of the LM head."""
    model = copy.deepcopy(tiny("qwen3"))
    batches = [torch.tensor([[0, 0, 0, 4, 8], [1, 2, 3, 4, 5]]), torch.tensor([[7, 6, 5], [0, 9, 1], [0, 0, 3]])]
    greedy = [SamplingTensors.create(temperature=0.0, batch_size=len(b)) for b in batches]
    decoders = [SpeculativeDecoder(model, packed=kind == "packed") for _ in batches]

    def run(i):
        return decoders[i].generate(batches[i], (batches[i] > 0).long(), greedy[i], max_new_tokens=12, eos=[]).tokens

    expected = [run(0), run(1)]
    meet = threading.Barrier(2)

    def wait(*_):
        # Broken once the other one is kept out for so long, as it should be.
        with contextlib.suppress(threading.BrokenBarrierError):
            meet.wait(0.5)

    got = [None, None]

    def work(i):
        got[i] = run(i)

    handle = model.register_forward_pre_hook(wait) if kind == "generic" else None
    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if handle is not None:
        handle.remove()
    assert got == expected
