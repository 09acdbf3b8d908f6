# The NGC PyTorch image brings torch, CUDA, NCCL, Transformer Engine and apex, built for each other; mamba-ssm,
# causal-conv1d and this project's own dependencies go on top. Build from the repository's root:
#
#     docker build -t megatron_fp4 .
#
# Not run by the authors: this file has not been built on a machine with a Docker engine yet.
ARG BASE=nvcr.io/nvidia/pytorch:26.06-py3
FROM ${BASE}

# The image pins its packages in /etc/pip/constraint.txt; ours may be newer, so the constraint is lifted, and the check
# at the end makes sure that nothing replaced the image's own torch or Transformer Engine.
ENV PIP_CONSTRAINT="" PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
RUN python -c "import torch, transformer_engine as te; print(torch.__version__, te.__version__)" > /etc/image_versions

# Compiled against the image's torch, hence no build isolation.
RUN MAMBA_FORCE_BUILD=TRUE CAUSAL_CONV1D_FORCE_BUILD=TRUE \
    pip install --no-build-isolation "causal-conv1d>=1.6" "mamba-ssm>=2.3"

WORKDIR /workspace/megatron_fp4
COPY pyproject.toml README.md LICENSE pretrain.py introduction.py assembly.py ./
COPY megatron_fp4 megatron_fp4
COPY models models
COPY data data
COPY exchange exchange
COPY inference inference
COPY scripts scripts
RUN pip install --editable ".[hf]"
COPY . .

RUN python -c "import torch, transformer_engine as te; print(torch.__version__, te.__version__)" \
    | diff - /etc/image_versions \
    && python -c "import apex, mamba_ssm, causal_conv1d, megatron_fp4.quantization"
