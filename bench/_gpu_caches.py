"""The ops over caches on a GPU: checks against the oracle, in graphs too, and times beside the bandwidth of a copy."""

from __future__ import annotations

from dataclasses import replace

import torch

import python_ref
import specdec_kernels as sk
from tests.cache_cases import DTYPES, LAYOUTS, assert_bits, cache_case, page_case, written
from tests.kv_states import (
    State,
    assert_append_as_oracle,
    assert_evict_as_oracle,
    assert_rollback_as_oracle,
    damage,
    make_state,
)

from .bench_kv_compact import compact_case
from .bench_kv_rollback import DRAFTS, rollback_case


def cache_moves(device: torch.device, backend: str, quick: bool) -> dict:
    """`kv_compact` on every layout and `state_select`, bit by bit; replays of a graph that holds both, with other paths."""
    moved = 0
    for i, layout in enumerate(LAYOUTS):
        D = 72 if layout == "latents" else 64 if quick else 128
        for K, nodes in ((5, 12),) if quick else ((5, 32), (128, 128)):
            case = cache_case(layout, DTYPES[i % len(DTYPES)], D=D, K=K, nodes=nodes, slots=True)
            values = python_ref.kv_compact(case.views(case.buffers), case.path, case.seq_lens, **case.options)
            buffers = [t.to(device, copy=True) for t in case.buffers]
            options = {name: t.to(device) for name, t in case.options.items()}
            arguments = case.path.to(device), case.seq_lens.to(device)
            sk.kv_compact(case.views(buffers), *arguments, backend=backend, **options)
            assert_bits([t.cpu() for t in buffers], written(case.buffers, case.views, values), layout)
            moved += int((case.path > 0).sum())
    g = torch.Generator().manual_seed(0)
    states = [torch.randn(4, 5, 8, 33, generator=g) for _ in range(3)]
    accepted = torch.tensor([2, 0, 9, 1], dtype=torch.int32)
    held = [t.to(device, copy=True) for t in states]
    sk.state_select(held, accepted.to(device), backend=backend)
    assert_bits([t.cpu() for t in held], python_ref.state_select(states, accepted))
    if device.type == "cuda":
        caches, path = (
            [torch.empty(9, 40, 2, 64, device=device) for _ in range(4)],
            torch.zeros(3, 5, dtype=torch.int32),
        )
        held_path, lengths = path.to(device), torch.full((3,), 7, device=device)

        def step():
            sk.kv_compact(caches, held_path, lengths, backend=backend)
            sk.state_select(held, held_path[:, 0].contiguous(), backend=backend)

        step()  # the tables of addresses are made outside
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(4):
            path = (torch.rand(3, 30, generator=g).topk(5, dim=1).indices.sort(dim=1).values + 1).int()
            start = [torch.randn(t.shape, generator=g) for t in (*caches, *held)]
            for into, value in zip((*caches, *held, held_path), (*start, path), strict=True):
                into.copy_(value)
            graph.replay()
            want = python_ref.kv_compact(start[:4], path, lengths.cpu()) + python_ref.state_select(
                start[4:], path[:, 0]
            )
            assert_bits([t.cpu() for t in (*caches, *held)], want, "replay")
    return {"moves": moved}


def cache_pages(device: torch.device, backend: str, quick: bool) -> dict:
    """`kv_copy_pages`, then `kv_rollback(scrub=)`, on paged layouts, bit by bit: called, and replayed from a graph."""
    changed, rejected = 0, torch.tensor([20, 3, 47, 0], dtype=torch.int32)
    layouts = ["nhd", "fused_hnd", "between"] if quick else [name for name, made in LAYOUTS.items() if made.paged]
    for i, layout in enumerate(layouts):
        state = make_state([33, 20, 47, 16], 16, 4, spare=4, share=0.3, seed=i)
        P = state.free_pages.shape[0]
        case = page_case(layout, P, D=24 if quick else 128, dtype=DTYPES[i % len(DTYPES)], seed=i)
        src, dst = torch.tensor([0, -1, 1, 0]), torch.tensor([P - 1, 2, P - 2, -1])
        lists, before = state.lists(), state.num_free.tolist()
        python_ref.kv_rollback(num_rejected=rejected.tolist(), **lists)
        del lists["page_size"]
        values = python_ref.kv_copy_pages(case.views(case.buffers), src, dst)
        values = python_ref.kv_scrub(values, before=before, num_rejected=rejected.tolist(), **lists)
        want = written(case.buffers, case.views, values)

        buffers, held = (
            [t.to(device) for t in case.copies()],
            {k: t.to(device) for k, t in state.copy().tensors().items()},
        )
        caches, pages, rejects = case.views(buffers), (src.to(device), dst.to(device)), rejected.to(device)

        def step(caches=caches, pages=pages, rejects=rejects, held=held):
            sk.kv_copy_pages(caches, *pages, backend=backend)
            sk.kv_rollback(**held, num_rejected=rejects, page_size=16, scrub=caches, backend=backend)

        step()  # the tables of addresses are made outside of the graph
        again = step
        assert_bits([t.cpu() for t in buffers], want, layout)
        if device.type == "cuda":
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            again = graph.replay
        for into, value in zip((*buffers, *held.values()), (*case.buffers, *state.tensors().values()), strict=True):
            into.copy_(value)
        again()
        assert_bits([t.cpu() for t in buffers], want, f"{layout}, replay")
        assert held["free_pages"].tolist() == lists["free_pages"]
        changed += sum(
            int((a.view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in zip(case.buffers, want, strict=True)
        )
    assert changed > 0
    return {"bytes": changed}


def on(state: State, device: torch.device) -> State:
    return replace(state, **{name: t.to(device, copy=True) for name, t in state.tensors().items()})


def bookkeeping(device: torch.device, backend: str, quick: bool) -> dict:
    """`kv_append_slots`, `kv_evict` and `kv_rollback`, with a window too, as the oracle, on sound and damaged states; replays of a
    graph that appends and rolls back."""
    g = torch.Generator().manual_seed(0)
    requests = 0
    for B, page_size in ((3, 4),) if quick else ((1, 1), (40, 16), (256, 64), (700, 256)):
        longest = 6 * page_size
        lengths = torch.randint(longest, (B,), generator=g).tolist()
        sound = make_state(lengths, page_size, 12, spare=2 * B, share=0.3)
        for state in (sound, damage(sound)):
            for _ in range(2):
                new = torch.randint(17, (B,), generator=g, dtype=torch.int32)
                rejected = torch.randint(longest, (B,), generator=g, dtype=torch.int32)
                held = on(state, device)
                assert_append_as_oracle(held, new.to(device), 17, backend)
                assert_rollback_as_oracle(held, rejected.to(device), backend)
                assert_evict_as_oracle(held, 2 * page_size, backend, sinks=1)
                assert_rollback_as_oracle(held, rejected.to(device), backend, window=page_size + 1, sinks=1)
                requests += 2 * B
    if device.type == "cuda":
        state = make_state([30, 7, 64, 0], 8, 12, spare=20, share=0.3)
        held, new = on(state, device), torch.zeros(4, dtype=torch.int32, device=device)
        rejected = torch.zeros_like(new)

        def step():
            return held.append(new, 9, backend), held.rollback_on_device(rejected, backend)

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, status = step()
        for _ in range(4):
            values = [torch.randint(10, (4,), generator=g, dtype=torch.int32) for _ in range(2)]
            for into, value in zip((new, rejected), values, strict=True):
                into.copy_(value)
            for name, t in held.tensors().items():
                t.copy_(state.tensors()[name])
            graph.replay()
            lists = state.lists()
            want = python_ref.kv_append_slots(num_new=values[0].tolist(), max_new=9, **lists)
            assert [t.tolist() for t in out] == list(want), "replay"
            assert status.tolist() == python_ref.kv_rollback(num_rejected=values[1].tolist(), **lists)
            for name, t in held.tensors().items():
                assert t.tolist() == lists[name], f"replay: {name}"
    return {"requests": requests}


def cache_times(device: torch.device, clock, bandwidth: float, backend: str, quick: bool) -> dict:
    """A step's bookkeeping for small and large caches, which should cost the same; `kv_compact`'s moved bytes a second as a share
    of a copy's (`bandwidth` in bytes read per microsecond, a copy reading one of two)."""
    result: dict[str, dict] = {}
    for B, spare in ((2, 0),) if quick else ((8, 0), (8, 1 << 22), (256, 1 << 20)):
        case = rollback_case(B, spare + 4 * B, 1 << 10)
        case = replace(case, **{name: t.to(device) for name, t in vars(case).items()})
        step = clock.graph(lambda case=case: case.step(backend))
        result[f"kv_append_slots + kv_rollback B={B}, {case.free_pages.shape[0]:,} pages, {DRAFTS} drafts"] = {
            "warm_us": clock.us(step, cold=False), "cold_us": clock.us(step, cold=True),
        }  # fmt: skip
    for layout in ("NHD", "HND"):
        case = compact_case(layout, quick, 8 if quick else 64)
        moving = replace(
            case, caches=[t.to(device) for t in case.caches], path=case.path.to(device), seq_lens=case.seq_lens.to(device),
            block_table=case.block_table.to(device),
        )  # fmt: skip
        us = clock.us(clock.graph(lambda moving=moving: moving(backend)), cold=True)
        result[f"kv_compact {layout} B={moving.path.shape[0]}"] = {
            "cold_us": us, "moved_bytes": moving.moved_bytes(), "of_copy": 2 * moving.moved_bytes() / us / bandwidth,
        }  # fmt: skip
    return result
