# One image for every role; compose.yaml says which actors a container runs.
FROM python:3.12-slim

# CPU builds of torch. For CUDA: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /app
RUN python -m venv /app/venv
ENV PATH=/app/venv/bin:$PATH

# Dependencies first: a change of the code does not download them again.
COPY pyproject.toml .
RUN python -c "import tomllib; print('\n'.join(tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies']))" \
        > requirements.txt \
    && pip install --retries 1 --extra-index-url "$TORCH_INDEX" "$(grep '^torch' requirements.txt)" \
    && pip install -r requirements.txt

COPY . .
RUN pip install --no-deps .

USER 10001:10001
WORKDIR /
ENTRYPOINT ["shoal"]
CMD ["--help"]
