"""What a lab is: reading quantities, and refusing those that cannot be meant."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowband.lab import LabConfig, parse_delay, parse_loss, parse_rate

RATE_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


@given(st.integers(1, 10**5), st.integers(0, 999), st.sampled_from(sorted(RATE_UNITS)), st.booleans(), st.booleans())
def test_a_rate_is_its_number_times_its_unit(
    whole: int, thousandths: int, unit: str, upper: bool, spaced: bool
) -> None:
    text = f"{whole}.{thousandths:03d}{' ' if spaced else ''}{unit.upper() if upper else unit}"
    expected = round((whole * 1000 + thousandths) * RATE_UNITS[unit] / 1000)
    if 8_000 <= expected <= 32 * 10**9:
        assert parse_rate(text) == parse_rate(text + "/s") == expected
    else:
        with pytest.raises(ValueError, match="8kbit to 32gbit"):
            parse_rate(text)


@given(st.integers(0, 10**7), st.sampled_from([("us", 10**6), ("ms", 10**3), ("s", 1)]))
def test_a_delay_is_its_number_times_its_unit(number: int, unit: tuple[str, int]) -> None:
    text, per_second = f"{number}{unit[0]}", unit[1]
    if number <= 10 * per_second:
        assert parse_delay(text) == pytest.approx(number / per_second, rel=1e-12)
    else:
        with pytest.raises(ValueError, match="more than 10s"):
            parse_delay(text)


@given(st.integers(0, 99_999))
def test_a_loss_is_a_percentage(thousandths: int) -> None:
    assert parse_loss(f"{thousandths / 1000:.3f}%") == pytest.approx(thousandths / 100_000, abs=1e-15)


@given(st.text(max_size=12))
def test_text_is_read_or_refused_and_nothing_else_happens(text: str) -> None:
    for parse in (parse_rate, parse_delay, parse_loss):
        try:
            value = parse(text)
        except ValueError as refused:
            message = str(refused)
        else:
            message = repr(text)
            assert value >= 0
        assert repr(text) in message


@pytest.mark.parametrize(
    ("parse", "texts", "example"),
    [
        (
            parse_rate,
            ["", "200", "mbit", "200 mb", "200mbps", "-1mbit", "1e3mbit", "nanbit", "²mbit", "1.mbit"],
            "200mbit",
        ),
        (parse_delay, ["", "5", "ms", "-5ms", "5 minutes", "infs"], "5ms"),
        (parse_loss, ["", "0.1", "%", "-1%", "0.1 percent"], "0.1%"),
    ],
)
def test_what_cannot_be_read_is_answered_with_an_example(parse: Any, texts: list[str], example: str) -> None:
    for text in texts:
        with pytest.raises(ValueError, match=example):
            parse(text)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"nodes": 0}, ValueError, "nodes is 0; expected 1 to 256"),
        ({"nodes": 257}, ValueError, "nodes is 257"),
        ({"nodes": 2.0}, TypeError, "nodes is 2.0, of type float"),
        ({"nodes": True}, TypeError, "nodes is True"),
        ({"rate": "fast"}, ValueError, "200mbit, 1gbit"),
        ({"rate": 200}, TypeError, "rate is 200, of type int"),
        ({"per_node": 0}, ValueError, "per_node is 0; expected 1 to 256"),
        ({"nodes": 100, "per_node": 3}, ValueError, "make 300 ranks, more than 256"),
        ({"nodes": 3, "rate": "1gbit,200mbit"}, ValueError, "has 2 rates for 3 machines"),
        ({"up": "slow"}, ValueError, "200mbit, 1gbit"),
        ({"delay": "5"}, ValueError, "500us, 5ms"),
        ({"loss": "100%"}, ValueError, "below 100"),
        ({"mtu": 100}, ValueError, "mtu is 100; expected 576 to 65535"),
        ({"timeout_s": 0}, ValueError, "timeout_s is 0"),
        ({"timeout_s": float("nan")}, ValueError, "timeout_s is nan"),
        ({"grace_s": -1}, ValueError, "grace_s is -1"),
    ],
)
def test_a_lab_that_cannot_be_is_refused_when_it_is_described(
    fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LabConfig(**fields)


@pytest.mark.parametrize("mtu", [576, 1500, 9000, 65535])
@pytest.mark.parametrize("rate", ["8kbit", "10mbit", "100mbit", "1gbit", "32gbit"])
def test_the_token_bucket_holds_a_super_packet_and_its_headers(rate: str, mtu: int) -> None:
    shape = LabConfig(rate=rate, mtu=mtu).links()[0].up
    segments = -(-shape.gso // (mtu - 52))
    assert mtu < shape.gso <= 65536
    assert shape.gso + 66 * segments <= shape.burst < shape.queue < 2**32


def test_an_unshaped_link_has_no_token_bucket() -> None:
    shape = LabConfig(rate=None).links()[0].up
    assert shape.rate == 0
    assert not shape.netem


def test_loss_is_drawn_per_packet_and_delay_has_room_for_all_in_flight() -> None:
    shape = LabConfig(rate="1gbit", delay="20ms", loss="0.1%").links()[0].up
    assert shape.gso_segments == 1
    assert (shape.delay_us, shape.loss_percent) == (20_000, pytest.approx(0.1))
    assert shape.netem_packets * 1500 >= 2 * 125_000_000 * 0.020


def test_links_differ_by_direction_and_by_host() -> None:
    rates = [(link.up.rate * 8, link.down.rate * 8) for link in LabConfig(nodes=2, rate="8mbit,16mbit").links()]
    assert rates == [(8_000_000, 8_000_000), (16_000_000, 16_000_000)]
    asymmetric = LabConfig(nodes=2, up="8mbit, 16mbit", down="32mbit")
    assert [(link.up.rate * 8, link.down.rate * 8) for link in asymmetric.links()] == [
        (8_000_000, 32_000_000),
        (16_000_000, 32_000_000),
    ]
    assert LabConfig(nodes=4, per_node=3).ranks == 12
