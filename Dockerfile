# docker build -t mprun .                             PyTorch for CPUs
# docker build -t mprun --build-arg TORCH=cuda .      that of PyPI, which is for NVIDIA GPUs on Linux
#
# docker run --rm -v "$PWD:/workspace" mprun recipe=my.py precision=bf16_mixed
# docker run --rm --gpus all --ipc host -v "$PWD:/workspace" mprun sweep recipe=my.py
#
# /workspace holds recipes, outputs/ and the data sets that mprun downloads. The user in the
# container has the number 1000; another one's folder needs --user "$(id -u):$(id -g)".
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
# cpu, cuda, or a folder of PyTorch's index for another device or an older driver: cu126, rocm6.4, xpu
ARG TORCH=cpu
# The compiler of mprun's kernels stays in this stage; a pinned version of it would soon be gone.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/mprun
ENV PATH=/opt/mprun/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# The bounds are those of pyproject.toml.
# hadolint ignore=DL3013
RUN if [ "$TORCH" = cuda ]; then set --; \
    else set -- --index-url "https://download.pytorch.org/whl/$TORCH"; fi \
    && pip install "$@" "torch>=2.11" "torchvision>=0.26"
WORKDIR /sources
COPY pyproject.toml setup.py README.md LICENSE ./
COPY mprun mprun
COPY conf conf
COPY recipes recipes
RUN pip install .

FROM python:${PYTHON}-slim
COPY --from=build /opt/mprun /opt/mprun
# The home folder is open to all numbers, and files that are written there are not kept.
RUN useradd --uid 1000 --home-dir /home/mprun --create-home mprun \
    && mkdir /workspace && chown mprun:mprun /workspace && chmod 1777 /home/mprun
ENV PATH=/opt/mprun/bin:$PATH HOME=/home/mprun MPRUN_DATA=/workspace/data PYTHONUNBUFFERED=1
USER 1000:1000
WORKDIR /workspace
VOLUME /workspace
ENTRYPOINT ["mprun"]
CMD ["--help"]
