"""The intake of a sampler: every event in every state."""

from __future__ import annotations

import pytest

from cachestream.worker.sampler import Intake, IntakeEvent

# What may happen in each state, and what comes of it: everything else is refused.
TRANSITIONS = {
    "OPEN": {"NOT_YET": "WAITING", "NONE_LEFT": "EXHAUSTED", "SUSPECT": "ALONE"},
    "WAITING": {"DUE": "OPEN"},
    "ALONE": {"END_ALONE": "OPEN"},
    "EXHAUSTED": {},
}


@pytest.mark.parametrize("state", Intake)
@pytest.mark.parametrize("event", IntakeEvent)
def test_every_event_in_every_state_leads_to_one_state_or_is_refused(
    state: Intake, event: IntakeEvent
) -> None:
    expected = TRANSITIONS[state.name].get(event.name)
    if expected is None:
        with pytest.raises(ValueError, match=state.name):
            state.after(event)
    else:
        assert state.after(event) is Intake[expected]


def test_every_state_can_end_in_exhaustion_and_that_is_final() -> None:
    for state in Intake:
        reached = {state}
        while more := {Intake[to] for one in reached for to in TRANSITIONS[one.name].values()} - reached:
            reached |= more
        assert Intake.EXHAUSTED in reached
    assert not TRANSITIONS["EXHAUSTED"]
