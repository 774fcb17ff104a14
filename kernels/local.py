"""The engine that computes: a checkpoint in torch, in one thread of its own, so that the loop always answers."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from kernels.batch import Batch
from kernels.cache import StatePool
from kernels.config import ModelConfig
from kernels.constraint import Constraint, Logprobs
from kernels.engine import (
    BLOCK_TOKENS,
    Admission,
    Chunk,
    Counts,
    EngineInfo,
    ImageRows,
    Prefix,
    Sampling,
    Tokens,
)
from kernels.group import Group, GroupSpec
from kernels.grouping import GroupError
from kernels.keys import ConfigError
from kernels.kvlayout import KVLayout
from kernels.lockstep import Lockstep
from kernels.member import LocalMember
from kernels.model import ComputeDtype, load_model
from kernels.pages import num_blocks_of
from kernels.requests import Requests, check_images
from kernels.revision import revision
from kernels.schedule import Mode, Scheduler
from kernels.slots import SlotRequest, export_state, read_blocks, read_windows, restore_state, resume
from kernels.stepping import Stepping
from kernels.steptimes import Floats
from kernels.thread import ComputeThread

T = TypeVar("T")

KV_BYTES = 1 << 30
"""For compressed KV of all requests; never less than the longest one needs, nor more than all of that length need."""

_STATE_REVISION = 4  # of what export writes; raise it whenever that changes
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
        drafts: Mode = "scheduled",
        group: GroupSpec | None = None,
        scheduler: Callable[[Mode, Floats], Scheduler] | None = None,
    ) -> None:
        """Reads only config.json and shoal.json; `start` loads the weights. Raises ConfigError.

        num_slots: requests held at once; max_step_tokens: the most tokens of one prefill step; num_threads: torch's, as
        products take one (`ops/blas.py`); drafts: whether the draft stages are used, where the checkpoint has them, and
        whether all they say is verified or what pays (`schedule.py`); group: the ranks that share the experts, which
        are met when it is started; scheduler: another one, to look on.
        """
        self._folder = Path(folder)
        self._compute_dtype: ComputeDtype = compute_dtype
        self._config = ModelConfig.from_folder(self._folder)
        self._mode: Mode = drafts if self._config.num_nextn_predict_layers > 0 else "off"
        self._drafts = self._mode != "off"
        card = _card(self._folder)
        self._temperatures = _temperatures(card if self._drafts else {}, self._config.dspark_block_size)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        max_tokens = self._config.max_position_embeddings
        longest, affordable = num_blocks_of(max_tokens), KV_BYTES // max(KVLayout(self._config).block_bytes, 1)
        self._num_blocks = min(max(affordable, longest), num_slots * longest)
        self._info = EngineInfo(
            model=str(card.get("model", self._folder.resolve().name)),
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
        self._group_spec, self._make_scheduler = group, scheduler
        self._steps: Stepping | None = None
        self._member: LocalMember | None = None

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def counts(self) -> Counts:
        return Counts(0, 0, 0) if self._steps is None else self._steps.counts

    @property
    def group(self) -> LocalMember | None:
        return self._member

    @property
    def expert_bytes(self) -> int:
        """Of the weights of experts that are held here."""
        return sum(moe.experts.num_bytes for moe in self._loaded().model.moes)

    async def start(self) -> None:
        """Load the weights and run one small step, in a group at its first meeting. Raises ConfigError or
        CheckpointError."""
        await self._thread.run(self._load)

    def admit(self, key: str, num_tokens: int, sampling: Sampling, *, bounded_prompt: int = 0) -> Admission:
        pool = self._loaded().pool
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

    def grow(self, key: str, num_tokens: int) -> bool:
        pool = self._loaded().pool
        if self._requests.grow(key, num_tokens, self._info, pool.kv.num_free) is None:
            return False
        pool.grow(self._requests[key].slot, num_tokens)
        return True

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

    def constrain(self, key: str, constraint: Constraint) -> None:
        self._requests[key].constraint = constraint

    async def prefill(self, chunks: Sequence[Chunk]) -> int:
        requests = self._requests.to_prefill(chunks)
        for request, chunk in zip(requests, chunks, strict=True):
            self._check_tokens(chunk.key, request, chunk.tokens)
        return await self._step(lambda steps: steps.prefill(requests, chunks)) if requests or self._member else 0

    async def export(self, key: str) -> bytes:
        request = self._requests.to_export(key)
        pool = self._loaded().pool
        return await self._thread.run(lambda: export_state(key, request, pool, self._info.layout))

    async def restore(self, key: str, state: bytes) -> None:
        request = self._requests.to_restore(key)
        pool = self._loaded().pool
        await self._thread.run(lambda: restore_state(request, pool, self._info.layout, state))

    async def resume(self, key: str, prefix: Prefix) -> int:
        pool = self._loaded().pool
        window = self._config.sliding_window
        request = self._requests.to_resume(key, prefix, self._info.block_bytes, window)
        return await self._thread.run(lambda: resume(request, pool, self._info.space, prefix))

    async def blocks(self, key: str, first: int, num: int) -> list[bytes]:
        pool = self._loaded().pool
        request = self._requests.to_read(key, first, num)
        return await self._thread.run(lambda: read_blocks(request, pool, first, num))

    async def windows(self, key: str, num_tokens: int) -> bytes | None:
        pool = self._loaded().pool
        request = self._requests.to_read_windows(key, num_tokens)
        return await self._thread.run(lambda: read_windows(request, pool, self._info.space, num_tokens))

    async def decode(self, keys: Sequence[str]) -> list[list[int]]:
        requests = self._requests.to_decode(keys)
        return await self._step(lambda steps: steps.decode(requests)) if requests or self._member else []

    def logprobs(self, key: str) -> list[Logprobs]:
        return self._requests.told(key)

    def free(self, key: str) -> None:
        request = self._requests.pop(key)
        if request is not None and self._steps is not None:
            self._steps.pool.free(request.slot)

    async def close(self) -> None:
        self._thread.close()
        if self._member is not None:
            self._member.leave()
        self._requests = Requests(SlotRequest)
        self._steps = self._member = None

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

    async def _step(self, work: Callable[[Stepping], T]) -> T:
        steps, member = self._loaded(), self._member
        if member is None:
            return await self._thread.run(lambda: work(steps))
        try:
            result = await self._thread.run(lambda: work(steps))
        except GroupError:
            member.stepped(is_broken=True)
            raise
        except Exception as error:  # the others go on without us: no step fits any more
            member.leave()
            raise RuntimeError(f"a step of the group failed here: {error!r}") from error
        member.stepped()
        return result

    def _loaded(self) -> Stepping:
        if self._steps is None:
            raise RuntimeError("the engine is not started, or closed")
        return self._steps

    def _load(self) -> None:
        """In the engine's thread."""
        group = None if self._group_spec is None else Group(self._group_spec, torch.device(self._device))
        model = load_model(self._folder, compute_dtype=self._compute_dtype, device=self._device, group=group)
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
        space = _space(revision(self._folder), self._config, self._compute_dtype, self._device)
        self._info = dataclasses.replace(self._info, space=space)
        lockstep = Lockstep(group, model)
        mode = self._mode if model.drafter is not None else "off"
        scheduler = (self._make_scheduler or Scheduler)(mode, self._temperatures)
        self._steps = Stepping(model, pool, lockstep, scheduler, self._info.eos_token)
        if group is None:
            self._warm_up()
        else:
            self._member = LocalMember(group, lockstep, self._thread, self._warm_up, model.serve)

    def _warm_up(self) -> None:
        """In the engine's thread, before there is any request."""
        model, pool = self._loaded().model, self._loaded().pool
        slot = pool.alloc(1)
        try:
            model.logits(model.forward(Batch.last_rows([(slot, 0, [self._config.bos_token_id])]), pool))
        finally:
            pool.free(slot)  # in a group it may be done again


def _card(folder: Path) -> dict[str, Any]:
    """shoal.json, empty without one."""
    try:
        return dict(json.loads((folder / "shoal.json").read_text()))
    except FileNotFoundError:
        return {}


def _temperatures(card: dict[str, Any], num_places: int) -> Floats:
    """What confidences of drafts are divided by, [places]: 1 where the card does not say. Raises ConfigError."""
    told = card.get("confidence_temperatures", [1.0] * num_places)
    is_list = isinstance(told, list) and len(told) == num_places
    if not is_list or not all(isinstance(one, int | float) and one > 0 for one in told):
        raise ConfigError(f"shoal.json: confidence_temperatures must be {num_places} numbers above 0")
    return np.array(told, dtype=np.float64)


def _layout(config: ModelConfig, compute_dtype: ComputeDtype, drafts: bool, device: str) -> str:
    """Equal for engines whose exported states mean the same: revision of the format, configuration, arithmetic."""
    return f"shoal-{_STATE_REVISION}-{_digest(config, compute_dtype, drafts, device)}"


def _space(weights: str, config: ModelConfig, compute_dtype: ComputeDtype, device: str) -> str:
    """Equal for engines that make the same blocks and windows of the same tokens. Drafts have no part in those."""
    return f"blocks-{_BLOCK_REVISION}-{weights}-{_digest(config, compute_dtype, device)}"


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
