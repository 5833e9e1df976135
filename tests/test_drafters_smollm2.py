"""Every drafter that the package ships decodes the real model exactly: greedy, with a seed, and in law."""

import json

import pytest
import torch
from scipy import stats

from tests.smollm2_fixture import assert_same_text, chat, recompute, smollm2

from specdec_kernels import SamplingTensors  # isort: skip
from specdec_kernels.decoding import SpeculativeDecoder  # isort: skip
from specdec_kernels.demo import drafters  # isort: skip
from specdec_kernels.demo.prompts import PROMPTS  # isort: skip

pytestmark = pytest.mark.model

NEW, NAMES = 32, ("quote text", "chat")


@pytest.fixture(scope="module")
def world():
    model, tokenizer = smollm2()
    plain = SpeculativeDecoder(model, packed=True)
    prompts = [chat(tokenizer, PROMPTS[name][0])[0].tolist() for name in NAMES]
    width = max(map(len, prompts))
    ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    modes = {
        "greedy": SamplingTensors.create(temperature=0.0, batch_size=2),
        "seed": SamplingTensors.create(temperature=0.8, top_p=0.9, seed=11, batch_size=2),
    }
    texts = {name: plain.generate(ids, mask, p, max_new_tokens=NEW).tokens for name, p in modes.items()}
    return model, tokenizer, plain, prompts, ids, mask, modes, texts, drafters.available(model)


def pytest_generate_tests(metafunc):
    if "name" in metafunc.fixturenames:
        shipped = sorted(path.name for path in drafters.SHIPPED.glob("*") if (path / "config.json").is_file())
        forms = {
            "eagle": ["eagle tree", "eagle chain"], "flashspec": ["flashspec", "flashspec, no blocks"],
            "dspark": ["dspark", "dspark, scheduled"], "draft-model": ["draft model"],
        }  # fmt: skip
        names = ["lookup", "lookup tree", *(form for part in shipped for form in forms[part])]
        metafunc.parametrize("name", names)


def test_shipped():
    """The parts, each below 8 MB and with its own account of how it was made."""
    shipped = sorted(path.name for path in drafters.SHIPPED.iterdir())
    assert shipped == ["eagle", "flashspec"]
    for name in shipped:
        folder = drafters.SHIPPED / name
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
        assert (folder / "model.safetensors").stat().st_size <= 8_000_000
        about = json.loads((folder / "config.json").read_text())["about"]
        assert about["command"].startswith(f"python -m specdec_kernels train {name} ")
        assert {"seed", "texts_sha256", "tokens", "figures"} <= set(about)


def test_greedy_and_seeded_texts(world, name):
    """A batch of two prompts; under rule "coupled" a seed's text is that of plain decoding."""
    model, _, plain, prompts, ids, mask, modes, texts, made = world
    accepted = 0
    for mode, params in modes.items():
        rule = "auto" if mode == "greedy" else "coupled"
        decoder = SpeculativeDecoder(model, made[name](), rule=rule, adaptive=False, forward=plain.forward)
        result = decoder.generate(ids, mask, params, max_new_tokens=NEW)
        accepted += result.stats.accepted
        for b, prompt in enumerate(prompts):
            assert_same_text(model, prompt, result.tokens[b], texts[mode][b], params, b)
    assert accepted > 10


def test_sampled_law(world, name):
    """The second and third token behind a prompt, which steps with drafts emit, by chi-square against the target's filtered law."""
    model, tokenizer, plain, *_, made = world
    if name.startswith("lookup"):
        pytest.skip("proposes nothing behind so short a text")
    prompt = tokenizer("The weather today is", return_tensors="pt").input_ids
    rows, top_k = 192, 3
    params = SamplingTensors.create(temperature=1.0, top_k=top_k, seed=list(range(rows)), batch_size=rows)
    decoder = SpeculativeDecoder(model, made[name](), num_draft=2, max_nodes=4, adaptive=False, forward=plain.forward)
    result = decoder.generate(prompt.expand(rows, -1).contiguous(), params=params, max_new_tokens=4, eos=[])
    assert result.stats.drafted > 0
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for text, p in law.items():
            kept = recompute(model, [*prompt[0].tolist(), *text])[-1].double().topk(top_k)
            for token, q in zip(kept.indices.tolist(), kept.values.softmax(-1).tolist(), strict=True):
                longer[(*text, token)] = p * q
        law = longer
    seen = dict.fromkeys(law, 0)
    for tokens in result.tokens:
        seen[tuple(tokens[:3])] += 1  # a token outside the filter is a KeyError
    pairs = sorted(((law[t] * rows, n) for t, n in seen.items()), reverse=True)
    big = [pair for pair in pairs if pair[0] >= 4]
    rest = [pair for pair in pairs if pair[0] < 4]
    big.append((sum(e for e, _ in rest), sum(n for _, n in rest)))
    statistic = sum((n - e) ** 2 / e for e, n in big if e > 0)
    assert stats.chi2.sf(statistic, len(big) - 1) > 1e-4
