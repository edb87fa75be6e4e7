# cprun for GPUs, without PyTorch. It also runs on CPUs.
#
#     docker build -t cprun .
#     docker run --rm --gpus all --ipc=host -v "$PWD:/work" cprun --nproc 4 train.yaml
#
# /work has the config, data and runs, and must be writable for the user: --user "$(id -u)", or 10001.
FROM golang:1.26-bookworm AS build
# Fetches CUDA's headers (scripts/cuda-sdk).
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
RUN make cuda && make install DESTDIR=/out

# Its runtime images have NVRTC, cuBLASLt, NCCL and cuDNN, and a glibc newer than the build's.
FROM nvidia/cuda:13.0.2-cudnn-runtime-ubuntu24.04
COPY --from=build /out/usr/local /usr/local
RUN useradd --uid 10001 --create-home cprun
USER 10001
WORKDIR /work
ENTRYPOINT ["cprun"]
