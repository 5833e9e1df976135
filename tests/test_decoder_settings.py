"""What a decoder takes from the generation config and from its arguments, and how it feeds the model."""

import sys

import pytest
import torch

from tests.smollm2_fixture import assert_same_text, recompute, tiny, transformers
from tests.test_decoder import NEW, Scripted, knows, one, padded, prompts, sampling

from specdec_kernels import SamplingTensors, filter_probs  # isort: skip
from specdec_kernels.decoding import DraftModelDrafter, ModelForward, SpeculativeDecoder  # isort: skip
from specdec_kernels.decoding import decoder as decoder_module, run as run_module  # isort: skip
from specdec_kernels.decoding.transfers import on_device  # isort: skip


def test_default_parameters_are_the_generation_config():
    model = tiny("llama", seed=7)
    ids = torch.tensor([prompts(1)[0]])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20)
    result = SpeculativeDecoder(model).generate(ids, max_new_tokens=20)
    assert_same_text(model, ids[0].tolist(), result.tokens[0], expected[0, ids.shape[1] :].tolist())


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.6}, {"top_k": 7}, {"top_k": 0, "top_p": 0.8}, {"min_p": 0.2, "temperature": 2.0}]
)
def test_default_parameters_sample_as_generate_does(settings, monkeypatch):
    """The distribution behind `generate`'s first token, with what it fills in for unset fields, is ours with params=None."""
    model, rows = tiny("llama", seed=7), 600
    config = transformers.GenerationConfig(do_sample=True, pad_token_id=0, **settings)
    monkeypatch.setattr(model, "generation_config", config)
    ids = torch.tensor([prompts(1)[0]])
    own = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, output_scores=True, return_dict_in_generate=True
    )
    law = own.scores[0].float().softmax(-1)
    params = SamplingTensors.from_generation_config(config)
    torch.testing.assert_close(filter_probs(recompute(model, ids[0].tolist())[-1:], params), law, atol=1e-5, rtol=0)
    seen, real_run = [], decoder_module.Run
    monkeypatch.setattr(decoder_module, "Run", lambda d, r, p, *rest: seen.append(p) or real_run(d, r, p, *rest))
    torch.manual_seed(0)
    result = SpeculativeDecoder(model).generate(ids.repeat(rows, 1), max_new_tokens=1)
    for name in ("temperature", "top_p", "top_k", "min_p"):
        assert (getattr(seen[0], name) == getattr(params, name)).all()
    assert (law[0, [t[0] for t in result.tokens]] > 0).all()


def test_settings_that_cannot_be_carried_over_are_named(monkeypatch, recwarn):
    model = tiny("llama", seed=7)
    ids = torch.tensor([prompts(1)[0]])
    settings = {
        "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 4, "suppress_tokens": [3], "typical_p": 0.9,
        "epsilon_cutoff": 1e-3, "eta_cutoff": 2e-3, "bad_words_ids": [[5]],
    }  # fmt: skip
    monkeypatch.setattr(model, "generation_config", transformers.GenerationConfig(do_sample=True, **settings))
    SpeculativeDecoder(model).generate(ids, max_new_tokens=1)
    ours = [str(w.message) for w in recwarn if "SamplingTensors" in str(w.message)]
    assert len(ours) == 1
    assert all(f"{name}={value!r}" in ours[0] for name, value in settings.items())
    recwarn.clear()
    SpeculativeDecoder(model).generate(ids, params=sampling(1), max_new_tokens=1)
    model.generation_config = transformers.GenerationConfig(do_sample=True, suppress_tokens=[])
    SpeculativeDecoder(model).generate(ids, max_new_tokens=1)
    # Truncations of sampling do nothing to a greedy request.
    model.generation_config = transformers.GenerationConfig(do_sample=False, typical_p=0.9)
    SpeculativeDecoder(model).generate(ids, max_new_tokens=1)
    assert not [w for w in recwarn if "SamplingTensors" in str(w.message)]


def test_ends_given_in_any_form():
    model = tiny("llama")
    ids, greedy = torch.tensor([prompts(1)[0]]), SamplingTensors.create(temperature=0.0)
    text = SpeculativeDecoder(model).generate(ids, params=greedy, max_new_tokens=NEW).tokens[0]
    end = text[5]
    stop = text[: text.index(end) + 1]
    tensor = torch.tensor(end)
    number = tensor.numpy()[()]
    for eos in (end, [end], tensor, tensor[None], [tensor], number, [number], (63, end)):
        assert SpeculativeDecoder(model).generate(ids, params=greedy, max_new_tokens=NEW, eos=eos).tokens[0] == stop


def test_padding_stays_within_the_position_table():
    """Row 0 comes near GPT-2's last position while row 1 still drafts as much as the row's padding would overrun it."""
    config = transformers.GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(64, (n,), generator=generator).tolist() for n in (58, 14)]
    greedy = SamplingTensors.create(temperature=0.0, batch_size=2)
    ids, mask = padded(texts, "left")
    alone = [
        SpeculativeDecoder(model).generate(torch.tensor([t]), params=one(greedy, b), max_new_tokens=6, eos=[]).tokens[0]
        for b, t in enumerate(texts)
    ]
    known = knows([t + a for t, a in zip(texts, alone, strict=True)]).choose

    def choose(tokens, budget):
        drafts = known(tokens, budget)
        return drafts[:2] if tokens[:58] == texts[0] else [(d + 1) % 64 for d in drafts]

    drafter = Scripted(choose)
    result = SpeculativeDecoder(model, drafter, adaptive=False).generate(ids, mask, greedy, max_new_tokens=6, eos=[])
    assert drafter.counts[1] == [1, 3]
    for b, prompt in enumerate(texts):
        assert_same_text(model, prompt, result.tokens[b], alone[b])


def test_nothing_comes_from_the_host_behind_a_forward(monkeypatch):
    """On a GPU a tensor made from a list waits for what was launched before it."""
    model = tiny("llama")
    drafter = DraftModelDrafter(model, packed=False)
    decoder = SpeculativeDecoder(model, drafter, packed=False, num_draft=3, adaptive=False)
    behind, late = [False], []
    make = torch.tensor

    def launches(forward):
        def call(*args, **kwargs):
            output = forward(*args, **kwargs)
            behind[0] = True
            return output

        return call

    def verify(*args, real=run_module.verify_chain, **kwargs):
        behind[0] = False  # its own read-back waits for the forward anyway
        return real(*args, **kwargs)

    def tensor(*args, **options):
        # `on_device` copies from pinned memory, which the host does not wait for.
        if behind[0] and sys._getframe(1).f_code is not on_device.__code__:
            late.append(args)
        return make(*args, **options)

    monkeypatch.setattr(torch, "tensor", tensor)
    monkeypatch.setattr(run_module, "verify_chain", verify)
    decoder.forward = launches(decoder.forward)
    decoder.forward.device, decoder.forward.new_cache = model.device, ModelForward(model).new_cache
    decoder.forward.vocab_size = 64
    decoder.forward.refresh = lambda: None
    propose = drafter.propose

    def proposes(context):
        inner = drafter.forward
        drafter.forward = launches(inner)
        drafter.forward.device = model.device
        try:
            return propose(context)
        finally:
            drafter.forward, behind[0] = inner, False

    drafter.propose = proposes
    ids, mask = padded(prompts(2), "left")
    decoder.generate(ids, mask, sampling(2), max_new_tokens=12, eos=[])
    assert late == []


def test_host_values_go_to_a_gpu_without_waiting(monkeypatch):
    """Equal values are made there, others are copied from pinned memory in the stream's order."""
    calls = []

    class Copied:
        def to(self, device, **options):
            calls.append((device, options))
            return self

    monkeypatch.setattr(torch, "tensor", lambda values, **options: calls.append((values, options)) or Copied())
    monkeypatch.setattr(torch, "full", lambda size, value, **options: calls.append((size, value)))
    device = torch.device("cuda")
    on_device([3, 3], torch.int64, device)
    on_device([3, 4], torch.int64, device)
    assert calls == [
        ((2,), 3), ([3, 4], {"dtype": torch.int64, "pin_memory": True}), (device, {"non_blocking": True}),
    ]  # fmt: skip
