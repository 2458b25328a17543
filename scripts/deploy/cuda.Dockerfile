# The server on an NVIDIA GPU: docker build -f scripts/deploy/cuda.Dockerfile -t specoffload:cuda .
FROM nvidia/cuda:12.8.1-devel-ubuntu24.04 AS build
RUN apt-get update && apt-get install -y --no-install-recommends build-essential python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
# One architecture compiles several times faster: --build-arg CUDA_ARCHITECTURES=89 for an RTX 40.
ARG CUDA_ARCHITECTURES="75-virtual;80-virtual;86-real;89-real;90-virtual;120-virtual"
ARG CPU_ARGS="-DGGML_NATIVE=off -DGGML_AVX2=on -DGGML_FMA=on -DGGML_F16C=on -DGGML_BMI2=on"
# The driver's library is not there while an image is built.
ENV CMAKE_ARGS="-DGGML_CUDA=on -DGGML_RPC=on -DCMAKE_CUDA_ARCHITECTURES=${CUDA_ARCHITECTURES} ${CPU_ARGS} -DCMAKE_EXE_LINKER_FLAGS=-Wl,--allow-shlib-undefined"
WORKDIR /src
COPY pyproject.toml setup.py README.md ./
COPY docs/specoffload.1 docs/
COPY specoffload specoffload
COPY offload offload
COPY specdec specdec
COPY numa numa
RUN python3 -m venv /opt/specoffload && /opt/specoffload/bin/pip install --no-cache-dir .

FROM nvidia/cuda:12.8.1-runtime-ubuntu24.04
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 python3 && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home specoffload && mkdir /profiles && chown specoffload /profiles
COPY --from=build /opt/specoffload /opt/specoffload
ENV PATH=/opt/specoffload/bin:$PATH SPECOFFLOAD_PROFILE_DIR=/profiles
USER specoffload
VOLUME ["/profiles"]
EXPOSE 8080
HEALTHCHECK --start-period=30m CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8080/health')"]
ENTRYPOINT ["specoffload"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8080"]
