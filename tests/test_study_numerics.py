"""The study behind docs/numerics.md runs, and what the page says can be run as it stands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import assembly
from megatron_fp4.precision.recipe import recipe_from_config
from megatron_fp4.quantization import quantize_nvfp4
from scripts import study_numerics
from scripts.study.errors import NEAREST, SQUARE, gain, relative
from scripts.study.exactness import encode_many
from scripts.study.hadamard import weight_seen
from scripts.study.rounding import saturated
from scripts.study.tensors import Study, generator
from scripts.study.weights import gradient_errors
from scripts.study_numerics import fill_page
from tests.programs import run_program

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "numerics.md"
SECTION_TABLES = {
    "formats": {"snr-nearest", "snr-stochastic", "zeroed"},
    "hadamard": {"rht-operands", "rht-wgrad", "rht-size", "rht-fprop"},
    "weights": {"weights", "chain-rule"},
    "rounding": {"rounding-mean", "rounding-gain"},
    "means": {"means"},
    "layers": {"layers"},
    "exactness": {"folding", "accumulation", "order"},
}


def fenced(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def commands() -> list[str]:
    """The page's shell lines with their variables expanded."""
    found = []
    for block in fenced("bash"):
        variables: dict[str, str] = {}
        for line in filter(str.strip, block.splitlines()):
            expanded = re.sub(r"\$(\w+)", lambda match: variables[match[1]], line)  # noqa: B023
            if assignment := re.fullmatch(r'(\w+)="(.*)"', expanded):
                variables[assignment[1]] = assignment[2]
            elif not expanded.startswith("#"):
                found.append(expanded)
    return found


def tables(text: str) -> dict[str, list[str]]:
    return {
        name: content.strip().splitlines()
        for name, content in re.findall(r"<!-- table: (\S+) -->\n(.*?)<!-- end -->", text, flags=re.DOTALL)
    }


@pytest.mark.slow
def test_the_quick_study_fills_a_page_and_draws(tmp_path: Path, corpus: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    small = ["model.pattern=M-*-", "model.nvfp4_bf16_blocks.last=1", "model.vocab_size=512"]
    script = str(ROOT / "scripts" / "study_numerics.py")
    arguments = ["--quick", "--pictures", str(tmp_path / "pictures"), "--page", str(page)]
    done = run_program([script, *arguments, "--set", *small, f"data.cache_dir={corpus}"])
    assert done.returncode == 0, done.stderr
    written, official = tables(page.read_text()), tables(PAGE.read_text())
    assert written.keys() == official.keys() == set().union(*SECTION_TABLES.values())
    for name, lines in written.items():
        assert len(lines) > 2, name
        assert lines[0] in done.stdout
        if name != "rounding-mean":  # whose columns are the numbers of draws
            assert lines[0] == official[name][0], f"{name}: the page is of another version of the script"
    drawn = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    assert drawn == sorted(
        path.name for path in (ROOT / "docs" / "pictures").iterdir() if f"{path.name})" in PAGE.read_text()
    )


def test_the_pages_pictures_are_small() -> None:
    pictures = re.findall(r"\]\((pictures/\S+\.png)\)", PAGE.read_text())
    assert 0 < len(pictures) <= 5
    assert all((PAGE.parent / name).stat().st_size < 200_000 for name in pictures)


def test_the_papers_experiments_are_what_they_say() -> None:
    def recipe(overrides: str) -> list[str]:
        (line,) = [command for command in commands() if command.endswith(overrides)]
        return recipe_from_config(assembly.configure(line.split()[3:]).precision).describe()

    assert recipe("precision.dgrad.weight.reuse_fprop=true") == [
        "fprop x|W: bf16 | nvfp4 1x16",
        "dgrad dy|W: bf16 | nvfp4 1x16 as fprop",
        "wgrad dy|x: bf16 | bf16",
    ]
    assert recipe("nearest precision.fprop.weight.rounding=stochastic") == [
        "fprop x|W: nvfp4 1x16 | nvfp4 1x16 SR",
        "dgrad dy|W: nvfp4 1x16 | nvfp4 1x16 SR",
        "wgrad dy|x: nvfp4 1x16 | nvfp4 1x16",
    ]
    assert recipe("nearest precision.fprop.weight.rounding=stochastic precision.dgrad.weight.rounding=nearest") == [
        "fprop x|W: nvfp4 1x16 | nvfp4 1x16 SR",
        "dgrad dy|W: nvfp4 1x16 | nvfp4 1x16",
        "wgrad dy|x: nvfp4 1x16 | nvfp4 1x16",
    ]
    assert recipe("nearest precision.dgrad.rht=16")[1] == "dgrad dy|W: nvfp4 1x16 | nvfp4 1x16, RHT 16 (fixed signs)"


def test_many_tensors_at_once_are_quantized_as_one() -> None:
    many = torch.randn(5, 64, generator=generator(9)) * torch.logspace(-6, 6, 5)[:, None]
    values, scales = encode_many(many, "as specified")
    for row, code, scale in zip(many, values, scales, strict=True):
        one = quantize_nvfp4(row)
        assert torch.equal(one.scales.float(), scale)
        assert torch.equal(one.block_values(), code * scale.repeat_interleave(16))


def test_a_transformed_weight_is_turned_back() -> None:
    w = torch.randn(32, 64, generator=generator(9))
    seen = weight_seen(w, NEAREST, 16)
    assert relative(seen, w) < 0.12
    assert gain(seen, w) == pytest.approx(1, abs=0.02)


def test_saturated_values_are_those_beyond_six_scales() -> None:
    x = torch.randn(64, 64, generator=generator(9))
    q = quantize_nvfp4(x)
    limit = q.scales.float().repeat_interleave(16, dim=1) * 6 * q.decode_scale()
    assert torch.equal(saturated(x), x.abs() > limit * (1 + 2**-20))
    assert 0.01 < saturated(x).double().mean() < 0.06


def test_gradients_of_square_blocks_are_those_of_the_forward_pass() -> None:
    assert gradient_errors(64, 3, SQUARE)[0] == 0
    assert gradient_errors(64, 3, NEAREST)[0] > 0.1


def test_pictures_are_drawn_where_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some sections alone, printed, leave the page's own pictures as they are."""
    folders: list[Path | None] = []

    def section(study: Study) -> Iterator[tuple[str, str]]:
        folders.append(study.pictures)
        yield "a", "| new |"

    monkeypatch.setattr(study_numerics, "SECTIONS", {"formats": section})
    (page := tmp_path / "page.md").write_text("<!-- table: a -->\nold\n<!-- end -->\n")
    for arguments in ([], ["--page", str(page)], ["--pictures", "here"]):
        assert study_numerics.main(["--only", "formats", *arguments]) == 0
    assert folders == [None, tmp_path / "pictures", Path("here")]


def test_a_page_without_a_place_for_a_table_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- table: a -->\nold\n<!-- end -->\n")
    fill_page(page, {"a": "| new |"})
    assert page.read_text() == "<!-- table: a -->\n| new |\n<!-- end -->\n"
    with pytest.raises(ValueError, match="no place <!-- table: b -->"):
        fill_page(page, {"b": ""})
