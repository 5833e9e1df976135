"""Draws bench/results/decode.json: speed-ups, acceptance by position, where the time goes, predicted beside measured."""

from __future__ import annotations

import json
from pathlib import Path


def draw(source: Path) -> list[Path]:
    """Writes decode_<batch>.svg beside the JSON, a page for each batch size."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "decode"  # the same file from the same JSON
    import matplotlib.pyplot as plt

    document = json.loads(source.read_text())
    pages = []
    for batch in sorted({cell["batch"] for cell in document["cells"]}):
        cells = [cell for cell in document["cells"] if cell["batch"] == batch]
        names = list(cells[0]["methods"])
        colors = {name: plt.get_cmap("tab20")(i % 20) for i, name in enumerate(names)}
        figure, axes = plt.subplots(2, 2, figsize=(15, 11), layout="constrained")
        _speedups(axes[0, 0], cells, names, colors)
        _acceptance(axes[0, 1], cells, names, colors)
        _time(axes[1, 0], cells, names)
        _predicted(axes[1, 1], cells, names, colors)
        machine = document["environment"]
        figure.suptitle(
            f"{document['target']}, batch {batch}, {machine['cpu']}, {machine['threads']} threads, "
            f"{document['settings']['tokens']} new tokens; commit {str(machine['commit'])[:9]}"
        )
        path = source.with_name(f"decode_{batch}.svg")
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
        pages.append(path)
    return pages


def _label(cell: dict) -> str:
    return f"{cell['class']}\n{'greedy' if not cell['temperature'] else 'T ' + format(cell['temperature'], 'g')}"


def _speedups(axis, cells, names, colors) -> None:
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        at = [x + i * width for x, cell in enumerate(cells) if name in cell["methods"]]
        height = [cell["methods"][name]["speedup"] for cell in cells if name in cell["methods"]]
        axis.bar(at, height, width, color=colors[name], label=name)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xticks([x + 0.4 for x in range(len(cells))], [_label(c) for c in cells], fontsize=7)
    axis.set_ylabel("speed-up over generate")
    axis.legend(fontsize=7, ncols=2)


def _acceptance(axis, cells, names, colors) -> None:
    for name in names:
        rates = [c["methods"][name].get("acceptance_by_position") for c in cells if name in c["methods"]]
        rates = [r for r in rates if r]
        if rates:
            longest = max(map(len, rates))
            mean = [sum(r[i] for r in rates if len(r) > i) / sum(len(r) > i for r in rates) for i in range(longest)]
            axis.plot(range(1, longest + 1), mean, marker="o", color=colors[name], label=name)
    axis.set_xlabel("draft of a step")
    axis.set_ylabel("accepted, mean over the cells")
    axis.set_ylim(0, 1)


def _time(axis, cells, names) -> None:
    rows = [n for n in names if any("time" in c["methods"].get(n, {}) for c in cells)]
    left = [0.0] * len(rows)
    for part in ("draft", "target", "verify", "rest"):
        share = []
        for name in rows:
            times = [c["methods"][name]["time"][part] for c in cells if "time" in c["methods"].get(name, {})]
            share.append(sum(times) / len(times))
        axis.barh(rows, share, left=left, label=part)
        left = [a + b for a, b in zip(left, share, strict=True)]
    axis.set_xlabel("share of the steps' time")
    axis.legend(fontsize=7)


def _predicted(axis, cells, names, colors) -> None:
    top = 1.0
    for name in names:
        pairs = [
            (run["predicted"], run["over_plain"])
            for cell in cells
            if (run := cell["methods"].get(name)) and run.get("predicted")
        ]
        if pairs:
            axis.scatter(*zip(*pairs, strict=True), color=colors[name], label=name)
            top = max(top, *(value for pair in pairs for value in pair))
    axis.plot([0, top], [0, top], color="black", linewidth=0.8)
    axis.set_xlabel("speed-up over plain, predicted by the cost model")
    axis.set_ylabel("measured")
    axis.legend(fontsize=7)
