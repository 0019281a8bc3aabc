# The image of spectrumkvd and spectrumkvctl (docs/operations.md, "Image").
#
#   docker build -t spectrumkv --build-arg REVISION="$(git rev-parse --short=12 HEAD)" .
#   docker build -t spectrumkv:cuda --build-arg CUDA_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04 .
#
# Everything is compiled and run on BASE_IMAGE, which must be Debian 12: the packages below are named by their sonames.
# CUDA_IMAGE lends its toolkit, /usr/local/cuda, to the compilation and nothing to the result: the CUDA runtime is
# linked statically and the driver comes from the node.
ARG BASE_IMAGE=debian:bookworm-slim
ARG CUDA_IMAGE=${BASE_IMAGE}

# The default has no toolkit; an empty folder is copied then.
FROM ${CUDA_IMAGE} AS cuda
RUN mkdir -p /usr/local/cuda

FROM ${BASE_IMAGE} AS build
# Versions are Debian's: a pin would only keep security updates out.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends cmake ninja-build g++ pkg-config libgrpc++-dev libssl-dev \
      protobuf-compiler protobuf-compiler-grpc libprotobuf-dev libabsl-dev libyaml-cpp-dev prometheus-cpp-dev ccache \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*
ARG BASE_IMAGE
ARG CUDA_IMAGE
# The slash: /usr/local/cuda is a link in NVIDIA's images.
COPY --from=cuda /usr/local/cuda/ /usr/local/cuda/
COPY . /src
WORKDIR /src
ARG REVISION=
# Jobs of the compilation; each takes about 1 GiB of memory.
ARG JOBS=
RUN --mount=type=cache,target=/root/.cache/ccache \
    if [ "$CUDA_IMAGE" = "$BASE_IMAGE" ]; then cuda=OFF; else cuda=ON; fi \
 && cmake --preset release "-DSPECTRUMKV_CUDA=$cuda" "-DSPECTRUMKV_REVISION=$REVISION" \
      -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=16 \
 && cmake --build --preset release --parallel "${JOBS:-$(nproc)}" --target spectrumkvd spectrumkvctl \
 && mkdir -p /out/bin /out/share/spectrumkv \
 && strip -o /out/bin/spectrumkvd build-release/server/spectrumkvd \
 && strip -o /out/bin/spectrumkvctl build-release/client/ctl/spectrumkvctl \
 && cp proto/spectrumkv.protoset config/spectrumkvd.yaml LICENSE NOTICE /out/share/spectrumkv/

FROM ${BASE_IMAGE} AS spectrumkv
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends libgrpc++1.51 libprotobuf32 libabsl20220623 libssl3 libyaml-cpp0.7 \
      libprometheus-cpp-core1.0 libprometheus-cpp-pull1.0 \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* \
 && install -d -o 65532 -g 65532 -m 0770 /run/spectrumkv
COPY --from=build /out/ /usr/local/
# A library that the packages above do not bring fails the build, not the first start.
RUN ldd /usr/local/bin/spectrumkvd /usr/local/bin/spectrumkvctl > /tmp/ldd \
 && if grep 'not found' /tmp/ldd; then exit 1; fi \
 && rm /tmp/ldd && spectrumkvd --version && spectrumkvctl --version

ARG BASE_IMAGE
ARG REVISION=
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="SpectrumKV" \
      org.opencontainers.image.description="Moves the KV cache of a prompt from a prefill to a decode worker under a byte budget" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}"

# What the container toolkit brings of the driver where a GPU is asked for.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 65532:65532
# Peers, health, metrics. Nothing is written but to /run/spectrumkv, /dev/shm and quality.verdicts_file: the rest may be read-only.
EXPOSE 7420 7421 7422
# Liveness, as a draining daemon is well. Kubernetes has its own probes and ignores this.
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s --retries=3 \
  CMD ["spectrumkvctl", "health", "--address", "127.0.0.1:7421", "--service", "liveness", "--timeout", "3"]
ENTRYPOINT ["spectrumkvd"]
