"""Training of drafters on tiny targets: what is trained is what drafts, runs resume, bad data is named."""

import copy
import json

import pytest
import torch

from tests.smollm2_fixture import recompute, tiny, transformers
from tests.test_trained_drafters import KEPT, eagle, eagle_logits, flashspec, flashspec_logits

from specdec_kernels import SamplingTensors  # isort: skip
from specdec_kernels.decoding import (  # isort: skip
    DraftModelDrafter,
    DSparkModel,
    DSparkPart,
    SpeculativeDecoder,
    load_drafter_part,
)
from specdec_kernels.decoding.draft_stack import StackForward  # isort: skip
from specdec_kernels.training import features, held_out, texts, trainer  # isort: skip
from specdec_kernels.training.cli import frequent_ids, main  # isort: skip
from specdec_kernels.training.draft_model import DraftModelTraining  # isort: skip
from specdec_kernels.training.dspark import DSparkTraining  # isort: skip
from specdec_kernels.training.eagle import EagleTraining  # isort: skip
from specdec_kernels.training.features import FeatureBatches  # isort: skip
from specdec_kernels.training.flashspec import FlashSpecTraining  # isort: skip
from specdec_kernels.training.run import evaluate  # isort: skip


def own_texts(model, count=24, seed=0):
    """Texts that the target wrote: random prompts, greedy continuations."""
    generator, out = torch.Generator().manual_seed(seed), []
    for i in range(count):
        tokens = torch.randint(64, (3 + i % 4,), generator=generator).tolist()
        start = len(tokens)
        for _ in range(10 + i % 5):
            tokens.append(int(recompute(model, tokens)[-1].argmax()))
        out.append(texts.Text(tokens, start, "self"))
    return out


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    model = tiny("llama")
    written = own_texts(model)
    folder = features.compute(model, written, (0, 1), tmp_path_factory.mktemp("features"))
    return model, written, folder


def batches(folder, taps=(0, -1), **options):
    return FeatureBatches(folder, taps, hidden_size=32, **options)


def test_features_are_the_target_s_states(prepared):
    model, written, folder = prepared
    seen = set()
    loaded = FeatureBatches(folder, (1, 0), hidden_size=32, tokens=64)
    for i in range(len(loaded)):
        batch = loaded[i]
        assert batch.tokens.numel() <= 64 or len(batch.texts) == 1
        for row, number in enumerate(batch.texts):
            text, n = written[number], int(batch.lengths[row])
            seen.add(number)
            assert batch.tokens[row, :n].tolist() == text.tokens and int(batch.starts[row]) == text.start
            states = []
            hooks = [
                layer.register_forward_hook(
                    lambda m, a, o, states=states: states.append(o[0] if isinstance(o, tuple) else o)
                )
                for layer in model.model.layers
            ]
            recompute(model, text.tokens)
            for hook in hooks:
                hook.remove()
            want = torch.cat([states[1].view(n, 32), states[0].view(n, 32)], 1)
            torch.testing.assert_close(batch.states[row, :n], want, atol=5e-3, rtol=2e-3)
            logits = batch.last[row, :n] @ model.lm_head.weight.T
            torch.testing.assert_close(logits, recompute(model, text.tokens), atol=2e-2, rtol=2e-3)
    assert seen == set(range(len(written)))


def test_features_go_on_and_refuse_others(prepared, tmp_path, monkeypatch):
    model, written, _ = prepared
    monkeypatch.setattr(features, "_TEXTS", 8)
    made = []
    real = features._shard
    monkeypatch.setattr(features, "_shard", lambda *a: made.append(a[3].name) or real(*a))
    features.compute(model, written[:12], (0, 1), tmp_path)
    (tmp_path / "00001.part").write_bytes(b"an interrupted one")
    assert made == ["00000.safetensors", "00001.safetensors"]
    made.clear()
    features.compute(model, written, (1,), tmp_path)
    assert made == ["00001.safetensors", "00002.safetensors"], "the shard that grew, and the new one"
    assert len(FeatureBatches(tmp_path, (0, 1), hidden_size=32).places) == 24
    features.compute(model, written, (-1, 0), tmp_path)  # -1 is always there
    with pytest.raises(ValueError, match=r"other features: taps is \[1\], not \[0\]"):
        features.compute(model, written, (0,), features.compute(model, written[:2], (1, -1), tmp_path / "one"))
    tuned = copy.deepcopy(model)
    with torch.no_grad():
        tuned.model.layers[1].mlp.down_proj.weight.add_(0.01)
    for other in (tiny("llama", seed=4), tuned):
        with pytest.raises(ValueError, match="other features: target is LlamaForCausalLM"):
            features.compute(other, written, (1,), tmp_path)
    with pytest.raises(ValueError, match="other features: dtype is float32, not bfloat16"):
        features.compute(model, written, (1,), tmp_path, dtype=torch.bfloat16)
    half = tmp_path / "half"
    features.compute(model, written[:8], (1,), half, dtype=torch.bfloat16)
    features.compute(model, written, (1,), half)  # in the folder's dtype
    assert json.loads((half / "meta.json").read_text())["dtype"] == "bfloat16" and made[-1] == "00002.safetensors"
    with pytest.raises(ValueError, match=r"00000.safetensors: holds other features: of other texts"):
        features.compute(model, written[1:], (1,), tmp_path)


@pytest.mark.parametrize("taps", [(1,), (0, 1), (-1,), (-1, 0)])
def test_eagle_is_trained_as_it_drafts(prepared, taps, monkeypatch):
    """The unrolled steps' logits are those of drafting: step s goes on from its own states of the s tokens before."""
    model, written, folder = prepared
    part = eagle(model, taps, KEPT)
    training = EagleTraining(part, steps=3)
    batch = batches(folder, taps, texts=[5, 9])[0]
    seen, real = [], part.logits
    monkeypatch.setattr(part, "logits", lambda h: seen.append(real(h)) or seen[-1])
    training(batch)
    monkeypatch.undo()
    assert len(seen) == 3
    for step, logits in enumerate(seen):
        row = 0
        for text in (written[n].tokens for n in batch.texts):
            start = next(w.start for w in written if w.tokens == text)
            for entry in range(max(start - 2, step), len(text) - 1):
                if entry + 2 < start:
                    continue
                known = entry + 2 - step
                want = eagle_logits(part, text[:known], text[known : entry + 2])
                torch.testing.assert_close(logits[row], want, atol=3e-2, rtol=2e-2)
                row += 1
        assert row == len(logits)


def test_adapters_of_a_hybrid_see_everything():
    """Behind a shared sliding-window layer the adapters are full attention, when trained as when drafting."""
    model = tiny("gemma3")
    part = flashspec(model)
    forward = StackForward(part.stack)
    x = torch.randn(1, 20, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        cache = forward.new_cache(1, 32)
        states = []
        handle = part.stack.decoder.layers[0].register_forward_hook(
            lambda m, a, o: states.append(o[0] if isinstance(o, tuple) else o)
        )
        whole = forward(x, [20], cache)
        handle.remove()
        upper = part.stack.upper(states[0].view(1, 20, 32), torch.arange(20)[None])[0]
    torch.testing.assert_close(upper, whole, atol=1e-4, rtol=0)


def test_texts_shorter_than_the_unrolled_steps(prepared, tmp_path):
    model = prepared[0]
    folder = features.compute(model, [texts.Text([1, 2], 1, "a"), texts.Text([3, 4, 5], 2, "a")], (1,), tmp_path)
    out = EagleTraining(eagle(model, (1,)), steps=3)(batches(folder, (1,))[0])
    assert torch.isfinite(out["loss"]) and "overlap_3" not in out


def test_states_too_large_for_float16_are_named(tmp_path):
    model = copy.deepcopy(tiny("llama"))
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1e7)
    with pytest.raises(ValueError, match=r"states of layers \[1\] are not finite in float16"):
        features.compute(model, [texts.Text([1, 2, 3], 1, "a")], (0, 1), tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


def test_no_usable_texts_is_an_error(tmp_path, monkeypatch):
    class Silent:
        def __init__(self, *arguments):
            pass

        def batch(self, source, key):
            return []

    monkeypatch.setattr(texts, "_Writer", Silent)
    with pytest.raises(ValueError, match="no usable text of source 'self' in 5 batches"):
        texts.generate(None, None, tmp_path / "a.jsonl", 10)


def test_flashspec_is_trained_as_it_drafts(prepared, monkeypatch):
    model, written, folder = prepared
    part = flashspec(model, KEPT)
    seen, real = [], part.logits
    monkeypatch.setattr(part, "logits", lambda h: seen.append(real(h)) or seen[-1])
    batch = batches(folder, (0,), texts=[3, 7])[0]
    FlashSpecTraining(part)(batch)
    monkeypatch.undo()
    row = 0
    for number in batch.texts:
        text = written[number]
        for place in range(text.start - 1, len(text.tokens)):
            want = flashspec_logits(part, text.tokens[: place + 1])
            torch.testing.assert_close(seen[0][row], want, atol=3e-2, rtol=2e-2)
            row += 1
    assert row == len(seen[0])


def training_of(kind, model):
    torch.manual_seed(0)
    if kind == "draft-model":
        return DraftModelTraining(model, hidden_size=16)
    if kind == "dspark":
        part = DSparkPart(model, mask_token_id=63, block_size=4, markov_rank=8, target_layer_ids=[0, 1])
        return DSparkTraining(part, blocks=6)
    return EagleTraining(eagle(model, (0, 1)), steps=2) if kind == "eagle" else FlashSpecTraining(flashspec(model))


@pytest.mark.parametrize("kind", ["eagle", "flashspec", "dspark", "draft-model"])
def test_training_helps_and_leaves_the_target_alone(kind, prepared, tmp_path):
    model, _, folder = prepared
    before = {name: p.clone() for name, p in model.named_parameters()}
    training = training_of(kind, model)
    taps = training.part.taps if kind != "draft-model" else ()
    loaded = batches(folder, taps, tokens=256)
    untrained = evaluate(training, loaded)
    trainer.train(training, loaded, tmp_path, epochs=40, learning_rate=5e-3, progress=False)
    trained = evaluate(training, loaded)
    # The loss has the target's entropy in it, which stays.
    assert trained["loss"] < untrained["loss"]
    figure = {"eagle": "overlap_1", "dspark": "accept_1"}.get(kind, "overlap")
    assert trained[figure] > untrained[figure] + 0.1
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]), f"{name} is the target's and frozen"


def test_interrupted_training_resumes(prepared, tmp_path, monkeypatch):
    """Stopped in the middle, with a checkpoint that was not written to its end: the result is that of a run in one go."""
    model, _, folder = prepared

    def run(out, stop=None):
        training = training_of("flashspec", model)
        loaded = batches(folder, training.part.taps, tokens=128)
        forward, count = training.forward, [0]

        def counted(batch):
            count[0] += 1
            if stop is not None and count[0] > stop:
                raise KeyboardInterrupt
            return forward(batch)

        training.forward = counted
        try:
            trainer.train(training, loaded, out, epochs=3, learning_rate=1e-3, save_steps=2, progress=False)
        except KeyboardInterrupt:
            return None
        return {name: t.detach().clone() for name, t in training.part.tensors().items()}, count[0]

    whole, steps = run(tmp_path / "whole")
    assert run(tmp_path / "cut", stop=7) is None
    broken = tmp_path / "cut" / "checkpoints" / "checkpoint-8"
    broken.mkdir()
    (broken / "model.safetensors").write_bytes(b"half")
    (broken / "trainer_state.json").write_text('{"epoch": 1')
    resumed, rest = run(tmp_path / "cut")
    assert rest == steps - 6
    for name, tensor in whole.items():
        torch.testing.assert_close(resumed[name], tensor, atol=1e-6, rtol=1e-5)


def test_nan_loss_names_step_and_batch(prepared, tmp_path):
    model, _, folder = prepared
    training = training_of("flashspec", model)
    loaded = batches(folder, training.part.taps, tokens=128)
    get = type(loaded).__getitem__
    poisoned = loaded.batches[1]

    class Poisoned(FeatureBatches):
        def __getitem__(self, index):
            batch = get(self, index)
            if self.batches[index] == poisoned:
                batch.states[0, 0] = torch.nan
            return batch

    loaded.__class__ = Poisoned
    with pytest.raises(FloatingPointError, match=r"loss is nan at step \d+, in the batch of texts \[") as error:
        trainer.train(training, loaded, tmp_path, epochs=1, learning_rate=1e-3, progress=False)
    assert str(poisoned) in str(error.value)


def test_text_files(tmp_path):
    class Tokenizer:
        def __call__(self, text, add_special_tokens):
            assert not add_special_tokens
            return type("Ids", (), {"input_ids": [ord(c) % 64 for c in text]})

        def apply_chat_template(self, messages, return_dict):
            assert not return_dict
            return self("".join(m["content"] for m in messages), False).input_ids

    path = tmp_path / "a.jsonl"
    lines = [
        {"tokens": [1, 2, 3, 4], "start": 2, "source": "self"},
        {"text": "abcdef"},
        {"messages": [{"content": "xy"}]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + '\n\n{"tokens": [1, 2')
    got = texts.read(path, Tokenizer(), max_tokens=4)
    assert [(t.tokens, t.start) for t in got] == [
        ([1, 2, 3, 4], 2), ([33, 34, 35, 36], 1), ([37, 38], 1), ([56, 57], 1),
    ]  # fmt: skip
    assert len(texts.read(path, Tokenizer())) == 3
    plain = tmp_path / "a.txt"
    plain.write_text("hello")
    assert texts.read(plain, Tokenizer(), max_tokens=3)[0].tokens == [ord(c) % 64 for c in "hel"]
    for bad, message in (
        ('{"tokens": [1, 2]}\n{"tokens": [1,\n{"tokens": [1]}', r"a.jsonl: line 2 is no JSON"),
        ('{"words": 3}\n', r'line 1: must be an object with "tokens", "text" or "messages"'),
        ('{"tokens": [1, -2]}\n', r'line 1: "tokens" must be a list of token ids'),
        ('{"tokens": [1, 2], "start": "x"}\n', r'line 1: "tokens" must be a list'),
    ):
        path.write_text(bad)
        with pytest.raises(ValueError, match=message):
            texts.read(path, Tokenizer())
    path.write_text('{"text": "abc"}\n')
    with pytest.raises(ValueError, match="texts need a tokenizer, got None"):
        texts.read(path)


def test_written_texts_resume(tmp_path, monkeypatch):
    """Batches are functions of the seed, the source and how far it has come: a run that was cut goes on as if it had not been."""

    class Writer:
        def __init__(self, target, tokenizer, seed, batch):
            self.seed = seed

        def batch(self, source, key):
            return [texts.Text([self.seed, key, len(source), 5], 1, source)]

    monkeypatch.setattr(texts, "_Writer", Writer)
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    texts.generate(None, None, whole, 60, seed=4)
    texts.generate(None, None, cut, 20, seed=4)
    with cut.open("a") as file:
        file.write('{"tokens": [4, 3')
    texts.generate(None, None, cut, 60, seed=4)
    assert whole.read_text() == cut.read_text()
    shares = texts._made(whole)
    assert shares["self"] > shares["code"] > shares["source"] > 0


def test_held_out_texts_are_about_something_else():
    """Texts whose prompt ends as that of a held-out one are not trained on, whatever came before; no prompt: how they begin."""
    piece, other = list(range(40, 80)), list(range(20, 60))
    some = [
        texts.Text([1, *piece, 7, 8], 41, "a"), texts.Text([2, 3, *piece, 9], 42, "a"), texts.Text([1, *other, 7], 41, "a"),
        texts.Text(piece, 1, "b"), texts.Text(other, 1, "b"),
    ]  # fmt: skip
    assert held_out.split(some, 0.1) == ([2, 3, 4], [0])
    assert held_out.split(some[::-1], 0.1) == ([1, 2, 3, 4], [0])
    with pytest.raises(ValueError, match=r"must leave texts to train on, got 0\.5 of 2 texts, prompts of the same end"):
        held_out.split(some[:2], 0.5)


def test_held_out_prompts_are_decoded():
    """The target itself as draft model: every draft is accepted."""
    model = tiny("llama")
    some = own_texts(model, 4)
    figures = held_out.decode(model, DraftModelDrafter(copy.deepcopy(model)), some, prompts=3, new_tokens=13)
    assert figures["prompts"] == 3 and figures["speedup"] > 0
    assert figures["tokens_per_call"] == pytest.approx(6.0)
    assert held_out.decode(model, DraftModelDrafter(model), [texts.Text([1, 2, 3], 1, "a")]) == {}


def test_bf16_training_keeps_the_weights_in_float32(prepared, tmp_path):
    model, _, folder = prepared
    training = training_of("eagle", model)
    loaded = batches(folder, training.part.taps, tokens=256)
    untrained = evaluate(training, loaded)
    trainer.train(training, loaded, tmp_path, epochs=40, learning_rate=5e-3, progress=False, bf16=True)
    assert evaluate(training, loaded)["overlap_1"] > untrained["overlap_1"] + 0.1
    tensors = training.part.tensors().values()
    assert all(t.dtype == torch.float32 for t in tensors)
    # Weights that only bfloat16 could hold would be multiples of its steps.
    assert any(not torch.equal(t, t.bfloat16().float()) for t in tensors)


def test_frequent_ids():
    some = [texts.Text([9, 9, 1, 1, 1, 2], 2, "a"), texts.Text([0, 7, 7, 5], 1, "b")]
    assert frequent_ids(some, 2, 64) == [1, 7]
    assert frequent_ids(some, 6, 64) == [0, 1, 2, 3, 5, 7]
    assert frequent_ids(some, 0, 64) is None and frequent_ids(some, 64, 64) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["eagle", "flashspec", "dspark", "draft-model"])
def test_command(kind, dtype, tmp_path, capsys):
    """From texts to a file that drafts, and again: the second run has nothing left to train."""
    model = tiny("llama", scale=0.3)
    copy.deepcopy(model).to(dtype).save_pretrained(tmp_path / "target")
    data = tmp_path / "texts.jsonl"
    texts.write(data, own_texts(model, 12))
    transformers.PreTrainedTokenizerFast(tokenizer_object=empty_tokenizer()).save_pretrained(tmp_path / "target")
    arguments = [kind, "--target", str(tmp_path / "target"), "--data", str(data), "--out", str(tmp_path / "out")]
    arguments += ["--epochs", "1", "--held-out", "0.2"]
    arguments += ["--hidden-size", "16"] if kind == "draft-model" else ["--draft-vocab", "40", "--dtype", "float16"]
    arguments += ["--public", str(tmp_path / "public")] if kind == "dspark" else []
    assert main(arguments) == 0
    out = capsys.readouterr().out
    report = json.loads(out[out.rindex("{\n") :])
    assert report["bytes"] > 0 and report["loss"] > 0
    assert report["prompts"] == 2 and report["tokens_per_call"] >= 1
    if kind == "dspark":
        public = DSparkModel.load(tmp_path / "public", model)
        for name, tensor in public.state_dict().items():
            assert tensor.shape == load_drafter_part(tmp_path / "out", model).model.state_dict()[name].shape
    if kind == "draft-model":
        draft = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
        decoder = SpeculativeDecoder(model, DraftModelDrafter(draft))
        ids = torch.tensor([[1, 2, 3]])
        assert decoder.generate(ids, params=SamplingTensors.create(temperature=0.0)).stats.drafted > 0
        return
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["about"]["figures"]["speedup"] > 0
    assert config["about"]["held_out"] == 2 and config["draft_vocab_size"] == 40
    assert config["about"]["command"].startswith(f"python -m specdec_kernels train {kind} --target")
    part = load_drafter_part(tmp_path / "out", model)
    assert part.kind == kind
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert main(arguments) == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    with pytest.raises(ValueError, match=r"--held-out must leave texts to train on, got 1\.0 of 12 texts"):
        main([*arguments, "--held-out", "1"])
    with pytest.raises(ValueError, match="has checkpoints of another run: seed was 0, is 1"):
        main([*arguments, "--seed", "1"])


def empty_tokenizer():
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({"a": 0}, "a"))
