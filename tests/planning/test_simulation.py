"""The simulation of a step against schedules that were worked out by hand, and what has to hold of every schedule."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowband.planning import Arrival, Inside, Machine, Message, Step, Transfer, simulate
from tests.thorough import examples


def gathered(nbytes, *, begin_s=0.0, latency_s=0.0, deliver_s=0.0):
    """A message of one collective."""
    return Message(begin_s, (Transfer(nbytes, latency_s),), (0.0,), deliver_s)


def seconds(step, **machine):
    return simulate(step, Machine(**machine)).step_s


def test_without_messages_a_step_is_compute():
    assert seconds(Step(2.0, after_s=0.5)) == 2.5
    assert seconds(Step(2.0, (Arrival(1.0, messages=(gathered(1e6),)),))) == 2.0  # nor over a link that takes no time


def test_one_bucket_is_encoded_sent_and_decoded_one_after_the_other():
    step = Step(1.0, (Arrival(1.0, 0.25, (gathered(4e6, latency_s=0.125, deliver_s=0.5),)),), after_s=0.0625)
    found = simulate(step, Machine(rate=4e6))
    assert found.step_s == pytest.approx(1.0 + 0.25 + 0.125 + 1.0 + 0.5 + 0.0625)
    assert found.compute_s == 1.0625
    assert found.codec_s == pytest.approx(0.75)
    assert found.wire_s == pytest.approx(1.0)
    assert found.latency_s == pytest.approx(0.125)


def test_the_wire_of_a_bucket_hides_behind_the_rest_of_backward():
    # The first is on the wire from 0.5 to 1.25 s. Backward ends at 1.0, and the second is on the wire until 1.5 s.
    step = Step(1.0, (Arrival(0.5, messages=(gathered(3e6),)), Arrival(1.0, messages=(gathered(1e6),))))
    assert seconds(step, rate=4e6, slots=1) == pytest.approx(1.5)
    assert seconds(step, rate=4e6, slots=2) == pytest.approx(1.5)  # the second waits for the first
    assert seconds(step, rate=16e6) == pytest.approx(1.0625)  # the first has gone long before


def test_a_wire_bound_step_is_the_first_bucket_and_all_bytes():
    arrivals = tuple(Arrival(0.2 * i, messages=(gathered(5e6),)) for i in range(1, 6))
    assert seconds(Step(1.0, arrivals), rate=5e6) == pytest.approx(0.2 + 5.0)


def test_an_encode_bound_step_is_the_first_bucket_and_all_encoding():
    # Cores to spare: backward goes on while the thread encodes. The last payload takes 0.1 s more.
    arrivals = tuple(Arrival(0.2 * i, 0.5, (gathered(1e5),)) for i in range(1, 6))
    found = simulate(Step(1.0, arrivals), Machine(rate=1e6))
    assert found.step_s == pytest.approx(0.2 + 5 * 0.5 + 0.1)
    assert found.codec_s == pytest.approx(1.7)  # what is left of encoding after backward


def test_on_one_core_encoding_takes_its_time_from_backward():
    # From 0.5 s on both have half a core: encoding ends after 0.4 s more, when backward has 0.3 s left.
    step = Step(1.0, (Arrival(0.5, 0.2, (gathered(1e6),)),))
    found = simulate(step, Machine(rate=1e7, cores=1))
    assert found.step_s == pytest.approx(1.2)
    assert found.codec_s == pytest.approx(0.2)
    assert found.wire_s == 0.0


def test_bytes_take_the_processor_too():
    # 1 s of wire needs 2 s of a core, so a processor with nothing else to do takes 2 s.
    step = Step(1.0, (Arrival(1.0, messages=(gathered(1e6),)),))
    assert seconds(step, rate=1e6, cores=1, cpu_s_per_byte=2e-6) == pytest.approx(3.0)
    # Other cores do not help: one thread sends.
    step = Step(1.0, (Arrival(0.0, messages=(gathered(1e6),)),))
    assert seconds(step, rate=1e6, cores=2.5, cpu_s_per_byte=2e-6) == pytest.approx(2.0)
    # A fifth of a core is less than its share: the wire takes what it needs, and backward has the rest.
    assert seconds(step, rate=1e6, cores=1, cpu_s_per_byte=0.2e-6) == pytest.approx(1.2)


def test_a_fraction_of_a_core_is_what_compute_was_measured_on():
    step = Step(1.0, (Arrival(1.0, 0.5, (gathered(1e6),)),))
    assert seconds(step, rate=1e6, cores=0.5) == pytest.approx(2.5)


def test_with_feedback_nothing_is_decoded_before_the_step_is_decided():
    one, two = gathered(1e6, deliver_s=0.2), gathered(3e6, deliver_s=0.2)
    arrivals = (Arrival(0.0, messages=(one,)), Arrival(0.5, messages=(two,)))
    assert seconds(Step(0.5, arrivals), rate=1e6, slots=1) == pytest.approx(4.2)
    assert seconds(Step(0.5, arrivals, transaction=True), rate=1e6, slots=1) == pytest.approx(4.4)


def test_what_is_decided_early_is_decoded_while_the_last_payload_is_on_the_wire():
    early = Message(0.0, (Transfer(1e6),), (0.0,), 0.2, decides=False)
    late = Message(0.0, (Transfer(3e6),), (0.0,), 0.2, decides=False)
    flag = gathered(0.0, latency_s=0.1)
    arrivals = (Arrival(0.0, messages=(early,)), Arrival(0.5, messages=(flag, late)))
    assert seconds(Step(0.5, arrivals, transaction=True), rate=1e6) == pytest.approx(4.2)


def test_phases_of_a_message_all_begin_before_those_of_the_next():
    two_phases = Message(0.0, (Transfer(1e6), Transfer(1e6)), (0.5, 0.0))
    step = Step(0.0, (Arrival(0.0, messages=(two_phases, gathered(1e6))),))
    # 1 s, half a second of work while the wire is idle, then 1 s for the second phase and 1 s for what waits.
    assert seconds(step, rate=1e6) == pytest.approx(3.5)
    # An exchange from rank to rank has a queue of its own, but the message behind still waits for the second phase.
    pairs = Message(0.0, (Transfer(1e6, queue="pairs"), Transfer(1e6)), (0.5, 0.0))
    assert seconds(Step(0.0, (Arrival(0.0, messages=(pairs, gathered(1e6))),)), rate=1e6) == pytest.approx(3.5)


def test_everything_waits_for_a_message_that_is_exclusive():
    first = Message(0.0, (Transfer(0.0, 0.25),), (0.0,), exclusive=True)
    step = Step(0.0, (Arrival(0.0, messages=(first, gathered(1e6))),))
    assert seconds(step, rate=1e6) == pytest.approx(1.25)


def test_a_short_message_waits_behind_a_long_one():
    flag = Message(0.0, (Transfer(1.0),), (0.0,))
    early = Message(0.0, (Transfer(1e6),), (0.0,), 0.5, decides=False)
    step = Step(0.0, (Arrival(0.0, messages=(early, flag)),), transaction=True)
    assert seconds(step, rate=1e6) == pytest.approx(1.5, abs=1e-5)  # decided when both have arrived


def test_slots_bound_how_many_latencies_overlap():
    step = Step(0.0, (Arrival(0.0, messages=tuple(gathered(0.0, latency_s=1.0) for _ in range(4))),))
    assert [seconds(step, slots=slots) for slots in (1, 2, 4)] == [4.0, 2.0, 1.0]


def test_on_two_levels_a_bucket_is_summed_inside_first_and_gathered_at_the_end():
    step = Step(1.0, (Arrival(0.5, 0.1, (gathered(1e6),), Inside(reduce_s=0.2, gather_s=0.3)),))
    assert seconds(step, rate=1e6) == pytest.approx(0.5 + 0.2 + 0.1 + 1.0 + 0.3)


def test_the_thread_of_a_node_takes_a_core_and_what_backward_does_not_hide_of_it_is_wire():
    # From 0.5 s on both have half a core: the sum takes 0.4 s, and backward has 0.3 s left.
    step = Step(1.0, (Arrival(0.5, inside=Inside(reduce_s=0.2, gather_s=0.0)),))
    found = simulate(step, Machine(cores=1))
    assert found.step_s == pytest.approx(1.2)
    assert (found.codec_s, found.wire_s) == (pytest.approx(0.2), 0.0)
    assert seconds(step, cores=2) == pytest.approx(1.0)
    step = Step(1.0, (Arrival(1.0, inside=Inside(reduce_s=0.2, gather_s=0.3)),))
    for cores in (0.5, 1.0):  # the sum was measured on as much of a core
        found = simulate(step, Machine(cores=cores))
        assert found.step_s == pytest.approx(1.5)
        assert (found.codec_s, found.wire_s, found.latency_s) == (0.0, pytest.approx(0.5), 0.0)


@pytest.mark.parametrize("wrong", [{"rate": 0.0}, {"cores": 0}, {"slots": 0}, {"threads": 0}, {"cpu_s_per_byte": -1.0}])
def test_a_machine_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Machine(**wrong)


# ---- what has to hold of every schedule ------------------------------------------------------------------------------

SHORT = st.floats(0.0, 0.5)


@st.composite
def messages(draw, work):
    transfers = draw(
        st.lists(
            st.builds(Transfer, st.floats(0.0, 1e6), st.floats(0.0, 0.1), st.sampled_from(["group", "pairs"])),
            min_size=1,
            max_size=3,
        )
    )
    after = tuple(draw(work) for _ in transfers)
    return Message(draw(work), tuple(transfers), after, draw(work), decides=draw(st.booleans()))


@st.composite
def steps(draw, work=SHORT):
    at = sorted(draw(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=5)))
    arrivals = tuple(Arrival(x, draw(work), tuple(draw(st.lists(messages(work), max_size=2)))) for x in at)
    return Step(draw(st.floats(1.0, 2.0)), arrivals, draw(SHORT), transaction=draw(st.booleans()))


def work_of(step):
    return sum(
        arrival.encode_s + sum(m.begin_s + sum(m.work_s) + m.deliver_s for m in arrival.messages)
        for arrival in step.arrivals
    )


MACHINES = st.builds(
    Machine,
    rate=st.floats(1e5, 1e8),
    cores=st.sampled_from([0.5, 1.0, 2.0, math.inf]),
    threads=st.sampled_from([1, 2]),
    cpu_s_per_byte=st.sampled_from([0.0, 1e-9, 1e-6]),
    slots=st.sampled_from([1, 2]),
)


@settings(max_examples=examples(150), deadline=None)
@given(steps(), MACHINES)
def test_never_faster_than_compute_nor_than_bytes_nor_than_work(step, machine):
    found = simulate(step, machine)
    at_least = max(step.until_s, step.nbytes / machine.rate) + step.after_s
    assert found.step_s >= at_least - 1e-6
    assert found.step_s >= step.arrivals[0].at_s + work_of(step) + step.after_s - 1e-6
    together = found.compute_s + found.codec_s + found.wire_s + found.latency_s
    assert found.step_s == pytest.approx(together, abs=1e-6)
    assert min(found.codec_s, found.wire_s, found.latency_s) >= -1e-9
    assert simulate(step, machine) == found


@settings(max_examples=examples(150), deadline=None)
@given(steps(), MACHINES)
def test_never_slower_than_one_thing_after_the_other(step, machine):
    """Nothing waits for nothing."""
    latency = sum(t.latency_s for arrival in step.arrivals for m in arrival.messages for t in m.transfers)
    # In all, the processor has to do no more than this, alone: what is shared is done when it is done.
    on_wire = step.nbytes * max(1 / machine.rate, machine.cpu_s_per_byte / min(1.0, machine.cores))
    serial = step.until_s + work_of(step) + on_wire + latency + step.after_s
    assert simulate(step, machine).step_s <= serial * (1 + 1e-9) + 1e-6


@settings(max_examples=examples(150), deadline=None)
@given(steps(st.just(0.0)), st.floats(1e5, 1e7), st.floats(1.0, 10.0), st.sampled_from([1, 2]))
def test_a_faster_link_is_never_slower(step, rate, times, slots):
    """Where the engine has work, the order in which things come to it may cost what one piece of it takes."""
    slow, fast = (simulate(step, Machine(rate=x, slots=slots)).step_s for x in (rate, rate * times))
    assert fast <= slow + 1e-6
