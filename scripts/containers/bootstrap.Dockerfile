# A bootstrap, or a keeper, without torch. From the root of the checkout:
#
#     docker build -f scripts/containers/bootstrap.Dockerfile -t flockstep-bootstrap .
#     docker run -d --restart always -p 4001:4001 -v bootstrap:/home/bootstrap/.flockstep flockstep-bootstrap \
#         --announce /ip4/203.0.113.7/tcp/4001
#
# It cannot see its own address in there: announce each one (docs/deploy.md). The volume keeps its key, which is its address.

FROM python:3.12-slim-bookworm AS built
COPY . /source
RUN pip wheel --no-cache-dir --no-deps -w /wheels /source

FROM python:3.12-slim-bookworm
RUN useradd --uid 1000 --create-home bootstrap && mkdir /home/bootstrap/.flockstep && chown bootstrap /home/bootstrap/.flockstep
ENV PYTHONUNBUFFERED=1
COPY scripts/containers/bootstrap.lock /tmp/
RUN pip install --no-cache-dir --require-hashes -r /tmp/bootstrap.lock
RUN --mount=type=bind,from=built,source=/wheels,target=/wheels pip install --no-cache-dir --no-deps /wheels/flockstep-*.whl
USER 1000
VOLUME /home/bootstrap/.flockstep
EXPOSE 4001
ENTRYPOINT ["flockstep", "bootstrap", "--port", "4001"]
