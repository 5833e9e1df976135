"""`filter_probs` in plain torch."""

from .. import _backends
from . import _rows


def filter_probs(logits, temperature, top_p, top_k, min_p, slots, rows, filter_order, probs, status) -> None:
    p = _rows.gather_params(temperature, top_p, top_k, min_p, slots, rows)
    step = max(_rows.CHUNK_ELEMENTS // logits.shape[1], 1)
    for i in range(0, logits.shape[0], step):
        s = slice(i, i + step)
        r = _rows.filter_rows(logits[s], p[s], filter_order)
        probs[s], status[s] = _rows.probs(r, p[s]).float(), r.status


_backends.register_eager("filter_probs", filter_probs)
