# The image of Quire. `docker build -t quire:cpu .` builds the one for CPUs, `docker buildx bake cuda` the one for NVIDIA
# GPUs; docs/guides/deployment.md says how to run them.
# Security updates of a distribution come without a version here:
# hadolint global ignore=DL3008

# cpu, or the CUDA version as PyTorch names it: cu130.
ARG VARIANT=cpu
ARG CPU_BASE=debian:bookworm-slim
# Not the `runtime` image of that version, which is larger: PyTorch's packages bring cuBLAS, cuDNN and NCCL.
ARG CU130_BASE=nvidia/cuda:13.0.2-base-ubuntu24.04

FROM ${CPU_BASE} AS cpu
RUN apt-get update && \
    apt-get install -y --no-install-recommends ca-certificates python3 tini && \
    rm -rf /var/lib/apt/lists/*

FROM ${CU130_BASE} AS cu130
# Triton compiles a few lines of C for each kernel.
RUN apt-get update && \
    apt-get install -y --no-install-recommends ca-certificates python3 tini gcc libc6-dev libpython3-dev && \
    rm -rf /var/lib/apt/lists/*

FROM ${VARIANT} AS build
RUN apt-get update && \
    apt-get install -y --no-install-recommends g++ libpython3-dev python3-venv && \
    rm -rf /var/lib/apt/lists/*
# The secret is a pip.conf, for other package indexes and their passwords: --secret id=pip,src=FILE.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -m venv /opt/build && \
    /opt/build/bin/pip install --no-cache-dir --upgrade pip 'cyclonedx-bom>=7.5,<8'

# Apart from Quire, so that their layer is the same while pyproject.toml and constraints.txt are.
FROM build AS dependencies
ARG VARIANT
# Another torch than that of constraints.txt, which has the versions that the tests run with.
ARG TORCH=""
ARG TORCH_INDEX=https://download.pytorch.org/whl/${VARIANT}
# Extras of Quire, with commas between them: ray, otlp, pdf, video, heif. The wheels of the last two contain x264 or x265,
# under the GPL.
ARG EXTRAS=""
COPY pyproject.toml constraints.txt /src/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -m venv --without-pip /opt/quire && \
    python3 -c 'import sys, tomllib; project = tomllib.load(open("/src/pyproject.toml", "rb"))["project"]; \
    extras = [project["optional-dependencies"][extra] for extra in sys.argv[1].split(",") if extra]; \
    print(*project["dependencies"], *sum(extras, []), sep="\n")' "${EXTRAS}" > /src/requirements.txt && \
    sed -i "${TORCH:+/^torch==/d}" /src/constraints.txt && \
    /opt/build/bin/pip --python /opt/quire install --no-cache-dir --extra-index-url "${TORCH_INDEX}" "${TORCH:-torch}" \
    --requirement /src/requirements.txt --constraint /src/constraints.txt && \
    # Out of the image: tests, and headers, which the wheel's kernels are compiled with. 250 MB.
    mv /opt/quire/lib/python3*/site-packages/torch/include /opt/torch-headers && \
    rm -rf /opt/quire/lib/python3*/site-packages/torch/bin/*est* && \
    find /opt/quire/lib -type d \( -name tests -o -path "*/torch/test" \) -prune -exec rm -r {} +

FROM build AS wheel
# The instruction sets of the CPU kernels, with commas between them; empty: all.
ARG KERNEL_ISAS=""
ARG REVISION=""
COPY . /src
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=bind,from=dependencies,source=/opt/torch-headers,target=/opt/torch-headers \
    TORCH_HEADERS=/opt/torch-headers KERNEL_ISAS="${KERNEL_ISAS}" REVISION="${REVISION}" \
    /opt/build/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src

FROM ${VARIANT}
COPY --from=dependencies /opt/quire /opt/quire
# Every user can write to the volumes, so that --user may name any. Login shells, as KubeRay starts one, set PATH anew.
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    --mount=type=bind,from=build,source=/opt/build,target=/opt/build \
    /opt/build/bin/pip --python /opt/quire install --no-cache-dir --no-index --no-deps /wheels/*.whl && \
    /opt/build/bin/cyclonedx-py environment --output-reproducible --output-file /opt/quire/sbom.cdx.json /opt/quire && \
    groupadd --gid 10001 quire && \
    useradd --uid 10001 --gid 10001 --create-home quire && \
    install --directory --mode 1777 /cache /models && \
    echo "PATH=/opt/quire/bin:\$PATH" > /etc/profile.d/quire.sh
ENV PATH=/opt/quire/bin:$PATH \
    HOME=/home/quire \
    USER=quire \
    QUIRE_HOST=0.0.0.0 \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton
VOLUME ["/cache", "/models"]
WORKDIR /models
USER 10001:10001
EXPOSE 8000
# Liveness: it needs no API key, and is 200 while the engine loads.
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s CMD ["python3", "-c", "\
import http.client; connection = http.client.HTTPConnection('127.0.0.1', 8000, timeout=4); \
connection.request('GET', '/health/live'); raise SystemExit(connection.getresponse().status != 200)"]
# A command of `quire`, or the arguments of `quire serve`, as vLLM's image takes them: docker run IMAGE MODEL.
# tini reaps the processes of a part that has died; it passes SIGTERM on, and the exit code back.
ENTRYPOINT ["tini", "-s", "--", "sh", "-c", "\
case $1 in \
bench|chat|complete|completion|doctor|kv|merge|plan|profile|quantize|run-batch|serve|-h|--help|--version) ;; \
*) set -- serve \"$@\" ;; \
esac; exec quire \"$@\"", "quire"]
CMD ["serve", "--help"]

ARG VERSION=0.1.0
ARG REVISION=""
LABEL org.opencontainers.image.title="Quire" \
      org.opencontainers.image.description="An OpenAI-compatible serving daemon for language models that are bigger than one device" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.source="https://github.com/quire-project/quire" \
      org.opencontainers.image.documentation="https://github.com/quire-project/quire/blob/main/docs/guides/deployment.md"
