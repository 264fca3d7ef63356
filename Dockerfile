# An image for `lockstep launch kubernetes --image`: Python, torch with CUDA, and Lockstep. It holds the recipes; an image
# with your own code begins with `FROM lockstep` and copies it to /workspace.
#
#   docker build --tag lockstep .
#
# The CUDA libraries come with torch's wheel, so the nodes need only the driver. For CPUs alone the image is much smaller
# with --build-arg TORCH_INDEX=URL, the address of torch's wheels for CPUs.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim

# torch.compile builds kernels with a C++ compiler.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

# torch first: this layer is large, and stays the same when Lockstep changes.
ARG TORCH_INDEX=
COPY constraints.txt /build/
RUN pip install --no-cache-dir --constraint /build/constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch

COPY pyproject.toml README.md LICENSE /build/
COPY src /build/src
RUN pip install --no-cache-dir --constraint /build/constraints.txt "/build[rl]"

# Paths in a command, such as my_task.py:MyTask, count from here.
WORKDIR /workspace
CMD ["lockstep", "--help"]
