"""The one map: complete, without double entries, and only messages in it."""

from __future__ import annotations

import typing
from typing import Any

import pytest

from bus import subjects
from bus.subjects import SUBJECTS, Subject, ping, report_load
from schemas.api import Protocol
from schemas.message import Message, Role


def test_every_subject_is_on_the_list() -> None:
    named = {value for value in vars(subjects).values() if isinstance(value, Subject)}
    assert named == set(SUBJECTS)


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: f"{subject.role}.{subject.verb}")
def test_messages_and_replies_are_messages(subject: Subject[Any, Any]) -> None:
    replies = typing.get_args(subject.reply) or ([subject.reply] if subject.reply is not None else [])
    for kind in (subject.message, *replies):
        assert issubclass(kind, Message)


def test_a_verb_means_one_thing_at_a_role() -> None:
    everywhere = [maker(role) for role in Role for maker in (ping, report_load)]
    names = [(subject.role, subject.verb) for subject in [*SUBJECTS, *everywhere]]
    assert len(names) == len(set(names))
    assert {role for role, _ in names} == {*Role, "event"}


def test_a_clients_reply_is_an_inbox_of_bounded_length() -> None:
    assert subjects.is_inbox("_INBOX.a.1")
    assert subjects.is_inbox("_INBOX.".ljust(subjects.MAX_REPLY_BYTES, "a"))
    assert subjects.is_inbox("_INBOX.tenant.a.1", "a")
    for tenant, reply in (("", "_INBOX.tenant.a.1"), ("b", "_INBOX.tenant.a.1"), ("a", "_INBOX.a.1"), ("a", "x.a.1")):
        assert not subjects.is_inbox(reply, tenant)
    assert not subjects.is_inbox("_INBOX.tenant.a.".ljust(subjects.MAX_REPLY_BYTES + 1, "a"), "a")
    for reply in ("", "_INBOX", "_SHOAL.1.1", "shoal.recipe.any.call", "_INBOX." + "ä" * 125):
        assert not subjects.is_inbox(reply)


def test_a_public_subject_says_whose_it_is() -> None:
    for protocol in Protocol:
        assert subjects.read_api(subjects.api(protocol)) == ("", protocol)
        assert subjects.read_api(subjects.api(protocol, "acme")) == ("acme", protocol)
    with pytest.raises(ValueError, match="nothing"):
        subjects.read_api("shoal.api.acme.nothing")
