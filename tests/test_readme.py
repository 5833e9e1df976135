"""The README's examples on raw logits run as printed, one after the other; so does that of a paged forward."""

import re
from pathlib import Path

import torch

README = Path(__file__).parents[1] / "README.md"


def test_examples_run_and_decide_something(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    examples = [block for block in blocks if "from_pretrained" not in block]
    assert len(examples) == 4 and len(blocks) == 5
    torch.manual_seed(0)
    names: dict = {}
    for example in examples:
        exec(compile(example, str(README), "exec"), names)
    for out in (names["out"], names["walk"]):
        assert out.num_accepted.sum() > 0 and (out.status == 0).all()
    assert "tensor" in capsys.readouterr().out


def test_forward_over_pages_runs():
    """docs/caches.md; its other examples are run by tests/test_cache_rollback.py."""
    text = (README.parent / "docs" / "caches.md").read_text()
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "PagedKVCache(" in b]
    names: dict = {}
    exec(compile(block, "caches.md", "exec"), names)
    assert names["cache"].seq_lens.tolist() == [12, 10]
