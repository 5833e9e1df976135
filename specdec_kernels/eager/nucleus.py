"""`nucleus` in plain torch."""

from .. import _backends
from . import _rows


def nucleus(
    logits, temperature, top_p, top_k, min_p, slots, rows, filter_order, cutoff, row_max, log_mass, status
) -> None:
    p = _rows.gather_params(temperature, top_p, top_k, min_p, slots, rows)
    step = max(_rows.CHUNK_ELEMENTS // logits.shape[1], 1)
    for i in range(0, logits.shape[0], step):
        s = slice(i, i + step)
        r = _rows.filter_rows(logits[s], p[s], filter_order)
        cutoff[s], row_max[s], log_mass[s], status[s] = (
            r.cutoff.float(),
            r.row_max.float(),
            r.log_mass.float(),
            r.status,
        )


_backends.register_eager("nucleus", nucleus)
