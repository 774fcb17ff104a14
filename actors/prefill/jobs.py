"""All requests of one prefill replica, from their arrival to the end of their hand-over: who may come, who is here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from actors.prefill.batch import Batch
from actors.prefill.job import Job, is_meant
from actors.rules.emission import Held
from schemas.handover import Dispatch, Refused
from schemas.request import Cancel

MAX_QUEUED = 1024
"""Requests here at most; more are refused."""


MAX_IMAGE_BYTES = 2 << 30
"""Encoded images of all requests; more are refused."""


class Offered(Protocol):
    """A state on its way: see `bus.offering.Offering`."""

    def cancel(self) -> None: ...


class Jobs:
    """`pulling`: their prompts come by handle, and are on their way here. `batch`: they wait or are computed.
    `leaving`: they are on offer to decode."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.pulling: dict[str, Dispatch] = {}
        self.leaving: dict[str, tuple[Job, Offered]] = {}

    def __len__(self) -> int:
        return len(self.pulling) + len(self.batch) + len(self.leaving)

    def __iter__(self) -> Iterator[Job]:
        """Those whose prompts are here."""
        return iter([*self.batch, *(job for job, _ in self.leaving.values())])

    def get(self, request_id: str) -> Job | None:
        """The job of a request, waiting, computing or on its way out."""
        return self.leaving[request_id][0] if request_id in self.leaving else self.batch.get(request_id)

    def held(self, returning: Mapping[str, Dispatch], request_id: str) -> Held | None:
        """What can be said to an entrypoint that asks after a request, also of those it is about to have back."""
        job = self.get(request_id)
        dispatch = job.dispatch if job is not None else self.pulling.get(request_id) or returning.get(request_id)
        return None if dispatch is None else Held(dispatch.epoch, [], None)

    def refuse(self, dispatch: Dispatch, id: str, max_tokens: int, *, is_draining: bool) -> Refused | None:
        """Why replica `id` does not take this one, if it does not."""
        if dispatch.num_prompt_tokens >= max_tokens:
            reason = f"the prompt has {dispatch.num_prompt_tokens} tokens, the limit is {max_tokens} with the answer"
            return Refused(reason=reason, is_final=True)
        if is_draining or len(self) >= MAX_QUEUED:
            return Refused(reason=f"prefill {id} takes no more requests now")
        if dispatch.prompt.handle is None and not dispatch.images:
            return None
        images = [image for one in (dispatch, *self.pulling.values()) for image in one.images]
        if self.batch.num_image_bytes + sum(image.embeddings.size_bytes for image in images) > MAX_IMAGE_BYTES:
            return Refused(reason=f"prefill {id} has no room for more images now")
        return None

    def cancel(self, cancel: Cancel) -> tuple[bool, Job | None]:
        """Whether a request was running that is cancelled now, and the job that is to leave for it."""
        job, pulling = self.get(cancel.request_id), self.pulling.get(cancel.request_id)
        was_running = pulling is not None and is_meant(cancel, pulling)
        if was_running:
            del self.pulling[cancel.request_id]
        if job is None or not is_meant(cancel, job.dispatch):
            return was_running, None
        was_running, job.is_cancelled = not job.is_cancelled, True
        return was_running, job
