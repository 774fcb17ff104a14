"""The file of an image at a URL, through the library's fetcher: from public addresses only."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable

import deepseek_recipe as library

from actors.recipe.addresses import is_public
from schemas.failure import Code, Failure

MAX_URL_BYTES = 8192
"""Spec recipe.md §2.3."""

MAX_BYTES = 8 * 1024 * 1024
"""Of one file: what a vision replica takes."""

_SEND_IT = "send the image itself, in base64"


class Fetch:
    """Fetches from addresses that are `allowed`, after a redirect too: others are not connected to.

    A call blocks for up to 60 s, the library's limit, and lets go of the interpreter lock: call it in a thread.
    """

    def __init__(self, allowed: Callable[[str], bool] = is_public) -> None:
        self._allowed = allowed

    def __call__(self, url: str) -> bytes | Failure:
        """The file, of any type, or why there is none, in words for the client that gave the URL."""
        refused: list[str] = []

        def may_connect(host: str, address: str) -> bool:
            is_allowed = self._allowed(address)
            if not is_allowed:
                refused.append(host)
            return is_allowed

        fetcher = library.ReqwestImageFetcher.with_max_bytes(MAX_BYTES).with_destination_filter(may_connect)
        try:
            return bytes(fetcher.fetch(url))
        except library.ImageError as error:
            return _failure(error.kind, error.is_retryable, refused)


FETCH = Fetch()
"""From public addresses only."""


def _failure(kind: str, is_retryable: bool, refused: list[str]) -> Failure:
    if kind == "DestinationRejected" and refused and _is_address(refused[-1]):
        message = f"the URL leads to an address that is not public, and nothing is fetched from there: {_SEND_IT}"
        return Failure(code=Code.BAD_REQUEST, message=message)
    if kind == "ImageTooLarge":
        return Failure(code=Code.BAD_REQUEST, message=f"the file at the URL has more than the {MAX_BYTES} bytes taken")
    if kind == "FetchStatus":
        if is_retryable:
            message = f"the server of the URL has failed: retry, or {_SEND_IT}"
            return Failure(code=Code.IMAGE_UNREACHABLE, message=message)
        message = f"the server of the URL does not give the image: correct the URL, or {_SEND_IT}"
        return Failure(code=Code.BAD_REQUEST, message=message)
    # A name that is only known here, with an address that is not public, must look like one that nobody knows.
    message = f"no server with a public address gives the image at the URL: correct it, retry, or {_SEND_IT}"
    return Failure(code=Code.IMAGE_UNREACHABLE, message=message)


def _is_address(host: str) -> bool:
    """Whether it is an address itself, not the name of one."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
