"""Real models after trees and recurrent steps: the next logits are those of the emitted text alone."""

import inspect

import pytest
import torch

from tests.smollm2_fixture import recompute, tiny
from tests.test_cache_rollback import small

from specdec_kernels import kv_compact, state_select  # isort: skip
from specdec_kernels.decoding import ModelForward  # isort: skip

PARENTS = (0, 0, 1, 1, 3)
"""Parent of nodes 1..5; 0 is the root."""
PATHS = ([1, 3, 5], [2], [], [1, 4])


def ancestors(node: int) -> list[int]:
    return [0] if node == 0 else [*ancestors(PARENTS[node - 1]), node]


@torch.inference_mode()
@pytest.mark.parametrize("cache", ["ragged", "paged"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_accepted_path_of_a_tree(kind, cache):
    """Several trees in a row, each under its own mask, rows with paths of different lengths: what `kv_compact` and the rollback
    leave is what a forward over the accepted text would have written."""
    model, B, nodes = tiny(kind), len(PATHS), len(PARENTS) + 1
    forward = ModelForward(model)
    made = forward.new_cache(B, 64, cache, page_size=4)
    g = torch.Generator().manual_seed(3)
    texts = [torch.randint(64, (n,), generator=g).tolist() for n in (5, 9, 4, 7)]
    width = max(map(len, texts))
    counts = list(map(len, texts))
    forward(torch.tensor([t + [0] * (width - len(t)) for t in texts]), counts, made)
    made.advance(counts)
    depth = torch.tensor([len(ancestors(n)) - 1 for n in range(nodes)])
    sees = torch.zeros(nodes, nodes, dtype=torch.bool)
    for n in range(nodes):
        sees[n, ancestors(n)] = True
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    for turn in range(3):
        tokens = torch.randint(64, (B, nodes), generator=g)
        lengths = torch.tensor(made.lengths)
        allowed = torch.arange(made.max_length + nodes) < lengths[:, None, None]
        allowed = allowed.repeat(1, nodes, 1)
        for b, n in enumerate(made.lengths):
            allowed[b, :, n : n + nodes] = sees
        mask = torch.zeros(allowed.shape).masked_fill_(~allowed, torch.finfo(torch.float32).min)
        made.reserve([nodes] * B, nodes)
        model(
            input_ids=tokens, position_ids=lengths[:, None] + depth, attention_mask=mask[:, None], use_cache=True,
            **{argument: made},
        )  # fmt: skip
        paths = [PATHS[(b + turn) % len(PATHS)] for b in range(B)]
        path = torch.tensor([p + [-1] * (3 - len(p)) for p in paths], dtype=torch.int32)
        if cache == "paged":
            made.pages.compact(path, lengths)
        else:
            kv_compact([t.transpose(1, 2) for layer in made.layers for t in (layer.keys, layer.values)], path, lengths)
        made.advance([nodes] * B)
        made.rollback([nodes - 1 - len(p) for p in paths])
        for text, row, p in zip(texts, tokens.tolist(), paths, strict=True):
            text += [row[0], *(row[n] for n in p)]
        assert made.lengths == list(map(len, texts))
        token = torch.randint(64, (B, 1), generator=g)
        got = forward(token, [1] * B, made).logits
        want = torch.stack([recompute(model, t + n)[-1] for t, n in zip(texts, token.tolist(), strict=True)])
        torch.testing.assert_close(got, want, atol=2e-4, rtol=0)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["qwen3_next", "mamba2"])
def test_state_not_rolled_back(kind):
    """A step's snapshots of every recurrent and convolution state: `state_select` gives each row the one behind its last
    accepted draft, and the model goes on from there, also after steps without drafts."""
    model, B = small(kind), 3
    g = torch.Generator().manual_seed(4)
    texts = [torch.randint(64, (6,), generator=g).tolist() for _ in range(B)]
    cache = None

    def feed(tokens):
        nonlocal cache
        names = inspect.signature(model.forward).parameters
        argument = next(n for n in ("cache", "cache_params", "past_key_values") if n in names)
        out = model(input_ids=tokens, use_cache=True, **{argument: cache})
        cache = getattr(out, argument)
        return out.logits[:, -1]

    def states():
        layers = [layer for layer in cache.layers if hasattr(layer, "conv_states")]
        found = [s for layer in layers for s in (*layer.conv_states.values(), *layer.recurrent_states.values())]
        return [s for s in found if s is not None]

    feed(torch.tensor(texts))
    attended = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    for accepted in ([2, 0, 3], [0, 0, 0], [3, 1, 2]):
        if attended and len(set(accepted)) > 1:
            accepted = [accepted[0]] * B  # its attention has one length for all rows, which `CacheRollback` deals with
        step = torch.randint(64, (B, 1 if accepted == [0, 0, 0] else 4), generator=g)
        snapshots = None
        for i in range(step.shape[1]):
            feed(step[:, i : i + 1])
            snapshots = snapshots or [s.new_zeros(B, step.shape[1], *s.shape[1:]) for s in states()]
            for kept, state in zip(snapshots, states(), strict=True):
                kept[:, i] = state
        state_select(snapshots, torch.tensor(accepted, dtype=torch.int32), out=states())
        for layer in attended:
            dropped = step.shape[1] - 1 - accepted[0]
            layer.keys, layer.values = (t[:, :, : t.shape[2] - dropped] for t in (layer.keys, layer.values))
        texts = [t + row[: n + 1] for t, row, n in zip(texts, step.tolist(), accepted, strict=True)]
    token = torch.randint(64, (B, 1), generator=g)
    got = feed(token)
    for b, text in enumerate(texts):
        torch.testing.assert_close(got[b], recompute(model, text + token[b].tolist())[-1], atol=2e-4, rtol=0)
