# CPU development: docker build -t torchtitan-npu . && docker run -it --rm --shm-size 4g torchtitan-npu
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*
WORKDIR /torchtitan-npu
COPY . .
# the CPU build of torch, from PyTorch's own index
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu PATH=/torchtitan-npu/.venv/bin:$PATH
RUN python3 -m venv .venv && . .venv/bin/activate && pip install torch==2.13.0 && pip install -c constraints.txt -e ".[dev]"
CMD ["bash"]
