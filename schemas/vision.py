"""Images: resolved to a size and a digest for the recipe, encoded to embeddings for prefill."""

from __future__ import annotations

from schemas.bulk import Handle, Payload
from schemas.message import Message


class ResolveImage(Message, frozen=True):
    """Recipe → any vision replica: what is this file, as a model input? `image` is the file as the client sent it.

    `deadline_ns` is unix time, 0 for none.
    """

    image: Payload
    deadline_ns: int = 0


class ImageResolved(Message, frozen=True):
    """It takes `num_tokens` positions of a prompt, delimiters included; `num_patches` are what encoding it costs.

    `digest` names its content as the model sees it. `pixels` is uint8 [height, width, 3], ready for the encoder; the
    replica `vision` holds it for whoever pulls, until `ReleaseImage` or the end of the lease.
    """

    vision: str
    digest: str
    width: int
    height: int
    num_tokens: int
    pixels: Handle
    num_patches: int = 0


class Image(Message, frozen=True):
    """One image of a prompt: its span begins at position `start`. The rest is as in `ImageResolved`."""

    start: int
    num_tokens: int
    digest: str
    width: int
    height: int
    vision: str
    pixels: Handle
    num_patches: int = 0


class EncodeImage(Message, frozen=True):
    """Entrypoint → vision replica: pull the pixels and encode them. `deadline_ns` is unix time, 0 for none.

    The replica releases `reservation` at `balancer` when it has answered.
    """

    request_id: str
    image: Image
    deadline_ns: int = 0
    reservation: int = 0
    balancer: str = ""


class ImageEncoded(Message, frozen=True):
    """`embeddings` is fp32 [num_tokens, hidden_size], held by the replica `vision` as the pixels are."""

    vision: str
    embeddings: Handle


class ReleaseImage(Message, frozen=True):
    """To the vision replica that holds these pixels or embeddings: nobody needs them any more. Idempotent."""

    held: Handle


class ImageEmbeddings(Message, frozen=True):
    """An encoded image of a prompt, for prefill: whose rows stand at `start` and the `num_tokens` positions from it."""

    start: int
    num_tokens: int
    embeddings: Handle
