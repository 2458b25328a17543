# The server without a GPU: docker build -f scripts/deploy/cpu.Dockerfile -t specoffload .
FROM python:3.12-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends build-essential && rm -rf /var/lib/apt/lists/*
# An image may run on another machine than it was built on: any processor since 2013.
# --build-arg CMAKE_ARGS="-DGGML_RPC=on -DGGML_NATIVE=on" compiles for the one that builds, which is faster there.
ARG CMAKE_ARGS="-DGGML_RPC=on -DGGML_NATIVE=off -DGGML_AVX2=on -DGGML_FMA=on -DGGML_F16C=on -DGGML_BMI2=on"
ENV CMAKE_ARGS=${CMAKE_ARGS}
WORKDIR /src
COPY pyproject.toml setup.py README.md ./
COPY docs/specoffload.1 docs/
COPY specoffload specoffload
COPY offload offload
COPY specdec specdec
COPY numa numa
RUN python -m venv /opt/specoffload && /opt/specoffload/bin/pip install --no-cache-dir .

FROM python:3.12-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 specoffload && mkdir /profiles && chown specoffload /profiles
COPY --from=build /opt/specoffload /opt/specoffload
ENV PATH=/opt/specoffload/bin:$PATH SPECOFFLOAD_PROFILE_DIR=/profiles
USER specoffload
VOLUME ["/profiles"]
EXPOSE 8080
HEALTHCHECK --start-period=30m CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8080/health')"]
ENTRYPOINT ["specoffload"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8080"]
