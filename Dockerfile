# One image for every role; compose.yaml says which actors a container runs.
FROM python:3.12-slim

# Where else pip may look for torch: the address of PyTorch's CPU wheels saves gigabytes on a machine without a GPU.
ARG TORCH_INDEX=
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /app
RUN python -m venv /app/venv
ENV PATH=/app/venv/bin:$PATH

# Dependencies first: a change of the code does not download them again.
COPY pyproject.toml .
RUN python -c "import tomllib; print('\n'.join(tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies']))" \
        > requirements.txt \
    && pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$(grep '^torch' requirements.txt)" \
    && pip install -r requirements.txt

COPY . .
RUN pip install --no-deps .

# A new volume takes its owner from here.
RUN install -d -o 10001 -g 10001 -m 700 /store

USER 10001:10001
WORKDIR /
ENTRYPOINT ["shoal"]
CMD ["--help"]
