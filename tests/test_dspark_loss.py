"""DSpark's loss: closed forms, loops in float64, and that following it raises what decoding measures."""

import math

import pytest
import torch

from tests.dspark_cases import KEPT, VOCAB, WIDTH, drafter_of, tapped
from tests.smollm2_fixture import tiny
from tests.test_decoder import padded, prompts

from specdec_kernels import SamplingTensors  # isort: skip
from specdec_kernels.decoding import DSparkConfig, DSparkDrafter, DSparkModel, SpeculativeDecoder  # isort: skip
from specdec_kernels.training.dspark import DSparkBatch, dspark_loss  # isort: skip

pytestmark = pytest.mark.usefixtures("one_thread")
REDUCED = {"draft_vocab_size": len(KEPT)}


def batch_of(seed=0, length=9):
    """Two random texts; the second one's last three tokens are padding and its first four a prompt; in the first, token 5 does not
    count, nor what a block has behind it."""
    generator = torch.Generator().manual_seed(seed)
    trained = torch.ones(2, length, dtype=torch.bool)
    trained[1, :4] = trained[1, -3:] = trained[0, 5] = False
    tokens = torch.randint(VOCAB, (2, length), generator=generator)
    tokens[0, 2] = 1  # no id of the reduced vocabulary
    return DSparkBatch(
        tokens, torch.randn(2, length, 2 * WIDTH, generator=generator),
        torch.randn(2, length, WIDTH, generator=generator), torch.tensor([[0, 3, 7], [3, 4, 8]]), trained,
    )  # fmt: skip


@pytest.mark.parametrize("keys", [{}, REDUCED], ids=["whole", "reduced"])
def test_uniform_distributions(tmp_path, keys):
    """p uniform over V ids and q over Vd of them overlap by Vd / V, and a c of 1/2 costs log 2 whatever c* is."""
    model, *_ = drafter_of(tmp_path, tiny("llama"), **keys)
    with torch.no_grad():
        for module in (model.lm_head, model.markov_head.markov_w2, model.confidence_head.proj):
            module.weight.zero_()
        model.confidence_head.proj.bias.zero_()
    batch = batch_of()._replace(hidden=torch.zeros(2, 9, WIDTH))
    out = dspark_loss(model, batch)
    columns = len(KEPT) if keys else VOCAB
    share = columns / VOCAB
    values = (math.log(columns), 1 - share, math.log(2))
    for got, expected in zip((out.ce, out.tv, out.confidence), values, strict=True):
        assert float(got) == pytest.approx(expected, abs=2e-6)
    assert float(out.loss.detach()) == pytest.approx(0.1 * values[0] + 0.9 * values[1] + values[2], abs=2e-6)
    assert out.acceptance.tolist() == pytest.approx([share] * 4 + [0.0], abs=1e-6)
    assert float(out.confidence_error) == pytest.approx(abs(0.5 - share), abs=1e-6)
    # Slots that count: 4, 1 and 1 of the blocks at 0, 3 and 7 of the first text, 2 and 1 of those at 3 and 4 of the second.
    slots = [4, 1, 1, 2, 1]
    expected = sum(sum(share**k for k in range(1, n + 1)) for n in slots) / len(slots)
    assert float(out.accepted) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("keys", [{}, REDUCED], ids=["whole", "reduced"])
def test_loss_is_the_sum_over_slots(tmp_path, keys):
    """Against loops over blocks, slots and ids; with the normaliser given, and with the kept rows of the head alone."""
    target = tiny("llama")
    model, config, tensors = drafter_of(tmp_path, target, **keys)
    batch, weights, decay = batch_of(), (0.3, 0.5, 0.7), 2.5
    h = model.forward_blocks(batch.states, batch.tokens, batch.anchors).detach().double()
    t = {name: tensor.double() for name, tensor in tensors.items()}
    head, ids = target.lm_head.weight.detach().double(), KEPT if keys else list(range(VOCAB))
    totals, parts = torch.zeros(3), torch.zeros(3, dtype=torch.float64)
    for row in range(2):
        for a, anchor in enumerate(batch.anchors[row].tolist()):
            for k in range(config["block_size"]):
                if anchor + k + 1 > 8 or not batch.trained[row, anchor + k + 1]:
                    break
                before, label = batch.tokens[row, anchor + k], int(batch.tokens[row, anchor + k + 1])
                w1 = t["markov_head.markov_w1.weight"][before]
                z = h[row, a, k] @ t["lm_head.weight"].T + w1 @ t["markov_head.markov_w2.weight"].T
                q = dict(zip(ids, z.softmax(0).tolist(), strict=True))
                p = (batch.hidden[row, anchor + k].double() @ head.T).softmax(0).tolist()
                overlap = sum(min(p[v], q.get(v, 0.0)) for v in range(VOCAB))
                logit = torch.cat([h[row, a, k], w1]) @ t["confidence_head.proj.weight"][0]
                c = float(torch.sigmoid(logit + t["confidence_head.proj.bias"][0]))
                weight = math.exp(-k / decay)
                terms = (
                    -math.log(q[label]) if label in q else 0.0, 0.5 * sum(abs(p[v] - q.get(v, 0.0)) for v in range(VOCAB)),
                    -overlap * math.log(c) - (1 - overlap) * math.log(1 - c),
                )  # fmt: skip
                parts += weight * torch.tensor(terms, dtype=torch.float64)
                totals += weight * torch.tensor([label in q, True, True])
    parts /= totals
    log_norm = (batch.hidden.double() @ head.T).logsumexp(-1).float()
    for given, rows in ((None, None), (log_norm, None), (log_norm, target.lm_head.weight[ids])):
        out = dspark_loss(model, batch._replace(log_norm=given), head=rows, weights=weights, decay=decay)
        got = torch.stack([out.ce, out.tv, out.confidence]).double()
        torch.testing.assert_close(got, parts, rtol=1e-4, atol=1e-5)
        assert float(out.loss.detach()) == pytest.approx(
            float((parts * torch.tensor(weights).double()).sum()), rel=1e-4
        )


def test_confidences_do_not_train_what_they_judge(tmp_path):
    """c* is a constant: this part alone leaves the bias of a draft's logits as it is, and moves c towards c*."""
    model, *_ = drafter_of(tmp_path, tiny("llama"))
    out = dspark_loss(model, batch_of(), weights=(0.0, 0.0, 1.0))
    out.loss.backward()
    assert float(model.markov_head.markov_w2.weight.grad.abs().max()) == 0
    proj = model.confidence_head.proj
    with torch.no_grad():
        for parameter in proj.parameters():
            assert float(parameter.grad.abs().max()) > 0
            parameter -= 0.05 * parameter.grad
    assert float(dspark_loss(model, batch_of()).confidence) < float(out.confidence)


def test_nothing_that_counts(tmp_path):
    model, *_ = drafter_of(tmp_path, tiny("llama"))
    batch = batch_of()._replace(trained=torch.zeros(2, 9, dtype=torch.bool))
    out = dspark_loss(model, batch)
    out.loss.backward()
    assert float(out.loss.detach()) == 0 and float(out.accepted) == 0 and out.acceptance.tolist() == [0] * 5


@pytest.mark.parametrize("reduced", [False, True])
def test_training_raises_measured_acceptance(reduced):
    """A few steps of Adam on the target's own greedy texts: the loss falls, and decoding the same prompts accepts more, with
    confidences closer to what is accepted."""
    target, greedy = tiny("llama", scale=2.0), SamplingTensors.create(temperature=0.0, batch_size=3)
    ids, mask = padded(prompts(3), "left")
    texts = SpeculativeDecoder(target).generate(ids, mask, greedy, max_new_tokens=40).tokens
    texts = [p + t for p, t in zip(prompts(3), texts, strict=True)]
    d2t = None
    keys = {}
    if reduced:
        kept = sorted({token for text in texts for token in text})
        d2t, keys = torch.tensor(kept) - torch.arange(len(kept)), {"draft_vocab_size": len(kept)}
    config = DSparkConfig.for_target(
        target, mask_token_id=63, block_size=4, target_layer_ids=[0, 1], markov_rank=8, initializer_range=0.1, **keys
    )
    torch.manual_seed(0)
    model = DSparkModel(config, target, d2t=d2t)

    def accepted():
        decoder = SpeculativeDecoder(target, DSparkDrafter(model), num_draft=4, rule="token", adaptive=False)
        return decoder.generate(ids, mask, greedy, max_new_tokens=40).stats.acceptance_rate

    length = max(map(len, texts))
    batch = DSparkBatch(
        torch.tensor([t + [0] * (length - len(t)) for t in texts]),
        torch.stack([torch.nn.functional.pad(tapped(target, t), (0, 0, 0, length - len(t))) for t in texts]),
        torch.stack([torch.nn.functional.pad(last_hidden(target, t), (0, 0, 0, length - len(t))) for t in texts]),
        torch.arange(2, length - 1)[None].expand(3, -1),
        torch.stack([torch.arange(length) < len(t) for t in texts]),
    )
    before, first = accepted(), None
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 5e-3)
    for _ in range(60):
        out = dspark_loss(model, batch)
        first = first or out
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
    assert out.loss.item() < 0.5 * first.loss.item()
    assert float(out.accepted) > 2 * float(first.accepted) and float(out.confidence_error) < float(
        first.confidence_error
    )
    # The packed matrices are made again, as the weights have changed.
    assert before < 0.1 and accepted() > 0.5, (before, accepted())


@torch.inference_mode()
def last_hidden(target, tokens):
    return target.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]


@pytest.mark.parametrize(
    ("changed", "given", "message"),
    [
        ({"tokens": torch.zeros(2, 9)}, {}, r"batch.tokens must be int64 \[B, S\], got torch.float32 \[2, 9\]"),
        ({"states": torch.zeros(2, 9, WIDTH)}, {}, r"batch.states must be \[2, 9, 64\], got \[2, 9, 32\]"),
        ({"hidden": torch.zeros(2, 8, WIDTH)}, {}, r"batch.hidden must be \[2, 9, 32\], got \[2, 8, 32\]"),
        ({"trained": torch.ones(9, dtype=torch.bool)}, {}, r"batch.trained must be \[2, 9\], got \[9\]"),
        ({"anchors": torch.zeros(3, 1, dtype=torch.int64)}, {}, r"batch.anchors must be int64 \[2, A\]"),
        ({"anchors": torch.tensor([[9], [0]])}, {}, r"batch.anchors must be in \[0, 9\), got \[0, 9\]"),
        ({}, {"weights": (1.0, -1.0, 0.0)}, "weights must be three numbers >= 0"),
        ({}, {"decay": 0.0}, "decay must be > 0, got 0.0"),
    ],
)
def test_errors_name_the_argument(tmp_path, changed, given, message):
    model, *_ = drafter_of(tmp_path, tiny("llama"))
    with pytest.raises(ValueError, match=message):
        dspark_loss(model, batch_of()._replace(**changed), **given)
