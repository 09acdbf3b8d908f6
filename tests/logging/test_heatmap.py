from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.image
import matplotlib.pyplot as plt
import numpy as np
import pytest

from megatron_fp4.logging.heatmap import SCALES, Scale, heatmap_values, plot_heatmap

NAMES = [f"blocks.{block}.mixer.{name}" for block in range(3) for name in ("in_proj", "out_proj")]


def _record(step: int, names: list[str], error: float | None) -> dict[str, Any]:
    linear = {
        "recipe": "nvfp4",
        "operands": {"wgrad_gradient": {"snr_db": 18.0, "zeroed": 0.1}},
        "gemms": {"wgrad": error},
        "gradient_to_noise": 7.0,
    }
    return {"kind": "diagnostics", "step": step, "linears": dict.fromkeys(names, linear), "blocks": {}}


def _write(folder: Path, records: list[dict[str, Any]]) -> Path:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_values_are_linears_by_records() -> None:
    records = [_record(1, NAMES, 0.1), _record(101, NAMES[:2], 0.2), _record(201, NAMES, None)]
    values = heatmap_values(records, NAMES, "wgrad.error")
    assert values.shape == (6, 3)
    assert np.array_equal(values[:, 0], np.full(6, 0.1))
    assert values[0, 1] == 0.2 and math.isnan(values[5, 1]) and math.isnan(values[0, 2])
    assert heatmap_values(records, NAMES, "wgrad_gradient.snr_db")[3, 0] == 18.0
    assert heatmap_values(records, NAMES, "gradient_to_noise")[3, 0] == 7.0
    assert np.isnan(heatmap_values(records, NAMES, "fprop_activation.snr_db")).all()


@pytest.mark.parametrize(
    ("names", "num_records"), [(NAMES[:1], 1), (NAMES, 5), ([f"blocks.{i}.mixer.up_proj" for i in range(30)], 3)]
)
def test_a_picture_is_drawn(tmp_path: Path, names: list[str], num_records: int) -> None:
    _write(tmp_path, [_record(100 * i, names, 0.1 + 0.01 * i) for i in range(num_records)])
    path = plot_heatmap(tmp_path)
    assert path == tmp_path / "diagnostics.png"
    assert matplotlib.image.imread(path).std() > 0.1
    other = plot_heatmap(tmp_path, ["gradient_to_noise", "dgrad.error"], tmp_path / "other.png")
    assert other == tmp_path / "other.png" and other.exists()


def test_a_run_without_diagnostics_has_no_picture(tmp_path: Path) -> None:
    assert plot_heatmap(_write(tmp_path, [{"kind": "event", "step": 1, "event": "checkpoint"}])) is None
    assert not (tmp_path / "diagnostics.png").exists()


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl does not exist"):
        plot_heatmap(tmp_path)
    for wrong in ("wgrad_gradient.snr", "bgrad.error", "snr_db", "wgrad_gradient"):
        with pytest.raises(ValueError, match="is no quantity of the diagnostics"):
            plot_heatmap(tmp_path, [wrong])


def test_a_colour_means_the_same_number_in_every_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of runs whose errors lie elsewhere, and of an outlier: the limits stay, and values beyond them are said."""
    seen: list[Any] = []
    monkeypatch.setattr(plt, "close", lambda figure: seen.append(figure))
    for folder, errors in (("low", [0.05, 0.06]), ("high", [0.3, 0.9])):
        (tmp_path / folder).mkdir()
        _write(tmp_path / folder, [_record(100 * i, NAMES, error) for i, error in enumerate(errors)])
        plot_heatmap(tmp_path / folder, ["wgrad.error"])
    low, high = (next(child for child in figure.axes[0].collections if child.cmap) for figure in seen)
    assert list(low.norm.boundaries) == list(high.norm.boundaries) == list(SCALES["error"].bounds)
    assert low.colorbar.extend == "neither" and high.colorbar.extend == "max"
    assert "measured: 0.05 to 0.06" in seen[0].axes[0].get_title(loc="left")
    assert seen[0].axes[1].get_ylabel() == "error / product (norms)"


def test_what_was_not_measured_has_no_colour_of_the_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(plt, "close", lambda figure: seen.append(figure))
    _write(tmp_path, [_record(1, NAMES, 0.1), _record(2, NAMES, None)])
    plot_heatmap(tmp_path, ["wgrad.error"])
    (mesh,) = [child for child in seen[0].axes[0].collections if child.cmap]
    assert mesh.get_array().mask.tolist() == [[False, True]] * len(NAMES)
    assert seen[0].axes[0].patches[0].get_hatch() == "////"
    assert [text.get_text() for text in seen[0].legends[0].get_texts()] == [
        "not quantized, not measured, or not finite"
    ]


@pytest.mark.parametrize("scale", SCALES.values())
def test_scales_rise(scale: Scale) -> None:
    assert scale.unit and all(low < high for low, high in pairwise(scale.bounds))
