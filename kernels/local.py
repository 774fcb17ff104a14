"""The engine that computes: a checkpoint in torch, in one thread of its own, so that the loop always answers."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from kernels.batch import Batch
from kernels.cache import StatePool
from kernels.config import ModelConfig
from kernels.engine import BLOCK_TOKENS, Admission, Chunk, EngineInfo, ImageRows, Prefix, Sampling, Tokens
from kernels.kvlayout import KVLayout
from kernels.kvpages import num_blocks_of
from kernels.model import ComputeDtype, Model, load_model
from kernels.requests import NONE, Requests, check_images
from kernels.revision import revision
from kernels.slots import SlotRequest, export_state, read_blocks, read_windows, restore_state, resume
from kernels.thread import ComputeThread
from kernels.verify import verify

KV_BYTES = 1 << 30
"""For compressed KV of all requests; never less than the longest one needs, nor more than all of that length need."""

_STATE_REVISION = 3  # of what export writes; raise it whenever that changes
_BLOCK_REVISION = 1  # of payloads and windows, likewise


class LocalEngine:
    """The Engine contract over a checkpoint folder, on a GPU where there is one (none: CUDA_VISIBLE_DEVICES=).

    Batch-invariant: a request's tokens are the same alone or in a batch, however its prompt is cut, with or without
    drafts, and after an export and restore at any point, also between two generated tokens.

    Methods that find a call out of order raise before anything changes. Cancelling a step waits for its end, so that
    the slot of a cancelled request can be freed at once. A step that fails for another reason leaves its requests
    undefined: free them.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        num_slots: int,
        max_step_tokens: int,
        num_threads: int = 1,
        compute_dtype: ComputeDtype = "fp32",
        drafts: bool = True,
    ) -> None:
        """Reads only config.json and shoal.json; `start` loads the weights. Raises ConfigError.

        num_slots: requests held at once; max_step_tokens: the most tokens of one prefill step; num_threads: torch's, as
        products take one (`ops/blas.py`); drafts: use the draft stages, where the checkpoint has them.
        """
        self._folder = Path(folder)
        self._compute_dtype: ComputeDtype = compute_dtype
        self._config = ModelConfig.from_folder(self._folder)
        self._drafts = drafts and self._config.num_nextn_predict_layers > 0
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        max_tokens = self._config.max_position_embeddings
        longest, affordable = num_blocks_of(max_tokens), KV_BYTES // max(KVLayout(self._config).block_bytes, 1)
        self._num_blocks = min(max(affordable, longest), num_slots * longest)
        self._info = EngineInfo(
            model=_model_name(self._folder),
            layout=_layout(self._config, compute_dtype, self._drafts, self._device),
            vocab_size=self._config.vocab_size,
            eos_token=self._config.eos_token_id,
            max_tokens=max_tokens,
            num_slots=num_slots,
            max_step_tokens=max_step_tokens,
            capacity_tokens=self._num_blocks * BLOCK_TOKENS,
            space="",
            block_bytes=KVLayout(self._config).block_bytes,
        )
        self._requests = Requests(SlotRequest)
        self._thread = ComputeThread("engine", num_threads)
        self._model: Model | None = None
        self._pool: StatePool | None = None

    @property
    def info(self) -> EngineInfo:
        return self._info

    async def start(self) -> None:
        """Load the weights and run one small step. Raises ConfigError or CheckpointError."""
        await self._thread.run(self._load)

    def admit(self, key: str, num_tokens: int, sampling: Sampling, *, bounded_prompt: int = 0) -> Admission:
        _, pool = self._loaded()
        admission = self._requests.admit(key, num_tokens, sampling, self._info, bounded_prompt)
        if admission is not Admission.OK:
            return admission
        room = pool.admit(num_tokens)
        if room is not Admission.OK:
            self._requests.pop(key)
            return room
        slot = self._requests[key].slot = pool.alloc(num_tokens)
        if bounded_prompt:
            pool.plan_replay(slot, bounded_prompt)
        return Admission.OK

    def attach(self, key: str, images: Sequence[ImageRows]) -> None:
        request = self._requests.to_attach(key)
        if self._config.vision is None:
            raise ValueError(f"{self._info.model} has no vision")
        dim = self._config.hidden_size
        check_images(request, images, 4 * dim)
        found = [(one.start, np.frombuffer(one.embeddings, "<f4").reshape(-1, dim)) for one in images]
        if not all(np.isfinite(rows).all() for _, rows in found):
            raise ValueError(f"request {key}: embeddings of an image are not finite")  # a batch would fail with it
        request.images = found

    async def prefill(self, chunks: Sequence[Chunk]) -> int:
        requests = self._requests.to_prefill(chunks)
        for request, chunk in zip(requests, chunks, strict=True):
            self._check_tokens(chunk.key, request, chunk.tokens)
        if not requests:
            return 0
        return await self._thread.run(lambda: self._prefill(requests, chunks))

    async def export(self, key: str) -> bytes:
        request = self._requests.to_export(key)
        _, pool = self._loaded()
        return await self._thread.run(lambda: export_state(key, request, pool, self._info.layout))

    async def restore(self, key: str, state: bytes) -> None:
        request = self._requests.to_restore(key)
        _, pool = self._loaded()
        await self._thread.run(lambda: restore_state(request, pool, self._info.layout, state))

    async def resume(self, key: str, prefix: Prefix) -> int:
        _, pool = self._loaded()
        window = self._config.sliding_window
        request = self._requests.to_resume(key, prefix, self._info.block_bytes, window)
        return await self._thread.run(lambda: resume(request, pool, self._info.space, prefix))

    async def blocks(self, key: str, first: int, num: int) -> list[bytes]:
        _, pool = self._loaded()
        request = self._requests.to_read(key, first, num)
        return await self._thread.run(lambda: read_blocks(request, pool, first, num))

    async def windows(self, key: str, num_tokens: int) -> bytes | None:
        _, pool = self._loaded()
        request = self._requests.to_read_windows(key, num_tokens)
        return await self._thread.run(lambda: read_windows(request, pool, self._info.space, num_tokens))

    async def decode(self, keys: Sequence[str]) -> list[list[int]]:
        requests = self._requests.to_decode(keys)
        if not requests:
            return []
        return await self._thread.run(lambda: self._decode(requests))

    def free(self, key: str) -> None:
        request = self._requests.pop(key)
        if request is not None and self._pool is not None:
            self._pool.free(request.slot)

    async def close(self) -> None:
        self._thread.close()
        self._requests = Requests(SlotRequest)
        self._model = self._pool = None

    def _check_tokens(self, key: str, request: SlotRequest, tokens: Tokens) -> None:
        """Raises ValueError unless the next `tokens` are image tokens where the request has images, and nowhere else.

        No text has that token, and its own embedding means nothing: without rows it is an image that was not given.
        """
        if self._config.image_token_id is None:
            return
        is_image = tokens == self._config.image_token_id
        for start, rows in request.images:
            begin = start - request.num_tokens
            span = is_image[max(begin, 0) : max(begin + len(rows), 0)]
            if not span.all():
                raise ValueError(f"request {key}: no image tokens where its image at position {start} is")
            span[:] = False
        if is_image.any():
            position = request.num_tokens + int(is_image.argmax())
            raise ValueError(f"request {key}: the image at position {position} was not attached")

    def _loaded(self) -> tuple[Model, StatePool]:
        if self._model is None or self._pool is None:
            raise RuntimeError("the engine is not started, or closed")
        return self._model, self._pool

    # What follows runs in the engine's thread.

    def _load(self) -> None:
        model = load_model(self._folder, compute_dtype=self._compute_dtype, device=self._device)
        most_drafts = self._config.dspark_block_size if self._drafts else 0
        pool = StatePool(
            self._config,
            self._info.num_slots,
            self._info.max_tokens,
            most_drafts,
            drafts=self._drafts,
            num_blocks=self._num_blocks,
            device=model.device,
        )
        slot = pool.alloc(1)
        model.logits(model.forward(Batch.last_rows([(slot, 0, [self._config.bos_token_id])]), pool))
        pool.free(slot)
        space = _space(revision(self._folder), self._config, self._compute_dtype, self._device)
        self._info = dataclasses.replace(self._info, space=space)
        self._model, self._pool = model, pool

    def _prefill(self, requests: list[SlotRequest], chunks: Sequence[Chunk]) -> int:
        model, pool = self._loaded()
        started_ns = time.perf_counter_ns()
        runs = [
            (request.slot, request.num_tokens, chunk.tokens.tolist())
            for request, chunk in zip(requests, chunks, strict=True)
        ]
        images = {request.slot: request.images for request in requests if request.images}
        hidden = model.forward(Batch.last_rows(runs, images), pool)
        for request, chunk, row in zip(requests, chunks, hidden, strict=True):
            request.advance(request.num_tokens + len(chunk.tokens))
            request.hidden = row.clone()
        if hidden.is_cuda:
            torch.cuda.synchronize()  # until then nothing but the launching has been timed
        return time.perf_counter_ns() - started_ns

    def _decode(self, requests: list[SlotRequest]) -> list[list[int]]:
        """Feed the last token of those that have sampled one, and what is drafted behind it; sample what follows."""
        model, pool = self._loaded()
        fed = [request for request in requests if request.last != NONE]
        fresh = [request for request in requests if request.last == NONE]
        drafts = self._draft(fed)
        runs = [
            (request.slot, request.num_tokens, [request.last, *drafted])
            for request, drafted in zip(fed, drafts, strict=True)
        ]
        rows = [model.forward(Batch.all_rows(runs), pool)] if runs else []
        # Of the others the last prompt row is at hand, as if that token were fed now.
        rows += [request.hidden[None] for request in fresh if request.hidden is not None]
        starts = [request.num_tokens for request in fed] + [request.num_tokens - 1 for request in fresh]
        ordered = [*fed, *fresh]
        drafts += [[] for _ in fresh]
        logits = model.logits(torch.cat(rows))
        is_sound = ~logits.isnan().any(1)
        if not bool(is_sound.all()):
            logits = logits.masked_fill(~is_sound.unsqueeze(1), 0.0)  # of requests that end here
        found = verify(logits, drafts, starts, [request.sampling for request in ordered])
        new: dict[int, list[int]] = {}
        sound = torch.split(is_sound, [1 + len(drafted) for drafted in drafts])
        for request, start, tokens, each in zip(ordered, starts, found, sound, strict=True):
            if not bool(each.all()):
                new[request.slot] = []
                continue
            request.num_tokens = start + len(tokens)
            pool.truncate(request.slot, request.num_tokens)
            request.last, request.hidden = tokens[-1], None
            new[request.slot] = tokens
        return [new[request.slot] for request in requests]

    def _draft(self, requests: list[SlotRequest]) -> list[list[int]]:
        """What may follow the last token of each: the whole block of proposals, as far as there is room for it."""
        model, pool = self._loaded()
        room = [max(0, request.num_reserved - request.num_tokens - 1) for request in requests]
        if model.drafter is None or not self._drafts or not any(room):
            return [[] for _ in requests]
        runs = [(request.slot, request.last) for request in requests]
        tokens = model.drafter.draft(runs, [request.sampling for request in requests], pool).tokens.tolist()
        return [drafted[:most] for drafted, most in zip(tokens, room, strict=True)]


def _model_name(folder: Path) -> str:
    """The served name of shoal.json, else the folder's name."""
    try:
        card = json.loads((folder / "shoal.json").read_text())
    except FileNotFoundError:
        return folder.resolve().name
    return str(card.get("model", folder.resolve().name))


def _layout(config: ModelConfig, compute_dtype: ComputeDtype, drafts: bool, device: str) -> str:
    """Equal for engines whose exported states mean the same: revision of the format, configuration, arithmetic."""
    return f"shoal-{_STATE_REVISION}-{_digest(config, compute_dtype, drafts, device)}"


def _space(weights: str, config: ModelConfig, compute_dtype: ComputeDtype, device: str) -> str:
    """Equal for engines that make the same blocks and windows of the same tokens. Drafts have no part in those."""
    return f"blocks-{_BLOCK_REVISION}-{weights}-{_digest(config, compute_dtype, device)}"


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
