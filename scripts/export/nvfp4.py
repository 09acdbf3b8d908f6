"""`export_hf.py --format nvfp4...`: its options, and the encoder that they ask for."""

from __future__ import annotations

import argparse

import torch

from exchange.calibration import calibrate, check_calibration, held_out_batches
from exchange.checkpoint import Checkpoint, load_model
from exchange.hf.architectures import architecture_of
from exchange.nvfp4 import PLANS, trained_plan
from exchange.nvfp4_encoder import NVFP4Encoder
from exchange.nvfp4_layouts import LAYOUTS, layout_named
from megatron_fp4.config.compose import config_from_saved
from megatron_fp4.logging.words import counted
from megatron_fp4.parallel.mesh import leave_distributed
from megatron_fp4.training.build import plans_of
from models import provider as models
from pretrain import CONFIGS

FORMATS = ("nvfp4", *(f"nvfp4-{name}" for name in LAYOUTS))
ACTIVATIONS = ("bf16", "calibrated")
_SAMPLES = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of NVFP4 alone."""
    group = parser.add_argument_group("NVFP4, the weights of linears that were trained in it")
    group.add_argument("--plan", choices=PLANS, help="before: behind a precision switch, by the plan before it")
    group.add_argument(
        "--activations", choices=ACTIVATIONS, help="calibrated: with a measured scale for each input (default bf16)"
    )
    group.add_argument("--calibrate-samples", type=int, help=f"held-out sequences to measure with (default {_SAMPLES})")
    group.add_argument(
        "--data-override", action="append", metavar="KEY=VALUE", help="where the run's data is now, to measure with"
    )


def check_arguments(options: argparse.Namespace) -> None:
    """Raise ValueError for an option that would do nothing."""
    given = {
        "--plan": options.plan,
        "--activations": options.activations,
        "--calibrate-samples": options.calibrate_samples,
        "--data-override": options.data_override,
    }
    used = [name for name, value in given.items() if value is not None]
    if options.format not in FORMATS and used:
        raise ValueError(f"{used[0]} is for NVFP4; add --format {FORMATS[0]}, or leave it out")
    if options.format in FORMATS and options.dtype is not None:
        raise ValueError(f"--dtype {options.dtype}: with --format {options.format} all else is bfloat16; leave it out")
    if options.activations != "calibrated" and (measured := [name for name in used if name in _OF_CALIBRATION]):
        raise ValueError(f"{measured[0]} is for --activations calibrated; add that, or leave it out")
    for override in options.data_override or ():
        if not override.lstrip("+~").startswith("data."):
            raise ValueError(f"--data-override {override} is not of the data; give data.KEY=VALUE")


_OF_CALIBRATION = ("--calibrate-samples", "--data-override")


def nvfp4_encoder(options: argparse.Namespace, checkpoint: Checkpoint) -> NVFP4Encoder:
    """The encoder of a checked checkpoint; measures the activations if it is to. Raises ValueError."""
    plans = plans_of(checkpoint.config, models)
    layout, trained = layout_named(options.format), trained_plan(checkpoint, plans, options.plan or PLANS[0])
    model = checkpoint.config.model
    sections, amax = architecture_of(model).sections(model), None
    if options.activations == "calibrated":
        samples = _SAMPLES if options.calibrate_samples is None else options.calibrate_samples
        check_calibration(trained, samples)
        config = config_from_saved(checkpoint.trainer["config"], options.data_override or [], CONFIGS)
        batches = held_out_batches(config, samples)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            loaded = load_model(checkpoint, compute_dtype=trained.compute_dtype, device=device)
            measured = calibrate(loaded, trained, batches, device)
        finally:
            leave_distributed()
        amax = measured.input_amax
        print(
            f"calibrated on {measured.sequences} held-out sequences, {measured.tokens:,} tokens (loss "
            f"{measured.loss:.4f}): inputs reach {min(amax.values()):.3g} to {max(amax.values()):.3g}"
        )
    encoder = NVFP4Encoder(layout, trained, sections, amax)
    for form in sorted(set(trained.others().values())):
        count = list(trained.others().values()).count(form)
        which = f"{counted(count, 'linear')} trained in {form}, which this format does not have"
        print(f"{which}: written in bfloat16")
    return encoder
