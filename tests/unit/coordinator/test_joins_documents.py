"""What a joiner says its engine runs on, where it cannot be read."""

from __future__ import annotations

import pytest

from updater.coordinator.members.models import document_of
from updater.core.participant import Description
from updater.core.policy import Capabilities
from updater.core.replica.state import started, status
from updater.protocol import wire
from updater.protocol.model_document import ModelDocument


def said(document: str) -> Description:
    front = status(started("a", "a1", "start", "live", 1), 0.0)
    return Description(front, "toy", "http://a", Capabilities(()), "", "m", (), document=document)


@pytest.mark.case("F65")
def test_a_document_that_is_huge_or_not_in_its_form_is_none() -> None:
    good = ModelDocument(config={"x": 1})
    assert document_of(said(wire.encode(good).decode())) == good
    for config in ({"x": "y" * (65 << 10)}, {"x": 1.0}):
        assert document_of(said(wire.encode(ModelDocument(config=config)).decode())) is None
    for text in ("", "{", "[]", '{"config": 1}'):
        assert document_of(said(text)) is None
    assert document_of(None) is None
