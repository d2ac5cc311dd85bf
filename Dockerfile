# syntax=docker/dockerfile:1
# Two images of one package, both without weights: `cpu` runs the embedded default, `gpu` TensorRT-LLM targets.
#   docker build --target cpu --tag saguaro:cpu .
#   docker build --target gpu --tag saguaro:gpu .
# docs/deployment/containers.md says how to run them.
ARG CPU_BASE=python:3.11-slim-bookworm
# The newest image with TensorRT-LLM 1.2.1, the last release that compiles engines.
ARG GPU_BASE=nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3

# The wheel, and what of its requirements NVIDIA's image does not bring ------------------------------------------------
FROM ${CPU_BASE} AS wheel
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /source
RUN python -m venv /opt/build && /opt/build/bin/pip install --no-cache-dir build==1.6.1
COPY . .
RUN /opt/build/bin/python -P -m build --outdir /wheels . && rm /wheels/*.tar.gz
RUN python docker/requirements.py pyproject.toml > /wheels/gpu.txt

# cpu -----------------------------------------------------------------------------------------------------------------
FROM ${CPU_BASE} AS cpu-environment
# The build for your device; from an index of PyTorch's own with --build-arg TORCH="torch==2.13.0 --index-url …".
ARG TORCH="torch==2.13.0"
COPY --from=wheel /wheels /wheels
# hadolint ignore=SC2086
RUN python -m venv /opt/saguaro \
    && /opt/saguaro/bin/pip install --no-cache-dir ${TORCH} \
    && wheel=$(echo /wheels/*.whl) \
    && /opt/saguaro/bin/pip install --no-cache-dir "${wheel}[mpi,serve]"

FROM ${CPU_BASE} AS cpu
# Triton's server is not Python and needs these beside the wheel's own libraries; g++ compiles the kernels of int8 and int4.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini libgomp1 g++ \
    && rm -rf /var/lib/apt/lists/*
COPY --from=cpu-environment /opt/saguaro /opt/saguaro
RUN useradd --uid 10001 --create-home saguaro \
    && install --directory --owner saguaro --group saguaro /var/lib/saguaro/cache /var/lib/saguaro/state
ENV PATH=/opt/saguaro/bin:$PATH \
    XDG_CACHE_HOME=/var/lib/saguaro/cache \
    XDG_STATE_HOME=/var/lib/saguaro/state \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /home/saguaro
# Models, engines, and the state of a running deployment.
VOLUME /var/lib/saguaro
EXPOSE 8000 8001 8002 8003 8080
# A first start fetches weights and builds engines; degraded is healthy, it answers without speculation.
HEALTHCHECK --interval=15s --timeout=5s --start-period=15m --retries=4 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8003/health', timeout=4)"]
STOPSIGNAL SIGTERM
# tini takes in orphans of the ranks; what is published decides `docker run --publish`.
ENTRYPOINT ["tini", "--", "saguaro", "serve", "--host", "0.0.0.0"]
CMD ["qwen-coder-int4-cpu"]

# gpu -----------------------------------------------------------------------------------------------------------------
FROM ${GPU_BASE} AS gpu
USER 0
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/*
COPY --from=wheel /wheels /wheels
# An environment over the image's: what is installed here comes first, and nothing of TensorRT-LLM's is replaced.
ARG IMAGE_PYTHON=/opt/venv-tritonserver/bin/python
RUN ${IMAGE_PYTHON} -m venv /opt/saguaro \
    && ${IMAGE_PYTHON} -c "import site; print(site.getsitepackages()[0])" \
        > "$(/opt/saguaro/bin/python -c 'import site; print(site.getsitepackages()[0])')/image.pth" \
    && /opt/saguaro/bin/pip install --no-cache-dir --requirement /wheels/gpu.txt \
    && /opt/saguaro/bin/pip install --no-cache-dir --no-deps /wheels/*.whl \
    && /opt/saguaro/bin/python -c "from importlib.metadata import version as v; exit(v('tensorrt_llm') != '1.2.1')"
RUN useradd --uid 10001 --create-home saguaro \
    && install --directory --owner saguaro --group saguaro /var/lib/saguaro/cache /var/lib/saguaro/state
ENV PATH=/opt/saguaro/bin:$PATH \
    XDG_CACHE_HOME=/var/lib/saguaro/cache \
    XDG_STATE_HOME=/var/lib/saguaro/state \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /home/saguaro
VOLUME /var/lib/saguaro
EXPOSE 8000 8001 8002 8003 8080
# Building engines of a large model takes longer than this: build them first (docs/deployment/gpu.md).
HEALTHCHECK --interval=15s --timeout=5s --start-period=15m --retries=4 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8003/health', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["tini", "--", "saguaro", "serve", "--host", "0.0.0.0"]
CMD ["/etc/saguaro/deployment.yaml"]
