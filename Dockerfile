# The NGC PyTorch image brings torch, CUDA, NCCL and Transformer Engine, built for each other; mamba-ssm, causal-conv1d
# and this project's own dependencies go on top. Build from the repository's root, and try it out:
#
#     docker build --tag megatron_fp4 .
#     docker run --rm --gpus all --ipc host megatron_fp4 python scripts/prove_backend.py
#     docker run --rm --gpus all --ipc host --user "$(id -u):$(id -g)" --volume "$PWD/runs:/runs" megatron_fp4 \
#         torchrun --nproc-per-node 8 pretrain.py run.dir=/runs/a
#
# The base is pinned by its tag, which NVIDIA could move; by its digest, which `docker buildx imagetools inspect
# nvcr.io/nvidia/pytorch:26.06-py3` prints, it cannot: --build-arg BASE=nvcr.io/nvidia/pytorch:26.06-py3@sha256:...
#
# Not built by the authors, who had no Docker engine: every line but those marked "needs NVIDIA's image" ran in a chroot
# of Debian 12; hadolint finds nothing.
ARG BASE=nvcr.io/nvidia/pytorch:26.06-py3
FROM ${BASE}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# The image pins its packages in /etc/pip/constraint.txt; ours may be newer, so the constraint is lifted, and the check
# at the end makes sure that nothing replaced the image's own torch or Transformer Engine.
ENV PIP_CONSTRAINT="" PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
# mamba-ssm is compiled against the image's torch, hence no build isolation. Needs NVIDIA's image.
RUN python -c "import torch, transformer_engine as te; print(torch.__version__, te.__version__)" > /etc/image_versions \
    && MAMBA_FORCE_BUILD=TRUE CAUSAL_CONV1D_FORCE_BUILD=TRUE \
    pip install --no-build-isolation causal-conv1d==1.6.2.post1 mamba-ssm==2.3.2.post1

# Training is no root's work. The image may have a user 1000 of another name; caches go to a home of our own.
RUN (getent passwd 1000 || useradd --uid 1000 --user-group --no-create-home megatron) \
    && install --directory --owner 1000 --group 1000 /workspace/megatron_fp4 /home/megatron
WORKDIR /workspace/megatron_fp4
COPY --chown=1000:1000 . .
RUN pip install --constraint constraints.txt --editable ".[hf,wandb,datasets]"

# Needs NVIDIA's image.
RUN python -c "import torch, transformer_engine as te; print(torch.__version__, te.__version__)" \
    | diff - /etc/image_versions \
    && python -c "import mamba_ssm, causal_conv1d, megatron_fp4.quantization"

USER 1000:1000
ENV HOME=/home/megatron USER=megatron
# Once a container: whether this machine computes NVFP4 as the recipe says, two minutes beside whatever runs. A container
# that is to train at once does without it: docker run --no-healthcheck.
HEALTHCHECK --interval=10m --timeout=30m --retries=1 CMD ["bash", "-c", \
    "test -e ~/proof.md || { python scripts/prove_backend.py --precision nvfp4 > ~/proof && mv ~/proof ~/proof.md; } || exit 1"]
