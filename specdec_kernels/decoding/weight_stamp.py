"""Whether weights are still those that something was made from."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


class WeightStamp:
    """Identity, storage and version of tensors. Values written through `.data` leave no trace in them, nor do any of inference
    tensors, which have no version."""

    def __init__(self, tensors: Iterable[Tensor]):
        # Held, so that an identity is not taken over by a new tensor.
        self.tensors = list(tensors)
        self.marks = [(t.data_ptr(), 0 if t.is_inference() else t._version) for t in self.tensors]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, WeightStamp)
            and [id(t) for t in self.tensors] == [id(t) for t in other.tensors]
            and self.marks == other.marks
        )

    __hash__ = None  # type: ignore[assignment]
