# SGLang with the tier. Build: docker build -t sglang-tutti .
# Run:   docker run --gpus all --ulimit memlock=-1 -v /mnt/nvme0/tutti:/mnt/nvme0/tutti -p 30000:30000 sglang-tutti \
#          --model-path meta-llama/Llama-3.1-8B-Instruct --host 0.0.0.0
# io_uring needs a seccomp profile that allows it (docs/operations.md); without one native threads move the bytes.
ARG SGLANG=0.5.23

FROM python:3.11-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE MANIFEST.in ./
COPY requirements requirements
COPY tutti_sglang tutti_sglang
COPY kernels kernels
COPY integration integration
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM lmsysorg/sglang:v${SGLANG}
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir /wheels/*.whl && rm -rf /wheels
ENV SGLANG_HICACHE_TUTTI_STORAGE_DIRS=/mnt/nvme0/tutti
VOLUME /mnt/nvme0/tutti
EXPOSE 30000
ENTRYPOINT ["python3", "-m", "sglang.launch_server", "--enable-hierarchical-cache", "--hicache-storage-backend", "tutti", "--enable-metrics"]
