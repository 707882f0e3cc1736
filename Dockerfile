# A machine without a GPU:
#   docker build -t rbdc .
# One with NVIDIA GPUs (the image's own torch is kept):
#   docker build -t rbdc --build-arg BASE=pytorch/pytorch:2.6.0-cuda12.4-cudnn9-runtime .
# Train, as the user of the folder that the run is written to:
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/runs" rbdc train --output /runs/demo
ARG BASE=python:3.12-slim
FROM ${BASE}
ARG EXTRAS=hub,transfer,ray

WORKDIR /opt/rbdc
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ".[${EXTRAS}]" && mkdir -m 1777 /work

# A user without a name or a home can write here, and torch finds a name for its caches.
ENV HOME=/tmp USER=rbdc
USER 1000
WORKDIR /work
ENTRYPOINT ["rbdc"]
CMD ["--help"]
