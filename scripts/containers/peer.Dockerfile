# A peer that trains or keeps a run, on a CPU or with CUDA. From the root of the checkout:
#
#     docker build -f scripts/containers/peer.Dockerfile --target cpu -t flockstep .
#     docker build -f scripts/containers/peer.Dockerfile --target cuda -t flockstep:cuda .
#     docker run -it --shm-size 4g -v flockstep:/home/peer/.flockstep flockstep join 'flockstep://…'
#     docker run -it --gpus all --shm-size 4g -v flockstep:/home/peer/.flockstep flockstep:cuda join 'flockstep://…'
#
# The two processes of a peer share the model's vectors in /dev/shm, of which a container has 64 MB unless told otherwise.
# No port has to be published. The volume keeps the peer's key, its state and the run's certificates.

FROM python:3.12-slim-bookworm AS base
RUN useradd --uid 1000 --create-home peer && mkdir /home/peer/.flockstep && chown peer /home/peer/.flockstep
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
COPY scripts/containers/cpu.lock scripts/containers/peer.lock /tmp/

FROM base AS built
COPY . /source
RUN pip wheel --no-deps -w /wheels /source

FROM base AS cpu
RUN pip install --no-deps --require-hashes -r /tmp/cpu.lock \
    && pip install --index-url https://download.pytorch.org/whl/cpu torch==2.13.0
RUN --mount=type=bind,from=built,source=/wheels,target=/wheels pip install --no-deps /wheels/flockstep-*.whl
USER 1000
VOLUME /home/peer/.flockstep
ENTRYPOINT ["flockstep"]

FROM base AS cuda
RUN pip install --require-hashes -r /tmp/peer.lock
RUN --mount=type=bind,from=built,source=/wheels,target=/wheels pip install --no-deps /wheels/flockstep-*.whl
USER 1000
VOLUME /home/peer/.flockstep
ENTRYPOINT ["flockstep"]
